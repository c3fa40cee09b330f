"""Effective context length equals the paper's definition in plain loops, and losses depend on the context only.

The definition is at the top of `effective_context.py`.

Shape suffixes: I models, C contexts, P positions, B batch size, T new tokens, D d_model, K tokens of the text, V
vocabulary, 1 a dimension of size 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from model_configs import small_model

from transformer_xl.apps.analyze import effective_context
from transformer_xl.apps.analyze.analysis_config import ContextSweep
from transformer_xl.apps.analyze.effective_context import (
    Gains,
    GroupModel,
    context_results,
    draw_positions,
    measure_context,
)
from transformer_xl.config import UserError
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.model.memory import ContextLimits

CLOSE = {"rtol": 0, "atol": 1e-10}  # tolerance of comparisons in float64
SEGMENT = 7  # segment length in tokens
# by name: model settings, and ContextLimits (memory length, attention window, clamp length); the memory of lstm and
# qrnn is their state, and any length but 0 keeps it
CASES: dict[str, tuple[dict[str, Any], ContextLimits]] = {
    "relative": ({}, ContextLimits(11)),
    "relative, long memory": ({}, ContextLimits(40)),
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
    plan = EvaluationPlan(SEGMENT, context_limits, batch_size=batch_size, softmax_temperature=1.3)
    return GroupModel(kind, small_model(**settings), plan)


def text(length: int, seed: int = 3) -> npt.NDArray[np.uint8]:
    """Return random token ids."""
    return np.random.default_rng(seed).integers(0, 23, length).astype(np.uint8)


def decreasing_losses(seed: int, contexts: int = 6, positions: int = 29) -> npt.NDArray[np.float64]:
    """Losses of three models: one decreases with every context, one soon stops decreasing, one is never the best.

    Losses are rounded, so that some are equal.
    """
    rng = np.random.default_rng(seed)
    level_I11, range_I11, rate_I11 = np.array([[0.0, 1.5, 3.0], [2.0, 0.5, 1.0], [0.1, 0.7, 2.0]])[..., None, None]
    mean_IC1 = level_I11 + range_I11 * np.exp(-rate_I11 * np.arange(contexts)[:, None])
    noise_ICP = rng.normal(0, 0.05, (3, contexts, positions))
    return (mean_IC1 + rng.gamma(1.0, 1.0, positions) + noise_ICP).round(1)


def gains_in_loops(losses_ICP: npt.NDArray[np.float64], fraction: float) -> list[list[float]]:
    """Gain of each model and context, from the definition in the paper."""
    models, contexts, positions = (range(size) for size in losses_ICP.shape)
    num_chosen = max(1, math.floor(fraction * len(positions) + 0.5))

    def best(c: int, t: int) -> float:
        return min(losses_ICP[i, c, t] for i in models)

    def perplexity(i: int, c: int, further: int) -> float:
        hardest = sorted(positions, key=lambda t: (-best(c, t), t))[:num_chosen]
        return math.exp(sum(min(best(c, t), losses_ICP[i, further, t]) for t in hardest) / num_chosen)

    return [[1 - perplexity(i, c, c + 1) / perplexity(i, c, c) for c in contexts[:-1]] for i in models]


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.37, 0.5, 1.0])
def test_gains_and_lengths_equal_the_papers_definition(fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effective_context, "FRACTIONS", (fraction,))
    sweep = ContextSweep(min_context=5, context_step=7, max_context=42, num_positions=29, threshold=0.05)
    lengths = set[tuple[int, bool]]()  # effective lengths, and whether a gain fell below the threshold
    for seed in range(5):
        losses_ICP = decreasing_losses(seed)
        # the losses are given, so the models are only three entries of the group
        results = context_results(sweep, (group_model("lstm"),) * 3, np.arange(29), losses_ICP, (0.0,) * 3)
        for model, gains in zip(results["models"], gains_in_loops(losses_ICP, fraction), strict=True):
            result = model["fractions"][f"{fraction:g}"]
            assert result["gains"] == pytest.approx(gains, rel=0, abs=1e-12)
            # the contexts are 5, 12, ..., 40
            below = [5 + 7 * c for c, gain in enumerate(gains) if gain < 0.05]
            expected = (below[0], True) if below else (40, False)
            assert (result["effective_context_tokens"], result["fell_below_threshold"]) == expected
            lengths.add(expected)
    assert {(5, True), (40, False)} <= lengths  # some lengths are the shortest context, others none below the threshold


def test_large_losses_do_not_overflow() -> None:
    gains = Gains.compute(np.array([[[2000.0], [1000.0], [1000.0 - 1e-9]]]), 1.0)
    np.testing.assert_allclose(gains.gains_IC, [[1.0, 1e-9]], rtol=1e-3)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("context", [1, 6, 7, 8, 14, 33])
def test_loss_equals_that_of_one_position_alone(kind: str, context: int) -> None:
    """Expected losses are computed for one position at a time: a first segment with the remainder, then whole ones."""
    group, tokens_K, positions_P = group_model(kind, batch_size=2), text(61), np.array([33, 40, 47, 58, 60])
    model, context_limits = group.model, group.plan.context_limits
    expected = []
    for position in positions_P.tolist():
        seen = tokens_K[position - context : position].tolist()
        if not context_limits.memory_length:
            seen = seen[-SEGMENT:]
        remainder = len(seen) % SEGMENT
        segments = [seen[:remainder]] if remainder else []
        segments += [seen[start : start + SEGMENT] for start in range(remainder, len(seen), SEGMENT)]
        memory = model.initial_memory(1, context_limits)
        with torch.no_grad():
            for segment in segments:
                hidden_BTD, memory = model(torch.tensor([segment]), memory)
            logits_V = model.logits(hidden_BTD)[0, -1]
        expected.append(-torch.log_softmax(logits_V / 1.3, 0)[int(tokens_K[position])].item())
    np.testing.assert_allclose(group.losses(tokens_K, positions_P, context), expected, **CLOSE)


def test_positions_are_distinct_and_have_the_context_before_them() -> None:
    sweep = ContextSweep(min_context=2, context_step=3, max_context=11, num_positions=50)
    assert draw_positions(sweep, 61).tolist() == list(range(11, 61))
    drawn = [
        draw_positions(sweep.model_copy(update={"num_positions": 20, "seed": seed}), 61).tolist() for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] == sorted(set(drawn[0])) != drawn[2]
    assert len(drawn[0]) == 20
    assert set(drawn[0]) <= set(range(11, 61))


def test_results_equal_separate_measurements() -> None:
    sweep = ContextSweep(min_context=3, context_step=5, max_context=14, num_positions=17, threshold=1e-9)
    models, progress = [group_model("lstm"), group_model("learned")], []
    results = measure_context(models, text(61), sweep, progress.append)
    assert results["contexts"] == [3, 8, 13]
    assert results["positions"] == draw_positions(sweep, 61).tolist()
    assert results["baseline"]["0.1"]["num_positions"] == 2
    lstm, learned = results["models"]
    # 17 positions; the model with learned positions sees at most the 7 tokens of a segment
    assert (lstm["tokens_read"], learned["tokens_read"]) == (17 * (3 + 8 + 13), 17 * (3 + 7 + 7))
    assert sum(progress) == lstm["tokens_read"] + learned["tokens_read"]
    assert (lstm["name"], lstm["max_visible_tokens"], learned["max_visible_tokens"]) == ("lstm", None, SEGMENT)
    for model, result in zip(models, (lstm, learned), strict=True):
        means = [model.losses(text(61), np.array(results["positions"]), context).mean() for context in sweep.contexts]
        assert result["nats_per_token"] == pytest.approx(means, rel=0, abs=1e-12)
    further, before = lstm["fractions"]["1"]["further_nats_per_token"], results["baseline"]["1"]["nats_per_token"]
    expected = [1 - math.exp(after - first) for after, first in zip(further, before, strict=True)]
    np.testing.assert_allclose(lstm["fractions"]["1"]["gains"], expected, **CLOSE)


def test_non_finite_weights_are_refused() -> None:
    group = group_model("lstm")
    with torch.no_grad():
        next(group.model.parameters())[0, 0] = math.inf
    with pytest.raises(UserError, match="not finite"):
        measure_context([group], text(61), ContextSweep(min_context=1, context_step=4, max_context=9, num_positions=3))
