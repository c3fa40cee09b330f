"""learning_rates.py trains the combinations that its file lacks, and its table names the best rate of each row."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import learning_rates
import pytest

from transformer_xl import prepare

RATES = [1e-3, 2e-3]


def call(monkeypatch: pytest.MonkeyPatch, folder: Path, words: str) -> list[str]:
    """Run the script's main function with a small model, and return its trainings' settings."""
    recipe = "tiny:model.n_layers=1:train.segment_length=8:train.memory_length=8:train.batch_size=2"
    options = f"--corpus {folder / 'corpus'} --out {folder / 'out.json'} --eval-tokens 50 --recipe {recipe} {words}"
    monkeypatch.setattr(sys, "argv", ["learning_rates.py", *options.split()])
    learning_rates.main()
    return json.loads((folder / "out.json").read_text(encoding="utf-8"))["trainings"]


def test_missing_combinations_are_trained(tmp_path, monkeypatch, capsys):
    prepare(documents=["some text\n" * 500], out=tmp_path / "corpus")
    words = "--widths 64 --optimizers muon --rates 1e-3,2e-3 --steps"
    first = call(monkeypatch, tmp_path, f"{words} 2")
    assert [entry["rate"] for entry in first] == RATES
    assert first[0]["nats_per_token"] != first[1]["nats_per_token"]
    both = call(monkeypatch, tmp_path, f"{words} 2,3")
    assert both[:2] == first
    assert [entry["steps"] for entry in both] == [2, 2, 3, 3]
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny")]
    assert [row.count("**") for row in rows[-2:]] == [2, 2]
    with pytest.raises(SystemExit, match="--widths 100 is not a multiple of 64"):
        call(monkeypatch, tmp_path, "--widths 100")


def test_the_table_has_the_best_rate_of_each_row_in_bold():
    common = {"recipe": "tiny", "steps": 2, "optimizer": "muon"}
    losses = {(64, 1e-3, 1): 2.0, (64, 1e-3, 2): 3.0, (64, 2e-3, 1): 2.4, (128, 2e-3, 1): 1.0}
    entries = [
        {**common, "width": width, "rate": rate, "seed": seed, "nats_per_token": loss}
        for (width, rate, seed), loss in losses.items()
    ]
    assert learning_rates.table(entries) == [
        "| recipe | width | steps | optimizer | seeds | 0.001 | 0.002 |",
        "|---|---|---|---|---|---|---|",
        "| tiny | 64 | 2 | muon | 2 | 2.500 | **2.400** |",
        "| tiny | 128 | 2 | muon | 1 |  | **1.000** |",
    ]
