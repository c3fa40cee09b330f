"""Settings of a run as a whole: what follows from the architecture, changed recipes, files of earlier versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from transformer_xl.config import RunConfig, UserError, load_recipe, merge_recipe, run_settings
from transformer_xl.config.model import VaswaniConfig
from transformer_xl.run_folder import RunFolder


def test_architectures_without_memory_train_without() -> None:
    assert run_settings({"model": {"architecture": "vaswani"}}, "settings").train.memory_length == 0
    assert run_settings({"model": {"architecture": "lstm"}}, "settings").train.memory_length == 128
    with pytest.raises(ValueError, match="vaswani has no memory; give memory_length 0"):
        RunConfig(model=VaswaniConfig())


def test_another_architecture_takes_the_settings_of_a_recipe_that_it_has() -> None:
    recipe = load_recipe("ablation")
    settings = merge_recipe(recipe, {"model": {"architecture": "lstm", "d_model": 64}, "train": {"max_steps": 9}})
    config = run_settings(settings, "settings")
    assert (config.model.architecture, config.model.d_model, config.model.n_layers) == ("lstm", 64, 4)
    assert (config.train.max_steps, config.train.batch_size) == (9, 32)
    learned = run_settings(merge_recipe(load_recipe("enwik8-12l"), {"model": {"architecture": "al-rfou"}}), "settings")
    assert (learned.train.memory_length, learned.evaluation.memory_length) == (0, None)
    assert (learned.evaluation.segment_length, learned.evaluation.attention_window) == (80, 2100)
    with pytest.raises(UserError, match="n_heads is a setting of transformer-xl"):  # what was typed is not left out
        run_settings(merge_recipe(recipe, {"model": {"architecture": "lstm", "n_heads": 2}}), "settings")


@pytest.mark.parametrize("settings", ["model: {layers: 3}", "model: {kind: lstm}", "train: {rows: 3}"])
def test_a_recipe_of_an_earlier_version_is_refused_in_one_line(tmp_path: Path, settings: str) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(f"title: t\nsource: s\ncorpus: c\n{settings}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"^[^\n]*earlier version: (model|train)\.\w+ [^\n]*txl train --help[^\n]*$"):
        load_recipe(str(file))


def test_a_run_of_an_earlier_version_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {kind: transformer}\ntrain: {rows: 3}\n", encoding="utf-8")
    (tmp_path / "vocabulary.json").touch()
    with pytest.raises(UserError, match=r"^[^\n]*earlier version[^\n]*train it again[^\n]*convert it again[^\n]*$"):
        RunFolder.open(tmp_path)
