"""Consecutive segments: a text is split into batch rows read in parallel, and each segment continues the previous one.

The N tokens become B batch rows; row b has the tokens from b*N//B to (b+1)*N//B, so row lengths differ by at most one.
Segment i covers the positions i*T to (i+1)*T of every row. A model that carries its memory from one segment to the next
reads each row as one continuous text. Every token is a target exactly once per epoch and is predicted from the
preceding token of the text, even at the start of a row. (The authors' iterators drop the N mod B last tokens, and the
first token of each row is never a target.)

Processes that train one model share the batch rows: each reads its shard of them, and all agree on every position.

Shape suffixes: B batch rows of a shard, T new tokens. N is the number of tokens in the text.
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
    """The next segment to read, which is the whole state of a dataset and is saved in checkpoints.

    It is valid for a dataset of the same tokens, batch size and segment length (and seed, if any), whatever the shard.
    """

    epoch: int = Field(default=0, ge=0)
    """Number of completed epochs."""
    segment_index: int = Field(default=0, ge=0)
    """Number of segments already read in this epoch."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The inputs and targets of one step; the arrays are new and may be modified."""

    inputs_BT: npt.NDArray[np.int64]
    """Token ids to read."""
    targets_BT: npt.NDArray[np.int64]
    """Token ids to predict: at each position the token after the input."""
    loss_mask_BT: npt.NDArray[np.bool_]
    """False for padding after the end of a batch row, which is excluded from the loss."""
    is_first: bool
    """True for the first segment of an epoch, which starts with empty memory."""

    @classmethod
    def empty(cls, shape: tuple[int, int], position: DatasetPosition, bos_token_id: int) -> Batch:
        """Return a batch of padding only: inputs `bos_token_id`, targets 0, loss mask False."""
        return cls(
            np.full(shape, bos_token_id, dtype=np.int64),
            np.zeros(shape, dtype=np.int64),
            np.zeros(shape, dtype=np.bool_),
            is_first=position.segment_index == 0,
        )

    def trimmed(self) -> Batch:
        """Return the batch without the positions that are padding in all rows."""
        length = int(self.loss_mask_BT.sum(axis=1).max())
        return Batch(
            self.inputs_BT[:, :length], self.targets_BT[:, :length], self.loss_mask_BT[:, :length], self.is_first
        )


class Shard(NamedTuple):
    """The batch rows that this process reads: part `index` of `count` parts.

    Rows are divided as torch divides a sharded tensor: into parts of equal size, except that the last may be smaller.
    """

    index: int = 0
    count: int = 1

    def batch_rows(self, batch_size: int) -> range:
        """Return the indices of the shard's rows in a batch of `batch_size` sequences over all shards.

        Raises:
            UserError: a shard would have no rows.
        """
        assert 0 <= self.index < self.count
        rows_per_shard = max(1, -(-batch_size // self.count))
        if (self.count - 1) * rows_per_shard >= batch_size:
            raise UserError(
                f"a batch of {batch_size} sequences, {rows_per_shard} for each process, leaves some of the "
                f"{self.count} processes without any; give --train.batch-size {rows_per_shard * self.count}, or start "
                f"{-(-batch_size // rows_per_shard)} processes"
            )
        return range(self.index * rows_per_shard, min((self.index + 1) * rows_per_shard, batch_size))


SINGLE_SHARD = Shard()
"""All batch rows, for a single process."""


class TokenDataset(Protocol):
    """A text in segments for training."""

    @property
    def tokens(self) -> Tokens:
        """(N,) ids of the whole text."""
        ...

    @property
    def batch_size(self) -> int:
        """Number of sequences in a batch, over all shards."""
        ...

    @property
    def segment_length(self) -> int:
        """T, number of new tokens of a sequence in one segment."""
        ...

    @property
    def local_batch_size(self) -> int:
        """B, the number of sequences in this shard's batches."""
        ...

    def segments_in(self, epoch: int) -> int:
        """Return the number of segments of an epoch: enough for the longest batch row of any shard."""
        ...

    def read(self, position: DatasetPosition) -> Batch:
        """Return the segment at a position, always of shape (B, T).

        After the end of a batch row the loss mask is False, the target 0 and the input `bos_token_id`.
        """
        ...

    def after(self, position: DatasetPosition) -> DatasetPosition:
        """Return the next position; after the last segment of an epoch, the first of the next epoch."""
        ...


@dataclass(frozen=True, eq=False)
class SegmentDataset:
    """A text as segments of B batch rows and T tokens, in order, read from where the tokens are stored.

    Raises:
        UserError: batch size or segment length below 1, fewer tokens than batch rows, or fewer rows than shards.
    """

    tokens: Tokens
    """(N,) ids; may be on disk."""
    _: KW_ONLY
    batch_size: int
    """Number of sequences in a batch, over all shards."""
    segment_length: int
    """T, number of new tokens of a sequence in one segment."""
    bos_token_id: int
    """The input before the first token of the text, and in padding."""
    shard: Shard = SINGLE_SHARD
    """Which of the batch rows are read."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        assert self.tokens.ndim == 1
        check_sizes(self)
        self.shard.batch_rows(self.batch_size)
        if len(self.tokens) < self.batch_size:
            raise UserError(
                f"the text has {len(self.tokens):,} tokens, and a batch of {self.batch_size:,} sequences needs one for "
                "each; lower the batch size or give more text"
            )

    @property
    def local_batch_size(self) -> int:
        """B, the number of sequences in this shard's batches."""
        return len(self.shard.batch_rows(self.batch_size))

    @property
    def num_segments(self) -> int:
        """Number of segments of an epoch: enough for the longest batch row."""
        longest = -(-len(self.tokens) // self.batch_size)
        return -(-longest // self.segment_length)

    def segments_in(self, epoch: int) -> int:
        """Return the number of segments of an epoch, which is the same for all epochs."""
        return self.num_segments

    def read(self, position: DatasetPosition) -> Batch:
        """Return the segment at a position; it is the same in every epoch."""
        assert position.segment_index < self.num_segments
        batch = Batch.empty((self.local_batch_size, self.segment_length), position, self.bos_token_id)
        for index, row in enumerate(self.shard.batch_rows(self.batch_size)):
            start, stop = self._target_range(row, position.segment_index)
            length = stop - start
            batch.targets_BT[index, :length] = self.tokens[start:stop]
            batch.loss_mask_BT[index, :length] = True
            first = 1 if start == 0 else 0  # the text's first token is predicted from bos_token_id
            batch.inputs_BT[index, first:length] = self.tokens[start + first - 1 : stop - 1]
        return batch

    def after(self, position: DatasetPosition) -> DatasetPosition:
        """Return the next position; after the last segment of an epoch, the first of the next epoch."""
        return next_position(position, self)

    def _target_range(self, row: int, segment_index: int) -> tuple[int, int]:
        """Return start and stop of a batch row's targets in a segment; they are equal after the end of the row."""
        row_start, row_stop = (edge * len(self.tokens) // self.batch_size for edge in (row, row + 1))
        # start <= row_stop: the last segment begins inside the longest row; others are at most one token shorter.
        start = row_start + segment_index * self.segment_length
        return start, min(start + self.segment_length, row_stop)


def next_position(position: DatasetPosition, dataset: TokenDataset) -> DatasetPosition:
    """Return the position after this one."""
    if position.segment_index + 1 < dataset.segments_in(position.epoch):
        return DatasetPosition(epoch=position.epoch, segment_index=position.segment_index + 1)
    return DatasetPosition(epoch=position.epoch + 1, segment_index=0)


def check_sizes(dataset: TokenDataset) -> None:
    """Check the batch size and the segment length.

    Raises:
        UserError: either is below 1.
    """
    if dataset.batch_size < 1 or dataset.segment_length < 1:
        raise UserError(
            f"batch size {dataset.batch_size} and segment length {dataset.segment_length} were given; both must be at "
            "least 1"
        )


def check_training(dataset: TokenDataset) -> None:
    """Check that a text is long enough to train on: one whole segment for every batch row.

    Raises:
        UserError: the text is too short; the message has its length and the required number of tokens.
    """
    needed = dataset.batch_size * dataset.segment_length
    if len(dataset.tokens) < needed:
        raise UserError(
            f"the training text has {len(dataset.tokens):,} tokens, and a batch of {dataset.batch_size:,} sequences of "
            f"{dataset.segment_length:,} tokens needs {needed:,}; lower --train.batch-size or --train.segment-length, "
            "or give more text"
        )
