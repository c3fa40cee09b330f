"""The choice of the memory length that evaluation uses by default, from losses of the segments of a text.

Suffix: N segments of the text.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from model_configs import settings_of
from training_runs import MODEL

from transformer_xl.config import run_settings
from transformer_xl.text.token_store import TokenSplit
from transformer_xl.training.memory_length_choice import candidate_lengths, choose_length, is_worse, num_measured_tokens

TRAINED_N = 100 + np.random.default_rng(1).normal(0, 10, 401)  # nats of each segment with the trained length, 64
NOISE_N = np.random.default_rng(2).normal(0, 1, 401)  # two standard errors of its mean: 0.1, a thousandth of the loss
NOISE_N -= NOISE_N.mean()


def chosen(**percent: float) -> int:
    """Return the choice among the trained length and others, given by how much their losses differ in percent."""
    others = {int(name.removeprefix("m")): TRAINED_N + NOISE_N + change for name, change in percent.items()}
    return choose_length({64: TRAINED_N, **others}, 64)


def test_a_longer_memory_is_chosen_only_if_it_is_certainly_better() -> None:
    assert chosen(m32=0.5, m128=0.1, m256=0.7) == 64
    assert chosen(m128=0.0) == 64
    assert chosen(m128=-0.15) == 64  # by less than the noise and the tolerance together
    assert chosen(m128=-0.5) == 128
    assert chosen(m128=-0.5, m256=-0.9, m512=0.3) == 256
    assert chosen(m128=-0.5, m256=-0.55) == 128  # no reason for twice the memory
    assert chosen(m32=0.0) == 64
    assert chosen(m32=-0.5) == 32


def test_a_text_of_few_segments_is_no_evidence() -> None:
    few = {64: TRAINED_N[:5], 128: TRAINED_N[:5] - 0.5 + 2 * NOISE_N[:5]}
    assert few[128].mean() < few[64].mean() * 0.995
    assert choose_length(few, 64) == 64
    assert not is_worse(few[64], few[128])
    assert is_worse(TRAINED_N, TRAINED_N + NOISE_N - 0.2)


@pytest.mark.parametrize(
    ("settings", "num_tokens", "expected"),
    [
        ({}, 8 * 88, [5, 11, 22, 44, 88]),
        ({}, 8 * 88 - 1, [5, 11, 22, 44]),
        ({}, 8 * 11, [5, 11]),
        ({}, 8 * 11 - 1, []),  # most of the text would be read with a memory that is not full
        ({"evaluation": {"segment_length": 23}}, 8 * 22, []),  # 8 segments at least
        ({"model": {"attention_window": 31}}, 8 * 88, [5, 11, 22, 30]),
        ({"evaluation": {"attention_window": 9}}, 8 * 88, [5, 11]),
        ({"evaluation": {"memory_length": 29}}, 8 * 88, []),
        ({"evaluation": {"method": "sliding-window"}}, 8 * 88, []),
        ({"train": {"memory_length": 0}}, 8 * 88, []),
        ({"model": {"architecture": "vaswani"}, "train": {"memory_length": 0}}, 8 * 88, []),
        ({"model": {"architecture": "lstm"}}, 8 * 88, []),
        ({"model": {"architecture": "qrnn"}}, 8 * 88, []),
        ({"model": {"architecture": "shaw"}}, 8 * 88, [5, 11, 22, 44, 88]),
    ],
)
def test_candidates(settings: dict[str, dict[str, Any]], num_tokens: int, expected: list[int]) -> None:
    train = {"segment_length": 7, "memory_length": 11} | settings.get("train", {})
    model = settings_of(**MODEL | settings.get("model", {}))
    config = run_settings({**settings, "model": model, "train": train}, "test")
    assert candidate_lengths(config, num_tokens) == expected


@pytest.mark.parametrize(
    ("memory_length", "num_valid", "trained_tokens", "expected"),
    [
        (64, 10**6, 10**8, 32_768),
        (1024, 10**6, 10**8, 8 * 8 * 1024),  # the longest of 8 times the trained length fits 8 times
        (64, 5000, 10**8, 5000),
        (64, 10**6, 64 * 1000 + 63, 1000),  # a short training is not followed by a long measurement
    ],
)
def test_number_of_measured_tokens(memory_length: int, num_valid: int, trained_tokens: int, expected: int) -> None:
    config = run_settings({"train": {"memory_length": memory_length}}, "test")
    split = Mock(TokenSplit, num_tokens=num_valid)
    assert num_measured_tokens(config, split, trained_tokens=trained_tokens) == expected
