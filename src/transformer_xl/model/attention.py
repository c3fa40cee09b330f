"""One layer of Transformer-XL: relative attention over memory and new tokens, then the feed-forward part (section 3.3).

Names and the paper's: `content_bias` is u, `position_bias` is v (v in code is always the values), and the weights
`q_proj`, `k_proj`, `v_proj`, `r_proj` are W_q, W_{k,E}, W_v, W_{k,R}.

Letters: B batch rows, T new tokens, M memory slots, S = M + T keys, P distances, D model width, K = D / 2 frequencies,
N heads, H head width, F feed-forward width, X any number of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import RelativeConfig, TransformerConfig
from transformer_xl.model.dropout import FastDropout
from transformer_xl.model.kernels import Attend, AttentionInputs, AttentionMask
from transformer_xl.model.key_values import KeyValueCache
from transformer_xl.model.linear import FewRowsLinear
from transformer_xl.model.memory import HiddenCache, LayerCache, padding_first


@dataclass(frozen=True)
class AttentionContext:
    """What attention over one segment needs beside the layer's weights; the same for every layer."""

    num_distances: int
    """P: distances that have a position key of their own."""
    encoding_PD: Tensor | None
    """Encodings of the distances P - 1, ..., 1, 0; none where every layer's cache holds its position keys already."""
    mask: AttentionMask
    """Which keys a query attends to."""
    lengths_B: Tensor | None
    """How many of the T tokens belong to each batch row, where there is padding before them; none: all."""
    attend: Attend
    """The attention kernel."""
    dropout: float
    """Probability that dropout zeroes an attention probability."""


@dataclass(frozen=True)
class Biases:
    """The trained vectors that a layer adds to its queries."""

    content_NH: Tensor
    """The paper's u."""
    position_NH: Tensor
    """The paper's v."""


def encode_distances(num_distances: int, width: int, like: Tensor) -> Tensor:
    """Return the sinusoidal encodings of the distances P - 1, ..., 1, 0: sines, then cosines; shape (P, D).

    On the device of `like`, in float32 even where `like` is bfloat16, which cannot tell distances above 256 apart
    (float64 stays float64).
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    distance_P = torch.arange(num_distances - 1, -1, -1, dtype=dtype, device=like.device)
    even_K = torch.arange(0, width, 2, dtype=dtype, device=like.device)
    frequency_K = torch.exp(even_K * (-math.log(10000.0) / width))
    angle_PK = distance_P[:, None] * frequency_K
    return torch.cat([angle_PK.sin(), angle_PK.cos()], dim=-1)


def make_final_norm(config: TransformerConfig) -> nn.Module:
    """Return the LayerNorm after the last layer, or an identity where the settings have none."""
    if config.norm_first and config.final_norm:
        return nn.LayerNorm(config.d_model, eps=config.norm_eps)
    return nn.Identity()


class RelativeAttention(nn.Module):
    """Multi-head attention of the T new tokens to memory and themselves, with its residual sum."""

    def __init__(self, config: RelativeConfig) -> None:
        super().__init__()
        self.head_shape = (config.n_heads, config.head_dim)
        self.norm_first = config.norm_first
        inner = config.n_heads * config.head_dim
        self.q_proj = FewRowsLinear(config.d_model, inner, bias=False)
        self.k_proj = FewRowsLinear(config.d_model, inner, bias=False)
        self.v_proj = FewRowsLinear(config.d_model, inner, bias=False)
        self.r_proj = FewRowsLinear(config.d_model, inner, bias=False)
        self.o_proj = FewRowsLinear(inner, config.d_model, bias=False)
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.dropout = FastDropout(config.dropout)

    @override
    def forward(
        self, x_BTD: Tensor, cache: LayerCache, context: AttentionContext, biases: Biases
    ) -> tuple[Tensor, LayerCache]:
        """Attend to memory and new tokens.

        The gradient reaches the weights of keys and values through memory too, but not the memory itself.

        Args:
            x_BTD: the layer's input.
            cache: what the layer kept of earlier tokens.
            context: what all layers share.
            biases: content and position bias of this layer.

        Returns:
            the sum of input and attention (B, T, D), and the next cache.
        """
        inputs, cache = self.attention_inputs(x_BTD, cache, context, biases)
        return self.output(x_BTD, context.attend(inputs, context.mask, context.dropout)), cache

    def attention_inputs(
        self, x_BTD: Tensor, cache: LayerCache, context: AttentionContext, biases: Biases
    ) -> tuple[AttentionInputs, LayerCache]:
        """Return what the attention kernel computes with, and the next cache; arguments as for `forward`."""
        new_BTD = self.norm(x_BTD) if self.norm_first else x_BTD
        q_BTNH = self.q_proj(new_BTD).unflatten(-1, self.head_shape)
        if isinstance(cache, KeyValueCache):
            k_BSNH, v_BSNH, cache = cache.append(*self.project(new_BTD), context.lengths_B)
            r_PNH = cache.keys_of_positions(context.num_distances, lambda: self._position_keys(context))
        else:
            assert isinstance(cache, HiddenCache)
            k_BSNH, v_BSNH = self._project_all(cache, new_BTD, context.lengths_B)
            r_PNH = self._position_keys(context)
            cache = cache.append(x_BTD, context.lengths_B)
        # the dtype of q: under autocast the products are bfloat16 and the biases float32
        content_bias_NH, position_bias_NH = biases.content_NH.to(q_BTNH.dtype), biases.position_NH.to(q_BTNH.dtype)
        return AttentionInputs(q_BTNH, k_BSNH, v_BSNH, r_PNH, content_bias_NH, position_bias_NH), cache

    def output(self, x_BTD: Tensor, attended_BTNH: Tensor) -> Tensor:
        """Project the attended values and add them to the layer's input; (B, T, D)."""
        sum_BTD = x_BTD + self.dropout(self.o_proj(attended_BTNH.flatten(-2)))
        return sum_BTD if self.norm_first else self.norm(sum_BTD)

    def project(self, x_BXD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, X, N, H) of hidden states, which with norm_first are normalised already."""
        k_BXNH, v_BXNH = (projection(x_BXD).unflatten(-1, self.head_shape) for projection in (self.k_proj, self.v_proj))
        return k_BXNH, v_BXNH

    def project_positions(self, encoding_PD: Tensor) -> Tensor:
        """Return the position keys (P, N, H) of encoded distances."""
        return self.r_proj(encoding_PD.to(self.r_proj.weight.dtype)).unflatten(-1, self.head_shape)

    def _position_keys(self, context: AttentionContext) -> Tensor:
        assert context.encoding_PD is not None
        return self.project_positions(context.encoding_PD)

    def _project_all(self, cache: HiddenCache, new_BTD: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values (B, S, N, H) of memory and new tokens.

        Both are projected apart: nobody asks for the gradient of memory, which saves the product that gives it.
        """
        hidden_BMD = cache.hidden_BMD.to(new_BTD.dtype)
        if self.norm_first:
            hidden_BMD = self.norm(hidden_BMD)
        pairs = zip(self.project(hidden_BMD), self.project(new_BTD), strict=True)
        k_BSNH, v_BSNH = (torch.cat(pair, dim=1) for pair in pairs)
        if lengths_B is None:
            return k_BSNH, v_BSNH
        num_new = new_BTD.shape[1]
        return padding_first(k_BSNH, num_new, lengths_B), padding_first(v_BSNH, num_new, lengths_B)


class FeedForward(nn.Module):
    """Two linear maps with ReLU between them, and the residual sum."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.up_proj = FewRowsLinear(config.d_model, config.d_ff)
        self.down_proj = FewRowsLinear(config.d_ff, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.relu_dropout = FastDropout(config.dropout, relu=True)
        self.dropout = FastDropout(config.dropout)

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the sum of input and feed-forward output, (B, T, D)."""
        inner_BTF = self.relu_dropout(self.up_proj(self.norm(x_BTD) if self.norm_first else x_BTD))
        sum_BTD = x_BTD + self.dropout(self.down_proj(inner_BTF))
        return sum_BTD if self.norm_first else self.norm(sum_BTD)


class Layer(nn.Module):
    """Relative attention, then feed-forward."""

    def __init__(self, config: RelativeConfig) -> None:
        super().__init__()
        self.attention = RelativeAttention(config)
        self.feed_forward = FeedForward(config)

    @override
    def forward(
        self, x_BTD: Tensor, cache: LayerCache, context: AttentionContext, biases: Biases
    ) -> tuple[Tensor, LayerCache]:
        """Return the next layer's input (B, T, D), and the next cache; arguments as for `RelativeAttention`."""
        x_BTD, cache = self.attention(x_BTD, cache, context, biases)
        return self.feed_forward(x_BTD), cache
