"""Learning rates and lengths by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from transformer_xl.config import TrainConfig
from transformer_xl.training.schedules import learning_rate, num_halvings, set_learning_rate


@pytest.mark.parametrize(
    ("step", "wanted"),
    [
        (0, 0.5),  # a quarter of the warm-up
        (1, 1.0),
        (2, 1.5),
        (3, 2.0),  # the last step of the warm-up has the peak
        (4, 2.0),  # the cosine starts there: cos 0
        (8, 1 + 0.5**0.5),  # cos(pi / 4)
        (12, 1.0),  # half way down: cos(pi / 2)
        (16, 1 - 0.5**0.5),
        (20, 0.0),  # cos(pi): where a next step would be
    ],
)
def test_warmup_is_linear_and_the_rest_a_cosine(step: int, wanted: float) -> None:
    config = TrainConfig(max_steps=20, warmup_steps=4, learning_rate=2.0)
    assert learning_rate(step, config) == pytest.approx(wanted, abs=1e-12)


def test_without_warmup_the_cosine_starts_at_once() -> None:
    config = TrainConfig(max_steps=4, warmup_steps=0, learning_rate=1.0)
    found = [learning_rate(step, config) for step in range(4)]
    assert found == pytest.approx([1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5], abs=1e-12)


@pytest.mark.parametrize("warmup", [5, 7])
def test_as_long_a_warmup_as_the_training(warmup: int) -> None:
    config = TrainConfig(max_steps=5, warmup_steps=warmup, learning_rate=1.0)
    assert [learning_rate(step, config) for step in range(5)] == pytest.approx([(i + 1) / warmup for i in range(5)])


def test_the_rate_only_rises_and_then_only_falls() -> None:
    config = TrainConfig(max_steps=211, warmup_steps=31, learning_rate=3.0)
    rates = [learning_rate(step, config) for step in range(211)]
    assert rates[:31] == sorted(rates[:31])
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert max(rates) == 3.0
    assert 0 < min(rates[31:]) < 1e-3


@pytest.mark.parametrize(
    ("step", "wanted"),
    [
        (0, 1.0),
        (1, 2.0),  # the last step of the warm-up
        (2, 2.0),
        (15, 2.0),
        (16, 2.0),  # the line starts here
        (17, 1.625),
        (18, 1.25),
        (19, 0.875),
        (20, 0.5),  # a quarter of the peak: where a next step would be
    ],
)
def test_wsd_is_stable_and_then_falls_along_a_line(step: int, wanted: float) -> None:
    config = TrainConfig(
        max_steps=20, warmup_steps=2, learning_rate=2.0, lr_schedule="wsd", decay_steps=4, min_learning_rate_ratio=0.25
    )
    assert learning_rate(step, config) == pytest.approx(wanted, abs=1e-12)


def test_wsd_without_decay_stays_at_its_peak() -> None:
    config = TrainConfig(max_steps=5, warmup_steps=0, learning_rate=2.0, lr_schedule="wsd")
    assert [learning_rate(step, config) for step in range(5)] == [2.0] * 5


def test_more_steps_leave_the_stable_part_of_wsd_as_it_was() -> None:
    short, long = (
        TrainConfig(max_steps=steps, warmup_steps=3, learning_rate=2.0, lr_schedule="wsd", decay_steps=5)
        for steps in (20, 40)
    )
    assert [learning_rate(step, short) for step in range(16)] == [learning_rate(step, long) for step in range(16)]
    assert learning_rate(16, short) < 2 == learning_rate(16, long)


def test_a_cosine_falls_to_the_minimum() -> None:
    config = TrainConfig(max_steps=20, warmup_steps=4, learning_rate=2.0, min_learning_rate_ratio=0.1)
    assert learning_rate(4, config) == pytest.approx(2.0, abs=1e-12)
    assert learning_rate(12, config) == pytest.approx(1.1, abs=1e-12)
    assert learning_rate(20, config) == pytest.approx(0.2, abs=1e-12)


def test_the_stages_of_the_segment_warmup_are_equally_long() -> None:
    config = TrainConfig(segment_length=32, memory_length=64, initial_segment_length=4, segment_warmup_steps=30)
    found = [num_halvings(step, config) for step in range(40)]
    assert found == [3] * 10 + [2] * 10 + [1] * 10 + [0] * 10
    uneven = config.model_copy(update={"segment_warmup_steps": 7})
    assert Counter(num_halvings(step, uneven) for step in range(7)) == {3: 3, 2: 2, 1: 2}
    assert [num_halvings(step, TrainConfig()) for step in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("average_start_step", {"weight_average": "uniform"}),
        ("average_start_step", {"weight_average": "ema"}),
        ("segment_warmup_steps", {"segment_length": 8, "memory_length": 8, "initial_segment_length": 4}),
    ],
)
def test_what_would_begin_after_the_last_step_is_refused(name: str, settings: dict[str, Any]) -> None:
    assert getattr(TrainConfig(max_steps=1200, **{name: 1199}, **settings), name) == 1199
    with pytest.raises(ValueError, match=rf"{name} 1,200 .*give 1,199 or less"):
        TrainConfig(max_steps=1200, **{name: 1200}, **settings)


def test_short_trials_need_no_other_warmup() -> None:
    """An average that is off begins nowhere, and the warm-up of the rate may be cut off."""
    assert TrainConfig(max_steps=3, average_start_step=5).warmup_steps == 100


def test_setting_the_rate_reaches_every_group() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizers = (
        torch.optim.SGD([{"params": [weight]} for weight in weights[:2]], lr=1.0),
        torch.optim.SGD(weights[2:], lr=1.0),
    )
    set_learning_rate(optimizers, 0.25)
    for weight in weights:
        weight.grad = torch.ones(2)
    for optimizer in optimizers:
        optimizer.step()
    assert all(weight.tolist() == [-0.25, -0.25] for weight in weights)
