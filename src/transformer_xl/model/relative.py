"""What layers with relative attention need besides themselves: biases, encodings of distances, masks, empty memories.

The language models and the backbone share these functions, and pass themselves.

Shape suffixes: B batch size, T new tokens, M memory slots, S = M + T keys, P distances with different position keys
(distances above clamp_length share one), D model width, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from transformer_xl.config import RelativeLayerConfig
from transformer_xl.model.attention import AttentionContext, Biases, encode_distances
from transformer_xl.model.key_values import KeyValueCache, KeyValueMemory
from transformer_xl.model.memory import ContextLimits, HiddenCache, HiddenMemory, LayerCache, Memory
from transformer_xl.model.model_with_memory import WEIGHT_STD, ModelWithMemory
from transformer_xl.ops import kernels, native
from transformer_xl.ops.kernels import AttentionMask


def check_kernel(config: RelativeLayerConfig) -> str:
    """Return the name of the attention kernel.

    Raises:
        UserError: it is unknown.
    """
    kernels.check(config.attn_implementation)
    native.status()  # loads the operators, which torch.compile cannot trace
    return config.attn_implementation


def cache_shapes(config: RelativeLayerConfig) -> dict[type[LayerCache], tuple[int, ...]]:
    """Return the caches that the layers accept, and the shape of what each holds of one token."""
    return {HiddenCache: (config.d_model,), KeyValueCache: (config.n_heads, config.head_dim)}


def make_bias(config: RelativeLayerConfig) -> nn.Parameter | None:
    """Return the content or the position biases of all layers, without initial values; None if none are learned."""
    num_pairs = config.n_bias_pairs
    return nn.Parameter(torch.empty(num_pairs, config.n_heads, config.head_dim)) if num_pairs else None


def init_biases(*biases: nn.Parameter | None) -> None:
    """Draw the initial content and position biases, if they are learned."""
    for bias in biases:
        if bias is not None:
            nn.init.normal_(bias, 0.0, WEIGHT_STD)


def layer_biases(model: ModelWithMemory) -> Iterator[Biases | None]:
    """Yield the biases of each layer: learned ones, zeros beside learned position keys, or None for the query of
    distance 0."""
    config, like = model.config, model.like
    assert isinstance(config, RelativeLayerConfig)
    pair = None
    if config.position_keys == "learned":  # not like.new_zeros, as in `initial_memory`
        zeros_NH = torch.zeros(config.n_heads, config.head_dim, dtype=like.dtype, device=like.device)
        pair = Biases(zeros_NH, zeros_NH)
    for index in range(config.n_layers):
        if model.content_bias is not None and model.position_bias is not None:
            index %= len(model.content_bias)
            # taken for each layer anew: the order in which gradients are added depends on it
            pair = Biases(model.content_bias[index], model.position_bias[index])
        yield pair


def initial_memory(model: ModelWithMemory, batch_size: int, context_limits: ContextLimits | None) -> Memory:
    """Return an empty memory: hidden states, or keys and values in a model that was prepared for inference."""
    limits, like, config = context_limits or model.context_limits, model.like, model.config
    assert isinstance(config, RelativeLayerConfig)
    # with norm_first, LayerNorm maps the zeros of empty slots to its bias, so their keys would not be 0
    if model.owner is None or (config.attends_empty_slots and config.norm_first):
        shape = (batch_size, limits.memory_length, config.d_model)
        # not like.new_zeros: `like` may be sharded over processes (fsdp), but memory is not
        caches = [HiddenCache(torch.zeros(shape, dtype=like.dtype, device=like.device)) for _ in model.layers]
        return HiddenMemory.empty(caches, batch_size, limits, like.device, num_recent=model.num_recent)
    zeros_BNMH = like.new_zeros(()).expand(batch_size, config.n_heads, limits.memory_length, config.head_dim)
    caches = [KeyValueCache.of(zeros_BNMH, zeros_BNMH, config.attends_empty_slots) for _ in model.layers]
    return KeyValueMemory.empty(
        caches, batch_size, limits, zeros_BNMH.device, num_recent=model.num_recent, owner=model.owner
    )


def attention_context(
    model: ModelWithMemory,
    x_BTD: Tensor,
    memory: Memory,
    lengths_B: Tensor | None = None,
    *,
    visible_BT: Tensor | None = None,
    last_start_BT: Tensor | None = None,
) -> AttentionContext:
    """Return what all layers need for attention, besides their inputs and caches.

    Args:
        model: the model.
        x_BTD: inputs of the first layer.
        memory: the memory of the tokens before them.
        lengths_B: number of tokens of each batch row that are not padding, which comes first, or None.
        visible_BT: number of keys that each token attends to at most, or None for all.
        last_start_BT: index of the token that starts the episode of each token, below 0 if that is before them; not
            together with lengths_B or visible_BT.
    """
    config, num_new = model.config, x_BTD.shape[1]
    assert isinstance(config, RelativeLayerConfig)
    num_attended = min(memory.length + num_new, memory.context_limits.attention_window or memory.length + num_new)
    clamp, vectors = memory.context_limits.clamp_length, config.max_vectors
    own = [] if clamp is None else [clamp + 1]  # distances that have a position key of their own
    own += [] if vectors is None else [vectors]
    num_encoded = min([num_attended, *own])
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
    encoding_PD = zero_PD = None  # None if the caches already hold the position keys
    if not isinstance(memory, KeyValueMemory):  # all layers share one dropout mask, as in the authors' code
        encoding_PD = model.input_dropout(_encode(num_encoded, config.d_model, model.like), token_dim=0)
    elif any(cache.position_keys.num_distances < num_encoded for cache in memory.layers):
        encoding_PD = _encode(num_encoded, config.d_model, model.like)
    if not config.n_bias_pairs and config.position_keys != "learned":  # biases are the query of distance 0
        zero_PD = _encode(1, config.d_model, model.like) if encoding_PD is None else encoding_PD
    return AttentionContext(
        num_distances=num_encoded,
        encoding_PD=encoding_PD,
        zero_distance_D=None if zero_PD is None else zero_PD[-1],
        mask=AttentionMask(valid_B, num_attended - num_encoded, first_key_BT),
        lengths_B=lengths_B,
        attend=kernels.choose(model.attn_implementation or "auto", x_BTD.device, x_BTD.dtype).attend,
        dropout=config.attention_dropout if model.training else 0.0,
    )


def _encode(num_distances: int, width: int, like: Tensor) -> Tensor:
    return encode_distances(num_distances, width, like).to(like.dtype)
