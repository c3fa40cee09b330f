"""This package in `inference.py`: the model and the memory of `txl evaluate` and `txl generate`."""

from __future__ import annotations

import numpy as np
import torch
from implementations.task import Task
from torch import Tensor

from transformer_xl import __version__
from transformer_xl.config import TransformerXLConfig
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.generation.sampling import sample
from transformer_xl.inference import TokenModel, prepare_inference
from transformer_xl.integrations.int8 import with_int8_weights
from transformer_xl.model.memory import ContextLimits
from transformer_xl.model.transformer_xl import TransformerXL


class Runner:
    """Inference with cached keys and values; variants: `hidden` caches hidden states, `int8` has 8-bit weights."""

    versions = {"transformer_xl": __version__}  # noqa: RUF012

    def __init__(self, task: Task) -> None:
        """Build the model, and fill its memory with token 0 in segments of 512."""
        self.task = task
        cached = "hidden states" if task.variant == "hidden" else "keys and values"
        self.note = f"{cached} cached; sampling from the 40 most likely tokens"
        model = TransformerXL(TransformerXLConfig(**task.model_sizes, dropout=0.0)).eval().to(task.device)
        if task.variant == "int8":
            model = with_int8_weights(model)
        self.model = model  # whose parameters are counted
        self.inference: TokenModel = model if task.variant == "hidden" else prepare_inference(model, task.dtype)
        context_limits = ContextLimits(task.memory_length, task.memory_length, task.clamp_length)
        self.memory = self.inference.initial_memory(task.batch_size, context_limits)
        with torch.inference_mode(), task.autocast():
            for segment_BT in torch.zeros(task.batch_size, task.memory_length, dtype=torch.int64).split(512, dim=1):
                _, self.memory = self.inference(segment_BT.to(task.device), self.memory)
        self.sampling = GenerationConfig(top_k=40)
        self.generators = [np.random.default_rng(1 + row) for row in range(task.batch_size)]

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """See `Implementation.step`; the next token is sampled from the 40 most likely (R in the code)."""
        with torch.inference_mode(), self.task.autocast():
            hidden_BTD, self.memory = self.inference(inputs_BT.to(self.task.device), self.memory)
            if inputs_BT.shape[1] == 1:
                logits_B1R, _ = self.inference.topk(hidden_BTD, 40)
                sample(logits_B1R[:, 0], self.sampling, self.generators)
            return self.inference.nats(hidden_BTD, targets_BT).mean()
