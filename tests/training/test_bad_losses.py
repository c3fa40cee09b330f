"""Losses that are no numbers: training stops, says what to do, and keeps no checkpoint of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_runs import CPU, letters, lines_of, make_corpus, start

from transformer_xl.config import UserError
from transformer_xl.run_folder import RunFolder
from transformer_xl.training.trainer import Trainer


def spoil(training: Trainer, step: int, change: Callable[[Tensor], Tensor]) -> None:
    """Lets the loss of one step be something else."""
    nats = training.model.nats

    def spoiled(hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        found = nats(hidden_BTD, targets_BT)
        return change(found) if training.state.step + 1 == step else found

    training.model.nats = spoiled


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda nats: nats * torch.nan, "the loss became nan at step {step}; "),
        (lambda nats: nats + torch.inf, "the loss became inf at step {step}; "),
        (lambda nats: (nats - nats.detach()).sqrt() + 1, "the gradient's norm became (nan|inf) at step {step}; "),
    ],
)
@pytest.mark.parametrize(("step", "checkpoint"), [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (17, 16)])
def test_a_loss_that_is_no_number_stops(
    tmp_path: Path, change: Callable[[Tensor], Tensor], message: str, step: int, checkpoint: int
) -> None:
    """Also at the very step of a checkpoint, which must not be written; and one can go on from the one before."""
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1))
    training = start(tmp_path / "run", corpus, checkpoint_interval=4)
    spoil(training, step, change)
    newest = rf".*run/checkpoints/step-{checkpoint:08} is the last good checkpoint\. Go on from it with a lower rate: "
    go_on = r"txl train --resume .*run --train.learning_rate 0\.005$"
    with pytest.raises(UserError, match=message.format(step=step) + newest + go_on):
        training.run()
    assert training.folder.checkpoints()[-1].name == f"step-{checkpoint:08}"
    assert all(torch.isfinite(weight).all() for weight in training.folder.load_model(CPU, "last").parameters())
    assert [line["step"] for line in lines_of(training, "train")] == [*range(1, step)] if step > 1 else True
    again = Trainer(RunFolder.open(tmp_path / "run"), corpus, CPU)
    again.resume()
    assert again.state.step == checkpoint
    assert again.run().finished


def test_an_absurd_rate_stops(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1), letters(41, seed=2))
    training = start(tmp_path / "run", corpus, learning_rate=1e30, warmup_steps=0)
    with pytest.raises(UserError, match=r"^(the loss|the gradient's norm) became (nan|inf) at step 2; .*step-00000000"):
        training.run()
    training.folder.load_model(CPU, "last")
    validated = start(tmp_path / "validated", corpus, learning_rate=1e30, warmup_steps=0, eval_interval=1)
    with pytest.raises(UserError, match=r"^the validation loss became nan at step 1; lower --train.learning_rate"):
        validated.run()
    assert not (tmp_path / "validated" / "model.safetensors").exists()
    validated.folder.load_model(CPU, "last")
