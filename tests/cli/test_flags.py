"""Every setting of every architecture can be typed as a flag, and every one of its choices."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args, get_origin

import pytest
from cyclopts import Argument

from transformer_xl.cli.flags import EvaluationFlags, ModelFlags, TrainFlags, given_settings
from transformer_xl.cli.main import COMMANDS, build_app
from transformer_xl.cli.options import parse_integers
from transformer_xl.config import ARCHITECTURES, OTHER_NAMES, EvaluationConfig, Settings, TrainConfig, run_settings

# prefix of the flags, such as model in --model.n-layers, and class of the settings
GROUPS: list[tuple[str, type[Settings]]] = [
    *(("model", kind) for kind in ARCHITECTURES.values()),
    ("train", TrainConfig),
    ("evaluation", EvaluationConfig),
]
CHOICES = {
    (group, name, choice)
    for group, kind in GROUPS
    for name, field in kind.model_fields.items()
    if get_origin(field.annotation) is Literal
    for choice in get_args(field.annotation)
}


def value_of_flag(group: str, name: str, value: str) -> Any:
    """Return the value of a setting whose flag is typed, before the settings are checked."""
    option = f"--{group}.{name.replace('_', '-')}"
    _, bound, _ = build_app().parse_args(["train", "small", option, value], exit_on_error=False, print_error=False)
    return given_settings(**{group: bound.arguments[group]})[group][name]


def test_every_setting_is_a_flag() -> None:
    flags = {"model": ModelFlags, "train": TrainFlags, "evaluation": EvaluationFlags}
    for group, kind in GROUPS:
        assert kind.model_fields.keys() - flags[group].model_fields.keys() <= {"vocab_size"}  # the corpus determines it


@pytest.mark.parametrize(("group", "name", "choice"), sorted(CHOICES))
def test_every_choice_can_be_typed(group: str, name: str, choice: str) -> None:
    assert value_of_flag(group, name, choice) == choice


@pytest.mark.parametrize(
    ("group", "name"), [("model", "attention_window"), ("model", "cutoffs"), ("train", "eval_tokens")]
)
def test_none_is_no_limit_unless_it_is_a_choice(group: str, name: str) -> None:
    """The flag's value none becomes None, except for settings with a choice "none", which the test above types."""
    assert value_of_flag(group, name, "none") is None


def test_several_integers_are_one_argument() -> None:
    cutoffs = value_of_flag("model", "cutoffs", "20,4e1")
    assert run_settings({"model": {"cutoffs": cutoffs}}, "flags").model.cutoffs == (20, 40)


def test_integers_may_have_an_exponent() -> None:
    """Settings, flags of the commands, and lists."""
    assert value_of_flag("train", "max_steps", "1e3") == value_of_flag("train", "eval_tokens", "1.0E3") == 1000
    words = ["evaluate", "run", "--max-tokens", "2.5e3", "--threads", "1e1"]
    _, bound, _ = build_app().parse_args(words, exit_on_error=False, print_error=False)
    assert (bound.arguments["max_tokens"], bound.arguments["device_options"].threads) == (2500, 10)
    assert parse_integers("--seeds", "1e1,3") == (10, 3)


def test_descriptions_list_the_architectures_that_have_the_setting() -> None:
    descriptions = {name: str(field.description) for name, field in ModelFlags.model_fields.items()}
    assert "[qrnn]" in descriptions["zoneout"]
    assert "[transformer-xl, xlnet, shaw" in descriptions["clamp_length"]
    assert "[" not in descriptions["n_layers"].removesuffix("[if not set: 6]")


def flags_of_all_commands() -> list[Argument]:
    app = build_app()
    commands = [app[name] for name in COMMANDS if name not in ("analyze", "reproduce")]
    groups = ("analyze", "reproduce", "runs")
    commands += [app[group][name] for group in groups for name in app[group] if name[0] != "-"]
    return [flag for command in commands for flag in command.assemble_argument_collection()]


def test_every_integer_may_have_an_exponent() -> None:
    """Which one of the two converts: cyclopts would round 1.5, and refuse 1e1."""
    integers = [flag for flag in flags_of_all_commands() if int in (flag.hint, *get_args(flag.hint))]
    assert len(integers) > 50
    converters = "_convert_integer|whole_number"
    assert [flag.name for flag in integers if not re.search(converters, str(flag.field_info.annotation))] == []


def test_every_suggestion_is_a_flag() -> None:
    names = [name for flag in flags_of_all_commands() for name in flag.names]
    assert set(OTHER_NAMES.values()) <= {name.removeprefix("--").rpartition(".")[2] for name in names}
