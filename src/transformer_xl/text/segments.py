"""Ordered segments: a text cut into rows that are read side by side, each segment continuing the one before.

The N tokens become B rows; row b holds the tokens b*N//B up to (b+1)*N//B, so rows differ by one token at most. Segment
i holds the places i*T up to (i+1)*T of every row. A model that carries its memory from one segment to the next reads
each row as one unbroken text. Every token is a target exactly once an epoch, predicted from the token before it in the
text, also across the edge of a row. (The authors' iterators drop the N mod B last tokens, and the first of each row is
never a target.)

Several processes that train one model share the rows: each reads its shard of them, and all agree on every position.

Shape suffixes: B rows of a shard, T new tokens.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import Field

from transformer_xl.config import Settings, UserError
from transformer_xl.text.token_store import Tokens


class DatasetPosition(Settings):
    """Which segment comes next: all there is to the state of a stream.

    `model_dump()` gives it as plain values, and `config.check_settings(StreamPosition, values, source)` takes them
    back. It holds for a stream of the same tokens, rows and segment (and seed, where there is one), whatever the shard.
    """

    epoch: int = Field(default=0, ge=0)
    """Times the whole text was read."""
    segment_index: int = Field(default=0, ge=0)
    """Segments read of this epoch."""


@dataclass(frozen=True, eq=False)
class Batch:
    """What a model reads in one step; its arrays are the reader's own."""

    inputs_BT: npt.NDArray[np.int64]
    """Token ids to read."""
    targets_BT: npt.NDArray[np.int64]
    """Token ids to predict: at each place the one that follows the input."""
    loss_mask_BT: npt.NDArray[np.bool_]
    """False past the end of a row, where there is padding that must not count."""
    is_first: bool
    """True for the first segment of an epoch: memory must be fresh."""

    @classmethod
    def empty(cls, shape: tuple[int, int], position: DatasetPosition, bos_token_id: int) -> Batch:
        """A segment of padding only: inputs `start_id`, targets 0, nothing counted."""
        return cls(
            np.full(shape, bos_token_id, dtype=np.int64),
            np.zeros(shape, dtype=np.int64),
            np.zeros(shape, dtype=np.bool_),
            is_first=position.segment_index == 0,
        )

    def trimmed(self) -> Batch:
        """The segment without the places where no row counts; with one row, no padding is left."""
        width = int(self.loss_mask_BT.sum(axis=1).max())
        return Batch(self.inputs_BT[:, :width], self.targets_BT[:, :width], self.loss_mask_BT[:, :width], self.is_first)


class Shard(NamedTuple):
    """Which of all rows are read here: of `count` parts, the part with number `index`.

    Parts are cut as torch cuts a sharded tensor: all of one size, but the last one, which may be smaller.
    """

    index: int = 0
    count: int = 1

    def rows_of(self, batch_size: int) -> range:
        """The numbers of its batch_size, of so many in all.

        Raises:
            UserError: some part would have no batch_size.
        """
        assert 0 <= self.index < self.count
        each = max(1, -(-batch_size // self.count))
        if (self.count - 1) * each >= batch_size:
            raise UserError(
                f"{batch_size} batch_size, {each} for each process, leave some of the {self.count} processes without any; give "
                f"--train.batch-size {each * self.count}, or start {-(-batch_size // each)} of them"
            )
        return range(self.index * each, min((self.index + 1) * each, batch_size))


SINGLE_SHARD = Shard()
"""All rows are read here."""


class TokenDataset(Protocol):
    """A text in segments: what training needs of it."""

    @property
    def tokens(self) -> Tokens:
        """(N,) ids of the whole text."""
        ...

    @property
    def batch_size(self) -> int:
        """Rows of all shards together."""
        ...

    @property
    def segment_length(self) -> int:
        """T: new tokens of a row in one segment."""
        ...

    @property
    def shard_rows(self) -> int:
        """B: rows that are read here."""
        ...

    def segments_in(self, epoch: int) -> int:
        """Number of segments of this epoch: enough for the longest row of any shard."""
        ...

    def read(self, position: DatasetPosition) -> Batch:
        """The segment at this position, always of shape (B, T).

        Places past the end of a row have counted False, target 0 and input start_id.
        """
        ...

    def after(self, position: DatasetPosition) -> DatasetPosition:
        """The position that follows; after the last segment of an epoch, the first of the next."""
        ...


@dataclass(frozen=True, eq=False)
class SegmentDataset:
    """A text as segments of B rows and T tokens, each read straight from where the tokens lie.

    Raises:
        UserError: rows or segment below 1, fewer tokens than rows, or rows that the shards cannot share.
    """

    tokens: Tokens
    """(N,) ids; may lie on disk."""
    _: KW_ONLY
    batch_size: int
    """Stretches read side by side, in all shards together."""
    segment_length: int
    """T: new tokens of a row in one segment."""
    bos_token_id: int
    """The token taken as read before the text begins; also fills padding."""
    shard: Shard = SINGLE_SHARD
    """Which of the rows are read here."""

    def __post_init__(self) -> None:
        """Checks the sizes."""
        assert self.tokens.ndim == 1
        check_sizes(self)
        self.shard.rows_of(self.batch_size)
        if len(self.tokens) < self.batch_size:
            raise UserError(
                f"the text has {len(self.tokens):,} tokens for {self.batch_size:,} rows, and each row needs one; "
                "lower the rows or give more text"
            )

    @property
    def shard_rows(self) -> int:
        """B: rows that are read here."""
        return len(self.shard.rows_of(self.batch_size))

    @property
    def num_segments(self) -> int:
        """Segments of an epoch: enough for the longest row."""
        longest = -(-len(self.tokens) // self.batch_size)
        return -(-longest // self.segment_length)

    def segments_in(self, epoch: int) -> int:
        """The same in every epoch."""
        return self.num_segments

    def read(self, position: DatasetPosition) -> Batch:
        """The segment at this position; epochs do not differ."""
        assert position.segment_index < self.num_segments
        segment = Batch.empty((self.shard_rows, self.segment_length), position, self.bos_token_id)
        for place, row in enumerate(self.shard.rows_of(self.batch_size)):
            start, stop = self._span(row, position.segment_index)
            width = stop - start
            segment.targets_BT[place, :width] = self.tokens[start:stop]
            segment.loss_mask_BT[place, :width] = True
            first = 1 if start == 0 else 0  # nothing stands before the text; its place keeps start_id
            segment.inputs_BT[place, first:width] = self.tokens[start + first - 1 : stop - 1]
        return segment

    def after(self, position: DatasetPosition) -> DatasetPosition:
        """The position that follows; after the last segment of an epoch, the first of the next."""
        return following(position, self)

    def _span(self, row: int, index: int) -> tuple[int, int]:
        """Places in the text of the targets of a row in segment `index`; equal ones where the row has ended."""
        begin, end = (edge * len(self.tokens) // self.batch_size for edge in (row, row + 1))
        # Never past the end: the last segment begins before the longest row ends, and others are one token shorter.
        start = begin + index * self.segment_length
        return start, min(start + self.segment_length, end)


def following(position: DatasetPosition, stream: TokenDataset) -> DatasetPosition:
    """The position that follows in this stream."""
    if position.segment_index + 1 < stream.segments_in(position.epoch):
        return DatasetPosition(epoch=position.epoch, segment_index=position.segment_index + 1)
    return DatasetPosition(epoch=position.epoch + 1, segment_index=0)


def check_sizes(stream: TokenDataset) -> None:
    """Checks that there are rows and segments.

    Raises:
        UserError: rows or segment below 1.
    """
    if stream.batch_size < 1 or stream.segment_length < 1:
        raise UserError(
            f"rows {stream.batch_size} and segment {stream.segment_length} were given; both must be at least 1"
        )


def check_training(stream: TokenDataset) -> None:
    """Checks that there is a segment for every row at least.

    Raises:
        UserError: it does not; the message says how many tokens there are and how many are needed.
    """
    needed = stream.batch_size * stream.segment_length
    if len(stream.tokens) < needed:
        raise UserError(
            f"the training text has {len(stream.tokens):,} tokens, and {stream.batch_size:,} rows of a segment of "
            f"{stream.segment_length:,} tokens need {needed:,}; lower --train.batch-size or --train.segment-length, or give more text"
        )
