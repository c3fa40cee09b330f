"""Averages of the weights against lists kept by hand, in validation, in what is saved, and over a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_runs import CPU, best_and, letters, make_corpus, reopened, rows_nats, start, train_until

from transformer_xl.config import TrainConfig, UserError
from transformer_xl.tensor_file import load_tensors
from transformer_xl.training.averaging import WeightAverage


def weights_of(model: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def wander(model: Any, average: WeightAverage, steps: int) -> list[Tensor]:
    """Moves the weights anywhere, and gives them after each step."""
    draw, seen = torch.Generator().manual_seed(3), []
    for step in range(1, steps + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
        average.update(step)
        seen.append(weights_of(model))
    return seen


def averaged(model: Any, average: WeightAverage) -> Tensor:
    with average.applied():
        return weights_of(model)


@pytest.mark.parametrize("begin", [0, 3, 10])
def test_uniform_is_the_mean_of_the_weights_since_it_began(make_model, begin: int) -> None:
    model = make_model()
    average = WeightAverage(model, TrainConfig(weight_average="uniform", average_start_step=begin))
    seen = wander(model, average, 11)
    torch.testing.assert_close(averaged(model, average), torch.stack(seen[begin:]).mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999])
def test_exponential_weighs_older_weights_less(make_model, begin: int, decay: float) -> None:
    model = make_model()
    average = WeightAverage(model, TrainConfig(weight_average="ema", ema_decay=decay, average_start_step=begin))
    seen = torch.stack(wander(model, average, 11)[begin:])
    share = decay ** torch.arange(len(seen) - 1, -1, -1, dtype=torch.float64)
    wanted = (share[:, None] * seen).sum(0) / share.sum()
    torch.testing.assert_close(averaged(model, average), wanted, rtol=0, atol=1e-12)


def test_before_it_begins_it_is_the_weights_themselves(make_model) -> None:
    model = make_model()
    average = WeightAverage(model, TrainConfig(weight_average="uniform", average_start_step=5))
    seen = wander(model, average, 5)
    assert torch.equal(averaged(model, average), seen[-1])


def test_the_weights_are_back_bit_for_bit(make_model) -> None:
    model = make_model().float()
    average = WeightAverage(model, TrainConfig(weight_average="uniform"))
    wander(model.double(), WeightAverage(model, TrainConfig()), 1)
    model.float()
    average.update(1)
    with torch.no_grad():
        next(model.parameters()).mul_(3)
    average.update(2)
    before, inside = weights_of(model), averaged(model, average)
    assert torch.equal(weights_of(model), before)
    assert not torch.equal(inside, before)
    with pytest.raises(ZeroDivisionError), average.applied():
        raise ZeroDivisionError
    assert torch.equal(weights_of(model), before)
    assert torch.equal(averaged(model, average), inside)


def test_it_goes_on_from_its_tensors(make_model) -> None:
    model, config = make_model(), TrainConfig(weight_average="uniform")
    average = WeightAverage(model, config)
    wander(model, average, 5)
    again = WeightAverage(model, config)
    again.load_tensors({name: tensor.clone() for name, tensor in average.tensors().items()})
    with torch.no_grad():
        next(model.parameters()).mul_(3)
    for one in (average, again):
        one.update(6)
    assert again.count == 6
    assert torch.equal(averaged(model, average), averaged(model, again))
    for wrong in (make_model(n_layers=2), make_model(d_model=22)):
        with pytest.raises(UserError, match="weight average does not fit this model"):
            average.load_tensors(WeightAverage(wrong, config).tensors())


AVERAGES = [{"weight_average": "uniform", "average_start_step": 3}, {"weight_average": "ema", "ema_decay": 0.5}]


@pytest.mark.parametrize("settings", AVERAGES)
def test_validation_and_the_best_weights_are_the_averages(tmp_path: Path, settings: dict[str, Any]) -> None:
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1), letters(41, seed=2))
    plain = start(tmp_path / "plain", corpus, eval_interval=5)
    plain.run()
    training = start(tmp_path / "run", corpus, eval_interval=5, **settings)
    training.run()
    assert torch.equal(weights_of(training.model), weights_of(plain.model))  # it never meets the training
    last, best = training.folder.metrics()[-1], training.folder.load_model(CPU, "best")
    assert (last["split"], last["step"]) == ("valid", 17)
    assert last["nats_per_token"] == training.state.best_nats
    tokens = corpus.split("valid").tokens
    wanted = rows_nats(best, tokens) / 41
    assert last["nats_per_token"] == pytest.approx(wanted, rel=1e-6)
    assert training.weight_average is not None
    assert torch.equal(averaged(training.model, training.weight_average), weights_of(best))
    assert not any(best_and(training.folder, training.folder.weights_file("last")))


def test_without_validation_text_the_average_is_kept(tmp_path: Path) -> None:
    training = start(tmp_path / "run", make_corpus(tmp_path / "corpus", letters(127, seed=1)), weight_average="uniform")
    training.run()
    assert training.weight_average is not None
    kept, _ = load_tensors(training.folder.weights_file("best"))
    found = torch.cat([kept[name].flatten() for name, _ in training.model.named_parameters()])
    assert torch.equal(found, averaged(training.model, training.weight_average))


@pytest.mark.parametrize("settings", AVERAGES)
def test_a_stop_changes_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1), letters(41, seed=2))
    straight = start(tmp_path / "straight", corpus, eval_interval=5, **settings)
    straight.run()
    training = start(tmp_path / "run", corpus, eval_interval=5, **settings)
    for stop in (1, 7, 11):
        train_until(training, stop)
        training = reopened(training)
    training.run()
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (
        tmp_path / "straight" / "model.safetensors"
    ).read_bytes()
