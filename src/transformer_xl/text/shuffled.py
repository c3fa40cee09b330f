"""Documents in a new order every epoch, for texts whose documents (often sentences) are independent of one another.

An epoch is all documents one after another, in an order drawn for it. The batch rows are consecutive ranges of that
order, cut between documents as near to equal lengths as possible. Within a row documents follow one another without
gaps, and one that does not fit into a segment continues in the next. Each document is read once an epoch. The input
before a document's first token is the last token of the document before it in the order: the end-of-sequence token of
that sentence. (The authors assign sentences to rows as these become free, so a position cannot be found again without
reading everything before it.)

The order follows from seed and epoch alone: documents are sorted by the 64-bit numbers of a PCG64 generator seeded with
SeedSequence(seed, spawn_key=(epoch,)), ties by their index. NumPy promises these numbers for every version and machine
(its compatibility policy for bit generators and SeedSequence), which it does not for shuffles. So epoch and segment are
all that a checkpoint has to save.

Memory: 12 bytes for each document of the shard's rows, and about 36 for each document of the corpus while an order is
drawn. For 30 million sentences these are 360 MB and 1.1 GB. Tokens are read from where they are stored.

Shape suffixes: B batch rows of a shard, T new tokens, K = T + 1 tokens read (the targets, and one before them).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import numpy.typing as npt

from transformer_xl.config import UserError
from transformer_xl.text.segments import SINGLE_SHARD, Batch, DatasetPosition, Shard, check_sizes, next_position
from transformer_xl.text.token_store import Tokens


@dataclass(frozen=True, eq=False)
class ShuffledDocumentDataset:
    """A text as segments of B batch rows and T tokens, its documents in a new order every epoch.

    Raises:
        UserError: batch size or segment length below 1, fewer documents than batch rows, or fewer rows than shards.
    """

    tokens: Tokens
    """(N,) ids; may be on disk."""
    document_starts: npt.NDArray[np.uint64]
    """(num_documents,) rising positions in `tokens`, the first 0."""
    _: KW_ONLY
    batch_size: int
    """Number of sequences in a batch, over all shards."""
    segment_length: int
    """T, the new tokens of a sequence in one segment."""
    bos_token_id: int
    """The input before the first token of an epoch, and in padding."""
    seed: int
    """Seed of the orders; the same in all shards."""
    shard: Shard = SINGLE_SHARD
    """Which of the batch rows are read."""
    _orders: dict[int, _EpochOrder] = field(default_factory=dict, init=False, repr=False)
    """The order of the epoch read last, which takes seconds to draw."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        assert self.tokens.ndim == 1
        check_sizes(self)
        self.shard.batch_rows(self.batch_size)
        if len(self.document_starts) < self.batch_size:
            raise UserError(
                f"the text has {len(self.document_starts):,} documents, and a batch of {self.batch_size:,} sequences "
                "needs one for each; lower --train.batch-size, or prepare the corpus with --document-unit line"
            )
        assert self.document_starts[0] == 0

    @property
    def local_batch_size(self) -> int:
        """B, the number of sequences in this shard's batches."""
        return len(self.shard.batch_rows(self.batch_size))

    def segments_in(self, epoch: int) -> int:
        """Return the number of segments of an epoch: enough for the longest batch row of any shard."""
        return -(-self._order(epoch).longest_row // self.segment_length)

    def read(self, position: DatasetPosition) -> Batch:
        """Return the segment at a position."""
        assert position.segment_index < self.segments_in(position.epoch)
        order = self._order(position.epoch)
        batch = Batch.empty((self.local_batch_size, self.segment_length), position, self.bos_token_id)
        offsets_K = np.arange(-1, self.segment_length)
        positions_BK = order.row_edges[:-1, None] + position.segment_index * self.segment_length + offsets_K
        inside_BK = positions_BK < order.row_edges[1:, None]
        batch.loss_mask_BT[:] = inside_BK[:, 1:]
        # There is no token before the first of an epoch, and none after the end of a row.
        has_token_BK = inside_BK & (positions_BK >= 0)
        tokens_BK = np.full(positions_BK.shape, self.bos_token_id)
        tokens_BK[has_token_BK] = self._read(order, positions_BK[has_token_BK])
        batch.inputs_BT[batch.loss_mask_BT] = tokens_BK[:, :-1][batch.loss_mask_BT]
        batch.targets_BT[batch.loss_mask_BT] = tokens_BK[:, 1:][batch.loss_mask_BT]
        return batch

    def after(self, position: DatasetPosition) -> DatasetPosition:
        """Return the next position; after the last segment of an epoch, the first of the next epoch."""
        return next_position(position, self)

    def _read(self, order: _EpochOrder, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.integer]:
        """The tokens at these positions of the epoch."""
        index = np.searchsorted(order.starts, positions, side="right") - 1
        starts = self.document_starts[order.documents[index]].astype(np.int64)
        return self.tokens[starts + positions - order.starts[index]]

    def _order(self, epoch: int) -> _EpochOrder:
        if epoch not in self._orders:
            self._orders.clear()
            self._orders[epoch] = _EpochOrder.draw(self, epoch)
        return self._orders[epoch]


@dataclass(frozen=True, eq=False)
class _EpochOrder:
    """The order of one epoch, as far as one shard needs it. Positions count the epoch's tokens in reading order."""

    documents: npt.NDArray[np.uint32]
    """Indices of the documents of the shard's rows, and of the document before them, if any."""
    starts: npt.NDArray[np.int64]
    """Positions where these documents start."""
    row_edges: npt.NDArray[np.int64]
    """(B + 1,) positions where the shard's rows start, and where the last one ends."""
    longest_row: int
    """Tokens of the longest row of any shard."""

    @classmethod
    def draw(cls, dataset: ShuffledDocumentDataset, epoch: int) -> _EpochOrder:
        num_documents, num_rows = len(dataset.document_starts), dataset.batch_size
        assert num_documents < 2**32
        generator = np.random.PCG64(np.random.SeedSequence(dataset.seed, spawn_key=(epoch,)))
        documents = np.argsort(generator.random_raw(num_documents), kind="stable")
        lengths = np.diff(dataset.document_starts.astype(np.int64), append=len(dataset.tokens))
        starts = np.zeros(num_documents + 1, dtype=np.int64)
        np.cumsum(lengths[documents], out=starts[1:])
        wanted = np.arange(num_rows + 1) * len(dataset.tokens) // num_rows
        above = np.searchsorted(starts, wanted)
        below = np.maximum(above - 1, 0)
        edges = np.where(wanted - starts[below] < starts[above] - wanted, below, above)
        # A document longer than a row must not leave its neighbours without one.
        rows = np.arange(1, num_rows)
        edges[1:-1] = np.maximum.accumulate(edges[1:-1] - rows).clip(0, num_documents - num_rows) + rows
        own = dataset.shard.batch_rows(num_rows)
        first = max(edges[own.start] - 1, 0)
        return cls(
            documents[first : edges[own.stop]].astype(np.uint32),
            starts[first : edges[own.stop]].copy(),  # a view would keep the whole array
            starts[edges[own.start : own.stop + 1]],
            int(np.diff(starts[edges]).max()),
        )
