"""One layer of Transformer-XL: relative attention over memory and new tokens, then feed-forward (paper section 3.3).

In the paper, `content_bias` is u, `position_bias` is v (v in the code is always the values), and the weights
`q_proj`, `k_proj`, `v_proj`, `r_proj` are W_q, W_{k,E}, W_v, W_{k,R}.

Shape suffixes: B batch size, T new tokens, M memory slots, S = M + T keys, P distances, D model width, K = D / 2
frequencies, N heads, H head width, E = N H, F feed-forward width, X any number of rows, Y = S + 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import LayerConfig, RelativeLayerConfig
from transformer_xl.model.gate import make_gate
from transformer_xl.model.key_values import KeyValues, offset_halves
from transformer_xl.model.memory import HiddenCache, LayerCache, padding_first
from transformer_xl.model.norm import RMSNorm
from transformer_xl.ops.dropout import FastDropout
from transformer_xl.ops.kernels import Attend, AttentionInputs, AttentionMask
from transformer_xl.ops.linear import PackedLinear

_GATE_CHANNELS = 12  # of a layer's input open the gates of value embeddings
_SINK_SCALE = 16  # of sinks, so that the learning rate of other weights moves them far enough


@dataclass(frozen=True)
class AttentionContext:
    """The inputs to attention over one segment that are the same for every layer."""

    num_distances: int
    """P: number of distances with different position keys."""
    encoding_PD: Tensor | None
    """Encodings of the distances P - 1, ..., 1, 0, or None if every layer's cache already holds its position keys."""
    zero_distance_D: Tensor | None
    """Encoding of the distance 0, the last of `encoding_PD`; None where biases are learned."""
    mask: AttentionMask
    """Which keys a query attends to."""
    lengths_B: Tensor | None
    """Number of tokens of each batch row that are not padding (which comes first), or None if there is no padding."""
    attend: Attend
    """The attention kernel."""
    dropout: float
    """Probability that dropout zeroes an attention probability."""
    ids_BT: Tensor | None = None
    """Ids of the new tokens + 1, and 0 where there is no token, for layers that need them; None without."""
    starts_BT: Tensor | None = None
    """With key_offset, which new tokens see none before them; None if all see one."""


@dataclass(frozen=True)
class Biases:
    """The vectors that a layer adds to its queries in the products with keys and with position keys."""

    content_NH: Tensor
    """The paper's u."""
    position_NH: Tensor
    """The paper's v."""


def encode_distances(
    num_distances: int, width: int, like: Tensor, *, num_later: int = 0, clamp: int | None = None
) -> Tensor:
    """Return the sinusoidal encodings of the distances P - 1, ..., 1, 0, sines then cosines, shape (P, D).

    The result is on the device of `like`, in float32 or, if `like` has it, float64: bfloat16 cannot represent all
    integers above 256.

    Args:
        num_distances: P.
        width: D.
        like: a tensor of the device and dtype.
        num_later: number of further distances, -1, -2, ...
        clamp: distances above it are encoded as it, and those below -clamp as -clamp; None for no limit.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    distance_P = torch.arange(num_distances - 1, -1 - num_later, -1, dtype=dtype, device=like.device)
    distance_P = distance_P if clamp is None else distance_P.clamp(-clamp, clamp)
    even_K = torch.arange(0, width, 2, dtype=dtype, device=like.device)
    # 10000 ** (-2 i / D), as in Vaswani et al. 2017
    frequency_K = torch.exp(even_K * (-math.log(10000.0) / width))
    angle_PK = distance_P[:, None] * frequency_K
    return torch.cat([angle_PK.sin(), angle_PK.cos()], dim=-1)


def as_multiplied(x: Tensor) -> Tensor:
    """Return x in the dtype in which autocast multiplies it, so that several projections share one converted copy."""
    kind = x.device.type
    if x.dtype != torch.float32 or kind == "meta" or not torch.is_autocast_enabled(kind):  # meta has no autocast
        return x
    return x.to(torch.get_autocast_dtype(kind))


def make_final_norm(config: LayerConfig) -> nn.Module:
    """Return the LayerNorm after the last layer, or an identity if the settings have none."""
    if config.norm_first and config.final_norm:
        return nn.LayerNorm(config.d_model, eps=config.norm_eps)
    return nn.Identity()


class RelativeAttention(nn.Module):
    """Multi-head attention of the T new tokens to memory and to each other, with the residual connection."""

    def __init__(self, config: RelativeLayerConfig) -> None:
        super().__init__()
        self.head_shape = (config.n_heads, config.head_dim)
        self.norm_first, self.has_key_offset = config.norm_first, config.has_key_offset
        inner = config.n_heads * config.head_dim
        self.q_proj = PackedLinear(config.d_model, inner, bias=False)
        self.k_proj = PackedLinear(config.d_model, inner, bias=False)
        self.v_proj = PackedLinear(config.d_model, inner, bias=False)
        has_own = config.position_keys == "projected"
        self.r_proj = PackedLinear(config.d_model, inner, bias=False) if has_own else None
        self.o_proj = PackedLinear(inner, config.d_model, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.dropout = FastDropout(
            config.dropout, relu=config.has_residual_relu, variational=config.regularization.variational_dropout
        )
        self.gate = make_gate(config)
        self.value_embedding: ValueEmbedding | None = None
        self.sinks = nn.Parameter(torch.empty(config.n_heads)) if config.has_attention_sinks else None
        self.qkv_dropout = FastDropout(
            config.regularization.qkv_dropout, variational=config.regularization.variational_dropout
        )

    @override
    def forward(
        self, x_BTD: Tensor, cache: LayerCache, context: AttentionContext, biases: Biases | None
    ) -> tuple[Tensor, LayerCache]:
        """Attend to memory and new tokens.

        The weights of keys and values also get gradients through the memory, but the memory itself gets none.

        Args:
            x_BTD: the layer's input.
            cache: the layer's cache of earlier tokens.
            context: inputs that all layers share.
            biases: content and position bias of this layer, or None if both are the query of distance 0.

        Returns:
            input and attention, joined by their sum or a gate (B, T, D), and the next cache.
        """
        inputs, cache = self.attention_inputs(x_BTD, cache, context, biases)
        return self.output(x_BTD, context.attend(inputs, context.mask, context.dropout)), cache

    def attention_inputs(
        self, x_BTD: Tensor, cache: LayerCache, context: AttentionContext, biases: Biases | None
    ) -> tuple[AttentionInputs, LayerCache]:
        """Return the inputs of the attention kernel, and the next cache; arguments are as for `forward`."""
        new_BTD = as_multiplied(self.norm(x_BTD) if self.norm_first else x_BTD)
        q_BTNH = self.q_norm(self.q_proj(new_BTD).unflatten(-1, self.head_shape))
        if isinstance(cache, KeyValues):
            k_BSNH, v_BSNH, cache = cache.append(
                *self.project(new_BTD, context.ids_BT), context.lengths_B, context.starts_BT
            )
            is_cached = not context.mask.num_later  # caches hold no position keys of later tokens
            r_PNH = (
                cache.keys_of_positions(context.num_distances, lambda: self.position_keys(context))
                if is_cached
                else self.position_keys(context)
            )
        else:
            assert isinstance(cache, HiddenCache)
            k_BSNH, v_BSNH = self._project_all(cache, new_BTD, context)
            r_PNH = self.position_keys(context)
            ids_BT, starts_BT = context.ids_BT, context.starts_BT
            if ids_BT is not None and starts_BT is not None:
                ids_BT = torch.where(starts_BT, -ids_BT, ids_BT)
            cache = cache.append(x_BTD, ids_BT, context.lengths_B)
        # after memory and new tokens are joined, which may share a mask
        q_BTNH, k_BSNH, v_BSNH = (self.qkv_dropout(states) for states in (q_BTNH, k_BSNH, v_BSNH))
        r_PNH = self.qkv_dropout(r_PNH, token_dim=0)
        if biases is None:
            biases = self._zero_distance_query(context)
        # in the dtype of q, because under autocast projections are bfloat16 and biases float32
        content_bias_NH, position_bias_NH = biases.content_NH.to(q_BTNH.dtype), biases.position_NH.to(q_BTNH.dtype)
        biases_and_sinks = (content_bias_NH, position_bias_NH, self.sink_scores())
        return AttentionInputs(q_BTNH, k_BSNH, v_BSNH, r_PNH, *biases_and_sinks), cache

    def init_sinks(self) -> None:
        """Set the sinks, if there are some, to a score of 3: as much as 20 keys of score 0."""
        if self.sinks is not None:
            nn.init.constant_(self.sinks, 3 / _SINK_SCALE)

    def sink_scores(self) -> Tensor | None:
        """Return the score of each head's sink (N,), or None without sinks."""
        return None if self.sinks is None else self.sinks * _SINK_SCALE

    def output(self, x_BTD: Tensor, attended_BTNH: Tensor) -> Tensor:
        """Project the attended values and join them with the layer's input, shape (B, T, D)."""
        out_BTD = self.dropout(self.o_proj(attended_BTNH.flatten(-2)))
        sum_BTD = x_BTD + out_BTD if self.gate is None else self.gate(x_BTD, out_BTD)
        return sum_BTD if self.norm_first else self.norm(sum_BTD)

    def project(self, x_BXD: Tensor, ids_BX: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, X, N, H) of hidden states, which are already normalized if norm_first is set.

        Args:
            x_BXD: the hidden states.
            ids_BX: the ids of their tokens, as `AttentionContext.ids_BT`.
        """
        k_BXNH, v_BXNH = (projection(x_BXD).unflatten(-1, self.head_shape) for projection in (self.k_proj, self.v_proj))
        if self.value_embedding is not None and ids_BX is not None:
            v_BXNH = v_BXNH + self.value_embedding(x_BXD, ids_BX).unflatten(-1, self.head_shape)
        return self.k_norm(k_BXNH), v_BXNH

    def position_keys(self, context: AttentionContext) -> Tensor:
        """Return the position keys (P, N, H) of the distances P - 1, ..., 1, 0."""
        assert context.encoding_PD is not None
        projection = self.k_proj if self.r_proj is None else self.r_proj
        return projection(context.encoding_PD.to(projection.weight.dtype)).unflatten(-1, self.head_shape)

    def _zero_distance_query(self, context: AttentionContext) -> Biases:
        """Return the query of the encoding of distance 0, R[0] in the paper, as both biases."""
        assert context.zero_distance_D is not None
        encoding_1D = context.zero_distance_D[None].to(self.q_proj.weight.dtype)
        query_1NH = self.q_proj(encoding_1D).unflatten(-1, self.head_shape)
        query_NH = self.qkv_dropout(query_1NH, token_dim=0)[0]
        return Biases(query_NH, query_NH)

    def _project_all(self, cache: HiddenCache, new_BTD: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, S, N, H) of memory and new tokens.

        Memory is projected separately, because it needs no gradient (the weights do): a matrix product of the backward
        pass is saved.
        """
        hidden_BMD = self.norm(cache.hidden_BMD) if self.norm_first else cache.hidden_BMD
        of_memory = self.project(hidden_BMD.to(new_BTD.dtype), None if cache.ids_BM is None else cache.ids_BM.abs())
        pairs = zip(of_memory, self.project(new_BTD, context.ids_BT), strict=True)
        k_BSNH, v_BSNH = (torch.cat(pair, dim=1) for pair in pairs)
        num_new, lengths_B = new_BTD.shape[1], context.lengths_B
        if self.has_key_offset:  # the first state is that of the token before the slots
            assert cache.ids_BM is not None
            is_token_BY = F.pad(cache.ids_BM != 0, (0, num_new), value=True)
            starts_BS = F.pad(cache.ids_BM[:, 1:] < 0, (0, num_new))
            if context.starts_BT is not None:
                starts_BS[:, starts_BS.shape[1] - num_new :] = context.starts_BT
            k_BYNH = offset_halves(k_BSNH[:, 1:], k_BSNH, num_new, lengths_B, starts_BS, is_token_BY)
            k_BSNH = k_BYNH[:, :-1]
            v_BSNH = v_BSNH[:, 1:]
        elif lengths_B is not None:
            k_BSNH = padding_first(k_BSNH, num_new, lengths_B)
        return k_BSNH, v_BSNH if lengths_B is None else padding_first(v_BSNH, num_new, lengths_B)


class ValueEmbedding(nn.Module):
    """An embedding of each token that is added to its values, through a gate for each head (as in nanochat)."""

    def __init__(self, config: RelativeLayerConfig, vocab_size: int) -> None:
        super().__init__()
        self.scale = config.d_model**0.5  # as of token embeddings
        self.table = nn.Embedding(vocab_size, config.n_heads * config.head_dim)
        self.gate = nn.Parameter(torch.empty(config.n_heads, min(_GATE_CHANNELS, config.d_model)))

    def init_weights(self) -> None:
        """Set all weights to 0, with which the layer begins as one without."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def rows(self, ids_BX: Tensor) -> Tensor:
        """Return the scaled embeddings (B, X, N H) of tokens, 0 where there is none; ids are like `context.ids_BT`."""
        factor_BX = (ids_BX > 0).to(self.table.weight.dtype) * self.scale
        return self.table((ids_BX - 1).clamp(min=0)) * factor_BX[..., None]

    @override
    def forward(self, x_BXD: Tensor, ids_BX: Tensor) -> Tensor:
        """Return what is added to the values (B, X, N H) of tokens with these hidden states."""
        gate_BXN = 2 * torch.sigmoid(F.linear(x_BXD[..., : self.gate.shape[1]], self.gate.to(x_BXD.dtype)))
        rows_BXE = self.rows(ids_BX).to(gate_BXN.dtype)
        return (gate_BXN[..., None] * rows_BXE.unflatten(-1, (len(self.gate), -1))).flatten(-2)


class FeedForward(nn.Module):
    """Two linear layers with ReLU between them, and the residual connection."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.up_proj = PackedLinear(config.d_model, config.d_ff)
        self.down_proj = PackedLinear(config.d_ff, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.relu_dropout = FastDropout(
            config.dropout, relu=True, variational=config.regularization.variational_dropout
        )
        self.dropout = FastDropout(
            config.dropout, relu=config.has_residual_relu, variational=config.regularization.variational_dropout
        )
        self.gate = make_gate(config)

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return input and feed-forward output, joined by their sum or a gate, (B, T, D)."""
        inner_BTF = self.relu_dropout(self.up_proj(self.norm(x_BTD) if self.norm_first else x_BTD))
        out_BTD = self.dropout(self.down_proj(inner_BTF))
        sum_BTD = x_BTD + out_BTD if self.gate is None else self.gate(x_BTD, out_BTD)
        return sum_BTD if self.norm_first else self.norm(sum_BTD)


class Layer(nn.Module):
    """One Transformer-XL layer: relative attention, then feed-forward."""

    def __init__(self, config: RelativeLayerConfig, attention_class: type[RelativeAttention]) -> None:
        super().__init__()
        self.attention = attention_class(config)
        self.feed_forward = FeedForward(config)

    @override
    def forward(
        self, x_BTD: Tensor, cache: LayerCache, context: AttentionContext, biases: Biases | None
    ) -> tuple[Tensor, LayerCache]:
        """Return the next layer's input (B, T, D), and the next cache; arguments as for `RelativeAttention`."""
        x_BTD, cache = self.attention(x_BTD, cache, context, biases)
        return self.feed_forward(x_BTD), cache
