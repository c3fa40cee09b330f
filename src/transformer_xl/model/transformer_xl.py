"""Transformer-XL (Dai et al. 2019, section 3): layers that attend over a memory of what they read before.

    hidden_BTD, memory = model(tokens_BT, memory)

Memory is hidden rows while weights change, keys and values where they do not; the numbers are the same.

Letters: B rows, T new tokens, M memory slots, S = M + T keys, P distances that have a position key of their own,
D model width, N heads, H head width, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import RelativeConfig, TransformerXLConfig, UserError
from transformer_xl.model import kernels
from transformer_xl.model.attention import (
    Attention,
    Biases,
    HiddenRows,
    KeysAndValues,
    Layer,
    Past,
    RelativeAttention,
    encode_distances,
)
from transformer_xl.model.kernels import AttentionInputs, AttentionMask, AttentionTerms, reference
from transformer_xl.model.key_values import KeyValueMemory, Span
from transformer_xl.model.memory import ContextLimits, HiddenMemory, Memory
from transformer_xl.model.token_model import WEIGHT_STD, TokenModel


@dataclass(frozen=True)
class LayerTrace:
    """What one layer did, for pictures and for reading features."""

    output_BTD: Tensor
    """What the layer gave to the next one."""
    terms: AttentionTerms
    """Its four attention terms and the probabilities, over [memory ; new tokens]."""


class TransformerXL(TokenModel):
    """Token embedding times sqrt(D), L layers, and a softmax that shares the embedding's weights unless told not to."""

    config: RelativeConfig  # pyrefly: ignore[bad-override-mutable-attribute]
    config_class: ClassVar[type[RelativeConfig]] = TransformerXLConfig

    def __init__(self, config: RelativeConfig, *, memory_length: int = 128) -> None:
        """Builds the model with the authors' first weights, drawn from torch's global random state.

        Raises:
            UserError: the settings are those of another model, or name no known attention kernel.
        """
        super().__init__(config, memory_length=memory_length)
        if not isinstance(config, self.config_class):
            raise UserError(f"{type(self).__name__} is not the model of {config.architecture}; use build_model")
        kernels.check(config.attn_implementation)
        tied = not isinstance(config, TransformerXLConfig) or config.tie_attention_biases
        num_bias_pairs = 1 if tied else config.n_layers
        self.content_bias = nn.Parameter(torch.empty(num_bias_pairs, config.n_heads, config.head_dim))
        self.position_bias = nn.Parameter(torch.empty(num_bias_pairs, config.n_heads, config.head_dim))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        final = config.norm_first and config.final_norm
        self.final_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps) if final else nn.Identity()
        self.init_weights()

    @override
    def init_weights(self) -> None:
        super().init_weights()
        nn.init.normal_(self.content_bias, 0.0, WEIGHT_STD)
        nn.init.normal_(self.position_bias, 0.0, WEIGHT_STD)

    @override
    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> HiddenMemory:
        config = self.config
        return HiddenMemory.empty(
            config.n_layers, batch_size, config.d_model, context_limits or self.context_limits, self.content_bias
        )

    @override
    def inference_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> Memory:
        config = self.config
        if config.attend_empty_memory and config.norm_first:
            return self.initial_memory(
                batch_size, context_limits
            )  # normalised, rows of zeros have keys that are not zeros
        shape = (config.n_layers, batch_size, config.n_heads, config.head_dim)
        context_limits, attended = context_limits or self.context_limits, config.attend_empty_memory
        return KeyValueMemory.empty(shape, context_limits, self.content_bias, attended=attended)

    @override
    def forward(
        self,
        tokens_BT: Tensor | None = None,
        memory: Memory | None = None,
        *,
        inputs_BTD: Tensor | None = None,
        lengths_B: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """Reads T tokens of each row after what `memory` holds.

        Args:
            tokens_BT: token numbers, int64.
            memory: what was read before; none: nothing. It is not changed.
            inputs_BTD: in place of tokens, continuous inputs (music, control, speech): the first layer's input as is.
            lengths_B: how many of the T are the row's own; they stand last. What stands before is padding, which is
                neither attended nor remembered; hidden rows of padding mean nothing. None: all.

        Returns:
            hidden rows (B, T, D), and the memory to hand in with the next tokens of the same rows.

        Raises:
            UserError: not exactly one kind of input, a wrong shape, or a memory of another batch or model.
        """
        states_BTD, memory = self.hidden_states(tokens_BT, memory, inputs_BTD=inputs_BTD, lengths_B=lengths_B)
        return states_BTD[-1], memory

    def hidden_states(
        self,
        tokens_BT: Tensor | None = None,
        memory: Memory | None = None,
        *,
        inputs_BTD: Tensor | None = None,
        lengths_B: Tensor | None = None,
    ) -> tuple[list[Tensor], Memory]:
        """As `forward`, but gives L + 1 hidden rows (B, T, D): the input of every layer, then what `forward` gives."""
        x_BTD = self.dropout(self.first_input(tokens_BT, inputs_BTD))
        memory = self.matching(memory, x_BTD, lengths_B)
        kernel = kernels.choose(self.config.attn_implementation, x_BTD.device, x_BTD.dtype)
        sight = self._sight(memory, x_BTD.shape[1], lengths_B)
        dropout = self.config.attention_dropout if self.training else 0.0

        def attend(inputs: AttentionInputs) -> Tensor:
            return kernel.attend(inputs, sight, dropout)

        states_BTD: list[Tensor] = []
        reading = self._reading(memory, x_BTD, lengths_B)
        for layer, past, biases in zip(self.layers, reading.pasts, self._biases(), strict=True):
            states_BTD.append(x_BTD)
            x_BTD = self.through(layer, x_BTD, past, biases, attend)
        after = reading.after(states_BTD)
        return [*states_BTD, self.dropout(self.final_norm(x_BTD))], after

    def trace(
        self, tokens_BT: Tensor | None = None, memory: Memory | None = None, *, inputs_BTD: Tensor | None = None
    ) -> Iterator[LayerTrace]:
        """Goes through the layers one by one and shows each: its output, and every attention term by itself.

        Same inputs as `forward`. A layer's B x N x T x S numbers live only until the next layer is asked for.
        Meant for pictures: dropout is not applied to the probabilities, and the reference kernel is used.
        """
        x_BTD = self.dropout(self.first_input(tokens_BT, inputs_BTD))
        memory = self.matching(memory, x_BTD, None)
        sight = self._sight(memory, x_BTD.shape[1], None)
        reading = self._reading(memory, x_BTD, None)
        for layer, past, biases in zip(self.layers, reading.pasts, self._biases(), strict=True):
            seen: list[AttentionTerms] = []
            x_BTD = layer(x_BTD, past, biases, _watched(sight, seen))
            yield LayerTrace(x_BTD, seen.pop())

    @override
    def matching(self, memory: Memory | None, x_BTD: Tensor, lengths_B: Tensor | None) -> Memory:
        memory = super().matching(memory, x_BTD, lengths_B)
        config = self.config
        own = isinstance(memory, HiddenMemory) and memory.layer_shape == (config.n_layers, config.d_model)
        if isinstance(memory, KeyValueMemory):
            own = memory.layer_shape == (config.n_layers, config.n_heads, config.head_dim)
        if not own:
            raise UserError("this memory was made by another model; start with initial_memory")
        return memory

    def _sight(self, memory: Memory, num_new: int, lengths_B: Tensor | None) -> AttentionMask:
        seen, told_apart = self._distances(memory, num_new)
        valid_B = None if memory.all_valid else memory.valid_B
        if self.config.attend_empty_memory:
            valid_B = None
        if lengths_B is not None:
            valid_B = (memory.length if valid_B is None else valid_B) - (num_new - lengths_B)
        return AttentionMask(valid_B, seen - told_apart)

    def _distances(self, memory: Memory, num_new: int) -> tuple[int, int]:
        """How many distances are seen, and how many of them a position encoding tells apart."""
        context_limits, num_keys = memory.context_limits, memory.length + num_new
        seen = min(num_keys, context_limits.attention_window or num_keys)
        return seen, min(seen, seen if context_limits.clamp_length is None else context_limits.clamp_length + 1)

    def _biases(self) -> Iterator[Biases]:
        for index in range(self.config.n_layers):
            pair = index if len(self.content_bias) > 1 else 0
            yield Biases(self.content_bias[pair], self.position_bias[pair])

    def _reading(self, memory: Memory, x_BTD: Tensor, lengths_B: Tensor | None) -> _Reading:
        num_new = x_BTD.shape[1]
        _, told_apart = self._distances(memory, num_new)
        bias = self.content_bias
        if isinstance(memory, HiddenMemory):
            encoding_PD = encode_distances(told_apart, self.config.d_model, like=bias).to(bias.dtype)
            # one dropout mask serves all layers, as in the authors' code
            return _ReadingHidden(memory, self.dropout(encoding_PD), lengths_B)
        assert isinstance(memory, KeyValueMemory)

        def make() -> list[Tensor]:
            encoding_PD = encode_distances(told_apart, self.config.d_model, like=bias).to(bias.dtype)
            attentions = [attention for attention in self.modules() if isinstance(attention, RelativeAttention)]
            return [attention.project_positions(encoding_PD) for attention in attentions]

        return _ReadingKeys(memory, memory.position_keys.nearest(told_apart, make), num_new, lengths_B)


class _Reading(Protocol):
    """New tokens going through the layers beside one kind of memory."""

    @property
    def pasts(self) -> Iterator[Past]:
        """What each layer read before."""
        ...

    def after(self, inputs_BTD: list[Tensor]) -> Memory:
        """The memory that follows, once all layers had their inputs."""
        ...


@dataclass(frozen=True)
class _ReadingHidden:
    memory: HiddenMemory
    encoding_PD: Tensor
    lengths_B: Tensor | None

    @property
    def pasts(self) -> Iterator[Past]:
        return (HiddenRows(rows_BMD, self.encoding_PD, self.lengths_B) for rows_BMD in self.memory.layers_BMD)

    def after(self, inputs_BTD: list[Tensor]) -> Memory:
        return self.memory.after(inputs_BTD, self.lengths_B)


@dataclass(frozen=True)
class _ReadingKeys:
    memory: KeyValueMemory
    position_keys_PNH: list[Tensor]
    num_new: int
    lengths_B: Tensor | None
    spans: list[Span] = field(default_factory=list)

    @property
    def pasts(self) -> Iterator[Past]:
        return (KeysAndValues(self._join, position_key_PNH) for position_key_PNH in self.position_keys_PNH)

    def _join(self, k_BTNH: Tensor, v_BTNH: Tensor) -> tuple[Tensor, Tensor]:
        """Called by one layer after the other."""
        span, k_BSNH, v_BSNH = self.memory.joined(len(self.spans), k_BTNH, v_BTNH, self.lengths_B)
        self.spans.append(span)
        return k_BSNH, v_BSNH

    def after(self, inputs_BTD: list[Tensor]) -> Memory:
        return self.memory.after(self.spans, self.num_new, self.lengths_B)


def _watched(sight: AttentionMask, seen: list[AttentionTerms]) -> Attention:
    """The reference attention, which leaves its terms in `seen`."""

    def attend(inputs: AttentionInputs) -> Tensor:
        terms = reference.attention_terms(inputs, sight)
        seen.append(terms)
        return reference.weighted_values(terms, inputs.v_BSNH)

    return attend
