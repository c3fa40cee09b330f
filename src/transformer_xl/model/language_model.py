"""The contract of every language model here; training, scoring, generation and analysis use nothing else.

    memory = model.initial_memory(batch_size)         (or, for weights that stay, model.inference_memory(batch_size))
    hidden_BTD, memory = model(tokens_BT, memory)
    logits_BTV = model.logits(hidden_BTD)
    nats_BT = model.nats(hidden_BTD, targets_BT)
    scores_BTR, ids_BTR = model.top(hidden_BTD, count)

Letters: B rows, T new tokens, D model width, V vocabulary, R candidates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import BaseModelConfig
from transformer_xl.model.memory import ContextLimits, Memory


class LanguageModel(nn.Module, ABC):
    """Reads tokens beside a memory, and says how likely each next token is."""

    layers: nn.ModuleList
    """What training may compile, recompute or share out one by one: modules that follow one another, alike."""

    def __init__(self, config: BaseModelConfig, *, memory_length: int = 128) -> None:
        super().__init__()
        self.config = config
        self.context_limits = ContextLimits(
            memory_length, config.limit("attention_window"), config.limit("clamp_length")
        )
        """Limits of attention where a memory is made without others."""
        self.activation_checkpointing = False
        """Whether what is inside a layer is computed again in the backward pass, dropout and all, and not kept."""

    @abstractmethod
    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> Memory:
        """An empty memory for B rows; `reach` in place of the model's own."""

    def inference_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> Memory:
        """An empty memory of the quickest kind for a model whose weights do not change; no gradient passes it.

        What it gives is what `initial_memory` gives. It goes with this model, device and number format alone.
        """
        return self.initial_memory(batch_size, context_limits)

    def generation_memory(
        self, batch_size: int, context_limits: ContextLimits | None = None, *, segment: int
    ) -> Memory:
        """An empty memory to write with, token after token; `segment` is the longest that training had.

        What `inference_memory` gives, but where nothing is kept of earlier segments (memory 0): the model would see
        only the token just written, so it gets what makes a segment with that token. A model without any memory
        remembers those tokens, and reads them again every time.
        """
        context_limits = context_limits or self.context_limits
        return self.inference_memory(
            batch_size,
            context_limits if context_limits.memory_length else replace(context_limits, memory_length=segment - 1),
        )

    @abstractmethod
    @override
    def forward(
        self,
        tokens_BT: Tensor | None = None,
        memory: Memory | None = None,
        *,
        inputs_BTD: Tensor | None = None,
        lengths_B: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """Reads T tokens of each row after what `memory` holds; gives hidden rows (B, T, D) and the next memory.

        Where `lengths_B` is given, only so many tokens of a row, the last ones, are its own. Those before are padding,
        which is neither attended nor remembered; hidden rows of padding mean nothing, but are finite.
        """

    def training_losses(
        self, tokens_BT: Tensor, targets_BT: Tensor, memory: Memory, *, done: float
    ) -> tuple[Tensor, Tensor, Memory]:
        """What a step of training needs: `nats` of the targets, what else the model is to be trained for, the memory.

        Args:
            tokens_BT: as for `forward`.
            targets_BT: as for `nats`.
            memory: as for `forward`.
            done: share of the training that is done, from 0 to 1.

        Returns:
            nats (B, T); auxiliary losses of the same places in nats (B, T), zeros unless a model has some, which are
            trained and never reported; and the next memory.
        """
        hidden_BTD, memory = self(tokens_BT, memory)
        nats_BT = self.nats(hidden_BTD, targets_BT)
        return nats_BT, torch.zeros_like(nats_BT), memory

    @abstractmethod
    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Unnormalised log-probabilities (B, T, V) of the token after each place."""

    @abstractmethod
    def nats(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Loss of each target in nats, float32 (or float64) of shape (B, T), in input order, never averaged.

        Targets may lie on the CPU whatever the model's device, and best do: then nothing is waited for.
        """

    def topk(self, hidden_BTD: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` likeliest tokens of each place (fewer where V is smaller): scores, falling, and ids; (B, T, R).

        Scores of one place differ from log-probabilities by a constant. A model that can find them without scoring
        the whole vocabulary does so.
        """
        scores_BTV = self.logits(hidden_BTD)
        return scores_BTV.topk(min(count, scores_BTV.shape[-1]), dim=-1)

    def num_parameters(self) -> int:
        """Number of trained numbers, shared ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())
