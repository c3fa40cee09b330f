"""What docs/surprisal.md shows works: its commands and its Python code run, with a model of random weights."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

import pytest
from refusals import txl
from small_runs import make_run

from transformer_xl.text.tokenizers.word import WordTokenizer

# without the section on a program that is not installed here
PAGE = (Path(__file__).parents[2] / "docs" / "surprisal.md").read_text(encoding="utf-8").split("## With minicons")[0]


def blocks(label: str) -> list[str]:
    return re.findall(rf"^```{label}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the page prepares and trains, and the file that it tells the reader to save."""
    words = ("<eos>", "<unk>", "the", "union", "found", "offer", "was", "too", "low")
    tokenizer = WordTokenizer(words, eos_token="<eos>", unk_token="<unk>")
    make_run(tmp_path / "runs" / "ptb", tokenizer=tokenizer)
    (table,) = blocks("csv")
    (tmp_path / "garden-paths.csv").write_text(table, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands_run(folder: Path) -> None:
    lines = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    commands = [shlex.split(line)[1:] for line in lines]
    assert [words[0] for words in commands] == ["prepare", "train", "score"]
    result = txl(*commands[-1])
    assert (result.status, result.out) == (0, "")
    assert "<svg" in (folder / "words.svg").read_text(encoding="utf-8")
    with (folder / "words.csv").open(encoding="utf-8", newline="") as file:
        names, *rows = csv.reader(file)
    assert names[-3:] == ["surprisal_bits_alone", "surprisal_bits_memory_4", "surprisal_bits_memory_32"]
    assert "".join(row[names.index("word")] or "\n" for row in rows).startswith("theunionreceivedan")


def test_python_code_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    exec(compile(code, "surprisal.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 12  # ten words and two ends
    assert (folder / "sentences.csv").is_file()
