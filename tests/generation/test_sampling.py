"""The distribution drawn from, by hand, and draws that follow it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.generation.sampling import Sampler

SHARES = [0.05, 0.4, 0.02, 0.25, 0.13, 0.15]  # the likeliest first: 1, 3, 5, 4, 0, 2


def logits_of(*rows: list[float]) -> Tensor:
    """Scores whose softmax is each row; a constant added to a row changes nothing."""
    return torch.tensor(rows, dtype=torch.float64).log() + torch.arange(len(rows))[:, None] * 3.0


def kept(probabilities_BV: Tensor) -> list[set[int]]:
    return [{place for place, share in enumerate(row) if share > 0} for row in probabilities_BV.tolist()]


def assert_shares(sampler: Sampler, wanted: list[float], given: list[float] = SHARES) -> None:
    """The wanted shares, up to a common factor, in each of two rows."""
    found_BV = sampler.probabilities(logits_of(given, given))
    assert found_BV.dtype == torch.float32
    wanted_V = torch.tensor(wanted) / sum(wanted)
    torch.testing.assert_close(found_BV, wanted_V.expand(2, -1), rtol=1e-5, atol=1e-7)
    assert kept(found_BV) == [{place for place, share in enumerate(wanted) if share}] * 2


def test_without_limits_it_is_the_softmax() -> None:
    assert_shares(Sampler(), SHARES)


@pytest.mark.parametrize("temperature", [0.25, 0.5, 2.0, 7.0])
def test_temperature_is_a_power_of_the_shares(temperature: float) -> None:
    assert_shares(Sampler(temperature), [share ** (1 / temperature) for share in SHARES])


@pytest.mark.parametrize(
    ("top_k", "wanted"),
    [
        (1, [0, 1, 0, 0, 0, 0]),
        (2, [0, 0.4, 0, 0.25, 0, 0]),
        (3, [0, 0.4, 0, 0.25, 0, 0.15]),
        (5, [0.05, 0.4, 0, 0.25, 0.13, 0.15]),
        (6, SHARES),
        (7, SHARES),
        (1000, SHARES),
    ],
)
def test_top_k_keeps_the_k_likeliest(top_k: int, wanted: list[float]) -> None:
    assert_shares(Sampler(top_k=top_k), wanted)


@pytest.mark.parametrize(
    ("top_p", "wanted"),
    [
        (0.01, [0, 1, 0, 0, 0, 0]),  # at least the likeliest
        (0.39, [0, 1, 0, 0, 0, 0]),
        (0.41, [0, 0.4, 0, 0.25, 0, 0]),
        (0.64, [0, 0.4, 0, 0.25, 0, 0]),
        (0.66, [0, 0.4, 0, 0.25, 0, 0.15]),
        (0.92, [0, 0.4, 0, 0.25, 0.13, 0.15]),
        (0.94, [0.05, 0.4, 0, 0.25, 0.13, 0.15]),
        (0.99, SHARES),
        (1.0, SHARES),
    ],
)
def test_top_p_keeps_the_likeliest_that_reach_it(top_p: float, wanted: list[float]) -> None:
    assert_shares(Sampler(top_p=top_p), wanted)


@pytest.mark.parametrize(
    ("min_p", "wanted"),
    [
        (0.0, SHARES),
        (0.049, SHARES),
        (0.051, [0.05, 0.4, 0, 0.25, 0.13, 0.15]),
        (0.126, [0, 0.4, 0, 0.25, 0.13, 0.15]),
        (0.36, [0, 0.4, 0, 0.25, 0, 0.15]),
        (0.62, [0, 0.4, 0, 0.25, 0, 0]),
        (0.63, [0, 1, 0, 0, 0, 0]),
        (1.0, [0, 1, 0, 0, 0, 0]),
    ],
)
def test_min_p_keeps_those_near_the_likeliest(min_p: float, wanted: list[float]) -> None:
    assert_shares(Sampler(min_p=min_p), wanted)


def test_min_p_goes_by_the_shares_after_temperature() -> None:
    """At temperature 2 the shares go as 0.632, 0.5, 0.387, 0.361, 0.224, 0.141; at 1/2 as 0.16, 0.0625, 0.0225, ..."""
    roots = [share**0.5 for share in SHARES]
    assert_shares(Sampler(2.0, min_p=0.35), [*roots[:2], 0, *roots[3:]])
    assert_shares(Sampler(2.0, min_p=0.36), [0, roots[1], 0, *roots[3:]])
    assert_shares(Sampler(0.5, min_p=0.36), [0, 0.16, 0, 0.0625, 0, 0])
    assert_shares(Sampler(top_k=3, top_p=0.9, min_p=0.3), [0, 0.4, 0, 0.25, 0, 0.15])
    assert_shares(Sampler(top_k=2, top_p=0.9, min_p=0.3), [0, 0.4, 0, 0.25, 0, 0])


def test_the_penalty_is_ctrls() -> None:
    """Divided where positive, multiplied where negative, once however often a token stood there; others stay."""
    scores_BV = torch.tensor([[3.0, -2.0, 0.0, 1.0, -4.0], [1.0, 2.0, 3.0, -1.0, -2.0]])
    earlier_BK = torch.tensor([[0, 4, 0, 2], [3, 3, 3, 1]])
    before = scores_BV.clone()
    found_BV = Sampler(repetition_penalty=2.0).penalised(scores_BV, earlier_BK)
    assert found_BV.tolist() == [[1.5, -2.0, 0.0, 1.0, -8.0], [1.0, 1.0, 3.0, -2.0, -2.0]]
    assert torch.equal(scores_BV, before)
    assert torch.equal(Sampler(repetition_penalty=1.0).penalised(scores_BV, earlier_BK), before)
    assert Sampler(repetition_penalty=0.5).penalised(scores_BV, earlier_BK)[0].tolist() == [6.0, -2.0, 0.0, 1.0, -2.0]


def test_each_row_draws_from_its_own_generator() -> None:
    """As it would alone, whatever stands beside it."""
    logits_BV = logits_of(SHARES, SHARES[::-1], SHARES)
    for sampler in (Sampler(), Sampler(top_k=3, min_p=0.2)):
        together = [torch.Generator().manual_seed(seed) for seed in (3, 5, 7)]
        drawn = [sampler.choose(logits_BV, *together).tolist() for _ in range(20)]
        for row, seed in enumerate((3, 5, 7)):
            alone = torch.Generator().manual_seed(seed)
            assert [draw[row] for draw in drawn] == [
                int(sampler.choose(logits_BV[row : row + 1], alone)) for _ in range(20)
            ]


@pytest.mark.parametrize("sampler", [Sampler(0), Sampler(), Sampler(top_k=2), Sampler(top_p=0.5), Sampler(min_p=0.5)])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_scores_that_are_not_numbers_are_refused(sampler: Sampler, wrong: float) -> None:
    logits_BV = logits_of(SHARES, SHARES)
    logits_BV[1, 4] = wrong
    with pytest.raises(UserError, match="the model's scores are not numbers"):
        sampler.choose(logits_BV, torch.Generator())
    with pytest.raises(UserError, match="no token is left to choose from"):
        sampler.choose(torch.full((1, 5), -torch.inf), torch.Generator())


def test_limits_apply_in_the_order_of_the_fields() -> None:
    """At temperature 1/2 the shares go as 0.16, 0.0625, 0.0225, ...; of the 3 likeliest, the first has 0.653."""
    assert_shares(Sampler(0.5, top_k=3, top_p=0.65), [0, 1, 0, 0, 0, 0])
    assert_shares(Sampler(0.5, top_k=3, top_p=0.66), [0, 0.16, 0, 0.0625, 0, 0])
    assert_shares(Sampler(1.0, top_k=3, top_p=0.81), [0, 0.4, 0, 0.25, 0, 0])  # 0.65 of 0.8 is 0.8125
    assert_shares(Sampler(1.0, top_k=3, top_p=0.82), [0, 0.4, 0, 0.25, 0, 0.15])


def test_ties() -> None:
    """Of tokens that are alike, the first by number are taken."""
    shares = [0.25, 0.125, 0.25, 0.125, 0.25]
    assert_shares(Sampler(top_k=1), [1, 0, 0, 0, 0], shares)
    assert_shares(Sampler(top_k=3), [1, 0, 1, 0, 1], shares)
    assert_shares(Sampler(top_k=4), [2, 1, 2, 0, 2], shares)
    assert_shares(Sampler(top_p=0.3), [1, 0, 1, 0, 0], shares)
    assert_shares(Sampler(top_p=0.8), [2, 1, 2, 0, 2], shares)
    assert Sampler(0).choose(logits_of(shares)).tolist() == [0]


@settings(deadline=None, max_examples=50)
@given(
    # quarters: taking the highest from them is exact, so that different scores stay different
    rows=st.lists(st.lists(st.integers(-120, 120), min_size=11, max_size=11), min_size=1, max_size=3),
    temperature=st.floats(0.05, 20),
    top_k=st.none() | st.integers(1, 13),
    top_p=st.none() | st.floats(0.01, 1),
    min_p=st.none() | st.floats(0, 1),
)
def test_what_holds_for_any_scores(
    rows: list[list[int]], temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    """Each row sums to 1, keeps its likeliest token, and never has a less likely token without a likelier one."""
    logits_BV = torch.tensor(rows) / 4
    found_BV = Sampler(temperature, top_k, top_p, min_p).probabilities(logits_BV)
    torch.testing.assert_close(found_BV.sum(-1), torch.ones(len(rows)))
    for scores_V, shares_V in zip(logits_BV, found_BV, strict=True):
        least, most = shares_V[shares_V > 0].min(), shares_V.max()
        assert shares_V[scores_V == scores_V.max()].max() == most
        assert (scores_V[shares_V > 0].min() >= scores_V[shares_V == 0]).all()
        assert least > 0
        if top_k is not None:
            assert (shares_V > 0).sum() <= top_k


def test_rows_do_not_see_each_other() -> None:
    other = [0.7, 0.1, 0.05, 0.05, 0.05, 0.05]
    for sampler in (Sampler(), Sampler(0.5), Sampler(top_k=2), Sampler(top_p=0.6), Sampler(min_p=0.3)):
        both_BV = sampler.probabilities(logits_of(SHARES, other))
        for row, shares in enumerate((SHARES, other)):
            torch.testing.assert_close(both_BV[row], sampler.probabilities(logits_of(shares))[0])


def test_draws_follow_the_distribution() -> None:
    generator = torch.Generator().manual_seed(5)
    for sampler in (Sampler(), Sampler(2.0), Sampler(top_k=3), Sampler(top_p=0.7), Sampler(0.8, min_p=0.3)):
        logits_BV = logits_of(SHARES).expand(20_011, -1)
        drawn_B = sampler.choose(logits_BV, generator)
        assert (drawn_B.dtype, drawn_B.shape) == (torch.int64, (20_011,))
        counts = torch.bincount(drawn_B, minlength=6) / 20_011
        wanted_V = sampler.probabilities(logits_of(SHARES))[0]
        torch.testing.assert_close(counts, wanted_V, rtol=0, atol=0.015)
        assert (counts[wanted_V == 0] == 0).all()


def test_the_generator_decides_and_torch_is_left_alone() -> None:
    logits_BV = logits_of(SHARES).expand(101, -1)
    random_state = torch.get_rng_state()
    first, again, other = (Sampler().choose(logits_BV, torch.Generator().manual_seed(seed)) for seed in (3, 3, 7))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_greedy_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    assert Sampler(0).choose(logits_of(SHARES, SHARES[::-1]), generator).tolist() == [1, 4]
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("temperature", [1e-3, 1e-7, 1e-30, 1e-40, 1e-50, 5e-324])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    """Scores divided by it overflow; the likeliest token must still come out."""
    assert_shares(Sampler(temperature), [0, 1, 0, 0, 0, 0])
    assert Sampler(temperature).choose(logits_of(SHARES), torch.Generator().manual_seed(1)).tolist() == [1]


def test_low_precision_scores_are_drawn_in_float32() -> None:
    found_BV = Sampler(top_p=0.9).probabilities(logits_of(SHARES).bfloat16())
    assert found_BV.dtype == torch.float32
    torch.testing.assert_close(found_BV.sum(-1), torch.ones(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, r"temperature -0.1: wanted 0 \(greedy\) or more"),
        ({"temperature": float("nan")}, "temperature nan: wanted 0"),
        ({"temperature": float("inf")}, "temperature inf: wanted 0"),
        ({"top_k": 0}, "top-k 0: wanted 1 or more"),
        ({"top_k": -3}, "top-k -3: wanted 1 or more"),
        ({"top_p": 0.0}, r"top-p 0.0: wanted a number above 0, up to 1"),
        ({"top_p": 1.01}, r"top-p 1.01: wanted a number above 0"),
        ({"top_p": float("nan")}, "top-p nan: wanted a number above 0"),
        ({"min_p": -0.1}, "min-p -0.1: wanted a number from 0 to 1"),
        ({"min_p": 1.5}, "min-p 1.5: wanted a number from 0 to 1"),
        ({"min_p": float("nan")}, "min-p nan: wanted a number from 0 to 1"),
        ({"repetition_penalty": 0.0}, r"repetition penalty 0.0: wanted more than 0 \(1 changes nothing\)"),
        ({"repetition_penalty": float("nan")}, "repetition penalty nan: wanted more than 0"),
        ({"repetition_penalty": float("inf")}, "repetition penalty inf: wanted more than 0"),
        ({"repetition_window": 0}, "repetition window 0: wanted 1 or more tokens"),
    ],
)
def test_wrong_limits_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sampler(**settings)
