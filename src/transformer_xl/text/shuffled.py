"""A training dataset that shuffles the documents every epoch, or the pieces that `cut` makes of them.

An epoch is the concatenation of all documents in a random order. It is cut between documents into one part for each
batch row; the parts have lengths as equal as possible. Within a row documents are adjacent, and a document that does
not fit into a segment continues in the next. Each document is read once per epoch. The input before a document's first
token is the last token of the document before it in the order: the end-of-sequence token of that document. (In
LMShuffledIterator of the Transformer-XL authors, a row takes the next sentence of the order when its current one ends,
so resuming requires reading everything before the position.)

The order depends only on seed and epoch: documents are sorted by 64-bit random integers of a PCG64 generator seeded
with SeedSequence(seed, spawn_key=(epoch,)), ties by their index. NumPy guarantees the same integers for every version
and platform (its compatibility policy for bit generators and SeedSequence), but not the same
results of Generator.shuffle. So a checkpoint
has to save only the epoch and the index of the segment.

RAM: 12 bytes per document of the shard's batch rows, and about 36 bytes per document of the corpus while an order is
drawn: 360 MB and 1.1 GB for 30 million sentences in a single shard. Tokens are read from the memory-mapped files.

Shape suffixes: B batch rows of a shard, T new tokens, K tokens read (the targets, the context and one before them).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.text.segments import Batch, DatasetPosition, TokenDataset


def cut(document_starts: npt.NDArray[np.uint64], num_tokens: int, length: int) -> npt.NDArray[np.uint64]:
    """Return where the pieces begin that documents of `num_tokens` tokens in all are cut into, `length` tokens each.

    The last piece of a document is shorter where its length is no multiple.
    """
    starts = document_starts.astype(np.int64)
    num_pieces = -(-np.diff(starts, append=num_tokens) // length)
    index_in_document = np.arange(num_pieces.sum()) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    return (np.repeat(starts, num_pieces) + index_in_document * length).astype(np.uint64)


@dataclass(frozen=True, eq=False)
class ShuffledDocumentDataset(TokenDataset):
    """A text as segments of B batch rows and T tokens, its documents in a new order every epoch.

    Raises:
        UserError: as in `TokenDataset`, or fewer documents than batch rows.
    """

    document_starts: npt.NDArray[np.uint64]
    """(num_documents,) ascending positions in `tokens`; the first is 0."""
    _: KW_ONLY
    seed: int
    """Seed of the orders; the same in all shards."""
    _orders: dict[int, _EpochOrder] = field(default_factory=dict, init=False, repr=False)
    """The order of the epoch that was read last, with the epoch as its key; cached because drawing it takes seconds."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.document_starts) < self.batch_size:
            raise UserError(
                f"the text has {len(self.document_starts):,} documents or pieces to shuffle, and a batch of "
                f"{self.batch_size:,} sequences needs one for each; lower train.batch_size, cut the text into shorter "
                "pieces (train.shuffle_length), or prepare the corpus with document_unit=line"
            )
        assert self.document_starts[0] == 0

    @override
    def segments_in(self, epoch: int) -> int:
        return -(-self._order(epoch).longest_row // self.segment_length)

    @override
    def read(self, position: DatasetPosition, *, num_segments: int = 1, context_length: int = 0) -> Batch:
        batch, order = self._padding(position, num_segments, context_length), self._order(position.epoch)
        offsets_K = np.arange(-context_length - 1, num_segments * self.segment_length)
        positions_BK = order.row_edges[:-1, None] + position.segment_index * self.segment_length + offsets_K
        inside_BK = positions_BK < order.row_edges[1:, None]
        batch.loss_mask_BT[:] = inside_BK[:, context_length + 1 :]
        # The first token of an epoch has no preceding token, and positions after the end of a row have no token.
        has_token_BK = inside_BK & (positions_BK >= 0)
        tokens_BK = np.full(positions_BK.shape, self.bos_token_id)
        positions = positions_BK[has_token_BK]
        index = np.searchsorted(order.starts, positions, side="right") - 1
        starts = self.document_starts[order.documents[index]].astype(np.int64)
        tokens_BK[has_token_BK] = self.tokens[starts + positions - order.starts[index]]
        batch.inputs_BX[inside_BK[:, 1:]] = tokens_BK[:, :-1][inside_BK[:, 1:]]
        batch.targets_BT[batch.loss_mask_BT] = tokens_BK[:, context_length + 1 :][batch.loss_mask_BT]
        return batch

    def _order(self, epoch: int) -> _EpochOrder:
        if epoch not in self._orders:
            self._orders.clear()
            self._orders[epoch] = _EpochOrder.draw(self, epoch)
        return self._orders[epoch]


@dataclass(frozen=True, eq=False)
class _EpochOrder:
    """The part of an epoch's order that one shard needs. A position is a token's index in the shuffled text."""

    documents: npt.NDArray[np.uint32]
    """Corpus indices of the documents in the shard's rows, preceded by that of the document before them, if any: its
    last token is the first input of the first row."""
    starts: npt.NDArray[np.int64]
    """(len(documents),) start positions of these documents in the shuffled text."""
    row_edges: npt.NDArray[np.int64]
    """(B + 1,) positions where the shard's rows start, and where the last one ends."""
    longest_row: int
    """Number of tokens in the longest row of any shard."""

    @classmethod
    def draw(cls, dataset: ShuffledDocumentDataset, epoch: int) -> _EpochOrder:
        """Shuffle the documents, and choose the row edges: the document boundaries nearest to rows of equal length."""
        num_documents, num_rows = len(dataset.document_starts), dataset.batch_size
        assert num_documents < 2**32
        generator = np.random.PCG64(np.random.SeedSequence(dataset.seed, spawn_key=(epoch,)))
        documents = np.argsort(generator.random_raw(num_documents), kind="stable")
        lengths = np.diff(dataset.document_starts.astype(np.int64), append=len(dataset.tokens))
        starts = np.zeros(num_documents + 1, dtype=np.int64)
        np.cumsum(lengths[documents], out=starts[1:])
        equal_edges = np.arange(num_rows + 1) * len(dataset.tokens) // num_rows
        after = np.searchsorted(starts, equal_edges)  # the first document boundary at or after each edge
        before = np.maximum(after - 1, 0)
        # `edges` are indices of document boundaries, so edge e is at position starts[e] of the shuffled text.
        edges = np.where(equal_edges - starts[before] < starts[after] - equal_edges, before, after)
        # A document longer than a row must not leave the adjacent rows without a document: each row has at least one.
        rows = np.arange(1, num_rows)
        edges[1:-1] = np.maximum.accumulate(edges[1:-1] - rows).clip(0, num_documents - num_rows) + rows
        shard_rows = dataset.shard.batch_rows(num_rows)
        first = max(edges[shard_rows.start] - 1, 0)
        return cls(
            documents[first : edges[shard_rows.stop]].astype(np.uint32),
            starts[first : edges[shard_rows.stop]].copy(),  # a view would keep the whole array
            starts[edges[shard_rows.start : shard_rows.stop + 1]],
            int(np.diff(starts[edges]).max()),
        )
