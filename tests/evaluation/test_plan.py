"""Plans: the run's settings unless told otherwise, what is out of range, and how far back losses can depend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from transformer_xl.config import EvaluationConfig, RunConfig, TrainConfig, TransformerXLConfig, UserError
from transformer_xl.evaluation.plan import EvaluationPlan, Text
from transformer_xl.model.memory import ContextLimits


def test_a_plan_is_the_runs_unless_told_otherwise() -> None:
    plain = RunConfig(
        train=TrainConfig(segment_length=7, memory_length=11),
        model=TransformerXLConfig(attention_window=13, clamp_length=17),
    )
    assert EvaluationPlan.of(plain) == EvaluationPlan(
        7, ContextLimits(11, 13, 17), rows=None, documents="continue", precision="float32"
    )
    own = plain.model_copy(
        update={"evaluation": EvaluationConfig(segment_length=2, memory_length=0, attention_window=3, clamp_length=5)}
    )
    assert EvaluationPlan.of(own) == EvaluationPlan(2, ContextLimits(0, 3, 5))
    assert EvaluationPlan.of(own, segment=19, memory=23, window=29, clamp=31) == EvaluationPlan(
        19, ContextLimits(23, 29, 31)
    )
    assert EvaluationPlan.of(own, memory=None, window=29) == EvaluationPlan(2, ContextLimits(0, 29, 5))
    assert EvaluationPlan.of(own, window="none", clamp="none") == EvaluationPlan(2, ContextLimits(0))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"segment": 0}, "segment 0: wanted 1 or more"),
        ({"segment": -3}, "segment -3: wanted 1 or more"),
        ({"segment": "none"}, "segment none: wanted 1 or more"),
        ({"memory": -1}, "memory -1 is too small; give 0 or more"),
        ({"memory": "none"}, "memory none: wanted a number of tokens, 0 or more"),
        ({"window": 0}, "window 0 is too small; give 1 or more"),
        ({"clamp": 0}, "clamp_length 0 is too small; give 1 or more"),
    ],
)
def test_a_plan_out_of_range_is_refused(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EvaluationPlan.of(RunConfig(), **wanted)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [({"rows": 0}, "rows 0: wanted 1 or more"), ({"warmup": -1}, "warmup -1: wanted 0 or more")],
)
def test_rows_out_of_range_are_refused(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EvaluationPlan(7, ContextLimits(11), **wanted)


@pytest.mark.parametrize(
    ("segment", "reach", "layers", "context"),
    [
        (7, ContextLimits(0), 3, 0),
        (7, ContextLimits(11), 1, 11),
        (7, ContextLimits(11), 3, 11 + 14 + 14),
        (7, ContextLimits(14), 3, 42),
        (80, ContextLimits(2100), 12, 2100 + 11 * 2160),
        (7, ContextLimits(4, 5), 3, 12),  # four tokens back in each layer
        (7, ContextLimits(99, 5), 3, 12),
        (7, ContextLimits(3, 5), 3, 12),  # also where memory is too short for the window
        (7, ContextLimits(3, 99), 3, 3 + 7 + 7),
    ],
)
def test_how_far_back_losses_depend(
    make_model, segment: int, context_limits: ContextLimits, layers: int, context: int
) -> None:
    plan, model = EvaluationPlan(segment, context_limits), make_model(layers=layers)
    assert plan.context_of_segment(model) == context
    assert plan.warmup_of(model) == -(-context // segment) * segment
    assert replace(plan, warmup=segment + 1).warmup_of(model) == 2 * segment


def test_edges_of_documents() -> None:
    text = Text(np.zeros(10, dtype=np.uint8), 0, np.array([0, 3, 3, 8, 10, 12], dtype=np.uint64))
    assert text.edges("reset").tolist() == [0, 3, 8, 10]
    assert text.edges("continue").tolist() == [0, 10]
    assert Text(np.zeros(10, dtype=np.uint8), 0).edges("reset").tolist() == [0, 10]
