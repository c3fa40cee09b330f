"""Training steps as `txl train` computes them, on tokens that the caller passes; used by several benchmarks."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from transformer_xl.config import TrainConfig, TransformerXLConfig
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.text.segments import Batch
from transformer_xl.training.averaging import WeightAverage
from transformer_xl.training.callbacks import Callback, Metrics
from transformer_xl.training.compiling import compile_layers
from transformer_xl.training.distributed import SINGLE_PROCESS
from transformer_xl.training.optimizers import build_optimizers
from transformer_xl.training.step import ModelWithLoss, TrainStep
from transformer_xl.training.trainer import Trainer


class StepTimer(Callback):
    """Measures the seconds of each training step but the first, without those of validation."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self._last: float | None = None

    @override
    def on_step(self, trainer: Trainer, num_tokens: int) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.step_seconds.append(now - self._last)
        self._last = now

    @override
    def on_metrics(self, trainer: Trainer, metrics: Metrics) -> None:
        if metrics["split"] == "valid":
            self._last = time.perf_counter()


class Trainee:
    """A model in training, with its optimizer and the memory that it carries from step to step."""

    def __init__(self, model: TransformerXLConfig, train: TrainConfig, device: str) -> None:
        """Build the model with weights of a fixed seed; the learning rate is constant at its peak."""
        torch.manual_seed(1)
        torch_device = torch.device(device)
        self.model = TransformerXL(model, memory_length=train.memory_length).to(torch_device).train()
        self.model.activation_checkpointing = train.activation_checkpointing
        compile_layers(self.model, torch_device, train.compile)
        with_loss = ModelWithLoss(self.model, copy_memory=train.compile == "cudagraphs")
        optimizers = build_optimizers(self.model, train)
        self.train_step = TrainStep(with_loss, optimizers, train, torch_device, SINGLE_PROCESS)
        self.average = None if train.weight_average == "none" else WeightAverage(self.model, train)
        self.num_steps = 0
        self.memories = (self.model.initial_memory(train.batch_size),)

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Run one optimizer step, and return its mean loss in nats per token, on the device.

        Args:
            inputs_BT: token ids (batch size B, segment length T), on the CPU.
            targets_BT: the next token of each input, on the CPU.
        """
        loss_mask_BT = np.ones(tuple(inputs_BT.shape), dtype=np.bool_)
        batch = Batch(inputs_BT.numpy(), targets_BT.numpy(), loss_mask_BT, is_first=False)
        sums, self.memories = self.train_step(batch, self.memories)
        self.num_steps += 1
        if self.average is not None:
            self.average.update(self.num_steps)
        return sums[0] / sums[1]  # sum of the losses, number of scored tokens
