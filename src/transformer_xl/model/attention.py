"""One layer: relative attention over memory and new tokens, then the feed-forward part (paper section 3.3).

Names and the paper's: `content_bias` u, `position_bias` v, `query` Wq, `key` WkE, `value` Wv, `position_key` WkR.
Letters: B rows, T new tokens, M memory slots, S = M + T keys, P distances, D model width, K = D / 2 frequencies,
N heads, H head width, F feed-forward width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import ModelConfig
from transformer_xl.model.dropout import Dropout
from transformer_xl.model.kernels import AttentionInputs

Attention = Callable[[AttentionInputs], Tensor]
"""A kernel with sight and dropout already given: inputs to attended values (B, T, N, H)."""


@dataclass(frozen=True)
class Positions:
    """What a layer needs to know of positions."""

    encoding_PD: Tensor
    """Encodings of the distances, farthest first."""
    content_bias_NH: Tensor
    position_bias_NH: Tensor


def encode_distances(num_distances: int, width: int, clamp_length: int | None, like: Tensor) -> Tensor:
    """Sinusoids of the distances P - 1, ..., 1, 0: all sines first, then all cosines; (P, D).

    On the device of `like`, in float32 even where `like` is bfloat16, which cannot tell distances above 256 apart
    (float64 stays float64). Above `clamp_length` all distances look alike.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    distance_P = torch.arange(num_distances - 1, -1, -1, dtype=dtype, device=like.device)
    if clamp_length is not None:
        distance_P = distance_P.clamp(max=clamp_length)
    even_K = torch.arange(0, width, 2, dtype=dtype, device=like.device)
    frequency_K = torch.exp(even_K * (-math.log(10000.0) / width))
    angle_PK = distance_P[:, None] * frequency_K
    return torch.cat([angle_PK.sin(), angle_PK.cos()], dim=-1)


class RelativeAttention(nn.Module):
    """Multi-head attention of the T new tokens over memory and themselves, with its residual sum."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_shape = (config.heads, config.head_size)
        self.pre_norm = config.norm == "pre"
        inner = config.heads * config.head_size
        self.query = nn.Linear(config.width, inner, bias=False)
        self.key = nn.Linear(config.width, inner, bias=False)
        self.value = nn.Linear(config.width, inner, bias=False)
        self.position_key = nn.Linear(config.width, inner, bias=False)
        self.output = nn.Linear(inner, config.width, bias=False)
        self.norm = nn.LayerNorm(config.width)
        self.dropout = Dropout(config.dropout)

    @override
    def forward(self, x_BTD: Tensor, memory_BMD: Tensor, positions: Positions, attend: Attention) -> Tensor:
        """Gives (B, T, D). The gradient reaches `key` and `value` through memory rows, but not the rows themselves."""
        memory_BMD, new_BTD = memory_BMD.to(x_BTD.dtype), x_BTD
        if self.pre_norm:
            memory_BMD, new_BTD = self.norm(memory_BMD), self.norm(new_BTD)
        encoding_PD = positions.encoding_PD.to(self.position_key.weight.dtype)
        q_BTNH = self.query(new_BTD).unflatten(-1, self.head_shape)
        k_BSNH, v_BSNH = (
            # apart: nobody asks for the gradient of memory rows, so its matrix product is left out
            torch.cat([projection(memory_BMD), projection(new_BTD)], dim=1).unflatten(-1, self.head_shape)
            for projection in (self.key, self.value)
        )
        inputs = AttentionInputs(
            q_BTNH,
            k_BSNH,
            v_BSNH,
            self.position_key(encoding_PD).unflatten(-1, self.head_shape),
            # the dtype of q: under autocast the products are bfloat16 and the biases float32
            positions.content_bias_NH.to(q_BTNH.dtype),
            positions.position_bias_NH.to(q_BTNH.dtype),
        )
        sum_BTD = x_BTD + self.dropout(self.output(attend(inputs).flatten(-2)))
        return sum_BTD if self.pre_norm else self.norm(sum_BTD)


class FeedForward(nn.Module):
    """Two linear maps with ReLU between, and the residual sum."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.widen = nn.Linear(config.width, config.feedforward)
        self.narrow = nn.Linear(config.feedforward, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.inner_dropout = Dropout(config.dropout, relu=True)
        self.dropout = Dropout(config.dropout)

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        """Gives (B, T, D)."""
        inner_BTF = self.inner_dropout(self.widen(self.norm(x_BTD) if self.pre_norm else x_BTD))
        sum_BTD = x_BTD + self.dropout(self.narrow(inner_BTF))
        return sum_BTD if self.pre_norm else self.norm(sum_BTD)


class Layer(nn.Module):
    """Attention, then feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = RelativeAttention(config)
        self.feedforward = FeedForward(config)

    @override
    def forward(self, x_BTD: Tensor, memory_BMD: Tensor, positions: Positions, attend: Attention) -> Tensor:
        """Gives the next layer's input (B, T, D)."""
        return self.feedforward(self.attention(x_BTD, memory_BMD, positions, attend))
