"""The settings of a run as a whole: defaults that depend on the architecture, and recipes with another architecture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from transformer_xl.config import (
    EvaluationConfig,
    RunConfig,
    TrainConfig,
    TransformerXLConfig,
    UserError,
    load_recipe,
    merge_recipe,
    read_yaml,
    recipe_names,
    run_settings,
)
from transformer_xl.config.model_config import ARCHITECTURES, RegularizationConfig, VaswaniConfig
from transformer_xl.config.run_config import Recipe
from transformer_xl.config.settings import check_settings


def test_memory_length_defaults_to_0_without_memory() -> None:
    assert run_settings({"model": {"architecture": "vaswani"}}, "settings").train.memory_length == 0
    # an LSTM has memory (its state), so it gets the default of TrainConfig
    assert run_settings({"model": {"architecture": "lstm"}}, "settings").train.memory_length == 128


def test_recipe_with_another_architecture_omits_settings_it_lacks() -> None:
    recipe = load_recipe("ablation")  # of transformer-xl, with 4 layers and batch size 32
    settings = merge_recipe(recipe, {"model": {"architecture": "lstm", "d_model": 64}, "train": {"max_steps": 9}})
    config = run_settings(settings, "settings")
    assert (config.model.architecture, config.model.d_model, config.model.n_layers) == ("lstm", 64, 4)
    assert (config.train.max_steps, config.train.batch_size) == (9, 32)
    # al-rfou has learned absolute positions and no memory
    learned = run_settings(merge_recipe(load_recipe("enwik8-12l"), {"model": {"architecture": "al-rfou"}}), "settings")
    assert (learned.train.memory_length, learned.evaluation.memory_length) == (0, None)
    # those of the recipe, which al-rfou has too
    assert (learned.evaluation.segment_length, learned.evaluation.attention_window) == (80, 2100)
    with pytest.raises(UserError, match="n_heads is a setting of transformer-xl"):  # overrides are never omitted
        run_settings(merge_recipe(recipe, {"model": {"architecture": "lstm", "n_heads": 2}}), "settings")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_recipe_can_have_every_architecture(architecture: str) -> None:
    """What XLNet or learned positions refuse, such as norm_first and n-grams, is omitted too."""
    for name in recipe_names():
        settings = merge_recipe(load_recipe(name), {"model": {"architecture": architecture, "cutoffs": ()}})
        config = run_settings(settings, name)
        assert config.model.n_layers == load_recipe(name).model["n_layers"]
    given = {"model": {"architecture": "xlnet", "norm_first": True}}
    with pytest.raises(UserError, match="norm_first true is not for xlnet; leave it out"):
        run_settings(merge_recipe(load_recipe("fast-small"), given), "settings")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (TransformerXLConfig, {"n_layer": 2}, "unknown setting 'n_layer' (did you mean 'n_layers'?)"),
        (EvaluationConfig, {"method": "foo"}, "method: Input should be 'memory', 'sliding-window'"),
        (RunConfig, {"model": {"n_layer": 2}}, "model: unknown setting 'n_layer' (did you mean 'n_layers'?)"),
        (EvaluationConfig, {"dynamic": {"optimiser": "sgd"}}, "dynamic: unknown setting 'optimiser'"),
    ],
)
def test_wrong_settings_raise_one_line_in_python(kind, settings, message):
    with pytest.raises(UserError, match=f"^{kind.__name__}: {re.escape(message)}[^\n]*$"):
        kind(**settings)


def test_recipe_of_ones_own_needs_only_settings(tmp_path: Path) -> None:
    """PyYAML reads 1e3, without a decimal point, as text."""
    file = tmp_path / "own.yaml"
    file.write_text("train: {max_steps: 1e3, learning_rate: 1e-3}\nmodel:\n")  # an empty group
    recipe = load_recipe(str(file))
    config = run_settings(merge_recipe(recipe, {}), "own.yaml")
    assert (recipe.corpus, config.train.max_steps, config.train.learning_rate) == ("any", 1000, 1e-3)


def test_fine_tuned_run_is_a_recipe_that_names_the_run(tmp_path: Path) -> None:
    finetune = {"base": "/base", "base_sha256": "0", "base_step": 7}
    (tmp_path / "config.yaml").write_text(json.dumps({"recipe": None, "finetune": finetune}))
    assert load_recipe(str(tmp_path)).title == f"settings of the run {tmp_path}"


def test_message_on_many_errors_is_bounded(tmp_path: Path) -> None:
    names = [name for name, field in TrainConfig.model_fields.items() if field.annotation is int]
    file = tmp_path / "own.yaml"
    file.write_text("train:\n" + "".join(f"  {name}: {'x' * 10_000}\n" for name in names))
    with pytest.raises(UserError, match=rf"{len(names)} errors: .*\(8\) .*and {len(names) - 8} more") as error:
        load_recipe(str(file))
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize(
    "text",
    [
        # PyYAML raises IndexError, IndexError, KeyError and AttributeError
        "a: !!int ''", "a: !!float '_'", "a: !!bool x", "a: !!timestamp x",
        # values that contain themselves or each other: without an end, 10**9 values, too deep for the stack
        "train: {max_steps: &a [*a]}", "a: &a {b: *a}",
        "\n".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}1]" if n else "a0: &a0 1" for n in range(10)),
        f"train: {{max_steps: {'[' * 150}{']' * 150}}}", "a: {b: 1, b: 2}",
    ],
)  # fmt: skip
def test_yaml_of_any_kind_is_read_or_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"^own.yaml: not readable as YAML \([^\n]+\)"):
        read_yaml(text, "own.yaml")


def test_yaml_may_have_anchors() -> None:
    assert read_yaml("a: &a [1, 2]\nb: {<<: {c: 3}, d: *a}", "own.yaml") == {"a": [1, 2], "b": {"c": 3, "d": [1, 2]}}


@pytest.mark.parametrize("name", ["my-note", "1x", ""])
def test_unknown_name_that_is_no_identifier_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"recipe r: unknown setting '{name}'"):
        check_settings(TrainConfig, {name: 1}, "recipe r")


def test_settings_of_earlier_versions_may_be_stated_with_their_only_value() -> None:
    assert TrainConfig(muon_momentum=0.95, segment_warmup_steps=0, initial_segment_length=None) == TrainConfig()
    with pytest.raises(UserError, match=r"muon_momentum is gone .* always 0\.95 now"):
        TrainConfig(muon_momentum=0.9)


def test_recipes_of_earlier_versions_are_merged_as_those_of_today(tmp_path: Path) -> None:
    """Whatever is given beside them: another architecture, the group, or a setting of it under its earlier name."""
    (tmp_path / "old.yaml").write_text("title: old\nmodel: {input_dropout: 0.3, qkv_dropout: 0.4}\n")
    recipe = load_recipe(str(tmp_path / "old.yaml"))

    def merged(model: dict[str, Any], recipe: Recipe = recipe) -> RegularizationConfig:
        return run_settings(merge_recipe(recipe, {"model": model}), "settings").model.regularization

    for architecture in ARCHITECTURES:
        expected = {"input_dropout": 0.3, "qkv_dropout": 0.4 if ARCHITECTURES[architecture].has_distances else 0.0}
        assert merged({"architecture": architecture}) == RegularizationConfig(**expected)
    both = RegularizationConfig(input_dropout=0.1, qkv_dropout=0.4)
    for given in ({"input_dropout": 0.1}, RegularizationConfig(input_dropout=0.1)):
        assert merged({"regularization": given}) == both
    assert merged({"input_dropout": 0.1}) == both
    assert merged({"architecture": "lstm"}, load_recipe("ptb")).input_dropout > 0


def test_regularization_is_read_where_earlier_files_have_it() -> None:
    flat = {"dropout": 0.2, "input_dropout": 0.3, "qkv_dropout": 0.4}
    config = TransformerXLConfig.model_validate(flat)
    assert (config.regularization.input_dropout, config.regularization.qkv_dropout) == (0.3, 0.4)
    assert config == TransformerXLConfig(dropout=0.2, regularization={"input_dropout": 0.3, "qkv_dropout": 0.4})
    # checksums and transformers' config.json keep that form
    assert config.flat().items() >= flat.items()
    assert "regularization" not in config.flat()
    assert "qkv_dropout" not in VaswaniConfig().flat()
    with pytest.raises(UserError, match="input_dropout was given twice, also in the group regularization"):
        TransformerXLConfig(**flat, regularization={"input_dropout": 0.1})
    with pytest.raises(UserError, match=r"regularization\.qkv_dropout is not for vaswani"):
        VaswaniConfig(regularization={"qkv_dropout": 0.1})
