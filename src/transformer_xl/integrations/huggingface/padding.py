"""Batches with padding: which columns an attention mask marks as padding, and how rows of unequal lengths are read.

Shape suffixes: B batch rows, T columns of the input, P columns of a step, D model width, K tokens of a step, X any
size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    lengths = is_token_BT.sum(1).tolist()
    if not bool((change_BT < 0).any()):
        return Padding("left", lengths)
    if not bool((change_BT > 0).any()):
        return Padding("right", lengths)
    raise UserError(
        "attention_mask has padding between tokens, or rows padded on different sides; pad all rows on the left "
        "(or all on the right, without a cache)"
    )


def read_columns(reader: Reader, inputs_BTX: Tensor, lengths: list[int] | None, num_at_once: int) -> Tensor:
    """Return the hidden states of a batch (B, T, D), 0 for padding.

    Args:
        reader: rows that read the batch; they are after it then.
        inputs_BTX: token ids (B, T), or inputs of the first layer (B, T, D).
        lengths: number of columns of each row that are not padding, which comes first, or None if there is none.
        num_at_once: number of columns that are computed at once, counted from the first token of each row.
    """
    num_columns = inputs_BTX.shape[1]
    if lengths is None or num_columns <= num_at_once:
        steps = [reader.step(part_BPX, lengths) for part_BPX in inputs_BTX.split(num_at_once, 1)]
        # for padding the model's results are arbitrary, different each time
        steps = steps if lengths is None else [masked_padding(step_BPD, lengths, 0) for step_BPD in steps]
        return steps[0] if len(steps) == 1 else torch.cat(steps, dim=1)
    device, hidden_BTD = inputs_BTX.device, None
    lengths_B, row_B1 = torch.tensor(lengths), torch.arange(len(lengths))[:, None]
    for start in range(0, max(1, *lengths), num_at_once):
        unpadded_B = (lengths_B - start).clamp(0, num_at_once)
        width = max(1, int(unpadded_B.max()))
        index_P = torch.arange(width)
        column_BP = (num_columns - lengths_B + start + unpadded_B)[:, None] + index_P - width
        column_BP = column_BP.clamp(0, num_columns - 1)
        step_BPD = reader.step(inputs_BTX[row_B1.to(device), column_BP.to(device)], unpadded_B.tolist())
        if hidden_BTD is None:
            hidden_BTD = step_BPD.new_zeros(*inputs_BTX.shape[:2], step_BPD.shape[-1])
        row_K, index_K = (index_P >= width - unpadded_B[:, None]).nonzero(as_tuple=True)
        places = row_K.to(device), column_BP[row_K, index_K].to(device)
        hidden_BTD = hidden_BTD.index_put(places, step_BPD[row_K.to(device), index_K.to(device)])
    assert hidden_BTD is not None
    return hidden_BTD


def masked_padding(values_BTX: Tensor, lengths: list[int], value: float) -> Tensor:
    """Return values (B, T) or (B, T, X) with another value for padding, which comes first in each row."""
    width = values_BTX.shape[1]
    is_padding_BT = torch.arange(width) < width - torch.tensor(lengths)[:, None]
    is_padding_BTX = is_padding_BT.view(*is_padding_BT.shape, *[1] * (values_BTX.ndim - 2))
    return values_BTX.masked_fill(is_padding_BTX.to(values_BTX.device), value)
