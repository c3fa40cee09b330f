"""The base class of all models: embedding and softmax around layers of any kind.

Shape suffixes: B batch size, T new tokens, D model width, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from transformer_xl.config import BaseModelConfig, UserError
from transformer_xl.model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from transformer_xl.model.dropout import FastDropout
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits, Memory

WEIGHT_STD, NORM_STD = 0.02, 0.02  # the authors' init_std


class TokenModel(LanguageModel):
    """Token embedding times sqrt(D), layers, and a softmax that by default shares the embedding's weights."""

    def __init__(self, config: BaseModelConfig, *, memory_length: int) -> None:
        super().__init__(config, memory_length=memory_length)
        self.embedding = AdaptiveEmbedding(config)
        self.softmax = AdaptiveSoftmax(config, self.embedding)
        self.dropout = FastDropout(config.dropout)

    def init_weights(self) -> None:
        """Draw the initial weights as the authors' code does: N(0, 0.02), biases 0, LayerNorm weights N(1, 0.02)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, WEIGHT_STD)
            elif isinstance(module, AdaptiveEmbedding | AdaptiveSoftmax):
                module.init_weights()
            elif isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, NORM_STD)
            if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @override
    def logits(self, hidden_BTD: Tensor) -> Tensor:
        return self.softmax.logits(hidden_BTD)

    @override
    def nats(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        return self.softmax.nats(hidden_BTD, targets_BT)

    @override
    def topk(self, hidden_BTD: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return self.softmax.topk(hidden_BTD, k)

    def check_limits(self, context_limits: ContextLimits | None) -> ContextLimits:
        """Return the limits if they are given, or else the model's `context_limits`.

        Raises:
            UserError: the model does not support these limits.
        """
        limits = context_limits or self.context_limits
        self.config.check_context_limits(
            memory_length=limits.memory_length,
            attention_window=limits.attention_window,
            clamp_length=limits.clamp_length,
        )
        return limits

    def embed_inputs(self, tokens_BT: Tensor | None, inputs_BTD: Tensor | None) -> Tensor:
        """Return the scaled embeddings of the tokens, or the continuous inputs unscaled, (B, T, D), without dropout.

        Raises:
            UserError: not exactly one of tokens and inputs is given, or a shape is wrong.
        """
        if (tokens_BT is None) == (inputs_BTD is None):
            raise UserError("give either tokens_BT or inputs_BTD")
        if tokens_BT is not None:
            if tokens_BT.ndim != 2 or tokens_BT.is_floating_point() or not tokens_BT.shape[1]:
                given = f"tokens_BT of shape {tuple(tokens_BT.shape)}, {tokens_BT.dtype}"
                raise UserError(f"{given}; expected integers of shape (batch, tokens), with one token or more")
            inputs_BTD = self.embedding(tokens_BT) * self.config.d_model**0.5
        assert inputs_BTD is not None
        if inputs_BTD.ndim != 3 or inputs_BTD.shape[-1] != self.config.d_model or not inputs_BTD.shape[1]:
            given = f"inputs_BTD of shape {tuple(inputs_BTD.shape)}"
            raise UserError(f"{given}; expected (batch, tokens, {self.config.d_model}), with one token or more")
        return inputs_BTD

    def check_memory(self, memory: Memory | None, x_BTD: Tensor, lengths_B: Tensor | None) -> Memory:
        """Return the memory if it is given, or else an empty one.

        Raises:
            UserError: the memory or the lengths are of another batch size, or the memory is of another model.
        """
        batch_size = len(x_BTD)
        if lengths_B is not None and lengths_B.shape != (batch_size,):
            raise UserError(
                f"lengths_B of shape {tuple(lengths_B.shape)} for batch size {batch_size}; expected one for each row"
            )
        if memory is None:
            return self.initial_memory(batch_size)
        if memory.batch_size != batch_size:
            raise UserError(
                f"memory of batch size {memory.batch_size} for inputs of batch size {batch_size}; "
                "use memory.select(rows), or initial_memory for new sequences"
            )
        return memory

    def run_layer(self, layer: nn.Module, *inputs: Any) -> Any:
        """Call a layer, with activation checkpointing if it is enabled."""
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(layer, *inputs, use_reentrant=False)
        return layer(*inputs)
