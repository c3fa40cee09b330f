"""Documents in a new order every epoch, for texts of sentences that have nothing to do with one another.

An epoch is all documents (often sentences) one after another, in an order drawn for it. The rows are consecutive
stretches of that order, cut between documents at the places nearest to equal lengths. Within a row documents follow one
another without a gap, and one that does not fit into a segment goes on in the next. Each document is read once an
epoch. The token read before a document's first is the last one of the document before it in the order: the mark that
ends each sentence. (The authors deal sentences out to rows as these fall free, so that a position cannot be found
again without reading everything before it.)

The order follows from seed and epoch alone: documents are sorted by the 64-bit numbers of a PCG64 generator seeded with
SeedSequence(seed, spawn_key=(epoch,)), ties by their place. NumPy promises these numbers for every version and machine
(its compatibility policy for bit generators and SeedSequence), which it does not for shuffles. So the epoch and the
segment are all that has to be saved.

Memory: 12 bytes for each document of the shard's rows, and about 36 for each document of the corpus while an order is
drawn. With 30 million sentences these are 360 MB and 1.1 GB. Tokens are read where they lie.

Shape suffixes: B rows of a shard, T new tokens, K = T + 1 tokens read (the targets, and one before them).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import numpy.typing as npt

from transformer_xl.config import UserError
from transformer_xl.text.segments import SINGLE_SHARD, Batch, DatasetPosition, Shard, check_sizes, following
from transformer_xl.text.token_store import Tokens


@dataclass(frozen=True, eq=False)
class ShuffledDocumentDataset:
    """A text as segments of B rows and T tokens, its documents in a new order every epoch.

    Raises:
        UserError: rows or segment below 1, fewer documents than rows, or rows that the shards cannot share.
    """

    tokens: Tokens
    """(N,) ids; may lie on disk."""
    document_starts: npt.NDArray[np.uint64]
    """(number of documents,) rising places in `tokens`, the first 0."""
    _: KW_ONLY
    batch_size: int
    """Stretches read side by side, in all shards together."""
    segment_length: int
    """T: new tokens of a row in one segment."""
    bos_token_id: int
    """The token taken as read before an epoch begins; also fills padding."""
    seed: int
    """What the orders are drawn from; the same in all shards."""
    shard: Shard = SINGLE_SHARD
    """Which of the rows are read here."""
    _orders: dict[int, _Order] = field(default_factory=dict, init=False, repr=False)
    """The order of the epoch read last, which would take seconds to draw again."""

    def __post_init__(self) -> None:
        """Checks the sizes."""
        assert self.tokens.ndim == 1
        check_sizes(self)
        self.shard.rows_of(self.batch_size)
        if len(self.document_starts) < self.batch_size:
            raise UserError(
                f"the text has {len(self.document_starts):,} documents for {self.batch_size:,} rows, and each row needs one; "
                "lower --train.batch-size, or prepare the corpus with --documents lines"
            )
        assert self.document_starts[0] == 0

    @property
    def shard_rows(self) -> int:
        """B: rows that are read here."""
        return len(self.shard.rows_of(self.batch_size))

    def segments_in(self, epoch: int) -> int:
        """Number of segments of this epoch: enough for the longest row of any shard."""
        return -(-self._order(epoch).longest_row // self.segment_length)

    def read(self, position: DatasetPosition) -> Batch:
        """The segment at this position."""
        assert position.segment_index < self.segments_in(position.epoch)
        order = self._order(position.epoch)
        segment = Batch.empty((self.shard_rows, self.segment_length), position, self.bos_token_id)
        places_BK = (
            order.row_edges[:-1, None]
            + position.segment_index * self.segment_length
            + np.arange(-1, self.segment_length)
        )
        inside_BK = places_BK < order.row_edges[1:, None]
        segment.loss_mask_BT[:] = inside_BK[:, 1:]
        # Before the first token of an epoch nothing was read, and behind a row's end nothing is.
        known_BK = inside_BK & (places_BK >= 0)
        read_BK = np.full(places_BK.shape, self.bos_token_id)
        read_BK[known_BK] = self._read(order, places_BK[known_BK])
        segment.inputs_BT[segment.loss_mask_BT] = read_BK[:, :-1][segment.loss_mask_BT]
        segment.targets_BT[segment.loss_mask_BT] = read_BK[:, 1:][segment.loss_mask_BT]
        return segment

    def after(self, position: DatasetPosition) -> DatasetPosition:
        """The position that follows; after the last segment of an epoch, the first of the next."""
        return following(position, self)

    def _read(self, order: _Order, places: npt.NDArray[np.int64]) -> npt.NDArray[np.integer]:
        """The tokens at these places of the epoch."""
        which = np.searchsorted(order.begins, places, side="right") - 1
        starts = self.document_starts[order.documents[which]].astype(np.int64)
        return self.tokens[starts + places - order.begins[which]]

    def _order(self, epoch: int) -> _Order:
        if epoch not in self._orders:
            self._orders.clear()
            self._orders[epoch] = _Order.draw(self, epoch)
        return self._orders[epoch]


@dataclass(frozen=True, eq=False)
class _Order:
    """The order of one epoch, as far as one shard needs it. Places count the epoch's tokens in reading order."""

    documents: npt.NDArray[np.uint32]
    """Numbers of the documents of the shard's rows, and of the one before, where there is one."""
    begins: npt.NDArray[np.int64]
    """Places where these documents begin."""
    row_edges: npt.NDArray[np.int64]
    """(B + 1,) places where the shard's rows begin, and where the last one ends."""
    longest_row: int
    """Tokens of the longest row of any shard."""

    @classmethod
    def draw(cls, stream: ShuffledDocumentDataset, epoch: int) -> _Order:
        number, rows = len(stream.document_starts), stream.batch_size
        assert number < 2**32
        generator = np.random.PCG64(np.random.SeedSequence(stream.seed, spawn_key=(epoch,)))
        documents = np.argsort(generator.random_raw(number), kind="stable")
        lengths = np.diff(stream.document_starts.astype(np.int64), append=len(stream.tokens))
        begins = np.zeros(number + 1, dtype=np.int64)
        np.cumsum(lengths[documents], out=begins[1:])
        wanted = np.arange(rows + 1) * len(stream.tokens) // rows
        above = np.searchsorted(begins, wanted)
        below = np.maximum(above - 1, 0)
        edges = np.where(wanted - begins[below] < begins[above] - wanted, below, above)
        # A document longer than a row must not leave its neighbours without one.
        edges[1:-1] = np.maximum.accumulate(edges[1:-1] - np.arange(1, rows)).clip(0, number - rows) + np.arange(
            1, rows
        )
        own = stream.shard.rows_of(rows)
        first = max(edges[own.start] - 1, 0)
        return cls(
            documents[first : edges[own.stop]].astype(np.uint32),
            begins[first : edges[own.stop]].copy(),  # so that the rest is not kept
            begins[edges[own.start : own.stop + 1]],
            int(np.diff(begins[edges]).max()),
        )
