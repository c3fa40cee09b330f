"""The code of docs/transformers.md runs, in the order of the page, on small models with the names that it uses."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from integrations.checkpoints.checkpoints import golden, hugging_face_folder
from small_runs import make_run

from transformer_xl.cli.main import run as txl

PAGE = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore:'pin_memory':UserWarning")  # torch, where there is no GPU
def test_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "mine")
    config, weights, _ = golden("clusters")
    (tmp_path / "hub").mkdir()
    hugging_face_folder(tmp_path / "hub" / "transfo-xl", config, weights)
    names: dict[str, object] = {}
    for language, block in BLOCKS:
        if language == "python":
            exec(compile(block, "docs/transformers.md", "exec"), names)
            if "hub/transfo-xl" in block:  # the page goes on with the first model
                exec("model, tokenizer = from_run('runs/mine')", names)
        elif block.startswith("txl "):
            assert txl(shlex.split(block)[1:]) == 0
    assert {folder.name for folder in (tmp_path / "hub").iterdir()} == {
        *("mine", "lines", "transfo-xl", "tuned", "adapter", "merged"),
    }
    assert txl(["convert", "hub/tuned", "runs/tuned"]) == 0
    shutil.copy("hub/mine/txl_tokenizer.json", "hub/merged")
    assert txl(["convert", "hub/merged", "runs/merged"]) == 0


def test_first_example_has_twelve_lines_at_most() -> None:
    first = next(block for language, block in BLOCKS if language == "python")
    assert "generate" in first
    assert len(first.splitlines()) <= 12
