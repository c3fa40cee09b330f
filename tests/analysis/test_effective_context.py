"""Relative effective context length: the paper's definition in plain loops, losses one by one, and nothing older seen.

Letters: I models, C contexts, P positions, B batch size, T new tokens, D width, K tokens of the text, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from model_configs import model_config
from torch import Tensor, nn

from transformer_xl.analysis.effective_context import ContextSweep, EffectiveContext, Gains, GroupModel, measure_context
from transformer_xl.config import TransformerXLConfig, UserError
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.model.baselines.token_memory import TokenCache, TokenMemory
from transformer_xl.model.build import build_model
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits, Memory

CLOSE = {"rtol": 0, "atol": 1e-10}
SIZES = {"vocab_size": 23, "n_layers": 3, "d_model": 14, "n_heads": 2, "d_ff": 19, "dropout": 0.0}
SEGMENT = 7
CASES: dict[str, tuple[dict[str, Any], ContextLimits]] = {
    "relative": ({}, ContextLimits(11)),
    "relative, all": ({}, ContextLimits(40)),
    "relative, window and clamp": ({}, ContextLimits(11, 9, 3)),
    "relative, no memory": ({}, ContextLimits(0)),
    "relative, empty slots attended": ({"attend_empty_memory": True}, ContextLimits(11)),
    "shaw": ({"architecture": "shaw", "max_relative_positions": 5}, ContextLimits(11)),
    "sinusoidal": ({"architecture": "vaswani"}, ContextLimits(0)),
    "learned": ({"architecture": "al-rfou", "max_position_embeddings": SEGMENT}, ContextLimits(0)),
    "lstm": ({"architecture": "lstm"}, ContextLimits(1)),
    "qrnn": ({"architecture": "qrnn"}, ContextLimits(1)),
}


def group_model(kind: str, batch_size: int | None = None) -> GroupModel:
    settings, context_limits = CASES[kind]
    torch.manual_seed(7)
    model = build_model(model_config(**{**SIZES, **settings})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at the start, so that all of it matters
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return GroupModel(kind, model, EvaluationPlan(SEGMENT, context_limits, batch_size=batch_size))


def text(length: int, seed: int = 3) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 23, length).astype(np.uint8)


# --- the definition


def falling_losses(seed: int, contexts: int = 6, positions: int = 29) -> npt.NDArray[np.float64]:
    """One model falls on and on, one soon falls no more, one is never the best. Few digits, so that some are equal."""
    draw = np.random.default_rng(seed)
    level_I11, fall_I11, rate_I11 = np.array([[0.0, 1.5, 3.0], [2.0, 0.5, 1.0], [0.1, 0.7, 2.0]])[..., None, None]
    mean_IC1 = level_I11 + fall_I11 * np.exp(-rate_I11 * np.arange(contexts)[:, None])
    noise_ICP = draw.normal(0, 0.05, (3, contexts, positions))
    return (mean_IC1 + draw.gamma(1.0, 1.0, positions) + noise_ICP).round(1)


def by_the_paper(
    losses: dict[tuple[int, int, int], float], sizes: tuple[int, int, int], fraction: float, threshold: float
) -> tuple[dict[tuple[int, int], float], dict[int, int | None]]:
    """Gain of each model and context, and how many steps its length is (none: the contexts end before)."""
    models, contexts, positions = (range(size) for size in sizes)
    count = max(1, math.floor(fraction * len(positions) + 0.5))

    def best(c: int, t: int) -> float:
        return min(losses[i, c, t] for i in models)

    def mean_nats(i: int, c: int, further: int) -> float:
        hardest = sorted(positions, key=lambda t: (-best(c, t), t))[:count]
        return sum(min(best(c, t), losses[i, further, t]) for t in hardest) / count

    def gain(i: int, c: int) -> float:
        short, long = math.exp(mean_nats(i, c, c)), math.exp(mean_nats(i, c, c + 1))
        return (short - long) / short

    gains, lengths = {(i, c): gain(i, c) for i in models for c in contexts[:-1]}, dict[int, int | None]()
    for i in models:
        c = 0
        while c + 1 < len(contexts) and gains[i, c] >= threshold:
            c += 1
        lengths[i] = c if c + 1 < len(contexts) else None
    return gains, lengths


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.37, 0.5, 1.0])
def test_gains_and_lengths_are_the_papers(seed: int, fraction: float) -> None:
    nats_ICP = falling_losses(seed)
    gains = Gains.of(nats_ICP, fraction)
    sweep = ContextSweep(min_context=5, context_step=7, max_context=42, num_positions=29, threshold=0.05)
    models = tuple(GroupModel(str(i), Copying(), EvaluationPlan(SEGMENT, ContextLimits(1))) for i in range(3))
    found = EffectiveContext(sweep, models, np.arange(29), nats_ICP, (0.0,) * 3)
    wanted, lengths = by_the_paper(dict(np.ndenumerate(nats_ICP)), nats_ICP.shape, fraction, 0.05)
    for (i, c), gain in wanted.items():
        assert gains.gains_IC[i, c] == pytest.approx(gain, rel=0, abs=1e-12)
    for i, length in enumerate(found.lengths(gains)):
        steps = lengths[i]
        assert (length.tokens, length.found) == ((40, False) if steps is None else (5 + 7 * steps, True))


def test_the_tables_above_have_every_kind_of_length() -> None:
    """Without this, the test above might compare one length with itself."""
    found = set[int | None]()
    for seed in range(5):
        nats_ICP = falling_losses(seed)
        _, lengths = by_the_paper(dict(np.ndenumerate(nats_ICP)), nats_ICP.shape, 0.5, 0.05)
        found |= set(lengths.values())
    assert {None, 0} < found


def test_by_hand() -> None:
    """Two positions, two models. Catching up with the best is no gain."""
    first, second = [[3.0, 1.0], [2.0, 2.0], [2.0, 2.0]], [[9.0, 9.0], [3.0, 1.0], [1.0, 1.0]]
    gains = Gains.of(np.array([first, second]), 0.5)
    # the hardest: position 0 (b = 3, first model), then position 0 (b = 2); at the second context b of position 1 is 1
    np.testing.assert_allclose(gains.nats_C, [3.0, 2.0], **CLOSE)
    np.testing.assert_allclose(gains.further_nats_IC, [[2.0, 2.0], [3.0, 1.0]], **CLOSE)
    np.testing.assert_allclose(gains.gains_IC, [[1 - math.exp(-1), 0.0], [0.0, 1 - math.exp(-1)]], **CLOSE)
    # all positions: the means of (3, 1) and (2, 1); the first model's loss of position 1 grows, which is no gain either
    gains = Gains.of(np.array([first, second]), 1.0)
    np.testing.assert_allclose(gains.nats_C, [2.0, 1.5], **CLOSE)
    np.testing.assert_allclose(gains.further_nats_IC, [[1.5, 1.5], [2.0, 1.0]], **CLOSE)


def test_large_losses_do_no_harm() -> None:
    gains = Gains.of(np.array([[[2000.0], [1000.0], [1000.0 - 1e-9]]]), 1.0)
    np.testing.assert_allclose(gains.gains_IC, [[1.0, 1e-9]], rtol=1e-3)


# --- l_i(c, t)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("context", [1, 6, 7, 8, 14, 33])
def test_a_loss_is_that_of_one_position_alone(kind: str, context: int) -> None:
    """One position at a time, with hidden states as memory: the remainder first, then whole segments."""
    reader, tokens_K, positions_P = group_model(kind, batch_size=2), text(61), np.array([33, 40, 47, 58, 60])
    model, context_limits = reader.model, reader.plan.context_limits
    wanted = []
    for position in positions_P.tolist():
        seen = tokens_K[position - context : position].tolist()
        if not context_limits.memory_length:
            seen = seen[-SEGMENT:]
        pieces = [seen[: len(seen) % SEGMENT]] if len(seen) % SEGMENT else []
        pieces += [seen[at : at + SEGMENT] for at in range(len(seen) % SEGMENT, len(seen), SEGMENT)]
        memory = model.initial_memory(1, context_limits)
        with torch.no_grad():
            for piece in pieces:
                hidden_BTD, memory = model(torch.tensor([piece]), memory)
            scores_V = model.logits(hidden_BTD)[0, -1]
        wanted.append(-torch.log_softmax(scores_V, 0)[int(tokens_K[position])].item())
    np.testing.assert_allclose(reader.nats(tokens_K, positions_P, context), wanted, **CLOSE)


@pytest.mark.parametrize("context", [6, 8, 33])
def test_memory_as_long_as_the_context_is_one_long_segment(context: int) -> None:
    reader, tokens_K, positions_P = group_model("relative, all"), text(61), np.array([33, 60])
    at_once = replace(reader, plan=EvaluationPlan(40, ContextLimits(0)))
    np.testing.assert_allclose(
        reader.nats(tokens_K, positions_P, context), at_once.nats(tokens_K, positions_P, context), **CLOSE
    )


@pytest.mark.parametrize("kind", CASES)
def test_the_batch_size_changes_nothing(kind: str) -> None:
    tokens_K, positions_P = text(61), np.arange(20, 61)
    one, many = (group_model(kind, batch_size=batch_size).nats(tokens_K, positions_P, 20) for batch_size in (1, None))
    np.testing.assert_allclose(one, many, **CLOSE)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("context", [5, 7, 16])
def test_nothing_older_is_seen(kind: str, context: int) -> None:
    """Bit for bit, while the oldest token of the context (without memory: of the segment) does change the loss."""
    reader, tokens_K, positions_P = group_model(kind), text(121), np.array([40, 80, 120])
    losses_P = reader.nats(tokens_K, positions_P, context)
    older_K, oldest_K = tokens_K.copy(), tokens_K.copy()
    seen = np.concatenate([np.arange(position - context, position + 1) for position in positions_P])
    older = np.setdiff1d(np.arange(121), seen)
    older_K[older] = (older_K[older] + 5) % 23
    assert np.array_equal(reader.nats(older_K, positions_P, context), losses_P)
    reached = context if reader.max_visible_tokens is None else min(context, reader.max_visible_tokens)
    oldest_K[positions_P - reached] = (oldest_K[positions_P - reached] + 5) % 23
    assert (reader.nats(oldest_K, positions_P, context) != losses_P).all()


def test_models_without_memory_gain_nothing_beyond_their_segment() -> None:
    """As the paper's vanilla model, whose row is its segment."""
    sweep = ContextSweep(min_context=3, context_step=5, max_context=23, num_positions=17, threshold=1e-6)
    found = measure_context([group_model("learned")], text(61), sweep)
    gains = found.gains(1.0)
    assert gains.gains_IC[0, 0] > 1e-3
    assert gains.gains_IC[0, 1:].tolist() == [0.0, 0.0, 0.0]
    assert [(length.tokens, length.found) for length in found.lengths(gains)] == [(SEGMENT, True)]


# --- a task whose dependencies are known

DISTANCES, VALUES = (4, 9, 14, 19), 7


class Copying(LanguageModel):
    """Knows the text below: sure of the value where it has read the token to be copied from, else without a guess."""

    def __init__(self, farthest: int = 19) -> None:
        super().__init__(TransformerXLConfig(vocab_size=VALUES * len(DISTANCES)), memory_length=100)
        self.init_weights()
        self.farthest, self.scale, self.layers = farthest, nn.Parameter(torch.ones(1).double()), nn.ModuleList()

    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> TokenMemory:
        tokens_BM = torch.zeros(batch_size, 100, dtype=torch.int64)
        return TokenMemory.empty([TokenCache(tokens_BM)], batch_size, ContextLimits(100), tokens_BM.device)

    def run_layers(self, x_BTD: Tensor, memory: Memory, lengths_B: Tensor | None) -> Any:
        raise NotImplementedError  # `forward` does not call it

    def forward(self, tokens_BT: Tensor, memory: TokenMemory) -> tuple[Tensor, TokenMemory]:
        """Hidden is the value that comes next, or -1."""
        read_BS, own_B, after = memory.append(tokens_BT, None)
        assert own_B is not None  # the text is shorter than the memory
        hidden = [
            [self.next_value(row[-own:], end) for end in range(own - tokens_BT.shape[1], own)]
            for row, own in zip(read_BS.tolist(), own_B.tolist(), strict=True)
        ]
        return torch.tensor(hidden)[..., None], after

    def next_value(self, read: list[int], last: int) -> int:
        """What follows the token at this position, or -1."""
        back = DISTANCES[read[last] % len(DISTANCES)]
        if back > min(last + 1, self.farthest):
            return -1
        return read[last + 1 - back] // len(DISTANCES)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        raise NotImplementedError

    def nats(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        value_BT, known = hidden_BTD[..., 0], math.log(len(DISTANCES))
        sure = torch.where(value_BT == targets_BT // len(DISTANCES), known, 99.0)
        return torch.where(value_BT < 0, known + math.log(VALUES), sure).double()


def copied_text(length: int) -> npt.NDArray[np.uint8]:
    """A token is a value and a kind; its kind says from how far back the next token copies its value."""
    draw = np.random.default_rng(5)
    kinds = draw.integers(0, len(DISTANCES), length)
    values = draw.integers(0, VALUES, length)
    for position in range(max(DISTANCES), length):
        values[position] = values[position - DISTANCES[kinds[position - 1]]]
    return (values * len(DISTANCES) + kinds).astype(np.uint8)


@pytest.mark.parametrize(
    ("start", "step", "wanted"),
    [(5, 5, (20, 10)), (4, 5, (19, 9)), (2, 6, (20, 14)), (3, 4, (19, 11)), (10, 3, (10, 10))],
)
def test_the_length_of_a_known_dependency_is_found(start: int, step: int, wanted: tuple[int, int]) -> None:
    """The first context that holds the farthest source, as long as each step on the way brings one more."""
    sweep = ContextSweep(min_context=start, context_step=step, max_context=start + 6 * step, num_positions=101)
    plan = EvaluationPlan(SEGMENT, ContextLimits(100))
    found = measure_context(
        [GroupModel("all", Copying(), plan), GroupModel("near", Copying(9), plan)], copied_text(400), sweep
    )
    for fraction in sweep.fractions:
        assert tuple(length.tokens for length in found.lengths(found.gains(fraction))) == wanted


# --- positions, costs, results, refusals


def test_positions_are_drawn_once_each_and_have_the_context_before_them() -> None:
    sweep = ContextSweep(min_context=2, context_step=3, max_context=11, num_positions=50)
    assert sweep.draw_positions(61).tolist() == list(range(11, 61))
    some = replace(sweep, num_positions=20)
    drawn = some.draw_positions(61).tolist()
    assert drawn == some.draw_positions(61).tolist() == sorted(set(drawn))
    assert len(drawn) == 20
    assert set(drawn) <= set(range(11, 61))
    assert drawn != replace(some, seed=2).draw_positions(61).tolist()


def test_results_and_progress() -> None:
    sweep = ContextSweep(
        min_context=3, context_step=5, max_context=14, num_positions=17, fractions=(0.25, 1.0), threshold=1e-9
    )
    models, told = [group_model("lstm"), group_model("learned")], []
    found = measure_context(models, text(61), sweep, told.append)
    figures = found.as_dict()
    assert figures["contexts"] == [3, 8, 13]
    assert figures["positions"] == sweep.draw_positions(61).tolist()
    assert figures["baseline"]["0.25"]["num_positions"] == 4
    lstm, learned = figures["models"]
    assert (lstm["tokens_read"], learned["tokens_read"]) == (17 * (3 + 8 + 13), 17 * (3 + 7 + 7))
    assert sum(told) == lstm["tokens_read"] + learned["tokens_read"]
    assert (lstm["name"], lstm["max_visible_tokens"], learned["max_visible_tokens"]) == ("lstm", None, SEGMENT)
    assert lstm["fractions"]["1"]["effective_context_tokens"] == 13
    assert not lstm["fractions"]["1"]["fell_below_threshold"]
    for index, model in enumerate((lstm, learned)):
        for column, context in enumerate(sweep.contexts):
            alone_P = models[index].nats(text(61), found.positions_P, context)
            assert model["nats_per_token"][column] == pytest.approx(alone_P.mean(), rel=0, abs=1e-12)
    further, before = lstm["fractions"]["1"]["further_nats_per_token"], figures["baseline"]["1"]["nats_per_token"]
    wanted = [1 - math.exp(after - first) for after, first in zip(further, before, strict=True)]
    np.testing.assert_allclose(lstm["fractions"]["1"]["gains"], wanted, **CLOSE)
    assert models[0].estimate_seconds(sweep, text(61), found.positions_P) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_step": 0}, "context_step 0"),
        ({"num_positions": 0}, "num_positions 0"),
        ({"max_context": 2**40}, "max_context 1,099,511,627,776.* 2,147,483,647 at most"),
        ({"seed": -1}, "seed -1"),
        ({"fractions": ()}, r"fractions \(none\)"),
        ({"fractions": (0.1, 1.5)}, "fractions 0.1,1.5.* up to 1"),
        ({"fractions": (math.nan,)}, "fractions nan"),
        ({"fractions": (0.5, 0.5)}, "fractions 0.5,0.5.* once"),
        ({"threshold": math.nan}, "threshold nan"),
        ({"max_context": 199}, "max_context 199.* min_context 100; wanted 200"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ContextSweep(**settings)


def test_too_short_a_text_is_refused() -> None:
    message = "20 have 41 before them, and num_positions is 21; give a smaller"
    with pytest.raises(UserError, match=message):
        measure_context(
            [group_model("lstm")],
            text(61),
            ContextSweep(min_context=1, context_step=40, max_context=41, num_positions=21),
        )


def test_weights_that_are_not_finite_are_refused() -> None:
    reader = group_model("lstm")
    with torch.no_grad():
        next(reader.model.parameters())[0, 0] = math.inf
    with pytest.raises(UserError, match="not finite"):
        measure_context([reader], text(61), ContextSweep(min_context=1, context_step=4, max_context=9, num_positions=3))
