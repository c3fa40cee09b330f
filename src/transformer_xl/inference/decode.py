"""All layers for few new tokens, as in generation, by one native operator; results are those of the modules.

Python takes about as long for the modules of twelve layers as the arithmetic of a small model. What the operator reads
of the layers is found once, when a model is prepared.

Shape suffixes: B batch size, T new tokens, D model width, L layers, C rows of storage (one for each token), P
distances, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from transformer_xl.model.attention import (
    AttentionContext,
    Biases,
    FeedForward,
    Layer,
    RelativeAttention,
    ValueEmbedding,
)
from transformer_xl.model.key_values import KeyValueCache, KeyValueMemory
from transformer_xl.model.memory import LayerCache, Memory
from transformer_xl.model.norm import RMSNorm
from transformer_xl.ops.dropout import FastDropout
from transformer_xl.ops.linear import Int8Linear, PackedLinear

_MATRICES = 6  # of a layer
_VALUES = (NoneType, ValueEmbedding)  # as they are made, and not replaced
_DTYPES = {(torch.float64,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32)}  # of products and inputs
_MAX_TOKENS = 16  # of a batch row; with more, attention that packs keys and values is faster,
_MAX_SCORES = 2**13  # but for so few pairs of a token and a key, of which it is a small part
_MAX_ROWS = 256  # tokens in all; with more, inputs of products do not stay in cache


@dataclass(frozen=True, eq=False)
class DecodeTables:
    """What the native operator reads of a model's layers."""

    dtype: torch.dtype
    """Of products."""
    position_keys: list[Callable[[AttentionContext], Tensor]]
    """The function of each layer that projects the encodings of distances."""
    weights: list[Tensor]
    """Of each layer, in the operator's order."""
    biases: list[Tensor]
    """u and w of each layer, in `dtype`."""
    eps: list[float]
    """Of the two LayerNorms and the norms of queries and keys in each layer; 0 where there is none."""
    value_embeddings: list[ValueEmbedding | None]
    sinks: list[Tensor]
    """Of each layer (N,); without elements where there are none."""
    norm_first: bool
    has_key_offset: bool

    def accept(self, x_BTD: Tensor, memory: Memory) -> bool:
        """Return whether these are few tokens of each row, after a KV cache.

        Args:
            x_BTD: input of the first layer.
            memory: that of the tokens before them.
        """
        num_rows, num_new = len(x_BTD) * x_BTD.shape[1], x_BTD.shape[1]
        return (
            x_BTD.dtype == self.weights[-1].dtype  # under autocast, a projected embedding is bfloat16
            and (num_new <= _MAX_TOKENS or num_rows * (memory.length + num_new) <= _MAX_SCORES)
            and 0 < num_rows <= _MAX_ROWS
            and isinstance(memory, KeyValueMemory)
            and not (self.has_key_offset and not memory.length)  # the first token sees none before it
            and not torch.compiler.is_compiling()
        )

    def decode(self, x_BTD: Tensor, memory: Memory, context: AttentionContext) -> tuple[list[Tensor], list[LayerCache]]:
        """Return the results of all layers for new tokens (B, T, D), and their next caches.

        Args:
            x_BTD: the input of the first layer.
            memory: a KV cache.
            context: inputs that all layers share.
        """
        caches, num_new = list[KeyValueCache](), x_BTD.shape[1]
        for cache, project in zip(memory.layers, self.position_keys, strict=True):
            assert isinstance(cache, KeyValueCache)
            cache.keys_of_positions(context.num_distances, partial(project, context))
            caches.append(cache.reserve(num_new, self.dtype))
        states_LBTD = torch.ops.transformer_xl_native.decode_layers(
            *(x_BTD, self.weights, self.biases, self.eps, self.norm_first),
            *([cache.storage.k_BNCH for cache in caches], [cache.storage.v_BNCH for cache in caches]),
            *([cache.end for cache in caches], memory.length + num_new),
            *([cache.position_keys.r_NHP for cache in caches], context.num_distances),
            *(context.mask.valid_B, context.mask.num_clamped),
            *self._added(x_BTD, context.ids_BT),
            self.sinks,
            self.has_key_offset,
        )
        return list(states_LBTD.unbind(0)), list(caches)

    def _added(self, x_BTD: Tensor, ids_BT: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        """Return value embeddings (B, T, N H) and gates of each layer, without elements where there are none."""
        none = x_BTD.new_empty(0)
        rows, gates = [none] * len(self.value_embeddings), [none] * len(self.value_embeddings)
        for layer, embedding in enumerate(self.value_embeddings):
            if embedding is not None and ids_BT is not None:
                rows[layer] = embedding.rows(ids_BT).to(x_BTD.dtype)
                gates[layer] = embedding.gate.to(self.dtype).to(x_BTD.dtype)  # rounded, as its module rounds it
        return rows, gates


def decode_tables(
    layers: Iterable[nn.Module], biases: Iterable[Biases | None], dtype: torch.dtype
) -> DecodeTables | None:
    """Return what the native operator reads of the layers, or None if it cannot compute them.

    It cannot if a module is not as it was made: replaced (LoRA), with a hook or with gates.

    Args:
        layers: the layers of a model.
        biases: those of each layer, or None where they are not learned.
        dtype: of products.
    """
    found = DecodeTables(dtype, [], [], [], [], [], [], norm_first=False, has_key_offset=False)
    for layer, pair in zip(layers, biases, strict=True):
        parts = None if pair is None else _parts(layer)
        if parts is None or pair is None:
            return None
        attention, weights, norms = parts
        found.position_keys.append(attention.position_keys)
        found.weights.extend(weights)
        found.value_embeddings.append(attention.value_embedding)
        sink_N = attention.sink_scores()
        sums = torch.promote_types(dtype, torch.float32)
        found.sinks.append(torch.empty(0) if sink_N is None else sink_N.detach().to(sums))
        found.biases.extend(bias.detach().to(dtype) for bias in (pair.content_NH, pair.position_NH))
        found.eps.extend(0.0 if isinstance(norm, nn.Identity) else float(norm.eps) for norm in norms)
    per_layer = len(found.weights) // len(found.position_keys)
    of_matrices = {weight.dtype for i, weight in enumerate(found.weights) if i % per_layer < _MATRICES}
    of_vectors = {weight.dtype for i, weight in enumerate(found.weights) if i % per_layer >= _MATRICES}
    if len(of_vectors) > 1 or of_matrices not in ({dtype}, {torch.int8}) or (dtype, *of_vectors) not in _DTYPES:
        return None
    return replace(found, norm_first=attention.norm_first, has_key_offset=attention.has_key_offset)


def _parts(layer: nn.Module) -> tuple[RelativeAttention, list[Tensor], list[Any]] | None:
    """Return attention, weights and norms of a layer, or None if it has others than the operator computes."""
    attention, feed_forward = layer._modules.get("attention"), layer._modules.get("feed_forward")
    if type(layer) is not Layer or type(attention) is not RelativeAttention or type(feed_forward) is not FeedForward:
        return None
    a, f = attention._modules, feed_forward._modules
    if a.get("gate") is not None or f.get("gate") is not None or type(a.get("value_embedding")) not in _VALUES:
        return None
    linears: list[Any] = [a["q_proj"], a["k_proj"], a["v_proj"], a["o_proj"], f["up_proj"], f["down_proj"]]
    norms: list[Any] = [a["norm"], f["norm"], a["q_norm"], a["k_norm"]]
    dropouts: list[Any] = [a["dropout"], a["qkv_dropout"], f["dropout"], f["relu_dropout"]]
    has_head_norms = type(norms[2]) is RMSNorm
    is_int8 = type(linears[0]) is Int8Linear
    linear_class = Int8Linear if is_int8 else PackedLinear
    expected = [linear_class] * 6 + [nn.LayerNorm] * 2 + [RMSNorm if has_head_norms else nn.Identity] * 2
    modules: list[Any] = [*linears, *norms, *dropouts]
    if (
        list(map(type, modules)) != expected + [FastDropout] * 4
        or any(map(_has_hook, layer.modules()))
        or [module.relu for module in dropouts] != [False, False, False, True]
        or any(linear.bias is not None for linear in linears[:4])
    ):
        return None
    vectors = [linears[4].bias, linears[5].bias]
    for norm in norms[:2]:
        vectors += [norm.weight, norm.bias]
    vectors += [norm.weight for norm in norms[2:] if has_head_norms]
    matrices, scales = [linear.weight for linear in linears], list[Tensor]()
    if is_int8:
        pairs = [_int8_parts(matrix) for matrix in matrices]
        if None in pairs:
            return None
        matrices, scales = map(list, zip(*pairs, strict=True))
    elif any(type(matrix) is not nn.Parameter for matrix in matrices):
        return None
    weights = [*matrices, *vectors, *scales]
    if any(type(vector) is not nn.Parameter for vector in vectors):
        return None
    if not all(weight.is_contiguous() and weight.is_cpu for weight in weights):
        return None
    return attention, weights, norms


def _int8_parts(weight: Any) -> tuple[Tensor, Tensor] | None:
    """Return the integers (O, I) and the scales (O, 1) of torchao's matrix of 8 bits, or None if it is another one."""
    integers, scales = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if integers is None or scales is None or (integers.dtype, scales.dtype) != (torch.int8, torch.float32):
        return None
    # neither activations of 8 bits nor zero points nor scales of groups
    is_plain = weight.act_quant_kwargs is None and scales.shape == (len(integers), 1)
    return (integers, scales) if is_plain and torch.equal(weight.dequantize(), integers * scales) else None


def _has_hook(module: nn.Module) -> bool:
    """Return whether a module has a hook, is compiled or has another forward pass than its class."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or module._compiled_call_impl is not None or "forward" in module.__dict__
