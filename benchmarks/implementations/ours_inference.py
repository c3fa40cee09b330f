"""This package in `inference.py`: reading with the memory that `txl evaluate` and `txl generate` use."""

from __future__ import annotations

import torch
from implementations.task import Task
from torch import Tensor

from transformer_xl import __version__
from transformer_xl.config import TransformerXLConfig
from transformer_xl.generation.config import GenerationConfig
from transformer_xl.generation.sampling import sample
from transformer_xl.model.memory import ContextLimits
from transformer_xl.model.precision import with_matrices_in
from transformer_xl.model.transformer_xl import TransformerXL


class Runner:
    """Variant `hidden`: hidden rows kept and projected again in each step, as in training."""

    versions = {"transformer_xl": __version__}  # noqa: RUF012
    note = "keys and values kept; the 40 likeliest tokens drawn from"

    def __init__(self, task: Task) -> None:
        config = TransformerXLConfig(
            vocab_size=task.vocab_size,
            n_layers=task.n_layers,
            d_model=task.d_model,
            n_heads=task.n_heads,
            d_head=task.d_head,
            d_ff=task.d_ff,
            dropout=0.0,
        )
        self.task, model = task, TransformerXL(config).eval().to(task.device)
        self.model = with_matrices_in(model, torch.bfloat16) if task.dtype == "bfloat16" else model
        context_limits = ContextLimits(task.memory_length, task.memory_length, task.clamp_length)
        kind = self.model.initial_memory if task.variant == "hidden" else self.model.inference_memory
        self.memory = kind(task.batch_size, context_limits)
        with torch.inference_mode(), task.autocast():
            for part_BT in torch.zeros(task.batch_size, task.memory_length, dtype=torch.int64).split(512, dim=1):
                _, self.memory = self.model(part_BT.to(task.device), self.memory)
        self.sampling = GenerationConfig(top_k=40)
        self.generators = [torch.Generator().manual_seed(1 + row) for row in range(task.batch_size)]

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Reads on; a single token is followed by the choice of the next, as in generation."""
        with torch.inference_mode(), self.task.autocast():
            hidden_BTD, self.memory = self.model(inputs_BT.to(self.task.device), self.memory)
            if inputs_BT.shape[1] == 1:
                logits_B1R, _ = self.model.topk(hidden_BTD, 40)
                sample(logits_B1R[:, 0], self.sampling, self.generators)
            return self.model.nats(hidden_BTD, targets_BT).mean()
