"""Training steps as `txl train` computes them, on tokens that the caller passes; used by several benchmarks."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from transformer_xl.config import TrainConfig, TransformerXLConfig
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.text.segments import Batch, SegmentDataset
from transformer_xl.training.callbacks import Callback, Metrics
from transformer_xl.training.stepper import Stepper
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
        self.model = TransformerXL(model, memory_length=train.memory_length).to(torch_device)
        unread, rows = np.zeros(train.batch_size, np.int64), train.batch_size  # the caller passes the tokens
        dataset = SegmentDataset(unread, batch_size=rows, segment_length=train.segment_length, bos_token_id=0)
        self.stepper = Stepper(self.model, dataset, train, torch_device)
        self.num_steps = 0

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Run one optimizer step, and return its mean loss in nats per token, on the device.

        Args:
            inputs_BT: token ids (batch size B, segment length T), on the CPU.
            targets_BT: the next token of each input, on the CPU.
        """
        loss_mask_BT = np.ones(tuple(inputs_BT.shape), dtype=np.bool_)
        batch = Batch(inputs_BT.numpy(), targets_BT.numpy(), loss_mask_BT, is_first=False)
        sums = self.stepper.train_on(batch)
        self.num_steps += 1
        if self.stepper.weight_average is not None:
            self.stepper.weight_average.update(self.num_steps)
        return sums[0] / sums[1]  # sum of the losses, number of scored tokens
