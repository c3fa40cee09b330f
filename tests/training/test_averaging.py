"""Averages of the weights: compared with weighted means, and used for validation and the best weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_runs import CPU, equals_best, letters_corpus, start, validation_nats

from transformer_xl.config import TrainConfig
from transformer_xl.run import load_run
from transformer_xl.tensor_file import load_tensors
from transformer_xl.training.averaging import WeightAverage


def weights_of(model: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def change_weights(model: Any, average: WeightAverage, steps: int) -> Tensor:
    """Add random numbers to the weights in each step; return the weights after each step, one row per step."""
    generator, weights = torch.Generator().manual_seed(3), []
    for step in range(1, steps + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        average.update(step)
        weights.append(weights_of(model))
    return torch.stack(weights)


def averaged_weights(model: Any, average: WeightAverage) -> Tensor:
    with average.applied():
        return weights_of(model)


@pytest.mark.parametrize("start_step", [0, 3, 10])
@pytest.mark.parametrize("decay", [None, 0.0, 0.9, 0.999])
def test_average_equals_the_weighted_mean(make_model, start_step: int, decay: float | None) -> None:
    """A decay of None stands for the uniform average, which equals an exponential one with a decay of 1.

    The average of n steps weights the step k steps ago by decay^k, and divides by the sum of these factors.
    """
    kind = {"weight_average": "uniform"} if decay is None else {"weight_average": "ema", "ema_decay": decay}
    model = make_model()
    average = WeightAverage(model, TrainConfig(**kind, average_start_step=start_step))
    weights = change_weights(model, average, steps=11)[start_step:]
    factors = (1.0 if decay is None else decay) ** torch.arange(len(weights) - 1, -1, -1, dtype=torch.float64)
    expected = (factors[:, None] * weights).sum(0) / factors.sum()
    torch.testing.assert_close(averaged_weights(model, average), expected, rtol=0, atol=1e-12)


def test_average_is_the_current_weights_before_its_start_step(make_model) -> None:
    model = make_model()
    average = WeightAverage(model, TrainConfig(weight_average="uniform", average_start_step=5))
    weights = change_weights(model, average, steps=5)
    assert torch.equal(averaged_weights(model, average), weights[-1])


def test_weights_are_restored_bit_for_bit(make_model) -> None:
    model = make_model().float()
    average = WeightAverage(model, TrainConfig(weight_average="uniform"))
    average.update(1)
    with torch.no_grad():
        next(model.parameters()).mul_(3)
    average.update(2)
    before, inside = weights_of(model), averaged_weights(model, average)
    assert torch.equal(weights_of(model), before)
    assert not torch.equal(inside, before)
    with pytest.raises(ZeroDivisionError), average.applied():
        raise ZeroDivisionError
    assert torch.equal(weights_of(model), before)
    assert torch.equal(averaged_weights(model, average), inside)


AVERAGES = [{"weight_average": "uniform", "average_start_step": 3}, {"weight_average": "ema", "ema_decay": 0.5}]


@pytest.mark.parametrize("settings", AVERAGES)
def test_average_is_validated_and_saved(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The loss of validation is that of the averaged weights, which are saved as the best; the last ones stay apart."""
    corpus = letters_corpus(tmp_path / "corpus")
    without = start(tmp_path / "without", corpus, eval_interval=5)
    without.run()
    trainer = start(tmp_path / "run", corpus, eval_interval=5, **settings)
    trainer.run()
    assert torch.equal(weights_of(trainer.model), weights_of(without.model))  # training is unchanged
    last, best = trainer.folder.metrics()[-1], load_run(trainer.folder, CPU, "best").model
    assert (last["split"], last["step"]) == ("valid", 17)  # 17 is max_steps
    assert last["nats_per_token"] == trainer.state.best_nats
    tokens = corpus.split("valid").tokens
    expected = validation_nats(best, tokens) / 41  # the number of tokens of the text
    assert last["nats_per_token"] == pytest.approx(expected, rel=1e-6)
    assert trainer.stepper.weight_average is not None
    assert torch.equal(averaged_weights(trainer.model, trainer.stepper.weight_average), weights_of(best))
    assert not any(equals_best(trainer.folder, trainer.folder.choose_weights("last").used.file))


def test_average_is_saved_without_validation_text(tmp_path: Path) -> None:
    trainer = start(tmp_path / "run", letters_corpus(tmp_path / "corpus", num_valid=0), weight_average="uniform")
    trainer.run()
    assert trainer.stepper.weight_average is not None
    best, _ = load_tensors(trainer.folder.choose_weights("best").used.file)
    actual = torch.cat([best[name].flatten() for name, _ in trainer.model.named_parameters()])
    assert torch.equal(actual, averaged_weights(trainer.model, trainer.stepper.weight_average))
