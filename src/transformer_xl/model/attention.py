"""One layer: relative attention over memory and new tokens, then the feed-forward part (paper section 3.3).

Names and the paper's: `content_bias` u, `position_bias` v, `query` Wq, `key` WkE, `value` Wv, `position_key` WkR.
Letters: B rows, T new tokens, M memory slots, S = M + T keys, P distances, D model width, K = D / 2 frequencies,
N heads, H head width, F feed-forward width, X any number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import RelativeConfig, TransformerConfig
from transformer_xl.model.dropout import Dropout
from transformer_xl.model.kernels import AttentionInputs
from transformer_xl.model.linear import Linear
from transformer_xl.model.memory import without_padding

Attention = Callable[[AttentionInputs], Tensor]
"""A kernel with sight and dropout already given: inputs to attended values (B, T, N, H)."""

Join = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""New keys and values (B, T, N, H) to all S of them: those of the memory, then the new ones."""


@dataclass(frozen=True)
class Biases:
    """The trained vectors of a layer that are added to its queries."""

    content_NH: Tensor
    """The paper's u."""
    position_NH: Tensor
    """The paper's v."""


def encode_distances(num_distances: int, width: int, like: Tensor) -> Tensor:
    """Sinusoids of the distances P - 1, ..., 1, 0: all sines first, then all cosines; (P, D).

    On the device of `like`, in float32 even where `like` is bfloat16, which cannot tell distances above 256 apart
    (float64 stays float64).
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    distance_P = torch.arange(num_distances - 1, -1, -1, dtype=dtype, device=like.device)
    even_K = torch.arange(0, width, 2, dtype=dtype, device=like.device)
    frequency_K = torch.exp(even_K * (-math.log(10000.0) / width))
    angle_PK = distance_P[:, None] * frequency_K
    return torch.cat([angle_PK.sin(), angle_PK.cos()], dim=-1)


class Past(Protocol):
    """What a layer read before the new tokens, in whatever form it was kept."""

    def keys_and_values(self, attention: RelativeAttention, new_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, S, N, H) of memory and new tokens; those are normalised already in pre-norm."""
        ...

    def position_keys(self, attention: RelativeAttention) -> Tensor:
        """Keys of the distances, farthest first: (P, N, H)."""
        ...


@dataclass(frozen=True)
class HiddenRows:
    """The inputs that the layer had at the last M tokens."""

    rows_BMD: Tensor
    encoding_PD: Tensor
    """Encodings of the distances, farthest first."""
    lengths_B: Tensor | None
    """How many of the new tokens are the row's own, where there is padding before them."""

    def keys_and_values(self, attention: RelativeAttention, new_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Projects memory and new rows apart: nobody asks for the gradient of memory rows, which saves its product."""
        rows_BMD = self.rows_BMD.to(new_BTD.dtype)
        if attention.pre_norm:
            rows_BMD = attention.norm(rows_BMD)
        pairs = zip(attention.project(rows_BMD), attention.project(new_BTD), strict=True)
        k_BSNH, v_BSNH = (torch.cat(pair, dim=1) for pair in pairs)
        if self.lengths_B is None:
            return k_BSNH, v_BSNH
        num_new = new_BTD.shape[1]
        return without_padding(k_BSNH, num_new, self.lengths_B), without_padding(v_BSNH, num_new, self.lengths_B)

    def position_keys(self, attention: RelativeAttention) -> Tensor:
        """Projects the encodings."""
        return attention.project_positions(self.encoding_PD)


@dataclass(frozen=True)
class KeysAndValues:
    """The keys and values that the layer made of the last M tokens."""

    join: Join
    position_key_PNH: Tensor

    def keys_and_values(self, attention: RelativeAttention, new_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Projects the new rows."""
        return self.join(*attention.project(new_BTD))

    def position_keys(self, attention: RelativeAttention) -> Tensor:
        """They are there."""
        return self.position_key_PNH


class RelativeAttention(nn.Module):
    """Multi-head attention of the T new tokens over memory and themselves, with its residual sum."""

    def __init__(self, config: RelativeConfig) -> None:
        super().__init__()
        self.head_shape = (config.n_heads, config.head_dim)
        self.pre_norm = config.norm_first
        inner = config.n_heads * config.head_dim
        self.q_proj = Linear(config.d_model, inner, bias=False)
        self.k_proj = Linear(config.d_model, inner, bias=False)
        self.v_proj = Linear(config.d_model, inner, bias=False)
        self.r_proj = Linear(config.d_model, inner, bias=False)
        self.o_proj = Linear(inner, config.d_model, bias=False)
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.dropout = Dropout(config.dropout)

    @override
    def forward(self, x_BTD: Tensor, past: Past, biases: Biases, attend: Attention) -> Tensor:
        """Gives (B, T, D). The gradient reaches `key` and `value` through memory rows, but not the rows themselves."""
        new_BTD = self.norm(x_BTD) if self.pre_norm else x_BTD
        q_BTNH = self.q_proj(new_BTD).unflatten(-1, self.head_shape)
        k_BSNH, v_BSNH = past.keys_and_values(self, new_BTD)
        inputs = AttentionInputs(
            q_BTNH,
            k_BSNH,
            v_BSNH,
            past.position_keys(self),
            # the dtype of q: under autocast the products are bfloat16 and the biases float32
            biases.content_NH.to(q_BTNH.dtype),
            biases.position_NH.to(q_BTNH.dtype),
        )
        sum_BTD = x_BTD + self.dropout(self.o_proj(attend(inputs).flatten(-2)))
        return sum_BTD if self.pre_norm else self.norm(sum_BTD)

    def project(self, x_BXD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, X, N, H) of normalised rows."""
        k_BXNH, v_BXNH = (projection(x_BXD).unflatten(-1, self.head_shape) for projection in (self.k_proj, self.v_proj))
        return k_BXNH, v_BXNH

    def project_positions(self, encoding_PD: Tensor) -> Tensor:
        """Position keys (P, N, H) of encoded distances."""
        return self.r_proj(encoding_PD.to(self.r_proj.weight.dtype)).unflatten(-1, self.head_shape)


class FeedForward(nn.Module):
    """Two linear maps with ReLU between, and the residual sum."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pre_norm = config.norm_first
        self.up_proj = Linear(config.d_model, config.d_ff)
        self.down_proj = Linear(config.d_ff, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.inner_dropout = Dropout(config.dropout, relu=True)
        self.dropout = Dropout(config.dropout)

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        """Gives (B, T, D)."""
        inner_BTF = self.inner_dropout(self.up_proj(self.norm(x_BTD) if self.pre_norm else x_BTD))
        sum_BTD = x_BTD + self.dropout(self.down_proj(inner_BTF))
        return sum_BTD if self.pre_norm else self.norm(sum_BTD)


class Layer(nn.Module):
    """Attention, then feed-forward."""

    def __init__(self, config: RelativeConfig) -> None:
        super().__init__()
        self.attention = RelativeAttention(config)
        self.feedforward = FeedForward(config)

    @override
    def forward(self, x_BTD: Tensor, past: Past, biases: Biases, attend: Attention) -> Tensor:
        """Gives the next layer's input (B, T, D)."""
        return self.feedforward(self.attention(x_BTD, past, biases, attend))
