"""This package in `training.py`: the model and the optimiser step that `txl train` uses."""

from __future__ import annotations

import torch
from torch import Tensor
from worker import Task

from transformer_xl import __version__
from transformer_xl.config import ModelConfig, TrainConfig
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.training.optimizers import build_optimizer


class Trained:
    """Variant `compile`: layers through torch.compile."""

    versions = {"transformer_xl": __version__}  # noqa: RUF012

    def __init__(self, task: Task) -> None:
        config = ModelConfig(
            vocabulary_size=task.vocabulary,
            layers=task.layers,
            width=task.width,
            heads=task.heads,
            head_width=task.head_width,
            feedforward=task.feedforward,
            dropout=task.dropout,
            memory=task.memory,
        )
        self.task = task
        self.model = TransformerXL(config).to(task.device)
        settings = TrainConfig(learning_rate=task.learning_rate, clip=task.clip)
        self.optimizer = build_optimizer(self.model, settings)
        self.memory = self.model.initial_memory(task.rows)
        self.note = "relative attention of the paper, kernel auto"
        if task.variant == "compile":
            for layer in self.model.layers:
                layer.compile(dynamic=False)
            self.note += ", layers compiled"

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """As `txl train`: forward with the memory carried, backward, clip, fused Adam."""
        with self.task.autocast():
            hidden_BTD, self.memory = self.model(inputs_BT, self.memory)
            loss = self.model.nats(hidden_BTD, targets_BT.cpu()).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss
