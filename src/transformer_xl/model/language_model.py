"""The interface of all language models, which training, evaluation, generation and analysis use.

    memory = model.initial_memory(batch_size)         (or model.inference_memory(batch_size) if nothing is trained)
    hidden_BTD, memory = model(tokens_BT, memory)
    logits_BTV = model.logits(hidden_BTD)
    nats_BT = model.nats(hidden_BTD, targets_BT)
    logits_BTK, ids_BTK = model.topk(hidden_BTD, k)

Shape suffixes: B batch size, T new tokens, D model width, V vocabulary, K most likely tokens.
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
    """The layers in order, all of the same class; training may compile, checkpoint or shard each of them."""

    def __init__(self, config: BaseModelConfig, *, memory_length: int = 128) -> None:
        super().__init__()
        self.config = config
        self.context_limits = ContextLimits(
            memory_length, config.limit("attention_window"), config.limit("clamp_length")
        )
        """The default limits of a new memory."""
        self.activation_checkpointing = False
        """Whether the backward pass recomputes the activations inside each layer instead of saving them."""

    @abstractmethod
    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> Memory:
        """Return an empty memory for training.

        Args:
            batch_size: B.
            context_limits: how far back attention can look, or None for the model's `context_limits`.

        Raises:
            UserError: the model does not support these limits.
        """

    def inference_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> Memory:
        """Return an empty memory of the fastest kind for inference: a KV cache if the model supports one.

        Hidden states are the same as with `initial_memory`, but no gradient flows through this memory, and it can be
        used only with this model, device and dtype. Arguments and errors are those of `initial_memory`.
        """
        return self.initial_memory(batch_size, context_limits)

    def generation_memory(
        self, batch_size: int, context_limits: ContextLimits | None = None, *, segment_length: int
    ) -> Memory:
        """Return an empty memory for generating token after token.

        It is that of `inference_memory`, unless memory_length is 0. Then the model would see only the newest token, so
        the memory has segment_length - 1 slots, which together with that token make one segment. A model without memory
        stores those tokens instead and recomputes them in each step.

        Args:
            batch_size: B.
            context_limits: how far back attention can look, or None for the model's `context_limits`.
            segment_length: the longest segment of training, in tokens.

        Raises:
            UserError: the model does not support these limits.
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
        """Read T tokens of each batch row, which continue the tokens in `memory`.

        Args:
            tokens_BT: token ids, int64.
            memory: the memory of earlier tokens, or None if there are none. It is not changed.
            inputs_BTD: continuous inputs to the first layer, in place of tokens.
            lengths_B: number of tokens of each batch row that are not padding, or None if there is no padding. Padding
                comes first and is neither attended nor cached; its hidden states are finite but meaningless.

        Returns:
            hidden states (B, T, D), and the memory after these tokens.

        Raises:
            UserError: not exactly one of tokens and inputs is given, a shape is wrong, or the memory is of another
                batch size or model.
        """

    def training_losses(
        self, tokens_BT: Tensor, targets_BT: Tensor, memory: Memory, *, progress: float
    ) -> tuple[Tensor, Tensor, Memory]:
        """Return the losses of one training step.

        Args:
            tokens_BT: as for `forward`.
            targets_BT: as for `nats`.
            memory: as for `forward`.
            progress: fraction of the training steps that are done, from 0 to 1.

        Returns:
            losses of the targets in nats (B, T); auxiliary losses in nats (B, T), which are trained but not reported,
            and zero if the model has none; and the next memory.
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
            hidden_BTD: hidden states that `forward` returned.
            targets_BT: token ids, int64, on any device; on the CPU they avoid a synchronization with the device.

        Returns:
            losses in nats, float32 (or float64), shape (B, T), in input order and not averaged.
        """

    def topk(self, hidden_BTD: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k most likely next tokens at every position, or all V if there are fewer.

        With an adaptive softmax, the logits of tails that cannot contain them are not computed.

        Args:
            hidden_BTD: hidden states that `forward` returned.
            k: number of tokens.

        Returns:
            their logits in descending order, up to a constant at each position, and their ids, each (B, T, K).
        """
        logits_BTV = self.logits(hidden_BTD)
        return logits_BTV.topk(min(k, logits_BTV.shape[-1]), dim=-1)

    def num_parameters(self) -> int:
        """Return the number of trainable parameters; shared parameters are counted once."""
        return sum(parameter.numel() for parameter in self.parameters())
