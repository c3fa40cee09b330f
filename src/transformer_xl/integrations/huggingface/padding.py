"""Batches with padding: which columns an attention mask marks as padding, and how rows of unequal lengths are read.

Shape suffixes: B batch rows, T columns of the input, P columns of a step, D model width, K tokens of a step or places
in a mask, X any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.reader import Reader

PaddingSide = Literal["left", "right"]


@dataclass(frozen=True)
class Padding:
    """The padding of a batch, all on one side."""

    side: PaddingSide
    lengths: list[int]
    """Number of columns of each row that are not padding."""


def read_mask(
    attention_mask: Tensor, new_shape: tuple[int, int], num_past: int, read_B: Tensor | None
) -> Padding | None:
    """Return the padding of the newest columns, or None if there is none.

    Args:
        attention_mask: 1 for tokens, 0 for padding; a column for each new column, or for past and new ones.
        new_shape: number of rows, and of new columns.
        num_past: number of columns that the cache has read.
        read_B: number of tokens that the memory of the cache has read of each row, or None if there is none.

    Raises:
        UserError: the mask has another shape, padding between tokens, or padding where the memory has read a token.
    """
    num_rows, num_new = new_shape
    shape, sizes = tuple(attention_mask.shape), (num_new, num_past + num_new)
    if len(shape) != 2 or shape[0] != num_rows or shape[1] not in sizes:
        wanted = f"{num_new} columns" + (f" or {num_past + num_new} with those of past_key_values" if num_past else "")
        raise UserError(f"attention_mask of shape {shape}; expected {num_rows} rows with {wanted}")
    if read_B is not None and shape[1] > num_new:
        is_fewer_B = (attention_mask[:, :num_past] != 0).sum(1) < read_B.to(attention_mask.device)
        if bool(is_fewer_B.any()):
            raise UserError(
                f"row {int(is_fewer_B.int().argmax())} of attention_mask has padding where the memory has read tokens, "
                "as of a row that has ended before others; give the whole text with a new MemoryCache()"
            )
    is_token_BT = attention_mask[:, attention_mask.shape[1] - num_new :] != 0
    if bool(is_token_BT.all()):
        return None
    change_BT = is_token_BT[:, 1:].int() - is_token_BT[:, :-1].int()
    lengths = is_token_BT.sum(1).tolist()
    if not bool((change_BT < 0).any()):
        return Padding("left", lengths)
    if not bool((change_BT > 0).any()):
        return Padding("right", lengths)
    raise UserError(
        "attention_mask has padding between tokens, or rows padded on different sides; pad all rows on the left "
        "(or all on the right, without a cache); after the virtual tokens of prompt tuning, give rows of equal length"
    )


def column_mask(attention_mask: Tensor) -> Tensor:
    """Return the mask of the columns (B, T): the mask itself, or of one with a row of keys for each column (B, T, T).

    Such a mask must let each token see itself and all tokens before it, and nothing else, as our models do. Rows of
    padding, whose results mean nothing, may also be zero.

    Raises:
        UserError: a column would see others than that.
    """
    if attention_mask.ndim != 3 or attention_mask.shape[1] != attention_mask.shape[2]:
        return attention_mask
    is_seen_BTT = attention_mask != 0
    is_token_BT = is_seen_BTT.diagonal(dim1=1, dim2=2)
    differs_BTT = is_seen_BTT != is_token_BT[:, None].expand_as(is_seen_BTT).tril()
    wrong_K3 = (differs_BTT & (is_seen_BTT | is_token_BT[:, :, None])).nonzero()
    if len(wrong_K3):
        row, column, key = wrong_K3[0].tolist()
        sees = "sees" if is_seen_BTT[row, column, key] else "does not see"
        raise UserError(
            f"attention_mask of shape {tuple(attention_mask.shape)}: in row {row} column {column} {sees} column {key}; "
            "each token sees itself and all tokens before it here, so give 1 for tokens and 0 for padding (batch, "
            "columns)"
        )
    return is_token_BT


class Step(NamedTuple):
    """What a reader returned for some columns of a batch."""

    hidden_BPX: Tensor
    """Hidden states; in each row the last ones are of tokens, those before them are meaningless."""
    lengths: list[int]
    """How many are of tokens."""
    column_BP: Tensor | None
    """The column of each token in the batch, or None where steps follow each other."""


def read_steps(
    reader: Reader,
    inputs_BTX: Tensor,
    padding: Padding | None,
    num_at_once: int,
    *,
    ends_together: bool = False,
    num_last: int | None = None,
) -> Iterator[Step]:
    """Read a batch, each row from its first token.

    Args:
        reader: rows that read the batch; they are after it then.
        inputs_BTX: token ids (B, T), or inputs of the first layer (B, T, D).
        padding: the padding of the batch, which is not read, or None if there is none.
        num_at_once: number of columns that are computed at once, counted from the first token of each row.
        ends_together: whether shorter rows begin later, so that the last steps are the last ones of all rows; else they
            end earlier.
        num_last: number of last steps that may have gradients, or None for all.

    Yields:
        each step, when it is asked for.
    """
    batch_size, num_columns = inputs_BTX.shape[:2]
    lengths = [num_columns] * batch_size if padding is None else padding.lengths
    num_steps = max(1, *(-(-length // num_at_once) for length in lengths))
    first_step = 0 if num_last is None else num_steps - num_last  # with gradients
    if padding is not None and padding.side == "left" and num_columns <= num_at_once:
        # for padding the model's results are arbitrary, different each time
        hidden_BPX = masked_padding(reader.step(inputs_BTX, lengths), lengths, 0)
        yield Step(hidden_BPX, lengths, None)
        return
    if padding is None:
        for index, part_BPX in enumerate(inputs_BTX.split(num_at_once, 1)):
            with torch.set_grad_enabled(torch.is_grad_enabled() and index >= first_step):
                hidden_BPX = reader.step(part_BPX)
            yield Step(hidden_BPX, [part_BPX.shape[1]] * batch_size, None)
        return
    device, row_B1 = inputs_BTX.device, torch.arange(batch_size)[:, None]
    length_B = torch.tensor(lengths)
    start_B = num_columns - length_B if padding.side == "left" else torch.zeros_like(length_B)
    num_skipped_B = num_steps - (-(-length_B // num_at_once)) if ends_together else torch.zeros_like(length_B)
    for index in range(num_steps):
        done_B = (index - num_skipped_B) * num_at_once
        unpadded_B = torch.where(done_B < 0, 0, (length_B - done_B).clamp(0, num_at_once))
        width = max(1, int(unpadded_B.max()))
        column_BP = (start_B + done_B + unpadded_B)[:, None] + torch.arange(width) - width
        column_BP = column_BP.clamp(0, num_columns - 1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and index >= first_step):
            hidden_BPX = reader.step(inputs_BTX[row_B1.to(device), column_BP.to(device)], unpadded_B.tolist())
        yield Step(hidden_BPX, unpadded_B.tolist(), column_BP)


def join_steps(steps: Iterable[Step], num_columns: int) -> Tensor:
    """Return what the steps of a batch returned, in its columns (B, T, X), 0 for padding."""
    parts, joined_BTX = list[Tensor](), None
    for hidden_BPX, lengths, column_BP in steps:
        if column_BP is None:
            parts.append(hidden_BPX)
            continue
        if joined_BTX is None:
            joined_BTX = hidden_BPX.new_zeros(len(hidden_BPX), num_columns, hidden_BPX.shape[-1])
        is_token_BP = torch.arange(column_BP.shape[1]) >= column_BP.shape[1] - torch.tensor(lengths)[:, None]
        row_K, index_K = is_token_BP.nonzero(as_tuple=True)
        column_K, device = column_BP[row_K, index_K], hidden_BPX.device
        row_K = row_K.to(device)
        joined_BTX = joined_BTX.index_put((row_K, column_K.to(device)), hidden_BPX[row_K, index_K.to(device)])
    if joined_BTX is not None:
        return joined_BTX
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def masked_padding(values_BTX: Tensor, lengths: list[int], value: float) -> Tensor:
    """Return values (B, T) or (B, T, X) with another value for padding, which comes first in each row."""
    width = values_BTX.shape[1]
    is_padding_BT = torch.arange(width) < width - torch.tensor(lengths)[:, None]
    is_padding_BTX = is_padding_BT.view(*is_padding_BT.shape, *[1] * (values_BTX.ndim - 2))
    return values_BTX.masked_fill(is_padding_BTX.to(values_BTX.device), value)
