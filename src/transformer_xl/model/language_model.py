"""The interface of every language model here; training, evaluation, generation and analysis use nothing else.

    memory = model.initial_memory(batch_size)         (or model.inference_memory(batch_size), where nothing is trained)
    hidden_BTD, memory = model(tokens_BT, memory)
    logits_BTV = model.logits(hidden_BTD)
    nats_BT = model.nats(hidden_BTD, targets_BT)
    logits_BTK, ids_BTK = model.topk(hidden_BTD, k)

Letters: B batch rows, T new tokens, D model width, V vocabulary, K most likely tokens.
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
    """A model that reads tokens after a memory and predicts the next token at every position."""

    layers: nn.ModuleList
    """The layers in order, alike; training may compile, checkpoint or shard them one by one."""

    def __init__(self, config: BaseModelConfig, *, memory_length: int = 128) -> None:
        super().__init__()
        self.config = config
        self.context_limits = ContextLimits(
            memory_length, config.limit("attention_window"), config.limit("clamp_length")
        )
        """The limits of a memory that is made without others."""
        self.activation_checkpointing = False
        """Compute the activations inside a layer again in the backward pass, dropout included, instead of keeping
        them."""

    @abstractmethod
    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> Memory:
        """Return an empty memory for training.

        Args:
            batch_size: B.
            context_limits: how far attention looks back; none: the model's own limits.

        Raises:
            UserError: this model cannot have such limits.
        """

    def inference_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> Memory:
        """Return an empty memory of the fastest kind for weights that do not change: a KV cache where there is one.

        Hidden states are those with `initial_memory`, but no gradient passes this memory, and it fits only this model,
        device and dtype. Arguments and errors are those of `initial_memory`.
        """
        return self.initial_memory(batch_size, context_limits)

    def generation_memory(
        self, batch_size: int, context_limits: ContextLimits | None = None, *, segment_length: int
    ) -> Memory:
        """Return an empty memory for generating token after token.

        It is that of `inference_memory`, unless the limits have memory_length 0: then the model would see only the
        newest token, so it gets the memory that together with that token makes a segment. A model that has no memory
        keeps those tokens, and reads them again every time.

        Args:
            batch_size: B.
            context_limits: how far attention looks back; none: the model's own limits.
            segment_length: the longest segment of training, in tokens.

        Raises:
            UserError: this model cannot have such limits.
        """
        limits = context_limits or self.context_limits
        if not limits.memory_length:
            limits = replace(limits, memory_length=segment_length - 1)
        return self.inference_memory(batch_size, limits)

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
        """Read T tokens of each batch row after what `memory` holds.

        Args:
            tokens_BT: token ids, int64.
            memory: what was read before; none: nothing. It is not changed.
            inputs_BTD: in place of tokens, continuous inputs to the first layer.
            lengths_B: how many of the T tokens, the last ones, belong to each batch row. Those before are padding,
                which is neither attended nor remembered; its hidden states mean nothing, but are finite. None: all.

        Returns:
            hidden states (B, T, D), and the memory after these tokens.

        Raises:
            UserError: not exactly one kind of input, a wrong shape, or a memory of another batch or model.
        """

    def training_losses(
        self, tokens_BT: Tensor, targets_BT: Tensor, memory: Memory, *, progress: float
    ) -> tuple[Tensor, Tensor, Memory]:
        """Return the losses of one training step.

        Args:
            tokens_BT: as for `forward`.
            targets_BT: as for `nats`.
            memory: as for `forward`.
            progress: how much of the training is done, from 0 to 1.

        Returns:
            nats (B, T) of the targets; auxiliary losses at the same positions in nats (B, T), zeros unless a model has
            some, which are trained and never reported; and the next memory.
        """
        hidden_BTD, memory = self(tokens_BT, memory)
        nats_BT = self.nats(hidden_BTD, targets_BT)
        return nats_BT, torch.zeros_like(nats_BT), memory

    @abstractmethod
    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the next-token logits, shape (B, T, V), for every position."""

    @abstractmethod
    def nats(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the cross-entropy of each target.

        Args:
            hidden_BTD: what `forward` returned.
            targets_BT: token ids, int64. They may be on the CPU whatever the model's device, and best are: then nothing
                waits for the device.

        Returns:
            nats, float32 (or float64) of shape (B, T), in input order, never averaged.
        """

    def topk(self, hidden_BTD: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k most likely next tokens at every position (fewer where V is smaller).

        A model that finds them without computing the logits of the whole vocabulary does so.

        Args:
            hidden_BTD: what `forward` returned.
            k: number of tokens.

        Returns:
            their logits in falling order, up to a constant at each position, and their ids; each (B, T, K).
        """
        logits_BTV = self.logits(hidden_BTD)
        return logits_BTV.topk(min(k, logits_BTV.shape[-1]), dim=-1)

    def num_parameters(self) -> int:
        """Return the number of trained parameters, shared ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())
