"""Every choice of every setting can be typed."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import pytest

from transformer_xl.cli.flags import given
from transformer_xl.cli.main import build_app
from transformer_xl.config import Settings, TrainConfig, TransformerXLConfig

GROUPS: dict[str, type[Settings]] = {"model": TransformerXLConfig, "train": TrainConfig}
CHOICES = [
    (group, name, choice)
    for group, kind in GROUPS.items()
    for name, field in kind.model_fields.items()
    if get_origin(field.annotation) is Literal
    for choice in get_args(field.annotation)
]


def typed(group: str, name: str, value: str) -> Any:
    """What a setting becomes that is typed so, checked as settings are."""
    option = f"--{group}.{name.replace('_', '-')}"
    _, bound, _ = build_app().parse_args(["train", "small", option, value], exit_on_error=False, print_error=False)
    return given(**{group: bound.arguments[group]})[group][name]


@pytest.mark.parametrize(("group", "name", "choice"), CHOICES)
def test_every_choice_can_be_typed(group: str, name: str, choice: str) -> None:
    assert typed(group, name, str(choice)) == choice


def test_there_are_choices_called_none() -> None:
    """Without this, the test above would not show that such a one is kept."""
    assert {("model", "tie_projections", "none"), ("train", "average", "none")} <= set(CHOICES)


@pytest.mark.parametrize("inputs", [1, 2])
def test_the_window_of_a_qrnn_can_be_typed(inputs: int) -> None:
    found = typed("model", "qrnn_kernel_size", str(inputs))
    assert TransformerXLConfig(architecture="qrnn", qrnn_kernel_size=found).qrnn_kernel_size == inputs


@pytest.mark.parametrize(("group", "name"), [("model", "window"), ("model", "cutoffs"), ("train", "eval_tokens")])
def test_elsewhere_none_takes_a_limit_away(group: str, name: str) -> None:
    assert typed(group, name, "none") is None
