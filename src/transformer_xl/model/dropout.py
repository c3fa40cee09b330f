"""Dropout that is quick on a CPU: torch draws a float for every number there, and keeps masks as wide as the numbers.

Here 16 random bits decide (any share of dropped numbers to 1 in 65,536), four of them come out of one draw, and a mask
takes one byte a number. Drawn from torch's global random state, as torch's own is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

_BITS = 16


class Dropout(nn.Module):
    """In training drops that share of all numbers and scales the others up; torch's own anywhere but on a CPU.

    With `relu`, negative numbers become 0 first. Where one function does both, its output is all that is kept: a number
    that came out as 0 has no gradient, whatever made it 0.
    """

    def __init__(self, share: float, *, relu: bool = False) -> None:
        super().__init__()
        self.share, self.relu = share, relu

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        if not self.training or not self.share:
            return x.relu() if self.relu else x
        if x.device.type not in ("cpu", "meta") or torch.compiler.is_compiling():
            return F.dropout(x.relu() if self.relu else x, self.share)
        return (_DroppedRelu if self.relu else _Dropped).apply(x, self.share)

    @override
    def extra_repr(self) -> str:
        return f"share={self.share}, relu={self.relu}"


def draw_kept(keep: Tensor, share: float, draws: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fills `keep` (bool) with true where a number stays.

    Args:
        keep: overwritten.
        share: of numbers dropped, below 1.
        draws: int64 work space, one number for every four of `keep` at least.
        generator: none: torch's global one.
    """
    draws.random_(-(2**63), None, generator=generator)
    least = min(round(share * 2**_BITS), 2**_BITS - 1) - 2 ** (_BITS - 1)
    return torch.ge(draws.view(torch.int16)[: keep.numel()].view(keep.shape), least, out=keep)


def num_draws(count: int) -> int:
    """How many int64 numbers `draw_kept` needs for so many decisions."""
    return -(-count * _BITS // 64)


class _Dropped(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:  # pyrefly: ignore[bad-override]
        keep = _kept(x, share)
        ctx.save_for_backward(keep)
        ctx.scale = 1 / (1 - share)
        return torch.mul(x, keep).mul_(ctx.scale)

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return torch.mul(grad_outputs[0], keep).mul_(ctx.scale), None


class _DroppedRelu(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:  # pyrefly: ignore[bad-override]
        ctx.scale = 1 / (1 - share)
        out = x.relu().mul_(_kept(x, share)).mul_(ctx.scale)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return torch.mul(grad_outputs[0], out > 0).mul_(ctx.scale), None


def _kept(x: Tensor, share: float) -> Tensor:
    draws = torch.empty(num_draws(x.numel()), dtype=torch.int64, device=x.device)
    return draw_kept(torch.empty(x.shape, dtype=torch.bool, device=x.device), share, draws)
