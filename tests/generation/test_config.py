"""What settings are refused, and what those that are not given stand for."""

from __future__ import annotations

import math
from typing import Any

import pytest

from transformer_xl.config import UserError, check_settings
from transformer_xl.generation.config import GenerationConfig

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "max_new_tokens.*1.*given: 0"),
    ({"max_prompt_tokens": 0}, "max_prompt_tokens.*1.*given: 0"),
    ({"min_new_tokens": -1}, "min_new_tokens.*0.*given: -1"),
    ({"min_new_tokens": 6, "max_new_tokens": 5}, "min_new_tokens 6 is above max_new_tokens 5"),
    ({"memory_length": -1}, "memory_length.*0.*given: -1"),
    ({"temperature": -0.1}, "temperature.*0"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"top_k": 0}, "top_k 0: must be 1 or more"),
    ({"top_k": 2.5}, "top_k.*integer"),
    ({"top_p": 0.0}, "top_p.*0"),
    ({"top_p": 1.01}, "top_p.*1"),
    ({"top_p": math.nan}, "top_p"),
    ({"min_p": -0.1}, "min_p.*0"),
    ({"min_p": 1.5}, "min_p.*1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty.*0"),
    ({"repetition_penalty": math.inf}, "repetition_penalty"),
    ({"repetition_penalty_window": 0}, "repetition_penalty_window.*1"),
    ({"repetition_penalty_window": 1.5}, "repetition_penalty_window.*integer"),
    ({"seed": -1}, "seed.*0"),
    ({"seed": 2**63}, "seed"),
    ({"num_samples": 0}, "num_samples.*1"),
    ({"num_beams": 0}, "num_beams.*1"),
    ({"stop": ""}, "a stop string is empty"),
    ({"stop": ["a", ""]}, "a stop string is empty"),
    ({"length_penalty": 0.5}, "length_penalty.*num_beams"),
    *(
        ({"num_beams": 2, **odd}, f"beam search neither samples.*leave out {next(iter(odd))}")
        for odd in (
            {"greedy": True},
            {"temperature": 0.5},
            {"top_k": 5},
            {"seed": 1},
            {"stop": "a"},
            {"num_samples": 2},
        )
    ),
    ({"num_beams": 2, "max_new_tokens": None}, "beam search needs a maximum length.*max_new_tokens"),
    ({"num_beams": 2, "length_penalty": math.nan}, "length_penalty"),
    ({"num_beams": 2, "length_penalty": 11.0}, "length_penalty.*10"),
    ({"num_beams": 2, "length_penalty": -11.0}, "length_penalty.*-10"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_settings(GenerationConfig, settings, "settings")


def test_top_k_is_40_where_nothing_limits_the_tokens() -> None:
    found = [
        GenerationConfig(**settings).effective_top_k
        for settings in ({}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": None}, {"top_k": 7, "top_p": 0.9})
    ]
    assert found == [40, None, None, None, 7]
