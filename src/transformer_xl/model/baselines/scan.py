"""A linear recurrence over time without a loop over its steps.

    c_t = keep_t c_(t-1) + added_t

Doubling (Hillis & Steele 1986): where each position has the combined effect of the s steps up to it, combining that
with the effect of the s steps before gives 2 s steps. So T steps take log2(T) rounds over whole tensors. There is no
division and no logarithm: products of numbers below 1 get small, never large, however long the text is.

The gradient is such a recurrence too, from the last position to the first.

Letters: B batch rows, T new tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override


def linear_recurrence(keep_BTD: Tensor, added_BTD: Tensor, first_BD: Tensor) -> Tensor:
    """Return all states c_1 ... c_T, shape (B, T, D).

    Args:
        keep_BTD: keep_1 ... keep_T, best in float32 or float64, since rounding errors add up.
        added_BTD: added_1 ... added_T.
        first_BD: c_0.
    """
    return _Recurrence.apply(keep_BTD, added_BTD, first_BD)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, keep_BTD: Tensor, added_BTD: Tensor, first_BD: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        states_BTD = added_BTD.clone()
        states_BTD[:, 0] += keep_BTD[:, 0] * first_BD
        _scan(keep_BTD.clone(), states_BTD)
        ctx.save_for_backward(keep_BTD, states_BTD, first_BD)
        return states_BTD

    @staticmethod
    @override
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        keep_BTD, states_BTD, first_BD = ctx.saved_tensors
        # d_t = (gradient of c_t from outside) + keep_(t+1) d_(t+1): the same recurrence, read from the end
        dstates_BTD = grad_outputs[0].flip(1)
        _scan(keep_BTD.flip(1).roll(1, 1), dstates_BTD)
        dstates_BTD = dstates_BTD.flip(1)
        before_BTD = torch.cat([first_BD[:, None], states_BTD[:, :-1]], dim=1)
        return dstates_BTD * before_BTD, dstates_BTD, dstates_BTD[:, 0] * keep_BTD[:, 0]


def _scan(keep_BTD: Tensor, states_BTD: Tensor) -> None:
    """Turns what is added at each step into states, in place; overwrites `keep_BTD`, whose first step is not read."""
    num_known, num_steps = 1, states_BTD.shape[1]
    while num_known < num_steps:
        later_BTD, earlier_BTD = keep_BTD[:, num_known:], keep_BTD[:, :-num_known]
        states_BTD[:, num_known:] += later_BTD * states_BTD[:, :-num_known]
        keep_BTD[:, num_known:] = later_BTD * earlier_BTD
        num_known *= 2
