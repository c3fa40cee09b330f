"""Losses that are not finite: training stops, says what to do, and keeps no checkpoint of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_runs import CPU, letters, lines_of, make_corpus, reopened, start

from transformer_xl.config import UserError
from transformer_xl.training.trainer import Trainer


def spoil(trainer: Trainer, step: int, change: Callable[[Tensor], Tensor]) -> None:
    """Replaces the loss of one step."""
    nats = trainer.model.nats

    def spoiled(hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        found = nats(hidden_BTD, targets_BT)
        return change(found) if trainer.state.step + 1 == step else found

    trainer.model.nats = spoiled


def nan(nats: Tensor) -> Tensor:
    return nats * torch.nan


def inf(nats: Tensor) -> Tensor:
    return nats + torch.inf


def bad_gradient(nats: Tensor) -> Tensor:
    return (nats - nats.detach()).sqrt() + 1


@pytest.mark.parametrize(
    ("change", "cause", "step", "checkpoint"),
    [
        (nan, "loss became nan", 1, 0),
        (inf, "loss became inf", 3, 0),
        (nan, "loss became nan", 4, 0),  # where a checkpoint is due, which must not be written
        (bad_gradient, "gradient norm became (nan|inf)", 5, 4),
        (inf, "loss became inf", 8, 4),
        (bad_gradient, "gradient norm became (nan|inf)", 17, 16),
    ],
)
def test_a_loss_that_is_not_finite_stops(
    tmp_path: Path, change: Callable[[Tensor], Tensor], cause: str, step: int, checkpoint: int
) -> None:
    trainer = start(tmp_path / "run", make_corpus(tmp_path / "corpus", letters(127, seed=1)), checkpoint_interval=4)
    spoil(trainer, step, change)
    message = rf"{cause} at step {step}; .*step-{checkpoint:08} .*--resume .*run --train.learning-rate 0\.005$"
    with pytest.raises(UserError, match=message):
        trainer.run()
    assert trainer.folder.checkpoints()[-1].name == f"step-{checkpoint:08}"
    assert all(torch.isfinite(weight).all() for weight in trainer.folder.load_model(CPU, "last").parameters())
    assert step == 1 or [line["step"] for line in lines_of(trainer, "train")] == [*range(1, step)]
    again = reopened(trainer)
    assert again.state.step == checkpoint
    assert again.run()


def test_an_absurd_learning_rate_stops(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1), letters(41, seed=2))
    trainer = start(tmp_path / "run", corpus, learning_rate=1e30, warmup_steps=0)
    with pytest.raises(UserError, match=r"became (nan|inf) at step 2; .*step-00000000"):
        trainer.run()
    trainer.folder.load_model(CPU, "last")
    validated = start(tmp_path / "validated", corpus, learning_rate=1e30, warmup_steps=0, eval_interval=1)
    with pytest.raises(UserError, match=r"validation loss became nan at step 1; .*--train.learning-rate"):
        validated.run()
    assert not (tmp_path / "validated" / "model.safetensors").exists()
