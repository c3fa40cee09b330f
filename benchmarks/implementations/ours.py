"""This package in `training.py`: the model and the optimiser step that `txl train` uses."""

from __future__ import annotations

from implementations.task import Task
from torch import Tensor
from trainee import Trainee

from transformer_xl import __version__
from transformer_xl.config import TrainConfig, TransformerXLConfig


class Runner:
    """Variant `compile`: layers through torch.compile. Nothing is set that `txl train` does not set."""

    versions = {"transformer_xl": __version__}  # noqa: RUF012

    def __init__(self, task: Task) -> None:
        model = TransformerXLConfig(
            vocab_size=task.vocab_size,
            n_layers=task.n_layers,
            d_model=task.d_model,
            n_heads=task.n_heads,
            d_head=task.d_head,
            d_ff=task.d_ff,
            dropout=task.dropout,
        )
        train = TrainConfig.model_validate(
            {
                "batch_size": task.batch_size,
                "segment_length": task.segment_length,
                "memory_length": task.memory_length,
                "learning_rate": task.learning_rate,
                "max_grad_norm": task.max_grad_norm,
                "dtype": task.dtype,
                "compile": "layers" if task.variant == "compile" else "none",
                "activation_checkpointing": task.variant == "recompute",
            }
        )
        self.trainee = Trainee(model, train, task.device)
        self.model = self.trainee.model
        self.note = "relative attention of the paper, kernel auto"

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The tokens come from the CPU, as those of a corpus do."""
        return self.trainee.step(inputs_BT, targets_BT)
