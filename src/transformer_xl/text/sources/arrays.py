"""Integers in .npy files, read as text: a line of numbers for each row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error
from transformer_xl.text.documents import Document
from transformer_xl.text.tokenizers.integer import MAX_VALUES

_CHUNK_NUMBERS = 2**16
_DAMAGED = (ValueError, EOFError, SyntaxError, TokenError, TypeError, OverflowError)  # what numpy raises for such files


@dataclass(frozen=True)
class ArrayRange:
    """The numbers `start` to `stop` of a .npy file in row order, iterated as chunks of text with a line for each row.

    A 2-D array has a sequence in each row, a 1-D array is one sequence. The file is memory-mapped while iterated. A
    row that is cut becomes two lines.
    """

    path: Path
    start: int
    stop: int
    below: int = MAX_VALUES
    """Upper bound of the numbers, exclusive; they must not be negative."""

    is_compressed = False
    known_num_bytes = 0

    @classmethod
    def whole(cls, path: Path) -> ArrayRange:
        """Return all of a file.

        Raises:
            UserError: it is not a one- or two-dimensional array of integers, is empty, or cannot be read.
        """
        return cls(path, 0, _open_array(path).size)

    @property
    def name(self) -> str:
        """Path and start, for messages."""
        return f"{self.path}, from number {self.start:,} on" if self.start else str(self.path)

    def size(self) -> int:
        """Return the length in the unit of `start` and `stop`: numbers."""
        return self.stop - self.start

    def row_end(self, position: int) -> int:
        """Return the first position from `position` on that does not cut a row of a 2-D array."""
        array = _open_array(self.path)
        row_length = array.shape[1] if array.ndim == 2 else 1
        return -(-position // row_length) * row_length

    def __iter__(self) -> Iterator[bytes]:
        """Read the chunks.

        Raises:
            UserError: the file cannot be read, has changed, or holds a number out of range.
        """
        array = _open_array(self.path)
        if array.size < self.stop:
            raise UserError(f"{self.path} became shorter while it was read; try again once it is complete")
        row_length = array.shape[-1]
        rows = array.reshape(1, -1) if array.ndim == 1 else array
        lines: list[str] = []
        num_held = 0
        for row in range(self.start // row_length, -(-self.stop // row_length)):
            first, last = max(self.start - row * row_length, 0), min(self.stop - row * row_length, row_length)
            for begin in range(first, last, _CHUNK_NUMBERS):
                numbers = rows[row, begin : min(begin + _CHUNK_NUMBERS, last)].tolist()
                if min(numbers) < 0 or max(numbers) >= self.below:
                    wrong = next(index for index, number in enumerate(numbers) if not 0 <= number < self.below)
                    raise self._out_of_range(numbers[wrong], (row, begin + wrong)[-array.ndim :])
                lines.append(" ".join(map(str, numbers)))
                lines.append("\n" if begin + _CHUNK_NUMBERS >= last else " ")
                num_held += len(numbers)
                if num_held >= _CHUNK_NUMBERS:
                    yield "".join(lines).encode("ascii")
                    lines.clear()
                    num_held = 0
        if lines:
            yield "".join(lines).encode("ascii")

    def _out_of_range(self, number: int, index: tuple[int, ...]) -> UserError:
        fits = 0 <= number < MAX_VALUES
        advice = "give --tokenizer integer and a larger --vocab-size" if fits else "renumber the values from 0"
        return UserError(
            f"{self.path}: array[{', '.join(map(str, index))}] is {number}, wanted an integer from 0 to "
            f"{self.below - 1}; remove it, or {advice}"
        )


def limit_numbers(documents: Iterable[Document], below: int) -> list[Document]:
    """Return the documents; those of arrays refuse numbers from `below` on, with their index in the array."""
    return [
        replace(document, chunks=replace(document.chunks, below=below))
        if isinstance(document.chunks, ArrayRange)
        else document
        for document in documents
    ]


def _open_array(path: Path) -> npt.NDArray[np.integer[Any]]:
    with as_user_error(f"reading {path}"):
        try:
            array = np.lib.format.open_memmap(path, mode="r")
        except _DAMAGED:
            # Not numpy's own message: some are about pickle and arguments of functions.
            raise UserError(
                f"{path}: damaged, or not a .npy file of integers; write it again with numpy.save(file, "
                "array.astype('int64'))"
            ) from None
    if array.dtype.kind not in "iu":
        raise UserError(f"{path}: has {array.dtype}, wanted integers; convert it with array.astype('int64')")
    if array.ndim not in (1, 2):
        raise UserError(
            f"{path}: an array of {array.ndim} dimensions, wanted 1 (one sequence) or 2 (a sequence in each row)"
        )
    if not array.size:
        raise UserError(f"{path}: an empty array; leave it out")
    return array
