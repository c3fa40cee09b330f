"""From text to generated text with every kind of vocabulary, and at word level with clusters, as a user would."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transformer_xl.cli.main import run
from transformer_xl.run_folder import RunFolder

TEXT = "the cat sat on a mat while that dog ran after it and all of them slept in warm sun till noon came"
WORDS = TEXT.split()
TINY = [
    "--model.n-layers=2", "--model.d-model=14", "--model.n-heads=2", "--model.d-ff=19", "--train.segment-length=7",
    "--train.memory-length=11", "--train.batch-size=3", "--train.max-steps=9", "--train.checkpoint-interval=4",
    "--train.eval-interval=5", "--train.dtype=float32",
]  # fmt: skip


def sentences(number: int, seed: int) -> list[str]:
    """Sentences of one to nine words; the first in `WORDS` are the most frequent."""
    draw = np.random.default_rng(seed)
    share = 1 / (np.arange(len(WORDS)) + 1.5)
    return [" ".join(draw.choice(WORDS, draw.integers(1, 10), p=share / share.sum())) for _ in range(number)]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for split, number, seed in (("train", 211, 1), ("valid", 31, 2), ("test", 29, 3)):
        Path(f"{split}.txt").write_text("\n".join(sentences(number, seed)) + "\n", encoding="utf-8")
    return tmp_path


def said(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON object a command prints."""
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", ["byte", "char", "word", "bpe", "integer"])
def test_every_kind_goes_all_the_way(texts: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    if kind == "integer":
        for split in ("train", "valid", "test"):
            file = Path(f"{split}.txt")
            lines = file.read_text(encoding="utf-8").splitlines()
            file.write_text("\n".join(" ".join(str(len(w)) for w in line.split()) for line in lines) + "\n")
    size = ["--vocab-size=300"] if kind == "bpe" else []
    files = ["--train", "train.txt", "--valid", "valid.txt", "--test", "test.txt"]
    made = said("prepare", *files, "--tokenizer", kind, *size, "--out", "corpus", capsys=capsys)
    assert made["tokenizer"] == kind
    train = said("train", "--corpus", "corpus", *TINY, capsys=capsys)
    assert train["run"] == "runs/corpus"
    scored = said("evaluate", "runs/corpus", capsys=capsys)
    assert scored["tokens"] == made["splits"]["test"]["num_tokens"]
    assert math.isfinite(scored["perplexity"])
    prompt = "3 3" if kind == "integer" else "the cat"
    assert run(["generate", "runs/corpus", "--prompt", prompt, "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out


def test_word_level_with_clusters(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Newlines count as tokens; a stopped run is resumed; cutoffs=auto becomes numbers in the run's settings."""
    files = ["--train", "train.txt", "--valid", "valid.txt", "--test", "test.txt"]
    made = said("prepare", *files, "--tokenizer", "word", "--out", "corpora/mine", capsys=capsys)
    for split, lines in (("train", 211), ("valid", 31), ("test", 29)):
        counts = made["splits"][split]
        assert counts["num_tokens"] == counts["num_words"] + lines
        assert counts["num_words"] == len(Path(f"{split}.txt").read_text(encoding="utf-8").split())
    clusters = ["--model.cutoffs=5,11", "--model.div-val=2", "--model.tie-projections=all_but_first"]
    said("train", "--corpus", "corpora/mine", *clusters, *TINY, capsys=capsys)
    straight = RunFolder.open(Path("runs/mine"))
    assert straight.config.model.cutoffs == (5, 11)
    assert said("evaluate", "runs/mine", capsys=capsys)["tokens"] == made["splits"]["test"]["num_tokens"]
    assert run(["evaluate", "runs/mine"]) == 0
    assert "words and newlines" in capsys.readouterr().out
    four = [word.replace("steps=9", "steps=4") for word in TINY]
    said("train", "--corpus", "corpora/mine", *clusters, *four, "--run=again", capsys=capsys)
    said("train", "--resume", "again", "--train.max-steps=9", capsys=capsys)
    # max_steps changes the learning rate, so the losses differ from those of the uninterrupted run
    assert [line["step"] for line in RunFolder.open(Path("again")).metrics()] == [4, 5, 9]
    assert run(["train", "--corpus", "corpora/mine", "--model.cutoffs=auto", *TINY, "--run=found"]) == 0
    assert "softmax" in capsys.readouterr().err
    assert isinstance(RunFolder.open(Path("found")).config.model.cutoffs, tuple)


def test_shuffled_sentences(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["prepare", "--train", "train.txt", "--tokenizer", "word", "--document-unit", "line", "--out", "corpus"]
    assert said(*lines, capsys=capsys)["splits"]["train"]["num_documents"] == 211
    assert said("train", "--corpus", "corpus", "--train.shuffle-documents", *TINY, capsys=capsys)["finished"]
    assert RunFolder.open(Path("runs/corpus")).config.train.shuffle_documents


def test_further_text_for_an_old_run(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is prepared with the run's own tokenizer, and unknown words are counted."""
    said("prepare", "--train", "train.txt", "--tokenizer", "word", "--out", "corpus", capsys=capsys)
    said("train", "--corpus", "corpus", *TINY, capsys=capsys)
    Path("new.txt").write_text("the cat met a walrus\nand the walrus slept\n", encoding="utf-8")
    made = said("prepare", "--train", "new.txt", "--tokenizer", "runs/corpus", "--out", "further", capsys=capsys)
    assert made["splits"]["train"]["num_unknown"] == 3  # met, walrus, walrus
    further = ["evaluate", "runs/corpus", "--corpus", "further", "--split", "train"]
    scored = said(*further, capsys=capsys)
    assert (scored["tokens"], scored["num_unknown"], scored["bytes"]) == (11, 3, 42)
    assert run(further) == 0
    assert "11 words and newlines (3 of them unknown words, 27.3%), 42 bytes" in capsys.readouterr().out
    # the bytes of a part are estimated by its share of the tokens, since white space and unknown words are lost
    part = said(*further, "--max-tokens=6", capsys=capsys)
    assert (part["tokens"], part["num_unknown"], part["bytes"]) == (6, 2, round(42 / 11 * 6))


@pytest.mark.parametrize("file", ["train-00000.tokens", "train.documents", "valid-00000.tokens"])
def test_a_damaged_corpus_of_the_right_size_is_refused(
    texts: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    files = ["--train", "train.txt", "--valid", "valid.txt"]
    said("prepare", *files, "--tokenizer", "word", "--document-unit", "line", "--out", "corpus", capsys=capsys)
    path = Path("corpus", file)
    path.write_bytes(b"\x05" * path.stat().st_size)
    assert run(["train", "--corpus", "corpus", "--train.shuffle-documents", *TINY]) == 2
    assert f"{file}: damaged (sha256" in capsys.readouterr().err
    assert not Path("runs").exists()
