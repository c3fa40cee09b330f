"""Transformer-XL (Dai et al. 2019, section 3): layers that attend to a memory of the previous segments.

    hidden_BTD, memory = model(tokens_BT, memory)

The memory contains hidden states in training, and keys and values in inference, with the same results.

Shape suffixes: B batch size, T new tokens, M memory slots, S = M + T keys, P distances with different position keys
(distances above clamp_length share one), D model width, N heads, H head width, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import RelativeConfig, TransformerXLConfig, UserError
from transformer_xl.model import kernels
from transformer_xl.model.attention import AttentionContext, Biases, Layer, encode_distances, make_final_norm
from transformer_xl.model.kernels import AttentionMask, AttentionTerms, reference
from transformer_xl.model.key_values import KeyValueCache, KeyValueMemory
from transformer_xl.model.language_model import WEIGHT_STD, LanguageModel
from transformer_xl.model.memory import ContextLimits, HiddenCache, HiddenMemory, LayerCache, Memory
from transformer_xl.model.token_ids import TokenIds


@dataclass(frozen=True)
class LayerTrace:
    """The output, attention terms and cache of one layer, for attention maps and feature extraction."""

    output_BTD: Tensor
    """The layer's output, which is the next layer's input."""
    terms: AttentionTerms
    """The layer's four attention terms and probabilities, over [memory ; new tokens]."""
    cache: LayerCache
    """The layer's cache after the new tokens."""


class TransformerXL(LanguageModel):
    """Token embedding times sqrt(D), L layers, and a softmax that by default shares the embedding's weights."""

    config: RelativeConfig  # pyrefly: ignore[bad-override-mutable-attribute]
    config_class: ClassVar[type[RelativeConfig]] = TransformerXLConfig

    def __init__(self, config: RelativeConfig, *, memory_length: int = 128) -> None:
        """Build the model with initial weights as in the authors' code, drawn from torch's global random state.

        Args:
            config: settings of the model.
            memory_length: M, the default number of memory slots of `initial_memory`.

        Raises:
            UserError: the settings are those of another architecture, or the attention kernel is unknown.
        """
        super().__init__(config, memory_length=memory_length)
        if not isinstance(config, self.config_class):
            raise UserError(f"{type(self).__name__} is not the model of {config.architecture}; use build_model")
        kernels.check(config.attn_implementation)
        self.cache_shapes = {HiddenCache: (config.d_model,), KeyValueCache: (config.n_heads, config.head_dim)}
        # Shaw's model has no such settings, and replaces the biases by zeros
        self.content_bias = self.position_bias = None
        if not isinstance(config, TransformerXLConfig) or config.learned_attention_biases:
            tied = not isinstance(config, TransformerXLConfig) or config.tie_attention_biases
            num_bias_pairs = 1 if tied else config.n_layers
            self.content_bias = nn.Parameter(torch.empty(num_bias_pairs, config.n_heads, config.head_dim))
            self.position_bias = nn.Parameter(torch.empty(num_bias_pairs, config.n_heads, config.head_dim))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.final_norm = make_final_norm(config)
        self.init_weights()

    @override
    def init_weights(self) -> None:
        super().init_weights()
        for bias in (self.content_bias, self.position_bias):
            if bias is not None:
                nn.init.normal_(bias, 0.0, WEIGHT_STD)

    @override
    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> HiddenMemory:
        limits, like = context_limits or self.context_limits, self.softmax.bias
        shape = (batch_size, limits.memory_length, self.config.d_model)
        # not like.new_zeros: `like` may be sharded over processes (fsdp), but memory is not
        caches = [HiddenCache(torch.zeros(shape, dtype=like.dtype, device=like.device)) for _ in self.layers]
        return HiddenMemory.empty(caches, batch_size, limits, like.device, num_recent=self.config.max_ngram - 1)

    @override
    def inference_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> Memory:
        limits, config = context_limits or self.context_limits, self.config
        # with norm_first, LayerNorm maps the zeros of empty slots to its bias, so their keys would not be 0
        if config.attend_empty_memory and config.norm_first:
            return self.initial_memory(batch_size, limits)
        shape = (batch_size, config.n_heads, limits.memory_length, config.head_dim)
        zeros_BNMH = self.softmax.bias.new_zeros(()).expand(shape)
        caches = [KeyValueCache.of(zeros_BNMH, zeros_BNMH, config.attend_empty_memory) for _ in self.layers]
        return KeyValueMemory.empty(
            caches,
            batch_size,
            limits,
            zeros_BNMH.device,
            num_recent=config.max_ngram - 1,
            weights_version=self.weights_version,
        )

    @override
    def run_layers(self, x_BTD: Tensor, memory: Memory, lengths_B: Tensor | None) -> tuple[list[Tensor], Memory]:
        x_BTD = self.input_dropout(x_BTD)
        context = self._attention_context(x_BTD, memory, lengths_B)
        states_BTD: list[Tensor] = []
        caches: list[LayerCache] = []
        for layer, cache, biases in zip(self.layers, memory.layers, self._biases(), strict=True):
            states_BTD.append(x_BTD)
            x_BTD, cache = self.run_layer(layer, x_BTD, cache, context, biases)
            caches.append(cache)
        states_BTD.append(self.final_norm(x_BTD))
        return states_BTD, memory.advance(caches, x_BTD.shape[1], lengths_B)

    def trace(
        self, tokens_BT: TokenIds | None = None, memory: Memory | None = None, *, inputs_BTD: Tensor | None = None
    ) -> Iterator[LayerTrace]:
        """Run the layers one by one and yield the output and the separate attention terms of each.

        Each term has B x N x T x S elements; unless the caller stores them, they are freed before the next layer runs.
        The reference kernel is used, without dropout of the probabilities, even in training.

        Args:
            tokens_BT: as for `forward`.
            memory: as for `forward`.
            inputs_BTD: as for `forward`.

        Yields:
            a `LayerTrace` for each layer.
        """
        x_BTD, memory = self.embed(tokens_BT, memory, inputs_BTD, None)
        x_BTD = self.input_dropout(x_BTD)
        context = self._attention_context(x_BTD, memory, None)
        for layer, cache, biases in zip(self.layers, memory.layers, self._biases(), strict=True):
            assert isinstance(layer, Layer)
            inputs, cache = layer.attention.attention_inputs(x_BTD, cache, context, biases)
            terms = reference.attention_terms(inputs, context.mask)
            attended_BTNH = reference.weighted_values(terms, inputs.v_BSNH)
            x_BTD = layer.feed_forward(layer.attention.output(x_BTD, attended_BTNH))
            yield LayerTrace(x_BTD, terms, cache)

    def _attention_context(self, x_BTD: Tensor, memory: Memory, lengths_B: Tensor | None) -> AttentionContext:
        num_new = x_BTD.shape[1]
        num_attended, num_encoded = self._num_distances(memory, num_new)
        # None: all slots are attended; with attend_empty_memory also those not filled yet, as zeros (the authors' code)
        valid_B = None if memory.all_valid or self.config.attend_empty_memory else memory.valid_B
        if lengths_B is not None:  # `padding_first` moves padding before the memory, where it masks like empty slots
            valid_B = (memory.length if valid_B is None else valid_B) - (num_new - lengths_B)
        encoding_PD, like = self._encoding(memory, num_encoded), self.softmax.bias
        zero_PD = (
            encode_distances(1, self.config.d_model, like=like).to(like.dtype) if encoding_PD is None else encoding_PD
        )
        return AttentionContext(
            num_distances=num_encoded,
            encoding_PD=encoding_PD,
            zero_distance_D=zero_PD[-1],
            mask=AttentionMask(valid_B, num_clamped=num_attended - num_encoded),
            lengths_B=lengths_B,
            attend=kernels.choose(self.config.attn_implementation, x_BTD.device, x_BTD.dtype).attend,
            dropout=self.config.attention_dropout if self.training else 0.0,
        )

    def _num_distances(self, memory: Memory, num_new: int) -> tuple[int, int]:
        """Return the number of attended distances and that of their encodings, which is smaller with clamp_length."""
        limits, num_keys = memory.context_limits, memory.length + num_new
        num_attended = min(num_keys, limits.attention_window or num_keys)
        return num_attended, num_attended if limits.clamp_length is None else min(num_attended, limits.clamp_length + 1)

    def _encoding(self, memory: Memory, num_distances: int) -> Tensor | None:
        """Return encodings (P, D) of the distances, or None if the caches already hold the position keys."""
        is_inference = isinstance(memory, KeyValueMemory)
        if is_inference and all(cache.position_keys.num_distances >= num_distances for cache in memory.layers):
            return None
        like = self.softmax.bias
        encoding_PD = encode_distances(num_distances, self.config.d_model, like=like).to(like.dtype)
        # all layers share one dropout mask, as in the authors' code
        return encoding_PD if is_inference else self.input_dropout(encoding_PD, token_dim=0)

    def _biases(self) -> Iterator[Biases | None]:
        """Yield the learned biases of each layer, or None if biases are not learned."""
        content_bias, position_bias = self.content_bias, self.position_bias
        for index in range(self.config.n_layers):
            if content_bias is None or position_bias is None:
                yield None
            else:
                num_pairs = len(content_bias)
                yield Biases(content_bias[index % num_pairs], position_bias[index % num_pairs])
