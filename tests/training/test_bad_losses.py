"""Losses that are not finite stop training with advice, and without a checkpoint of the broken weights.

Shape suffixes: B batch rows, T tokens of a segment, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_runs import CPU, letters_corpus, reopened, start

from transformer_xl.config import UserError
from transformer_xl.run import load_run
from transformer_xl.training.trainer import Trainer


def nan(losses_BT: Tensor) -> Tensor:
    return losses_BT * torch.nan


def inf(losses_BT: Tensor) -> Tensor:
    return losses_BT + torch.inf


def infinite_gradient(losses_BT: Tensor) -> Tensor:
    """Return finite losses with an infinite gradient, that of a square root at 0."""
    return (losses_BT - losses_BT.detach()).sqrt() + 1


def change_losses(trainer: Trainer, step: int, change: Callable[[Tensor], Tensor]) -> None:
    """Change the losses that the model computes in one step."""
    nats = trainer.model.nats

    def changed_nats(hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        losses_BT = nats(hidden_BTD, targets_BT)
        return change(losses_BT) if trainer.state.step + 1 == step else losses_BT

    trainer.model.nats = changed_nats


@pytest.mark.parametrize(
    # the step whose losses are changed, and the step of the last checkpoint before it (there is one every 4 steps)
    ("change", "cause", "step", "checkpoint_step"),
    [
        (nan, "loss became nan", 1, 0),
        (nan, "loss became nan", 4, 0),  # where a checkpoint is due, which must not be written
        (infinite_gradient, "gradient norm became (nan|inf)", 5, 4),
        (inf, "loss became inf", 17, 16),  # the last step
    ],
)
def test_training_stops_at_a_non_finite_loss(
    tmp_path: Path, change: Callable[[Tensor], Tensor], cause: str, step: int, checkpoint_step: int
) -> None:
    trainer = start(tmp_path / "run", letters_corpus(tmp_path / "corpus", num_valid=0), checkpoint_interval=4)
    change_losses(trainer, step, change)
    # half of the learning rate, 0.01, is recommended
    message = rf"{cause} at step {step}; .*step-{checkpoint_step:08} .*--resume .*run --train.learning-rate 0\.005$"
    with pytest.raises(UserError, match=message):
        trainer.run()
    assert trainer.folder.checkpoints()[-1].name == f"step-{checkpoint_step:08}"
    assert all(torch.isfinite(weight).all() for weight in load_run(trainer.folder, CPU, "last").model.parameters())
    assert [line["step"] for line in trainer.folder.metrics()] == [*range(1, step)]
    trainer = reopened(trainer)  # with the model's own losses
    assert trainer.state.step == checkpoint_step
    assert trainer.run()


def test_training_stops_after_a_too_large_learning_rate(tmp_path: Path) -> None:
    corpus = letters_corpus(tmp_path / "corpus")
    trainer = start(tmp_path / "run", corpus, learning_rate=1e30, warmup_steps=0)
    # the first step makes the weights huge
    with pytest.raises(UserError, match=r"became (nan|inf) at step 2; .*step-00000000"):
        trainer.run()
    load_run(trainer.folder, CPU, "last")
    validated = start(tmp_path / "validated", corpus, learning_rate=1e30, warmup_steps=0, eval_interval=1)
    with pytest.raises(UserError, match=r"validation loss became nan at step 1; .*train.learning_rate"):
        validated.run()
    assert not (tmp_path / "validated" / "model.safetensors").exists()
