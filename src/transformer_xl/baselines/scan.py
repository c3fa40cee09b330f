"""A linear recurrence over time, computed without a loop over its steps; `recurrent.py` uses it for QRNN.

    c_t = keep_t c_(t-1) + added_t

The method is doubling (Hillis & Steele 1986): s steps together are again c_t = keep c_(t-s) + added. If this keep and
added are known for the s steps up to each position, combining those of two neighbouring ranges gives them for 2 s
steps. So T steps take log2(T) operations on whole tensors. Without divisions and logarithms, products of numbers below
1 become small but never overflow, however long the text is. The gradient is the same kind of recurrence, from the last
position to the first.

Shape suffixes: B batch size, T new tokens, D width.
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
        keep_BTD: keep_1 ... keep_T, in float32 or float64, because rounding errors add up.
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
        # d_t = (incoming gradient of c_t) + keep_(t+1) d_(t+1): the same recurrence in reverse
        dstates_BTD = grad_outputs[0].flip(1)
        _scan(keep_BTD.flip(1).roll(1, 1), dstates_BTD)
        dstates_BTD = dstates_BTD.flip(1)
        previous_BTD = torch.cat([first_BD[:, None], states_BTD[:, :-1]], dim=1)
        return dstates_BTD * previous_BTD, dstates_BTD, dstates_BTD[:, 0] * keep_BTD[:, 0]


def _scan(keep_BTD: Tensor, states_BTD: Tensor) -> None:
    """Turn what is added at each step into states, in place; overwrites `keep_BTD`, whose first step is not used."""
    num_combined, num_steps = 1, states_BTD.shape[1]
    while num_combined < num_steps:
        later_BTD, earlier_BTD = keep_BTD[:, num_combined:], keep_BTD[:, :-num_combined]
        states_BTD[:, num_combined:] += later_BTD * states_BTD[:, :-num_combined]
        keep_BTD[:, num_combined:] = later_BTD * earlier_BTD
        num_combined *= 2
