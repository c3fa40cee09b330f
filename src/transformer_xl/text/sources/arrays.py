"""Whole numbers in .npy files, read as text: a line of numbers for each row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer_xl.config import UserError
from transformer_xl.files import explained

_NUMBERS_AT_ONCE = 2**16


@dataclass(frozen=True)
class ArrayPart:
    """The numbers `start` to `stop` of a .npy file, row after row, as lines of text, in pieces.

    A 2-D array is a sequence a row, a 1-D array one sequence. The file is opened only while it is gone through, and
    then mapped, not loaded. A row that is cut becomes two lines.
    """

    path: Path
    start: int
    stop: int

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
            UserError: the file cannot be read, or has changed.
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
                lines.append(" ".join(map(str, numbers)))
                lines.append("\n" if begin + _NUMBERS_AT_ONCE >= last else " ")
                held += len(numbers)
                if held >= _NUMBERS_AT_ONCE:
                    yield "".join(lines).encode("ascii")
                    lines.clear()
                    held = 0
        if lines:
            yield "".join(lines).encode("ascii")


def _mapped(path: Path) -> npt.NDArray[np.integer[Any]]:
    with explained(f"reading {path}"):
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise UserError(
                f"{path}: not a whole .npy file of numbers ({error}); write it anew with numpy.save"
            ) from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        found = array.dtype if isinstance(array, np.ndarray) else "several arrays"
        raise UserError(f"{path}: holds {found}, wanted whole numbers; convert it with array.astype('int64')")
    if array.ndim not in (1, 2):
        raise UserError(f"{path}: an array of {array.ndim} dimensions, wanted 1 (one sequence) or 2 (a sequence a row)")
    if not array.size:
        raise UserError(f"{path}: an array without numbers; leave it out")
    return array
