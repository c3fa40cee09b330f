"""Token ids as a model accepts them: tensors, arrays or lists of any integer dtype, converted and checked.

An id outside the vocabulary is an error wherever the lookups by themselves would accept it: with several tables
(`adaptive.py`) it would select the embedding of another token, and torch's cross-entropy ignores the target -100. Ids
on the CPU are checked at once. For ids on a GPU the check is queued there, since reading them would synchronize.

Shape suffixes: B batch size, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transformer_xl.config import UserError

TokenIds = Tensor | npt.NDArray[np.integer[Any]] | Sequence[int] | Sequence[Sequence[int]]
"""Token ids of shape (B, T), or (T,) for one batch row, of any integer dtype."""


def as_token_ids(ids: TokenIds, vocab_size: int, name: str) -> Tensor:
    """Return token ids as an int64 tensor of shape (B, T), on the device they are on.

    Args:
        ids: tensor, array or list; of shape (T,) it becomes one batch row.
        vocab_size: V; ids must be 0 to V - 1.
        name: name of the argument, with which messages begin.

    Raises:
        UserError: these are not integers, the shape is another one, or an id on the CPU is outside the vocabulary.
    """
    if not isinstance(ids, Tensor):
        try:
            array = np.asarray(ids)
        except (ValueError, TypeError, RuntimeError):  # such as lists of different lengths
            raise UserError(f"{name} is not rectangular; expected integers of shape (batch, tokens)") from None
        if not array.size or array.dtype.kind not in "iu":
            raise UserError(_unexpected(name, array.shape, array.dtype))
        _check_range(int(array.min()), int(array.max()), vocab_size, name)
        ids = torch.from_numpy(array.astype(np.int64))
    elif ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UserError(_unexpected(name, ids.shape, ids.dtype))
    elif ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        lowest, highest = ids.long().aminmax()  # long: torch has no aminmax for most unsigned dtypes
        _check_range(int(lowest), int(highest), vocab_size, name)
    ids_BT = ids[None] if ids.ndim == 1 else ids
    if ids_BT.ndim != 2 or not ids_BT.numel():
        raise UserError(_unexpected(name, ids.shape, ids.dtype))
    return ids_BT.long()


def assert_in_vocabulary(ids: Tensor, vocab_size: int) -> None:
    """Check ids that are on a GPU, or in code that is being compiled, without waiting for the device.

    An id outside the vocabulary is reported by the device, as a RuntimeError at one of the next operations.
    """
    if ids.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(((ids >= 0) & (ids < vocab_size)).all(), "a token id is not in the model's vocabulary")


def _check_range(lowest: int, highest: int, vocab_size: int, name: str) -> None:
    if lowest >= 0 and highest < vocab_size:
        return
    wrong = lowest if lowest < 0 else highest
    message = f"{name}: token id {wrong} is not in the vocabulary of {vocab_size:,}; give 0 to "
    ignored = "; to ignore a target, multiply its loss by 0" if lowest == -100 else ""
    raise UserError(f"{message}{vocab_size - 1}{ignored}")


def _unexpected(name: str, shape: Sequence[int], dtype: object) -> str:
    return (
        f"{name} of shape {tuple(shape)}, {dtype}; expected integers of shape (batch, tokens), with one token or more"
    )
