"""The distribution that is sampled from, by hand, and samples that follow it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.generation.config import GenerationConfig
from transformer_xl.generation.sampling import apply_repetition_penalty, sample, sampling_probabilities

PROBABILITIES = [0.05, 0.4, 0.02, 0.25, 0.13, 0.15]  # the most likely first: 1, 3, 5, 4, 0, 2


def config_of(temperature: float = 1.0, **given: Any) -> GenerationConfig:
    """Without the limit of 40 tokens."""
    return GenerationConfig(**{"temperature": temperature, "top_k": None, **given})


def logits_of(*rows: list[float]) -> Tensor:
    """Logits whose softmax is each row; a constant added to a row changes nothing."""
    return torch.tensor(rows, dtype=torch.float64).log() + torch.arange(len(rows))[:, None] * 3.0


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def assert_probabilities(config: GenerationConfig, wanted: list[float], given: list[float] = PROBABILITIES) -> None:
    """The wanted probabilities, up to a common factor, in each of two rows."""
    found_BV = sampling_probabilities(logits_of(given, given), config)
    assert found_BV.dtype == torch.float32
    wanted_V = torch.tensor(wanted) / sum(wanted)
    torch.testing.assert_close(found_BV, wanted_V.expand(2, -1), rtol=1e-5, atol=1e-7)
    assert torch.equal(found_BV > 0, (wanted_V > 0).expand(2, -1))


@pytest.mark.parametrize("temperature", [0.25, 0.5, 1.0, 2.0, 7.0])
def test_temperature_is_a_power_of_the_probabilities(temperature: float) -> None:
    assert_probabilities(config_of(temperature), [one ** (1 / temperature) for one in PROBABILITIES])


@pytest.mark.parametrize(
    ("top_k", "wanted"),
    [
        (1, [0, 1, 0, 0, 0, 0]),
        (2, [0, 0.4, 0, 0.25, 0, 0]),
        (3, [0, 0.4, 0, 0.25, 0, 0.15]),
        (5, [0.05, 0.4, 0, 0.25, 0.13, 0.15]),
        (6, PROBABILITIES),
        (1000, PROBABILITIES),
    ],
)
def test_top_k(top_k: int, wanted: list[float]) -> None:
    assert_probabilities(config_of(top_k=top_k), wanted)


@pytest.mark.parametrize(
    ("top_p", "wanted"),
    [
        (0.01, [0, 1, 0, 0, 0, 0]),  # at least the most likely token
        (0.39, [0, 1, 0, 0, 0, 0]),
        (0.41, [0, 0.4, 0, 0.25, 0, 0]),
        (0.64, [0, 0.4, 0, 0.25, 0, 0]),
        (0.66, [0, 0.4, 0, 0.25, 0, 0.15]),
        (0.92, [0, 0.4, 0, 0.25, 0.13, 0.15]),
        (0.94, [0.05, 0.4, 0, 0.25, 0.13, 0.15]),
        (0.99, PROBABILITIES),
        (1.0, PROBABILITIES),
    ],
)
def test_top_p(top_p: float, wanted: list[float]) -> None:
    assert_probabilities(config_of(top_p=top_p), wanted)


@pytest.mark.parametrize(
    ("min_p", "wanted"),
    [
        (0.0, PROBABILITIES),
        (0.049, PROBABILITIES),
        (0.051, [0.05, 0.4, 0, 0.25, 0.13, 0.15]),
        (0.126, [0, 0.4, 0, 0.25, 0.13, 0.15]),
        (0.36, [0, 0.4, 0, 0.25, 0, 0.15]),
        (0.62, [0, 0.4, 0, 0.25, 0, 0]),
        (0.63, [0, 1, 0, 0, 0, 0]),
        (1.0, [0, 1, 0, 0, 0, 0]),
    ],
)
def test_min_p(min_p: float, wanted: list[float]) -> None:
    assert_probabilities(config_of(min_p=min_p), wanted)


def test_limits_apply_one_after_another() -> None:
    """Temperature, top-k, top-p, min-p. At temperature 1/2 the probabilities go as 0.16, 0.0625, 0.0225, ..."""
    assert_probabilities(config_of(0.5, top_k=3, top_p=0.65), [0, 1, 0, 0, 0, 0])  # the first of 3 has 0.653
    assert_probabilities(config_of(0.5, top_k=3, top_p=0.66), [0, 0.16, 0, 0.0625, 0, 0])
    assert_probabilities(config_of(1.0, top_k=3, top_p=0.81), [0, 0.4, 0, 0.25, 0, 0])  # 0.65 of 0.8 is 0.8125
    assert_probabilities(config_of(1.0, top_k=3, top_p=0.82), [0, 0.4, 0, 0.25, 0, 0.15])
    roots = [one**0.5 for one in PROBABILITIES]  # as 0.632, 0.5, 0.387, 0.361, 0.224, 0.141
    assert_probabilities(config_of(2.0, min_p=0.35), [*roots[:2], 0, *roots[3:]])
    assert_probabilities(config_of(2.0, min_p=0.36), [0, roots[1], 0, *roots[3:]])
    assert_probabilities(config_of(0.5, min_p=0.36), [0, 0.16, 0, 0.0625, 0, 0])
    assert_probabilities(config_of(top_k=3, top_p=0.9, min_p=0.3), [0, 0.4, 0, 0.25, 0, 0.15])
    assert_probabilities(config_of(top_k=2, top_p=0.9, min_p=0.3), [0, 0.4, 0, 0.25, 0, 0])


def test_of_equal_tokens_the_first_are_kept() -> None:
    equal = [0.25, 0.125, 0.25, 0.125, 0.25]
    assert_probabilities(config_of(top_k=1), [1, 0, 0, 0, 0], equal)
    assert_probabilities(config_of(top_k=3), [1, 0, 1, 0, 1], equal)
    assert_probabilities(config_of(top_k=4), [2, 1, 2, 0, 2], equal)
    assert_probabilities(config_of(top_p=0.3), [1, 0, 1, 0, 0], equal)
    assert_probabilities(config_of(top_p=0.8), [2, 1, 2, 0, 2], equal)
    assert sample(logits_of(equal), config_of(greedy=True), seeded(1)).tolist() == [0]


def test_the_repetition_penalty_is_ctrls() -> None:
    """Divided where positive, multiplied where negative, once however often a token occurred; others stay."""
    logits_BV = torch.tensor([[3.0, -2.0, 0.0, 1.0, -4.0], [1.0, 2.0, 3.0, -1.0, -2.0]])
    earlier_BK = torch.tensor([[0, 4, 0, 2], [3, 3, 3, 1]])
    before = logits_BV.clone()
    found_BV = apply_repetition_penalty(logits_BV, earlier_BK, 2.0)
    assert found_BV.tolist() == [[1.5, -2.0, 0.0, 1.0, -8.0], [1.0, 1.0, 3.0, -2.0, -2.0]]
    assert torch.equal(logits_BV, before)
    assert apply_repetition_penalty(logits_BV, earlier_BK, 0.5)[0].tolist() == [6.0, -2.0, 0.0, 1.0, -2.0]


@settings(deadline=None, max_examples=50)
@given(
    # quarters: subtracting the maximum from them is exact, so that different logits stay different
    rows=st.lists(st.lists(st.integers(-120, 120), min_size=11, max_size=11), min_size=1, max_size=3),
    temperature=st.floats(0.05, 20),
    top_k=st.none() | st.integers(1, 13),
    top_p=st.none() | st.floats(0.01, 1),
    min_p=st.none() | st.floats(0, 1),
)
def test_what_holds_for_any_logits(
    rows: list[list[int]], temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    """Each row sums to 1 and keeps its most likely tokens, and none less likely than one that is left out."""
    logits_BV = torch.tensor(rows) / 4
    found_BV = sampling_probabilities(logits_BV, config_of(temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    torch.testing.assert_close(found_BV.sum(-1), torch.ones(len(rows)))
    for logits_V, found_V in zip(logits_BV, found_BV, strict=True):
        assert found_V[logits_V == logits_V.max()].max() == found_V.max()
        assert (logits_V[found_V > 0].min() >= logits_V[found_V == 0]).all()
        if top_k is not None:
            assert (found_V > 0).sum() <= top_k


@pytest.mark.parametrize("config", [config_of(), config_of(top_k=3, min_p=0.2)])
def test_each_row_is_sampled_as_it_would_be_alone(config: GenerationConfig) -> None:
    logits_BV = logits_of(PROBABILITIES, PROBABILITIES[::-1], PROBABILITIES)
    together = seeded(3, 5, 7)
    sampled = [sample(logits_BV, config, together).tolist() for _ in range(20)]
    for row, generator in enumerate(seeded(3, 5, 7)):
        alone = [int(sample(logits_BV[row : row + 1], config, [generator])) for _ in range(20)]
        assert [one[row] for one in sampled] == alone


def test_samples_follow_the_distribution() -> None:
    generator = torch.Generator().manual_seed(5)
    logits_BV, generators = logits_of(PROBABILITIES).expand(4001, -1), [generator] * 4001
    for config in (config_of(), config_of(2.0), config_of(top_k=3), config_of(top_p=0.7), config_of(0.8, min_p=0.3)):
        sampled_B = sample(logits_BV, config, generators)
        assert (sampled_B.dtype, sampled_B.shape) == (torch.int64, (4001,))
        frequencies_V = torch.bincount(sampled_B, minlength=6) / 4001
        wanted_V = sampling_probabilities(logits_BV[:1], config)[0]
        torch.testing.assert_close(frequencies_V, wanted_V, rtol=0, atol=0.03)
        assert (frequencies_V[wanted_V == 0] == 0).all()


def test_only_the_given_generators_are_used() -> None:
    logits_BV = logits_of(PROBABILITIES, PROBABILITIES[::-1])
    random_state, (generator,) = torch.get_rng_state(), seeded(3)
    before = generator.get_state()
    assert sample(logits_BV, config_of(greedy=True), [generator] * 2).tolist() == [1, 4]
    assert torch.equal(generator.get_state(), before)
    sample(logits_BV, config_of(), [generator] * 2)
    assert not torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-50, 5e-324])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    """Logits divided by it overflow."""
    assert_probabilities(config_of(temperature), [0, 1, 0, 0, 0, 0])


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    found_BV = sampling_probabilities(logits_of(PROBABILITIES).bfloat16(), config_of(top_p=0.9))
    assert found_BV.dtype == torch.float32
    torch.testing.assert_close(found_BV.sum(-1), torch.ones(1))


@pytest.mark.parametrize(
    "config", [config_of(greedy=True), config_of(), config_of(top_k=2), config_of(top_p=0.5), config_of(min_p=0.5)]
)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(config: GenerationConfig, wrong: float) -> None:
    logits_BV = logits_of(PROBABILITIES, PROBABILITIES)
    logits_BV[1, 4] = wrong
    with pytest.raises(UserError, match=r"not finite.*--checkpoint"):
        sample(logits_BV, config, seeded(1, 2))
    with pytest.raises(UserError, match="no token is left"):
        sample(torch.full((1, 5), -torch.inf), config, seeded(1))
