"""sweep.py trains each change for the same time, goes on where it stopped, and compares equal seeds."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import sweep

from transformer_xl import prepare
from transformer_xl.config import UserError


def call(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> dict[str, Any]:
    """Run the script's main function with a small recipe, and return the contents of its file."""
    options = f"--corpus {folder / 'corpus'} --out {folder / 'out.json'} --recipe {folder / 'recipe.yaml'} --rounds 2"
    options += " --eval-tokens 50 --threads 1"
    monkeypatch.setattr(sys, "argv", ["sweep.py", *options.split(), *words])
    sweep.main()
    return json.loads((folder / "out.json").read_text(encoding="utf-8"))


def test_recipes_with_settings() -> None:
    choice = sweep.parsed("small:train.optimizer=muon:train.learning_rate=4e-3:model.norm_first=true")
    assert choice == {
        "recipe": "small",
        "model": {"norm_first": True},
        "train": {"optimizer": "muon", "learning_rate": 4e-3},
        "evaluation": {},
    }
    with pytest.raises(UserError, match=r"'optimizer=muon' is not a setting; give model.NAME=VALUE"):
        sweep.parsed("small:optimizer=muon")


def test_missing_trainings_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    text = ["some text\n" * 500]
    prepare(documents={"train": text, "valid": text, "test": text}, out=tmp_path / "corpus", tokenizer="byte")
    (tmp_path / "recipe.yaml").write_text(
        "model: {vocab_size: 9, n_layers: 1, d_model: 8, n_heads: 2, d_ff: 8}\n"  # the corpus has another one
        "train: {segment_length: 8, memory_length: 8, batch_size: 2, learning_rate: 0.01}\n"
    )
    changes = ["--changes", "model.norm_first=true:train.batch_size=4:evaluation.memory_length=20"]
    first = call(monkeypatch, tmp_path, *changes, "--seconds", "0.01", "--seeds", "1")
    assert [entry["change"] for entry in first["trainings"]] == ["", *changes[1:]]
    changes.append("")  # the recipe as it is, which is trained anyway
    assert len({entry["nats_per_token"]["valid"] for entry in first["trainings"]}) == 2
    second = call(monkeypatch, tmp_path, *changes, "--seconds", "0.01", "--seeds", "1,2")
    assert second["step_seconds"] == first["step_seconds"]
    assert second["trainings"][:2] == first["trainings"]
    assert [entry["seed"] for entry in second["trainings"][2:]] == [2, 2]
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, tmp_path, "--changes", "model.qk_norm=true", "--seconds", "0.01")
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, tmp_path, *changes, "--steps", "2")
    first_error, second_error = capsys.readouterr().err.splitlines()[-2:]
    assert "lacks model.qk_norm=true, but steps are measured together" in first_error
    assert "has results with another seconds; choose another --out" in second_error


def test_table_compares_equal_seeds_in_bits() -> None:
    losses = {("", 1): 2.0, ("", 2): 3.0, ("a", 1): 2.5, ("a", 2): 3.1, ("a", 3): 9.0}
    trainings = [
        {"change": change, "seed": seed, "steps": 7, "nats_per_token": {"valid": 1.0, "test": nats * math.log(2)}}
        for (change, seed), nats in losses.items()
    ]
    assert sweep.table({"recipe": "tiny", "trainings": trainings})[2:] == [
        "| `tiny` | 7 | 2 | 2.500 |  |",
        "| `a` | 7 | 3 | 4.867 | +0.300 (+0.100 to +0.500) |",
    ]
