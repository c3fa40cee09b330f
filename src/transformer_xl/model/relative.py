"""What models with relative attention have besides layers: biases, encodings of distances, masks, empty memories.

Shape suffixes: B batch size, T new tokens, M memory slots, S = M + T keys, P distances with different position keys
(distances above clamp_length share one), D model width, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import NoneType
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import RelativeLayerConfig, UserError, check_type
from transformer_xl.model.attention import (
    AttentionContext,
    Biases,
    Layer,
    RelativeAttention,
    encode_distances,
    make_final_norm,
)
from transformer_xl.model.key_values import KeyValueCache, KeyValueMemory
from transformer_xl.model.memory import ContextLimits, HiddenCache, HiddenMemory, Memory
from transformer_xl.model.model_with_memory import WEIGHT_STD, ModelWithMemory
from transformer_xl.ops import kernels, native
from transformer_xl.ops.kernels import AttentionMask


class RelativeModel(ModelWithMemory):
    """A model of layers with relative attention: a language model, or a backbone."""

    config: RelativeLayerConfig  # pyrefly: ignore[bad-override-mutable-attribute]
    content_bias: nn.Parameter | None
    position_bias: nn.Parameter | None
    """Learned biases, which the layers share in turn, or None."""
    num_ahead: ClassVar[int] = 0
    """Number of further distances that are encoded: by so many tokens a query may stand after the last that it sees."""
    final_norm: nn.Module
    """LayerNorm after the last layer, or an identity."""

    def make_layers(
        self, attention_class: type[RelativeAttention], layer_class: Callable[..., nn.Module] = Layer
    ) -> None:
        """Create the biases and the layers of the settings; the caller draws their initial values.

        Raises:
            UserError: the attention kernel is unknown.
        """
        config = self.config
        kernels.check(config.attn_implementation)
        native.status()  # loads the operators, which torch.compile cannot trace
        self.attn_implementation = config.attn_implementation
        self.cache_shapes = {HiddenCache: (config.d_model,), KeyValueCache: (config.n_heads, config.head_dim)}
        shape, has_biases = (config.n_bias_pairs, config.n_heads, config.head_dim), config.n_bias_pairs > 0
        self.content_bias = nn.Parameter(torch.empty(shape)) if has_biases else None
        self.position_bias = nn.Parameter(torch.empty(shape)) if has_biases else None
        self.layers = nn.ModuleList(layer_class(config, attention_class) for _ in range(config.n_layers))
        self.final_norm = make_final_norm(config)

    def init_biases(self) -> None:
        """Draw the initial content and position biases, if they are learned."""
        for bias in (self.content_bias, self.position_bias):
            if bias is not None:
                nn.init.normal_(bias, 0.0, WEIGHT_STD)

    def layer_biases(self) -> Iterator[Biases | None]:
        """Yield the biases of each layer: learned ones, zeros beside learned position keys, or None for the query of
        distance 0."""
        config, like, pair = self.config, self.like, None
        if config.position_keys == "learned":  # not like.new_zeros, as in `initial_memory`
            zeros_NH = torch.zeros(config.n_heads, config.head_dim, dtype=like.dtype, device=like.device)
            pair = Biases(zeros_NH, zeros_NH)
        for index in range(config.n_layers):
            if self.content_bias is not None and self.position_bias is not None:
                index %= len(self.content_bias)
                # taken for each layer anew: the order in which gradients are added depends on it
                pair = Biases(self.content_bias[index], self.position_bias[index])
            yield pair

    @override
    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> Memory:
        """Return an empty memory: hidden states, or keys and values in a model that was prepared for inference."""
        check_type(context_limits, (ContextLimits, NoneType), "context_limits", "give ContextLimits(64), for example")
        limits, like, config = context_limits or self.context_limits, self.like, self.config
        # with norm_first, LayerNorm maps the zeros of empty slots to its bias, so their keys would not be 0
        if self.owner is None or (config.attends_empty_slots and config.norm_first):
            # not like.new_zeros: `like` may be sharded over processes (fsdp), but memory is not
            shape, device = (batch_size, limits.memory_length + config.has_key_offset, config.d_model), like.device
            caches = [
                HiddenCache(
                    torch.zeros(shape, dtype=like.dtype, device=device),
                    torch.zeros(shape[:2], dtype=torch.int64, device=device) if index in config.id_layers else None,
                )
                for index in range(config.n_layers)
            ]
            return HiddenMemory.empty(caches, batch_size, limits, like.device, num_recent=self.num_recent)
        k_BNMH, v_BNMH = (
            like.new_zeros(()).expand(batch_size, config.n_heads, num_rows, config.head_dim)
            for num_rows in (limits.memory_length + config.has_key_offset, limits.memory_length)
        )
        caches = [KeyValueCache.of(k_BNMH, v_BNMH, config.attends_empty_slots) for _ in self.layers]
        return KeyValueMemory.empty(
            caches, batch_size, limits, v_BNMH.device, num_recent=self.num_recent, owner=self.owner
        )

    @override
    def check_memory(self, memory: Memory | None, batch_size: int) -> Memory:
        memory, config = super().check_memory(memory, batch_size), self.config
        for index, cache in enumerate(memory.layers):
            if isinstance(cache, HiddenCache) and (
                (cache.ids_BM is not None) != (index in config.id_layers)
                or cache.hidden_BMD.shape[1] != memory.length + config.has_key_offset
            ):
                raise UserError("this memory was made by another model; start with initial_memory")
        return memory

    def attention_context(
        self,
        x_BTD: Tensor,
        memory: Memory,
        lengths_B: Tensor | None = None,
        *,
        visible_BT: Tensor | None = None,
        last_start_BT: Tensor | None = None,
    ) -> AttentionContext:
        """Return what all layers need for attention, besides their inputs and caches.

        Args:
            x_BTD: inputs of the first layer.
            memory: the memory of the tokens before them.
            lengths_B: number of tokens of each batch row that are not padding, which comes first, or None.
            visible_BT: number of keys that each token attends to at most, or None for all.
            last_start_BT: index of the token that starts the episode of each token, below 0 if that is before them; not
                together with lengths_B or visible_BT.
        """
        config, num_new = self.config, x_BTD.shape[1]
        num_attended = min(memory.length + num_new, memory.context_limits.attention_window or memory.length + num_new)
        clamp, vectors = memory.context_limits.clamp_length, config.max_vectors
        own = [] if clamp is None else [clamp + 1]  # distances that have a position key of their own
        own += [] if vectors is None else [vectors]
        num_encoded = min([num_attended, *own])
        num_rows = num_encoded + self.num_ahead
        # None: all slots are attended; with attend_empty_memory also those not filled yet, as zeros (the authors' code)
        valid_B = None if memory.all_valid or config.attends_empty_slots else memory.valid_B
        if lengths_B is not None:  # `padding_first` moves padding before the memory, where it masks like empty slots
            valid_B = (memory.length if valid_B is None else valid_B) - (num_new - lengths_B)
        first_key_BT = None
        if last_start_BT is not None:
            first_key_BT = torch.where(last_start_BT < 0, last_start_BT.new_zeros(()), memory.length + last_start_BT)
        if visible_BT is not None:
            key_T = torch.arange(memory.length, memory.length + num_new, device=visible_BT.device)  # of each token
            first_key_BT = (key_T + 1 - visible_BT).clamp(min=0)
        starts_BT = None
        if config.has_key_offset and visible_BT is not None:
            starts_BT = visible_BT <= 1
        elif config.has_key_offset and not memory.length:
            padding_B1 = 0 if lengths_B is None else (num_new - lengths_B)[:, None]
            starts_BT = torch.arange(num_new, device=x_BTD.device).expand(len(x_BTD), -1) == padding_B1
        encoding_PD = zero_PD = None  # None if the caches already hold the position keys
        if not isinstance(memory, KeyValueMemory):  # all layers share one dropout mask, as in the authors' code
            encoding_PD = self.input_dropout(_encode(num_rows, config.d_model, self.like, clamp), token_dim=0)
        elif any(cache.position_keys.num_distances < num_rows for cache in memory.layers):
            encoding_PD = _encode(num_rows, config.d_model, self.like, clamp)
        if not config.n_bias_pairs and config.position_keys != "learned":  # biases are the query of distance 0
            zero_PD = _encode(1, config.d_model, self.like) if encoding_PD is None else encoding_PD
        return AttentionContext(
            num_distances=num_rows,
            encoding_PD=encoding_PD,
            zero_distance_D=None if zero_PD is None else zero_PD[-1],
            mask=AttentionMask(valid_B, num_attended - num_encoded, first_key_BT),
            lengths_B=lengths_B,
            attend=kernels.choose(self.attn_implementation or "auto", x_BTD.device, x_BTD.dtype).attend,
            dropout=config.attention_dropout if self.training else 0.0,
            ids_BT=memory.newest_ids(num_new) if config.id_layers else None,
            starts_BT=starts_BT,
        )


def _encode(num_distances: int, width: int, like: Tensor, clamp: int | None = None) -> Tensor:
    return encode_distances(num_distances, width, like, clamp=clamp).to(like.dtype)
