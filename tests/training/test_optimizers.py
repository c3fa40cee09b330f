"""The learning rate by hand, and an Adam that moves every weight."""

from __future__ import annotations

import pytest
import torch

from transformer_xl.config import TrainConfig
from transformer_xl.training.optimizers import build_optimizer, learning_rate, set_learning_rate


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
    config = TrainConfig(steps=20, warmup=4, learning_rate=2.0)
    assert learning_rate(step, config) == pytest.approx(wanted, abs=1e-12)


def test_without_warmup_the_cosine_starts_at_once() -> None:
    config = TrainConfig(steps=4, warmup=0, learning_rate=1.0)
    found = [learning_rate(step, config) for step in range(4)]
    assert found == pytest.approx([1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5], abs=1e-12)


@pytest.mark.parametrize("warmup", [5, 7])
def test_as_long_a_warmup_as_the_training(warmup: int) -> None:
    config = TrainConfig(steps=5, warmup=warmup, learning_rate=1.0)
    assert [learning_rate(step, config) for step in range(5)] == pytest.approx([(i + 1) / warmup for i in range(5)])


def test_the_rate_only_rises_and_then_only_falls() -> None:
    config = TrainConfig(steps=211, warmup=31, learning_rate=3.0)
    rates = [learning_rate(step, config) for step in range(211)]
    assert rates[:31] == sorted(rates[:31])
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert max(rates) == 3.0
    assert 0 < min(rates[31:]) < 1e-3


def test_every_weight_is_in_the_optimiser_once(make_model) -> None:
    model = make_model(tie_position_biases=False, norm="pre")
    optimizer = build_optimizer(model, TrainConfig(learning_rate=0.03))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len({id(parameter) for parameter in held})
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in model.parameters()}
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.03, (0.9, 0.999), 1e-8, 0)


def test_setting_the_rate_reaches_every_group() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": [weight]} for weight in weights], lr=1.0)
    set_learning_rate(optimizer, 0.25)
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
    assert all(weight.tolist() == [-0.25, -0.25] for weight in weights)
