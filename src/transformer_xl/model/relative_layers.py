"""The layers of Transformer-XL and their memory, which the language model and the backbone share.

The memory contains hidden states in training, and keys and values in inference, with the same results.

Shape suffixes: B batch size, T new tokens, M memory slots, S = M + T keys, P distances with different position keys
(distances above clamp_length share one), D model width, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl import native
from transformer_xl.config import RelativeConfig, RelativeLayerConfig, TransformerXLConfig
from transformer_xl.model import kernels
from transformer_xl.model.attention import AttentionContext, Biases, Layer, encode_distances, make_final_norm
from transformer_xl.model.decode_layers import DecodableLayers, can_decode, find_decodable_layers
from transformer_xl.model.dropout import FastDropout
from transformer_xl.model.kernels import AttentionMask
from transformer_xl.model.key_values import KeyValueCache, KeyValueMemory
from transformer_xl.model.memory import ContextLimits, HiddenCache, HiddenMemory, LayerCache, Memory, last_starts
from transformer_xl.model.model_with_memory import WEIGHT_STD, ModelWithMemory


class RelativeLayers(ModelWithMemory):
    """L layers with relative attention, their two biases, and a last LayerNorm where the layers normalize first."""

    config: RelativeLayerConfig
    input_dropout: FastDropout
    _decodable: DecodableLayers | None = None
    attn_implementation: str
    """The attention kernel, or `auto`. Training puts the kernel that a run began with in place of `auto`."""

    def make_layers(self, config: RelativeLayerConfig) -> None:
        """Register the layers and what they share, without initial weights.

        Raises:
            UserError: the attention kernel is unknown.
        """
        kernels.check(config.attn_implementation)
        native.status()  # loads the operators, which torch.compile cannot trace
        self.attn_implementation = config.attn_implementation
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

    def init_biases(self) -> None:
        """Draw the initial content and position biases, if they are learned."""
        for bias in (self.content_bias, self.position_bias):
            if bias is not None:
                nn.init.normal_(bias, 0.0, WEIGHT_STD)

    @property
    def like(self) -> Tensor:
        """A parameter that has the dtype and device of memory and of the encodings of distances."""
        norm = self.layers[0].get_submodule("feed_forward.norm")
        assert isinstance(norm, nn.LayerNorm)
        return norm.weight

    @property
    def attends_empty_slots(self) -> bool:
        """Whether empty memory slots are attended (the setting attend_empty_memory)."""
        return isinstance(self.config, RelativeConfig) and self.config.attend_empty_memory

    @property
    @override
    def limits_visible(self) -> bool:
        return not self.attends_empty_slots

    @override
    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> HiddenMemory:
        limits, like = context_limits or self.context_limits, self.like
        shape = (batch_size, limits.memory_length, self.config.d_model)
        # not like.new_zeros: `like` may be sharded over processes (fsdp), but memory is not
        caches = [HiddenCache(torch.zeros(shape, dtype=like.dtype, device=like.device)) for _ in self.layers]
        return HiddenMemory.empty(caches, batch_size, limits, like.device, num_recent=self.num_recent)

    @override
    def inference_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> Memory:
        limits, config = context_limits or self.context_limits, self.config
        # with norm_first, LayerNorm maps the zeros of empty slots to its bias, so their keys would not be 0
        if self.attends_empty_slots and config.norm_first:
            return self.initial_memory(batch_size, limits)
        shape = (batch_size, config.n_heads, limits.memory_length, config.head_dim)
        zeros_BNMH = self.like.new_zeros(()).expand(shape)
        caches = [KeyValueCache.of(zeros_BNMH, zeros_BNMH, self.attends_empty_slots) for _ in self.layers]
        return KeyValueMemory.empty(
            caches,
            batch_size,
            limits,
            zeros_BNMH.device,
            num_recent=self.num_recent,
            weights_version=self.weights_version,
        )

    def run_layers(
        self,
        x_BTD: Tensor,
        memory: Memory,
        lengths_B: Tensor | None,
        starts_BT: Tensor | None = None,
        visible_BT: Tensor | None = None,
    ) -> tuple[list[Tensor], Memory]:
        """Return the inputs of all layers and the result of the last, L + 1 tensors (B, T, D), and the next memory.

        Args:
            x_BTD: inputs of the first layer, without dropout.
            memory: the memory of the tokens before them.
            lengths_B: number of tokens of each batch row that are not padding, which comes first, or None.
            starts_BT: whether each token starts an episode, or None if none does; not together with lengths_B.
            visible_BT: number of keys that each token attends to at most, or None for all; not with starts_BT.
        """
        x_BTD = self.input_dropout(x_BTD)
        last_start_BT = None if starts_BT is None else last_starts(starts_BT)
        context = self.attention_context(x_BTD, memory, lengths_B, last_start_BT, visible_BT)
        states_BTD: list[Tensor] = [x_BTD]
        caches: list[LayerCache] = []
        if can_decode(x_BTD, memory, context) and (decodable := self._decodable_layers(x_BTD.dtype)):
            results_BTD, caches = decodable.decode(x_BTD, memory, context)
            states_BTD += results_BTD
        else:
            for layer, cache, biases in zip(self.layers, memory.layers, self.biases(), strict=True):
                x_BTD, cache = self.run_layer(layer, x_BTD, cache, context, biases)
                states_BTD.append(x_BTD)
                caches.append(cache)
        states_BTD[-1] = self.final_norm(states_BTD[-1])
        last_start_B = None if last_start_BT is None else last_start_BT[:, -1]
        return states_BTD, memory.advance(caches, x_BTD.shape[1], lengths_B, last_start_B)

    def _decodable_layers(self, dtype: torch.dtype) -> DecodableLayers | None:
        """Return what the native operator for a single new token needs, or None where it cannot compute the layers."""
        found, number = self._decodable, self._weights_version.number  # of now: the memory was just checked
        if found is None or not found.are_unchanged(number, next(iter(self.biases()))):
            found = self._decodable = find_decodable_layers(self.layers, self.biases(), number)
        return found if found is not None and found.accept(dtype) else None

    def attention_context(
        self,
        x_BTD: Tensor,
        memory: Memory,
        lengths_B: Tensor | None,
        last_start_BT: Tensor | None = None,
        visible_BT: Tensor | None = None,
    ) -> AttentionContext:
        """Return what all layers need for attention, besides their inputs and caches.

        Args:
            x_BTD: as for `run_layers`.
            memory: as for `run_layers`.
            lengths_B: as for `run_layers`.
            last_start_BT: index of the token that starts the episode of each token, below 0 if that is before them.
            visible_BT: as for `run_layers`.
        """
        num_new = x_BTD.shape[1]
        num_attended, num_encoded = self._num_distances(memory, num_new)
        # None: all slots are attended; with attend_empty_memory also those not filled yet, as zeros (the authors' code)
        valid_B = None if memory.all_valid or self.attends_empty_slots else memory.valid_B
        if lengths_B is not None:  # `padding_first` moves padding before the memory, where it masks like empty slots
            valid_B = (memory.length if valid_B is None else valid_B) - (num_new - lengths_B)
        encoding_PD, zero_PD = self._encoding(memory, num_encoded), None
        if self.content_bias is None:
            zero_PD = self._encode_distances(1) if encoding_PD is None else encoding_PD
        first_key_BT = None
        if last_start_BT is not None:
            first_key_BT = torch.where(last_start_BT < 0, last_start_BT.new_zeros(()), memory.length + last_start_BT)
        if visible_BT is not None:
            key_T = torch.arange(memory.length, memory.length + num_new, device=visible_BT.device)  # of each token
            first_key_BT = (key_T + 1 - visible_BT).clamp(min=0)
        return AttentionContext(
            num_distances=num_encoded,
            encoding_PD=encoding_PD,
            zero_distance_D=None if zero_PD is None else zero_PD[-1],
            mask=AttentionMask(valid_B, num_attended - num_encoded, first_key_BT),
            lengths_B=lengths_B,
            attend=kernels.choose(self.attn_implementation, x_BTD.device, x_BTD.dtype).attend,
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
        encoding_PD = self._encode_distances(num_distances)
        # all layers share one dropout mask, as in the authors' code
        return encoding_PD if is_inference else self.input_dropout(encoding_PD, token_dim=0)

    def _encode_distances(self, num_distances: int) -> Tensor:
        like = self.like
        return encode_distances(num_distances, self.config.d_model, like=like).to(like.dtype)

    def biases(self) -> Iterator[Biases | None]:
        """Yield the learned biases of each layer, or None if biases are not learned."""
        content_bias, position_bias = self.content_bias, self.position_bias
        for index in range(self.config.n_layers):
            if content_bias is None or position_bias is None:
                yield None
            else:
                num_pairs = len(content_bias)
                yield Biases(content_bias[index % num_pairs], position_bias[index % num_pairs])
