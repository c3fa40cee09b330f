"""Dropout that is fast on a CPU, where torch draws a float for each element and saves masks in the elements' dtype.

There are two implementations, which drop different elements; random numbers come from torch's global random state, as
in torch's dropout.

- `native`, where the native operators are built: an element is dropped by a hash of its index and one random number,
  which both passes compute, so that no mask is saved.
- `torch`: each element needs 16 random bits (so p is rounded to a multiple of 1 / 65,536), one int64 random number
  serves four elements, and a mask takes one byte for each element.

Shape suffixes: B batch size, T new tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from transformer_xl.ops import native
from transformer_xl.ops.linear import is_transformed

_BITS = 16  # random bits for each element


class FastDropout(nn.Module):
    """Dropout: in training, zero each element with probability p and scale the others by 1 / (1 - p).

    On devices other than the CPU it is torch's dropout. With `relu`, ReLU is applied first; both are one autograd
    function, which saves only its output for the backward pass: where the output is 0, by ReLU or by dropout, the
    gradient is 0.

    With `variational`, all tokens of a sequence share one mask (Gal and Ghahramani 2016).
    """

    def __init__(self, p: float, *, relu: bool = False, variational: bool = False) -> None:
        super().__init__()
        self.p, self.relu, self.variational = p, relu, variational

    @override
    def forward(self, x: Tensor, token_dim: int = 1) -> Tensor:
        """Return a tensor of the shape of x.

        Args:
            x: a tensor of any shape.
            token_dim: with `variational`, the dimension of the tokens (or positions), along which the mask is constant.
        """
        if not self.training or not self.p:
            return x.relu() if self.relu else x
        is_by_torch = torch.compiler.is_compiling() or is_transformed()
        if x.device.type not in ("cpu", "meta") or is_by_torch or self.p >= 1:
            x = x.relu() if self.relu else x
            if not self.variational:
                return F.dropout(x, self.p)
            return x * F.dropout(torch.ones_like(x.narrow(token_dim, 0, 1)), self.p)
        if not self.variational and x.dtype in native.DTYPES and native.takes("dropout"):
            return _NativeDropout.apply(x, self.p, self.relu)
        return _Dropout.apply(x, self.p, self.relu, token_dim if self.variational else None)

    @override
    def extra_repr(self) -> str:
        return f"p={self.p}, relu={self.relu}, variational={self.variational}"


def drop_vocabulary(x_BTD: Tensor, tokens_BT: Tensor, p: float, vocab_size: int) -> Tensor:
    """Return the embeddings of tokens after dropping each token of the vocabulary with probability p, (B, T, D).

    All occurrences of a token are dropped together; the others are scaled by 1 / (1 - p). The first token of a sequence
    is neither dropped nor scaled: it attends only to itself, so its states would be 0 in every layer, where each
    LayerNorm multiplies gradients by about 300, and they would overflow.

    Args:
        x_BTD: the embeddings.
        tokens_BT: the token ids.
        p: probability that a token is dropped.
        vocab_size: V.
    """
    scale_BT = F.dropout(x_BTD.new_ones(vocab_size), p)[tokens_BT]
    scale_BT[:, 0] = 1
    return x_BTD * scale_BT[..., None]


def draw_mask(keep: Tensor, p: float, draws: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill `keep` (bool) with true for each element that is kept, and return it.

    Args:
        keep: the mask, which is overwritten.
        p: probability that an element is dropped, below 1.
        draws: int64 buffer for `num_draws` random numbers, which is overwritten.
        generator: a random generator, or None for torch's global one.
    """
    draws.random_(-(2**63), None, generator=generator)  # uniform over all int64 numbers
    # elements whose 16 bits, as an int16 from -2**15 up, are below the threshold are dropped
    threshold = min(round(p * 2**_BITS), 2**_BITS - 1) - 2 ** (_BITS - 1)
    return torch.ge(draws.view(torch.int16)[: keep.numel()].view(keep.shape), threshold, out=keep)


def num_draws(count: int) -> int:
    """Return how many int64 numbers `draw_mask` needs for a mask of `count` elements."""
    return -(-count * _BITS // 64)


class _Dropout(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, p: float, relu: bool, shared_dim: int | None) -> Tensor:  # pyrefly: ignore[bad-override]
        keep, ctx.scale = _mask(x if shared_dim is None else x.narrow(shared_dim, 0, 1), p), 1 / (1 - p)
        out = (x.relu().mul_(keep) if relu else torch.mul(x, keep)).mul_(ctx.scale)
        ctx.save_for_backward(out if relu else keep)
        return out

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None, None]:
        (saved,) = ctx.saved_tensors
        keep = saved if saved.dtype == torch.bool else saved > 0
        return torch.mul(grad_outputs[0], keep).mul_(ctx.scale), None, None, None


class _NativeDropout(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, p: float, relu: bool) -> Tensor:  # pyrefly: ignore[bad-override]
        ctx.p, ctx.relu, seed = p, relu, torch.randint(2**62, (), device=x.device)
        out = native.operators().dropout(x, seed, p, relu, None)
        ctx.save_for_backward(out if relu else seed)
        return out

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]
        (saved,) = ctx.saved_tensors
        seed, out = (None, saved) if ctx.relu else (saved, None)
        return native.operators().dropout(grad_outputs[0], seed, ctx.p, False, out), None, None


def _mask(x: Tensor, p: float) -> Tensor:
    draws = torch.empty(num_draws(x.numel()), dtype=torch.int64, device=x.device)
    return draw_mask(torch.empty(x.shape, dtype=torch.bool, device=x.device), p, draws)
