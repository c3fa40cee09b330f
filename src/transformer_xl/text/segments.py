"""Splits a tokenized text into the batches that training and validation read, one segment of every batch row at a time.

The N tokens of the text become B batch rows; row b has the tokens from b*N//B to (b+1)*N//B, so row lengths differ by
at most one. Segment i covers the positions i*T to (i+1)*T of every row. A model that carries its memory from one
segment to the next reads each row as one continuous text. Every token is a target exactly once per epoch and is
predicted from the preceding token of the text, even at the start of a row. (The iterators in the code of the
Transformer-XL authors drop the N mod B last tokens, and the first token of each row is never a target.)

Processes that train one model share the batch rows: each reads its shard of the rows, and all have the same position.

Shape suffixes: B batch rows of a shard, T new tokens, C tokens of an extended context, X = C + T. N is the number of
tokens in the text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field
from typing_extensions import override

from transformer_xl.config import Settings, UserError
from transformer_xl.text.token_store import Tokens


class DatasetPosition(Settings):
    """The next segment to read, which is the whole state of a dataset and is saved in checkpoints.

    A position is valid for datasets of the same tokens, batch size and segment length (and seed, if documents are
    shuffled), whatever the shard.
    """

    epoch: int = Field(default=0, ge=0)
    """Number of completed epochs."""
    segment_index: int = Field(default=0, ge=0)
    """Number of segments already read in this epoch."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One segment of every batch row of a shard: inputs and targets; the arrays are new and may be modified."""

    inputs_BX: npt.NDArray[np.int64]
    """Token ids that the model reads: C tokens of an extended context, and the T inputs of the segment."""
    targets_BT: npt.NDArray[np.int64]
    """Token ids to predict: at each position the token after the input."""
    loss_mask_BT: npt.NDArray[np.bool_]
    """False for padding after the end of a batch row, and other tokens that are not predicted."""
    is_first: bool
    """True for the first segment of an epoch, which starts with empty memory."""
    order_B2T: npt.NDArray[np.int64] | None = None
    """Where the tokens of a segment are predicted in an order of their own: the place of each in it, below 0 if all may
    see it, and its segment in the sense of XLNet. Inputs and targets are the same tokens then. None: from left to
    right."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are read."""
        return int(self.loss_mask_BT.sum()) if self.order_B2T is None else self.targets_BT.size


class Shard(NamedTuple):
    """The batch rows that this process reads: part `index` of `count` parts.

    Rows are divided as torch.chunk divides a tensor: into parts of equal size, except that the last may be smaller.
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
                f"{self.count} processes without any; give train.batch_size={rows_per_shard * self.count}, or start "
                f"{-(-batch_size // rows_per_shard)} processes"
            )
        return range(self.index * rows_per_shard, min((self.index + 1) * rows_per_shard, batch_size))


SINGLE_SHARD = Shard()
"""All batch rows, for a single process."""


@dataclass(frozen=True, eq=False)
class TokenDataset(ABC):
    """A text as segments of B batch rows and T tokens; `read` loads the tokens of one segment.

    Raises:
        UserError: batch size or segment length below 1, fewer tokens than batch rows, or fewer rows than shards.
    """

    tokens: Tokens
    """(N,) ids of the whole text; may be on disk."""
    _: KW_ONLY
    batch_size: int
    """Number of sequences in a batch, over all shards."""
    segment_length: int
    """T, number of new tokens of a sequence in one segment."""
    bos_token_id: int
    """The input before the first token of an epoch, and in padding."""
    shard: Shard = SINGLE_SHARD
    """Which of the batch rows this dataset reads."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        assert self.tokens.ndim == 1
        if self.batch_size < 1 or self.segment_length < 1:
            raise UserError(
                f"batch size {self.batch_size} and segment length {self.segment_length} were given; both must be at "
                "least 1"
            )
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

    @abstractmethod
    def segments_in(self, epoch: int) -> int:
        """Return the number of segments of an epoch: enough for the longest batch row of any shard."""

    def context_length(self, position: DatasetPosition, longest: int) -> int:
        """Return C: the number of tokens of each row before a position in this epoch, `longest` at most."""
        return min(longest, position.segment_index * self.segment_length)

    @abstractmethod
    def read(self, position: DatasetPosition, *, num_segments: int = 1, context_length: int = 0) -> Batch:
        """Return the segment at a position, always of shape (B, T).

        After the end of a batch row the loss mask is False, the target 0 and the input `bos_token_id`.

        Args:
            position: position of the segment.
            num_segments: number of consecutive segments to read as one.
            context_length: C, number of tokens before the segment that the inputs begin with, at most the number that
                `context_length` returns.
        """

    def after(self, position: DatasetPosition, num_segments: int = 1) -> DatasetPosition:
        """Return the position after some segments; after the last one of an epoch, the start of the next epoch."""
        if position.segment_index + num_segments < self.segments_in(position.epoch):
            return DatasetPosition(epoch=position.epoch, segment_index=position.segment_index + num_segments)
        return DatasetPosition(epoch=position.epoch + 1, segment_index=0)

    def _padding(self, position: DatasetPosition, num_segments: int, context_length: int) -> Batch:
        """Return a batch of padding only, for `read` to fill."""
        assert position.segment_index < self.segments_in(position.epoch)
        assert context_length <= position.segment_index * self.segment_length
        num_rows, num_new = self.local_batch_size, num_segments * self.segment_length
        inputs_BX = np.full((num_rows, context_length + num_new), self.bos_token_id, np.int64)
        targets_BT, loss_mask_BT = np.zeros((num_rows, num_new), np.int64), np.zeros((num_rows, num_new), np.bool_)
        return Batch(inputs_BX, targets_BT, loss_mask_BT, is_first=position.segment_index == 0)


@dataclass(frozen=True, eq=False)
class SegmentDataset(TokenDataset):
    """A text as segments in the order of the text, the same in every epoch."""

    @override
    def segments_in(self, epoch: int) -> int:
        longest_row = -(-len(self.tokens) // self.batch_size)
        return -(-longest_row // self.segment_length)

    @override
    def read(self, position: DatasetPosition, *, num_segments: int = 1, context_length: int = 0) -> Batch:
        batch = self._padding(position, num_segments, context_length)
        for index, row in enumerate(self.shard.batch_rows(self.batch_size)):
            row_start, row_stop = (edge * len(self.tokens) // self.batch_size for edge in (row, row + 1))
            # start <= row_stop: the last segment begins inside the longest row; others are at most one token shorter.
            start = row_start + position.segment_index * self.segment_length
            stop = min(start + num_segments * self.segment_length, row_stop)
            length = stop - start
            batch.targets_BT[index, :length] = self.tokens[start:stop]
            batch.loss_mask_BT[index, :length] = True
            first_input = start - context_length
            first = 1 if first_input == 0 else 0  # the text's first token is predicted from bos_token_id
            batch.inputs_BX[index, first : context_length + length] = self.tokens[first_input + first - 1 : stop - 1]
        return batch


def check_training(dataset: TokenDataset, segment_length: int) -> None:
    """Check that a text is long enough to train on: one whole segment for every batch row.

    Args:
        dataset: the text.
        segment_length: tokens of a segment, of which the dataset's segments may be parts.

    Raises:
        UserError: the text is too short; the message gives its length and the required number of tokens.
    """
    min_tokens = dataset.batch_size * segment_length
    if len(dataset.tokens) < min_tokens:
        raise UserError(
            f"the training text has {len(dataset.tokens):,} tokens, and a batch of {dataset.batch_size:,} sequences of "
            f"{segment_length:,} tokens needs {min_tokens:,}; lower train.batch_size or "
            "train.segment_length, or give more text"
        )
