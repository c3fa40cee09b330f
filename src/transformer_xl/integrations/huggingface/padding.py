"""Reads attention masks: which columns of a batch are padding, and how its rows are cut into segments.

Shape suffixes: B batch rows, T columns of the input, P columns of a segment, X any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from transformer_xl.config import UserError

PaddingSide = Literal["left", "right"]


@dataclass(frozen=True)
class Padding:
    """The padding of a batch, all on one side."""

    side: PaddingSide
    lengths_B: Tensor
    """Number of columns of each row that are not padding."""


def read_mask(attention_mask: Tensor, num_new: int, num_past: int) -> Padding | None:
    """Return the padding of the newest columns, or None if there is none.

    Args:
        attention_mask: 1 for tokens, 0 for padding; a column for each new column, or for past and new ones.
        num_new: T, number of new columns.
        num_past: number of columns that the cache has read.

    Raises:
        UserError: the mask has another shape, or padding between tokens.
    """
    if attention_mask.ndim != 2 or attention_mask.shape[1] not in (num_new, num_past + num_new):
        wanted = f"{num_new} columns" + (f" or {num_past + num_new} with those of past_key_values" if num_past else "")
        raise UserError(
            f"attention_mask of shape {tuple(attention_mask.shape)}; expected (batch, columns) with {wanted}"
        )
    is_token_BT = attention_mask[:, attention_mask.shape[1] - num_new :] != 0
    if bool(is_token_BT.all()):
        return None
    change_BT = is_token_BT[:, 1:].int() - is_token_BT[:, :-1].int()
    lengths_B = is_token_BT.sum(1)
    if not bool((change_BT < 0).any()):
        return Padding("left", lengths_B)
    if not bool((change_BT > 0).any()):
        return Padding("right", lengths_B)
    raise UserError(
        "attention_mask has padding between tokens, or rows padded on different sides; pad all rows on the left "
        "(or all on the right, without a cache)"
    )


@dataclass(frozen=True)
class Segment:
    """Columns of the input that the model reads at once."""

    columns: slice | Tensor
    """The columns, equal in all rows, or of each row (B, P)."""
    lengths_B: Tensor | None
    """Number of columns of each row that are not padding, which comes first, or None if there is none."""

    def select(self, x_BTX: Tensor) -> Tensor:
        """Return the segment's columns of ids or embeddings."""
        if isinstance(self.columns, slice):
            return x_BTX[:, self.columns]
        return x_BTX[torch.arange(len(x_BTX), device=x_BTX.device)[:, None], self.columns]


def cut(num_columns: int, segment_length: int, lengths_B: Tensor | None, *, from_end: bool) -> Iterator[Segment]:
    """Yield the segments in which a batch is read.

    They are counted from the start of each row's tokens, or from the end, so a row is cut at the same tokens whatever
    the padding.

    Args:
        num_columns: T.
        segment_length: number of columns of a segment, at most.
        lengths_B: number of columns of each row that are not padding, which comes first, or None if there is none.
        from_end: count segments from the end, where padded rows are aligned.
    """
    if lengths_B is None or from_end or num_columns <= segment_length:
        starts = range(num_columns, 0, -segment_length) if from_end else range(0, num_columns, segment_length)
        for start, stop in pairwise(sorted({0, *starts, num_columns})):
            unpadded_B = None if lengths_B is None else (lengths_B - (num_columns - stop)).clamp(0, stop - start)
            yield Segment(slice(start, stop), unpadded_B)
        return
    first_B = num_columns - lengths_B
    for start in range(0, max(1, int(lengths_B.max())), segment_length):
        unpadded_B = (lengths_B - start).clamp(0, segment_length)
        width = max(1, int(unpadded_B.max()))
        column_P = torch.arange(width, device=lengths_B.device) - width
        column_BP = (first_B + start + unpadded_B)[:, None] + column_P
        yield Segment(column_BP.clamp(0, num_columns - 1), unpadded_B)


def put_back(parts: list[tuple[Segment, Tensor]], num_columns: int) -> Tensor:
    """Return the results of all segments in the columns of the input, 0 for padding on the left.

    Args:
        parts: each segment with its result (B, P, X).
        num_columns: T.
    """
    if isinstance(parts[0][0].columns, slice):
        kept = [_without_padding(part_BPX, segment.lengths_B) for segment, part_BPX in parts]
        return kept[0] if len(kept) == 1 else torch.cat(kept, dim=1)
    first = parts[0][1]
    out_BTX = first.new_zeros(len(first), num_columns, *first.shape[2:])
    for segment, part_BPX in parts:
        assert isinstance(segment.columns, Tensor)
        assert segment.lengths_B is not None
        width = part_BPX.shape[1]
        is_token_BP = torch.arange(width, device=part_BPX.device) >= width - segment.lengths_B[:, None]
        row_K, index_K = is_token_BP.nonzero(as_tuple=True)
        column_K = segment.columns[row_K, index_K]
        out_BTX = out_BTX.index_put((row_K, column_K), part_BPX[row_K, index_K])
    return out_BTX


def _without_padding(x_BPX: Tensor, lengths_B: Tensor | None) -> Tensor:
    """Return the tensor with 0 for padding, where a model's results are arbitrary, different each time."""
    if lengths_B is None:
        return x_BPX
    width = x_BPX.shape[1]
    is_padding_BP = torch.arange(width, device=x_BPX.device) < width - lengths_B[:, None]
    return x_BPX.masked_fill(is_padding_BP[..., None], 0)
