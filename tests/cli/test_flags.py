"""Every setting of every architecture can be typed as a flag, and every one of its choices."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import pytest

from transformer_xl.cli.flags import EvaluationFlags, ModelFlags, TrainFlags, typed_settings
from transformer_xl.cli.main import build_app
from transformer_xl.config import ARCHITECTURES, EvaluationConfig, Settings, TrainConfig, run_settings

CLASSES: list[tuple[str, type[Settings]]] = [
    *(("model", kind) for kind in ARCHITECTURES.values()),
    ("train", TrainConfig),
    ("evaluation", EvaluationConfig),
]
CHOICES = {
    (group, name, choice)
    for group, kind in CLASSES
    for name, field in kind.model_fields.items()
    if get_origin(field.annotation) is Literal
    for choice in get_args(field.annotation)
}


def typed(group: str, name: str, value: str) -> Any:
    """The value that a flag gives to its setting, before the settings are checked."""
    option = f"--{group}.{name.replace('_', '-')}"
    _, bound, _ = build_app().parse_args(["train", "small", option, value], exit_on_error=False, print_error=False)
    return typed_settings(**{group: bound.arguments[group]})[group][name]


def test_every_setting_is_a_flag() -> None:
    flags = {"model": ModelFlags, "train": TrainFlags, "evaluation": EvaluationFlags}
    for group, kind in CLASSES:
        assert kind.model_fields.keys() - flags[group].model_fields.keys() <= {"vocab_size"}  # which the corpus says


@pytest.mark.parametrize(("group", "name", "choice"), sorted(CHOICES))
def test_every_choice_can_be_typed(group: str, name: str, choice: str) -> None:
    assert typed(group, name, choice) == choice


def test_there_are_choices_called_none() -> None:
    """Without this, the test above would not show that such a choice is kept."""
    assert {("model", "tie_projections", "none"), ("train", "weight_average", "none")} <= CHOICES


@pytest.mark.parametrize(
    ("group", "name"), [("model", "attention_window"), ("model", "cutoffs"), ("train", "eval_tokens")]
)
def test_elsewhere_none_means_no_limit(group: str, name: str) -> None:
    assert typed(group, name, "none") is None


def test_several_integers_are_one_word() -> None:
    cutoffs = typed("model", "cutoffs", "20,40")
    assert run_settings({"model": {"cutoffs": cutoffs}}, "flags").model.cutoffs == (20, 40)


def test_a_setting_that_not_every_architecture_has_names_those_that_do() -> None:
    described = {name: str(field.description) for name, field in ModelFlags.model_fields.items()}
    assert "[qrnn]" in described["zoneout"]
    assert "[transformer-xl, shaw]" in described["clamp_length"]
    assert "[" not in described["n_layers"].removesuffix("[default: 6]")
