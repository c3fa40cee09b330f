"""A text cut into stretches that are read side by side, each after a warm-up that is read but not counted.

A stretch begins where a segment of its document begins, and its warm-up is whole segments. So every token stands at
the same place of the same segment as in the text read as one, whatever the number of rows; and where the warm-up is as
long as losses can look back (`Plan.context_of_segment`), it gets the same loss.

Shape suffixes: N documents, S stretches, B rows, T new tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transformer_xl.evaluation.plan import EvaluationPlan, Text

_FAR = 2**62  # further than any text goes back, and not too large for an int64
_SLOTS_AT_ONCE = 4096  # keys side by side in a step of several documents: enough for a machine to be busy


@dataclass(frozen=True)
class Stretch:
    """Tokens of a text that one row reads."""

    first: int
    """Place of the first token that is read."""
    begin: int
    """Place of the first token that counts."""
    end: int
    """Place after the last token."""
    fresh: bool
    """Whether nothing stands before it: its first token is predicted from the start token."""

    @property
    def length(self) -> int:
        """Tokens read."""
        return self.end - self.first


@dataclass(frozen=True, eq=False)
class Stretches:
    """All stretches of a text, as columns of numbers."""

    first_S: npt.NDArray[np.int64]
    begin_S: npt.NDArray[np.int64]
    end_S: npt.NDArray[np.int64]
    fresh_S: npt.NDArray[np.bool_]

    @staticmethod
    def whole(begin_S: npt.NDArray[np.int64], end_S: npt.NDArray[np.int64]) -> Stretches:
        """Stretches that are read from their own beginning, with nothing before them."""
        return Stretches(begin_S, begin_S, end_S, np.ones(len(begin_S), dtype=np.bool_))

    @staticmethod
    def cut(text: Text, plan: EvaluationPlan, warmup: int | None) -> Stretches:
        """Cuts a text: each document into as many stretches as it has of `plan.rows` by its share of the text.

        `warmup`: tokens, in whole segments; none: documents stay whole.
        """
        edges_N = text.edges(plan.documents)
        start_N, stop_N, total = edges_N[:-1], edges_N[1:], len(text.tokens_K)
        segments_N = -(-(stop_N - start_N) // plan.segment)
        rows = 1 if warmup is None or plan.rows is None else min(plan.rows, total)
        share_N = -(-(stop_N - start_N) * rows // total)
        pieces_N = np.minimum(share_N, segments_N)
        start_S, stop_S, segments_S, pieces_S = (
            np.repeat(column_N, pieces_N) for column_N in (start_N, stop_N, segments_N, pieces_N)
        )
        number_S = np.arange(len(start_S)) - np.repeat(np.cumsum(pieces_N) - pieces_N, pieces_N)
        begin_S = start_S + number_S * segments_S // pieces_S * plan.segment
        end_S = np.minimum(start_S + (number_S + 1) * segments_S // pieces_S * plan.segment, stop_S)
        first_S = np.maximum(begin_S - min(warmup or 0, _FAR), start_S)
        return Stretches(first_S, begin_S, end_S, first_S == start_S)

    def __getitem__(self, index: int) -> Stretch:
        """One of them."""
        first, begin, end = (int(column_S[index]) for column_S in (self.first_S, self.begin_S, self.end_S))
        return Stretch(first, begin, end, bool(self.fresh_S[index]))

    def groups(self, plan: EvaluationPlan) -> Iterator[list[Stretch]]:
        """Stretches to read side by side, of about the same length in each group, longest first."""
        length_S = self.end_S - self.first_S
        longest_first_S = np.argsort(-length_S, kind="stable")
        place = 0
        while place < len(longest_first_S):
            length = int(length_S[longest_first_S[place]])
            slots = min(length, plan.segment) + slots_needed(length, plan)
            rows = plan.rows or max(1, _SLOTS_AT_ONCE // slots)
            yield [self[index] for index in longest_first_S[place : place + rows]]
            place += rows


def slots_needed(length: int, plan: EvaluationPlan) -> int:
    """Memory slots that can be filled before the last segment of so many tokens is read; more would stay empty."""
    return min(plan.context_limits.memory_length, (length - 1) // plan.segment * plan.segment)


def segment_of(text: Text, group: list[Stretch], offset: int, width: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (B, T) of a segment; padding on the right, which nothing that counts can see."""
    inputs_BT = np.full((len(group), width), text.bos_token_id, dtype=np.int64)
    targets_BT = np.zeros((len(group), width), dtype=np.int64)
    for row, stretch in enumerate(group):
        start = stretch.first + offset
        stop = min(start + width, stretch.end)
        targets_BT[row, : stop - start] = text.tokens_K[start:stop]
        alone = 1 if stretch.fresh and not offset else 0  # nothing stands before it; its place keeps the start token
        inputs_BT[row, alone : stop - start] = text.tokens_K[start - 1 + alone : stop - 1]
    return torch.from_numpy(inputs_BT), torch.from_numpy(targets_BT)
