"""A model in training as `txl train` trains it: the package's own model, optimisers and step, on tokens handed in."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from transformer_xl.config import TrainConfig, TransformerXLConfig
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.text.segments import Batch
from transformer_xl.training.compiling import compile_layers
from transformer_xl.training.distributed import SINGLE_PROCESS
from transformer_xl.training.optimizers import build_optimizers
from transformer_xl.training.step import ModelWithLoss, TrainStep


class Trainee:
    """Carries its memory from step to step."""

    def __init__(self, model: TransformerXLConfig, train: TrainConfig, device: str) -> None:
        """Weights are drawn from the same seed each time; the learning rate stays at its peak."""
        torch.manual_seed(1)
        place = torch.device(device)
        self.model = TransformerXL(model, memory_length=train.memory_length).to(place).train()
        self.model.activation_checkpointing = train.activation_checkpointing
        compile_layers(self.model, place, train.compile)
        scored = ModelWithLoss(self.model, copy_memory=train.compile == "cudagraphs")
        self.train_step = TrainStep(scored, build_optimizers(self.model, train), train, place, SINGLE_PROCESS)
        self.memories = (self.model.initial_memory(train.batch_size),)

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """One whole optimiser step on tokens (B, T) that lie on the CPU; gives the mean loss in nats, on the device."""
        loss_mask_BT = np.ones(tuple(inputs_BT.shape), dtype=np.bool_)
        segment = Batch(inputs_BT.numpy(), targets_BT.numpy(), loss_mask_BT, is_first=False)
        numbers, self.memories = self.train_step(segment, self.memories)
        return numbers[0] / numbers[1]
