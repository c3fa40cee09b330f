"""What every model of tokens here shares: embedding and softmax around layers of any kind.

Letters: B rows, T new tokens, D model width, V vocabulary, R candidates, X any shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from transformer_xl.config import BaseModelConfig, UserError
from transformer_xl.model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from transformer_xl.model.dropout import Dropout
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits, Memory

WEIGHT_STD, NORM_STD = 0.02, 0.02  # the authors' init_std


class TokenModel(LanguageModel):
    """Token embedding times sqrt(D), layers, and a softmax that shares the embedding's weights unless told not to."""

    def __init__(self, config: BaseModelConfig, *, memory_length: int) -> None:
        super().__init__(config, memory_length=memory_length)
        self.embedding = AdaptiveEmbedding(config)
        self.softmax = AdaptiveSoftmax(config, self.embedding)
        self.dropout = Dropout(config.dropout)

    def init_weights(self) -> None:
        """Draws the first weights as the authors' code does: N(0, 0.02), biases 0, LayerNorm weights N(1, 0.02)."""
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
    def topk(self, hidden_BTD: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return self.softmax.top(hidden_BTD, count)

    def checked(self, context_limits: ContextLimits | None) -> ContextLimits:
        """The model's own reach, or the one that is asked for.

        Raises:
            UserError: this model has nothing that could reach so.
        """
        context_limits = context_limits or self.context_limits
        self.config.check_context_limits(
            memory_length=context_limits.memory_length,
            attention_window=context_limits.attention_window,
            clamp_length=context_limits.clamp_length,
        )
        return context_limits

    def first_input(self, tokens_BT: Tensor | None, inputs_BTD: Tensor | None) -> Tensor:
        """The scaled embedding of the tokens, or the continuous inputs as they are; without dropout.

        Raises:
            UserError: not exactly one kind of input, or a wrong shape.
        """
        if (tokens_BT is None) == (inputs_BTD is None):
            raise UserError("give either tokens_BT or inputs_BTD")
        if tokens_BT is not None:
            if tokens_BT.ndim != 2 or tokens_BT.is_floating_point() or not tokens_BT.shape[1]:
                given = f"tokens of shape {tuple(tokens_BT.shape)}, {tokens_BT.dtype}"
                raise UserError(f"{given}; wanted whole numbers (rows, tokens), one token at least")
            inputs_BTD = self.embedding(tokens_BT) * self.config.d_model**0.5
        assert inputs_BTD is not None
        if inputs_BTD.ndim != 3 or inputs_BTD.shape[-1] != self.config.d_model or not inputs_BTD.shape[1]:
            raise UserError(f"inputs of shape {tuple(inputs_BTD.shape)}; wanted (rows, tokens, {self.config.d_model})")
        return inputs_BTD

    def matching(self, memory: Memory | None, x_BTD: Tensor, lengths_B: Tensor | None) -> Memory:
        """The memory, or an empty one.

        Raises:
            UserError: it has another number of rows, or the lengths have.
        """
        batch_size = len(x_BTD)
        if lengths_B is not None and lengths_B.shape != (batch_size,):
            raise UserError(f"lengths of shape {tuple(lengths_B.shape)} beside {batch_size} rows; wanted one a row")
        if memory is None:
            return self.initial_memory(batch_size)
        if memory.batch_size != batch_size:
            raise UserError(
                f"memory of {memory.batch_size} rows beside {batch_size} rows of input; "
                "use memory.select(rows), or initial_memory for new texts"
            )
        return memory

    def through(self, layer: nn.Module, *given: Any) -> Any:
        """What a layer gives; where asked for, what is inside is computed again in the backward pass, and not kept."""
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(layer, *given, use_reentrant=False)
        return layer(*given)
