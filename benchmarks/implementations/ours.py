"""This package in `training.py`: the model and the optimizer step of `txl train`."""

from __future__ import annotations

from implementations.task import Task
from torch import Tensor
from trainee import Trainee

from transformer_xl import __version__
from transformer_xl.config import TrainConfig, TransformerXLConfig


class Runner:
    """Training as by `txl train`; variants: `compile` uses torch.compile, `recompute` activation checkpointing."""

    versions = {"transformer_xl": __version__}  # noqa: RUF012
    note = "relative attention of the paper, kernel auto"

    def __init__(self, task: Task) -> None:
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
        trainee = Trainee(TransformerXLConfig(**task.model_sizes, dropout=task.dropout), train, task.device)
        self.model, self._step = trainee.model, trainee.step

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """See `Implementation.step`."""
        return self._step(inputs_BT, targets_BT)
