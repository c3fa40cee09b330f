"""The vector of a text: its hidden states pooled while it is read, so that no more than those of one step are held.

Shape suffixes: B batch rows, T new tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Pooling = Literal["last", "mean"]
"""The vector of a text: the hidden state of its last token, or the mean of those of all its tokens."""


class PooledStates:
    """Pools the hidden states of batch rows, step by step, in float32 or what is more exact."""

    def __init__(self, pooling: Pooling) -> None:
        """Begin rows of which nothing is read."""
        self._pooling: Pooling = pooling
        self._state: Tensor | float = 0.0  # the last hidden states (B, D), or the sums of all
        self._count: Tensor | int = 0  # tokens read (B, 1)

    def add(self, hidden_BTD: Tensor, lengths: Sequence[int]) -> Tensor:
        """Add the states of a step, and return the pooled states (B, D) of all that was read.

        Args:
            hidden_BTD: hidden states of a step of a `Reader`.
            lengths: how many of them are of new tokens of each row: the last ones.
        """
        hidden_BTD = hidden_BTD.to(torch.promote_types(hidden_BTD.dtype, torch.float32))
        length_B1 = torch.tensor(lengths, device=hidden_BTD.device)[:, None]
        if self._pooling == "last":
            self._state = torch.where(length_B1 > 0, hidden_BTD[:, -1], self._state)
            return self._state
        num_new = hidden_BTD.shape[1]
        is_new_BT = torch.arange(num_new, device=hidden_BTD.device) >= num_new - length_B1
        self._state = self._state + hidden_BTD.masked_fill(~is_new_BT[..., None], 0).sum(1)
        self._count = self._count + length_B1
        return self._state / self._count.clamp(min=1)

    def detach(self) -> None:
        """End gradients here: those of later steps do not pass into what was read until now."""
        if isinstance(self._state, Tensor):
            self._state = self._state.detach()
