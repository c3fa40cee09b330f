"""Settings of generation that are refused, and the value that the default of top_k, auto, stands for."""

from __future__ import annotations

import math
from typing import Any

import pytest

from transformer_xl.config import UserError, check_settings
from transformer_xl.generation.generation_config import GenerationConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens.*1.*given: 0"),
        ({"min_new_tokens": 6, "max_new_tokens": 5}, "min_new_tokens 6 is above max_new_tokens 5"),
        ({"temperature": -0.1}, "temperature.*0"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": 0}, "top_k 0: must be 1 or more"),
        ({"top_p": 0.0}, "top_p.*0"),
        ({"top_p": 1.01}, "top_p.*1"),
        ({"min_p": 1.5}, "min_p.*1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty.*0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"repetition_penalty_window": 0}, "repetition_penalty_window.*1"),
        ({"seed": 2**63}, "seed"),
        ({"num_samples": 0}, "num_samples.*1"),
        ({"num_beams": 0}, "num_beams.*1"),
        ({"stop": ["a", ""]}, "a stop string is empty"),
        ({"length_penalty": 0.5}, "length_penalty.*num_beams"),
        ({"num_beams": 2, "length_penalty": 11.0}, "length_penalty.*10"),
        ({"num_beams": 2, "max_new_tokens": None}, "beam search needs a maximum length.*max_new_tokens"),
        ({"num_beams": 2, "greedy": True}, "beam search neither samples.*leave out greedy"),
        ({"num_beams": 2, "top_k": 5}, "leave out top_k"),
        ({"num_beams": 2, "stop": "a"}, "leave out stop"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_settings(GenerationConfig, settings, "settings")


def test_top_k_is_40_unless_another_setting_limits_the_tokens() -> None:
    configs = [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": None}, {"top_k": 7, "top_p": 0.9}]
    assert [GenerationConfig(**settings).effective_top_k for settings in configs] == [40, None, None, None, 7]
