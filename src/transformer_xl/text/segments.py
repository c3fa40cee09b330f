"""Ordered segments: a text cut into rows that are read side by side, each segment continuing the one before.

The N tokens become B rows; row b holds the tokens b*N//B up to (b+1)*N//B, so rows differ by one token at most. Segment
i holds the places i*T up to (i+1)*T of every row. A model that carries its memory from one segment to the next reads
each row as one unbroken text. Every token is a target exactly once an epoch, predicted from the token before it in the
text, also across the edge of a row. (The authors' iterators drop the N mod B last tokens, and the first of each row is
never a target.)

Shape suffixes: B rows, T new tokens.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np
import numpy.typing as npt
from pydantic import Field

from transformer_xl.config import Settings, UserError
from transformer_xl.text.vocabulary import TokenArray


class StreamPosition(Settings):
    """Which segment comes next: all there is to the state of a stream.

    `model_dump()` gives it as plain values, and `config.check_settings(StreamPosition, values, source)` takes them
    back. It holds for a stream of the same tokens, rows and segment.
    """

    epoch: int = Field(default=0, ge=0)
    """Times the whole text was read."""
    segment: int = Field(default=0, ge=0)
    """Segments read of this epoch."""


@dataclass(frozen=True, eq=False)
class Segment:
    """What a model reads in one step; its arrays are the reader's own."""

    inputs_BT: npt.NDArray[np.int64]
    """Token ids to read."""
    targets_BT: npt.NDArray[np.int64]
    """Token ids to predict: at each place the one that follows the input."""
    counted_BT: npt.NDArray[np.bool_]
    """False past the end of a row, where there is padding that must not count."""
    starts: bool
    """True for the first segment of an epoch: memory must be fresh."""

    def trimmed(self) -> Segment:
        """The segment without the places where no row counts; with one row, no padding is left."""
        width = int(self.counted_BT.sum(axis=1).max())
        return Segment(self.inputs_BT[:, :width], self.targets_BT[:, :width], self.counted_BT[:, :width], self.starts)


@dataclass(frozen=True, eq=False)
class SegmentStream:
    """A text as segments of B rows and T tokens, each read straight from where the tokens lie.

    Raises:
        UserError: rows or segment below 1, or fewer tokens than rows.
    """

    tokens: TokenArray
    """(N,) ids; may be a memory map."""
    _: KW_ONLY
    rows: int
    """B: stretches read side by side."""
    segment: int
    """T: new tokens of a row in one segment."""
    start_id: int
    """The token taken as read before the text begins; also fills padding."""

    def __post_init__(self) -> None:
        """Checks the sizes."""
        assert self.tokens.ndim == 1
        if self.rows < 1 or self.segment < 1:
            raise UserError(f"rows {self.rows} and segment {self.segment} were given; both must be at least 1")
        if len(self.tokens) < self.rows:
            raise UserError(
                f"the text has {len(self.tokens):,} tokens for {self.rows:,} rows, and each row needs one; "
                "lower the rows or give more text"
            )

    @property
    def num_segments(self) -> int:
        """Segments of an epoch: enough for the longest row."""
        longest = -(-len(self.tokens) // self.rows)
        return -(-longest // self.segment)

    def read(self, index: int) -> Segment:
        """Segment `index` of an epoch, always of shape (B, T).

        Places past the end of a row have counted False, target 0 and input start_id.
        """
        assert 0 <= index < self.num_segments
        shape = (self.rows, self.segment)
        inputs_BT = np.full(shape, self.start_id, dtype=np.int64)
        targets_BT = np.zeros(shape, dtype=np.int64)
        counted_BT = np.zeros(shape, dtype=np.bool_)
        for row in range(self.rows):
            start, stop = self._span(row, index)
            width = stop - start
            targets_BT[row, :width] = self.tokens[start:stop]
            counted_BT[row, :width] = True
            first = 1 if start == 0 else 0  # nothing stands before the text; its place keeps start_id
            inputs_BT[row, first:width] = self.tokens[start + first - 1 : stop - 1]
        return Segment(inputs_BT, targets_BT, counted_BT, starts=index == 0)

    def after(self, position: StreamPosition) -> StreamPosition:
        """The position that follows; after the last segment of an epoch, the first of the next."""
        if position.segment + 1 < self.num_segments:
            return StreamPosition(epoch=position.epoch, segment=position.segment + 1)
        return StreamPosition(epoch=position.epoch + 1, segment=0)

    def _span(self, row: int, index: int) -> tuple[int, int]:
        """Places in the text of the targets of a row in segment `index`; equal ones where the row has ended."""
        begin, end = (edge * len(self.tokens) // self.rows for edge in (row, row + 1))
        # Never past the end: the last segment begins before the longest row ends, and others are one token shorter.
        start = begin + index * self.segment
        return start, min(start + self.segment, end)


def check_training(stream: SegmentStream) -> None:
    """Checks that every row fills one segment at least.

    Raises:
        UserError: it does not; the message says how many tokens there are and how many are needed.
    """
    needed = stream.rows * stream.segment
    if len(stream.tokens) < needed:
        raise UserError(
            f"the training text has {len(stream.tokens):,} tokens, and {stream.rows:,} rows of a segment of "
            f"{stream.segment:,} tokens need {needed:,}; lower --train.rows or --train.segment, or give more text"
        )
