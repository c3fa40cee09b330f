"""Reads integer arrays in .npy files as text for the integer tokenizer, with one line for each row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error

_CHUNK_VALUES = 2**16
# What numpy raises for damaged files.
_DAMAGED = (ValueError, EOFError, SyntaxError, TokenError, TypeError, OverflowError)


@dataclass(frozen=True)
class ArrayRange:
    """The values from `start` to `stop` of a .npy file, iterated as chunks of text with one line per row.

    Positions count values in row-major order. Each row of a 2-D array is a sequence; a 1-D array is one sequence. The
    file is memory-mapped while iterated. A row that crosses `start` or `stop` is split into two lines.
    """

    path: Path
    start: int
    stop: int

    @classmethod
    def whole(cls, path: Path) -> ArrayRange:
        """Return the range of a whole file.

        Raises:
            UserError: the file is not a one- or two-dimensional array of integers, is empty, or cannot be read.
        """
        return cls(path, 0, _open_array(path).size)

    @property
    def name(self) -> str:
        """Path and start, for messages."""
        return f"{self.path}, from value {self.start:,} on" if self.start else str(self.path)

    def size(self) -> int:
        """Return the number of values."""
        return self.stop - self.start

    def row_end(self, position: int) -> int:
        """Return the first position at or after `position` at which a row ends; in a 1-D array, `position` itself."""
        array = _open_array(self.path)
        row_length = array.shape[1] if array.ndim == 2 else 1
        return -(-position // row_length) * row_length

    def __iter__(self) -> Iterator[bytes]:
        """Read the chunks.

        Raises:
            UserError: the file cannot be read, or was truncated meanwhile.
        """
        array = _open_array(self.path)
        if array.size < self.stop:
            raise UserError(f"{self.path} became shorter while it was read; try again once it is complete")
        for first in range(self.start, self.stop, _CHUNK_VALUES):
            values = array.flat[first : min(first + _CHUNK_VALUES, self.stop)]
            yield "".join(
                f"{value}\n" if next_position % array.shape[-1] == 0 or next_position == self.stop else f"{value} "
                for next_position, value in enumerate(values.tolist(), first + 1)
            ).encode("ascii")


def _open_array(path: Path) -> npt.NDArray[np.integer[Any]]:
    with as_user_error(f"reading {path}"):
        try:
            array = np.lib.format.open_memmap(path, mode="r")
        except _DAMAGED:
            # numpy's messages are misleading here: some are about pickle or function arguments.
            raise UserError(
                f"{path}: damaged, or not a .npy file of integers; write it again with numpy.save(file, "
                "array.astype('int64'))"
            ) from None
    if array.dtype.kind not in "iu":
        raise UserError(f"{path}: has {array.dtype}, expected integers; convert it with array.astype('int64')")
    if array.ndim not in (1, 2):
        raise UserError(
            f"{path}: an array of {array.ndim} dimensions, expected 1 (one sequence) or 2 (a sequence in each row)"
        )
    if not array.size:
        raise UserError(f"{path}: an empty array; leave it out")
    return array
