"""Whole numbers in .npy files, read as text: a line of numbers for each row."""

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

_NUMBERS_AT_ONCE = 2**16
_DAMAGED = (ValueError, EOFError, SyntaxError, TokenError, TypeError, OverflowError)  # what numpy raises for such files


@dataclass(frozen=True)
class ArrayPart:
    """The numbers `start` to `stop` of a .npy file, row after row, as lines of text, in pieces.

    A 2-D array is a sequence a row, a 1-D array one sequence. The file is opened only while it is gone through, and
    then mapped, not loaded. A row that is cut becomes two lines.
    """

    path: Path
    start: int
    stop: int
    below: int = MAX_VALUES
    """Every number must be smaller, and not negative."""

    @classmethod
    def whole(cls, path: Path) -> ArrayPart:
        """All of a file.

        Raises:
            UserError: it is not an array of whole numbers of one or two dimensions, is empty, or cannot be read.
        """
        return cls(path, 0, _mapped(path).size)

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"{self.path}, from number {self.start:,} on" if self.start else str(self.path)

    def size(self) -> int:
        """How many numbers it holds."""
        return self.stop - self.start

    def row_end(self, place: int) -> int:
        """The first place from `place` on that does not cut a row of a 2-D array; a 1-D array may be cut anywhere."""
        array = _mapped(self.path)
        width = array.shape[1] if array.ndim == 2 else 1
        return -(-place // width) * width

    def __iter__(self) -> Iterator[bytes]:
        """Reads the part.

        Raises:
            UserError: the file cannot be read, has changed, or holds a number out of range.
        """
        array = _mapped(self.path)
        if array.size < self.stop:
            raise UserError(f"{self.path} became shorter while it was read; try again once it no longer changes")
        width = array.shape[-1]
        rows = array.reshape(1, -1) if array.ndim == 1 else array
        lines: list[str] = []
        held = 0
        for row in range(self.start // width, -(-self.stop // width)):
            first, last = max(self.start - row * width, 0), min(self.stop - row * width, width)
            for begin in range(first, last, _NUMBERS_AT_ONCE):
                numbers = rows[row, begin : min(begin + _NUMBERS_AT_ONCE, last)].tolist()
                if min(numbers) < 0 or max(numbers) >= self.below:
                    wrong = next(place for place, number in enumerate(numbers) if not 0 <= number < self.below)
                    raise self._out_of_range(numbers[wrong], (row, begin + wrong)[-array.ndim :])
                lines.append(" ".join(map(str, numbers)))
                lines.append("\n" if begin + _NUMBERS_AT_ONCE >= last else " ")
                held += len(numbers)
                if held >= _NUMBERS_AT_ONCE:
                    yield "".join(lines).encode("ascii")
                    lines.clear()
                    held = 0
        if lines:
            yield "".join(lines).encode("ascii")

    def _out_of_range(self, number: int, place: tuple[int, ...]) -> UserError:
        where = ", ".join(map(str, place))
        fits = 0 <= number < MAX_VALUES
        cure = "give --tokenizer integer and a larger --vocab-size" if fits else "number the values anew from 0"
        return UserError(
            f"{self.path}: array[{where}] is {number}, wanted a whole number from 0 to {self.below - 1}; take it out, "
            f"or {cure}"
        )


def limited(documents: Iterable[Document], below: int) -> list[Document]:
    """The documents, those of arrays refusing numbers from `below` on by their place in the array."""
    return [
        replace(document, chunks=replace(document.chunks, below=below))
        if isinstance(document.chunks, ArrayPart)
        else document
        for document in documents
    ]


def _mapped(path: Path) -> npt.NDArray[np.integer[Any]]:
    with as_user_error(f"reading {path}"):
        try:
            array = np.lib.format.open_memmap(path, mode="r")
        except _DAMAGED:
            # Not numpy's own words: some are about pickle and options of functions.
            raise UserError(
                f"{path}: not a whole .npy file of whole numbers; write it anew with numpy.save(file, "
                "array.astype('int64'))"
            ) from None
    if array.dtype.kind not in "iu":
        raise UserError(f"{path}: holds {array.dtype}, wanted whole numbers; convert it with array.astype('int64')")
    if array.ndim not in (1, 2):
        raise UserError(f"{path}: an array of {array.ndim} dimensions, wanted 1 (one sequence) or 2 (a sequence a row)")
    if not array.size:
        raise UserError(f"{path}: an array without numbers; leave it out")
    return array
