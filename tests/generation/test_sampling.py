"""The distribution that is sampled from, against values computed by hand, and samples that follow it.

Shape suffixes: B rows, V vocabulary, K earlier tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.generation.sampling import apply_repetition_penalty, sample, sampling_probabilities

PROBABILITIES = [0.05, 0.4, 0.02, 0.25, 0.13, 0.15]  # indices in descending order of probability: 1, 3, 5, 4, 0, 2


def config_of(temperature: float = 1.0, **settings: Any) -> GenerationConfig:
    """Settings without the default top-k of 40."""
    return GenerationConfig(**{"temperature": temperature, "top_k": None, **settings})


def logits_of(*rows: list[float]) -> Tensor:
    """Logits whose softmax is each row; a constant added to a row changes nothing."""
    return torch.tensor(rows, dtype=torch.float64).log() + torch.arange(len(rows))[:, None] * 3.0


def seeded(*seeds: int) -> list[np.random.Generator]:
    return [np.random.default_rng(seed) for seed in seeds]


def assert_probabilities(
    config: GenerationConfig, expected: list[float], probabilities: list[float] = PROBABILITIES
) -> None:
    """Check the distribution in each of two rows; the expected one is given up to a common factor."""
    sampled_BV = sampling_probabilities(logits_of(probabilities, probabilities), config)
    assert sampled_BV.dtype == torch.float32
    expected_V = torch.tensor(expected) / sum(expected)
    torch.testing.assert_close(sampled_BV, expected_V.expand(2, -1), rtol=1e-5, atol=1e-7)
    assert torch.equal(sampled_BV > 0, (expected_V > 0).expand(2, -1))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 0.5}, [probability**2 for probability in PROBABILITIES]),
        ({"temperature": 2.0}, [probability**0.5 for probability in PROBABILITIES]),
        ({"top_k": 1}, [0, 1, 0, 0, 0, 0]),
        ({"top_k": 3}, [0, 0.4, 0, 0.25, 0, 0.15]),
        ({"top_k": 1000}, PROBABILITIES),
        ({"top_p": 0.01}, [0, 1, 0, 0, 0, 0]),  # the most likely token is always kept
        ({"top_p": 1e-320}, [0, 1, 0, 0, 0, 0]),  # 0 in float32
        ({"top_p": 0.39}, [0, 1, 0, 0, 0, 0]),
        ({"top_p": 0.41}, [0, 0.4, 0, 0.25, 0, 0]),
        ({"top_p": 0.66}, [0, 0.4, 0, 0.25, 0, 0.15]),
        ({"top_p": 0.92}, [0, 0.4, 0, 0.25, 0.13, 0.15]),
        ({"top_p": 1.0}, PROBABILITIES),
        ({"min_p": 0.0}, PROBABILITIES),
        ({"min_p": 0.126}, [0, 0.4, 0, 0.25, 0.13, 0.15]),
        ({"min_p": 0.62}, [0, 0.4, 0, 0.25, 0, 0]),
        ({"min_p": 0.63}, [0, 1, 0, 0, 0, 0]),
        ({"min_p": 1.0}, [0, 1, 0, 0, 0, 0]),
        # the order is temperature, top-k, top-p, min-p; temperature 1/2 gives 0.16, 0.0625, 0.0225 and so on
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.65}, [0, 1, 0, 0, 0, 0]),  # the first of 3 has 0.653
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.66}, [0, 0.16, 0, 0.0625, 0, 0]),
        ({"top_k": 3, "top_p": 0.81}, [0, 0.4, 0, 0.25, 0, 0]),  # the first 2 of 3 have 0.65 of 0.8, which is 0.8125
        ({"top_k": 3, "top_p": 0.82}, [0, 0.4, 0, 0.25, 0, 0.15]),
        ({"temperature": 0.5, "min_p": 0.36}, [0, 0.16, 0, 0.0625, 0, 0]),
        ({"top_k": 3, "top_p": 0.9, "min_p": 0.5}, [0, 0.4, 0, 0.25, 0, 0]),
        # small temperatures, down to the smallest float64 above 0
        *(({"temperature": tiny}, [0, 1, 0, 0, 0, 0]) for tiny in (1e-3, 1e-50, 5e-324)),  # must not overflow
    ],
    ids=str,
)
def test_distribution_of_settings(settings: dict[str, Any], expected: list[float]) -> None:
    assert_probabilities(config_of(**settings), expected)


def test_first_of_equal_tokens_are_kept() -> None:
    equal = [0.25, 0.125, 0.25, 0.125, 0.25]
    assert_probabilities(config_of(top_k=1), [1, 0, 0, 0, 0], equal)
    assert_probabilities(config_of(top_k=4), [2, 1, 2, 0, 2], equal)
    assert_probabilities(config_of(top_p=0.3), [1, 0, 1, 0, 0], equal)
    assert_probabilities(config_of(top_p=0.8), [2, 1, 2, 0, 2], equal)
    assert sample(logits_of(equal), config_of(greedy=True), seeded(1)).tolist() == [0]


def test_repetition_penalty_follows_ctrl() -> None:
    """Divided where positive, multiplied where negative, once however often a token occurred; others stay."""
    logits_BV = torch.tensor([[3.0, -2.0, 0.0, 1.0, -4.0], [1.0, 2.0, 3.0, -1.0, -2.0]])
    earlier_BK = torch.tensor([[0, 4, 0, 2], [3, 3, 3, 1]])
    before = logits_BV.clone()
    penalized_BV = apply_repetition_penalty(logits_BV, earlier_BK, 2.0)
    assert penalized_BV.tolist() == [[1.5, -2.0, 0.0, 1.0, -8.0], [1.0, 1.0, 3.0, -2.0, -2.0]]
    assert torch.equal(logits_BV, before)
    assert apply_repetition_penalty(logits_BV, earlier_BK, 0.5)[0].tolist() == [6.0, -2.0, 0.0, 1.0, -2.0]


@settings(deadline=None, max_examples=50)
@given(
    # divided by 4 below: subtracting the maximum from multiples of 1/4 is exact, so that different logits stay
    # different
    rows=st.lists(st.lists(st.integers(-120, 120), min_size=11, max_size=11), min_size=1, max_size=3),
    temperature=st.floats(0.05, 20),
    top_k=st.none() | st.integers(1, 13),
    top_p=st.none() | st.floats(0.01, 1),
    min_p=st.none() | st.floats(0, 1),
)
def test_distribution_of_any_logits_is_valid(
    rows: list[list[int]], temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    """Each row sums to 1 and keeps its most likely tokens; no kept token is less likely than a removed one."""
    logits_BV = torch.tensor(rows) / 4
    probability_BV = sampling_probabilities(logits_BV, config_of(temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    torch.testing.assert_close(probability_BV.sum(-1), torch.ones(len(rows)))
    for logits_V, probability_V in zip(logits_BV, probability_BV, strict=True):
        assert probability_V[logits_V == logits_V.max()].max() == probability_V.max()
        assert (logits_V[probability_V > 0].min() >= logits_V[probability_V == 0]).all()
        if top_k is not None:
            assert (probability_V > 0).sum() <= top_k


@pytest.mark.parametrize("config", [config_of(), config_of(top_k=3, min_p=0.2)])
def test_each_row_is_sampled_independently(config: GenerationConfig) -> None:
    logits_BV = logits_of(PROBABILITIES, PROBABILITIES[::-1], PROBABILITIES)
    together = seeded(3, 5, 7)
    sampled = [sample(logits_BV, config, together).tolist() for _ in range(20)]
    for row, generator in enumerate(seeded(3, 5, 7)):
        alone = [int(sample(logits_BV[row : row + 1], config, [generator])) for _ in range(20)]
        assert [indices[row] for indices in sampled] == alone


def test_samples_follow_the_distribution() -> None:
    generator = np.random.default_rng(5)
    # 4001 samples: the standard error of a frequency is at most 0.008
    logits_BV, generators = logits_of(PROBABILITIES).expand(4001, -1), [generator] * 4001
    for config in (config_of(), config_of(0.8, top_k=4, min_p=0.3)):
        sampled_B = sample(logits_BV, config, generators)
        assert (sampled_B.dtype, sampled_B.shape) == (torch.int64, (4001,))
        frequencies_V = torch.bincount(sampled_B, minlength=6) / 4001
        expected_V = sampling_probabilities(logits_BV[:1], config)[0]
        torch.testing.assert_close(frequencies_V, expected_V, rtol=0, atol=0.03)
        assert (frequencies_V[expected_V == 0] == 0).all()


def test_only_the_passed_generators_are_used() -> None:
    logits_BV = logits_of(PROBABILITIES, PROBABILITIES[::-1])
    random_state, (generator,) = torch.get_rng_state(), seeded(3)
    before = generator.bit_generator.state
    assert sample(logits_BV, config_of(greedy=True), [generator] * 2).tolist() == [1, 4]
    assert generator.bit_generator.state == before
    sample(logits_BV, config_of(), [generator] * 2)
    assert generator.bit_generator.state != before
    assert torch.equal(torch.get_rng_state(), random_state)


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    probability_BV = sampling_probabilities(logits_of(PROBABILITIES).bfloat16(), config_of(top_p=0.9))
    assert probability_BV.dtype == torch.float32
    torch.testing.assert_close(probability_BV.sum(-1), torch.ones(1))


@pytest.mark.parametrize(
    "config", [config_of(greedy=True), config_of(), config_of(top_k=2), config_of(top_p=0.5), config_of(min_p=0.5)]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(config: GenerationConfig, value: float) -> None:
    logits_BV = logits_of(PROBABILITIES, PROBABILITIES)
    logits_BV[1, 4] = value
    with pytest.raises(UserError, match=r"not finite.*checkpoint=best"):
        sample(logits_BV, config, seeded(1, 2))
    with pytest.raises(UserError, match="no token is left"):
        sample(torch.full((1, 5), -torch.inf), config, seeded(1))
