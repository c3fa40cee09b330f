"""Tests of `ShuffledDocumentDataset`: every epoch reads each document once, in an order fixed by seed and epoch.

Shape suffixes: B batch rows, T new tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.text.segments import SINGLE_SHARD, Batch, DatasetPosition, Shard
from transformer_xl.text.shuffled import ShuffledDocumentDataset, cut

BOS = 7919  # no token of the texts
LENGTHS = st.lists(st.integers(1, 13), min_size=1, max_size=43)  # of documents, in tokens


def dataset_of(
    lengths: list[int], *, batch_size: int, segment_length: int, seed: int = 5, shard: Shard = SINGLE_SHARD
) -> ShuffledDocumentDataset:
    """Documents of these lengths; the token at index i of the text is i + 1, so that each token shows its index."""
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint16)
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.uint64)
    return ShuffledDocumentDataset(
        tokens, starts, batch_size=batch_size, segment_length=segment_length, bos_token_id=BOS, seed=seed, shard=shard
    )


@st.composite
def datasets(draw: st.DrawFn) -> ShuffledDocumentDataset:
    lengths = draw(LENGTHS)
    batch_size = draw(st.integers(1, min(len(lengths), 7)))
    return dataset_of(
        lengths, batch_size=batch_size, segment_length=draw(st.integers(1, 17)), seed=draw(st.integers(0, 2**63 - 1))
    )


def read_epoch(dataset: ShuffledDocumentDataset, epoch: int = 0) -> Iterator[Batch]:
    for index in range(dataset.segments_in(epoch)):
        yield dataset.read(DatasetPosition(epoch=epoch, segment_index=index))


def rows_of(dataset: ShuffledDocumentDataset, epoch: int = 0) -> list[list[tuple[int, int]]]:
    """The (input, target) pairs of each row; checks the padding, which is only at the end of a row."""
    batches = list(read_epoch(dataset, epoch))
    for index, batch in enumerate(batches):
        assert batch.inputs_BX.shape == batch.targets_BT.shape == (dataset.batch_size, dataset.segment_length)
        assert (batch.inputs_BX[~batch.loss_mask_BT] == BOS).all()
        assert (batch.targets_BT[~batch.loss_mask_BT] == 0).all()
        assert batch.loss_mask_BT.any()
        assert batch.is_first == (index == 0)
    inputs, targets, mask = (
        np.concatenate([getattr(batch, name) for batch in batches], axis=1)
        for name in ("inputs_BX", "targets_BT", "loss_mask_BT")
    )
    assert (np.diff(mask.astype(int), axis=1) <= 0).all()
    return [
        list(zip(inputs[row][mask[row]].tolist(), targets[row][mask[row]].tolist(), strict=True))
        for row in range(len(mask))
    ]


def first_tokens(dataset: ShuffledDocumentDataset) -> set[int]:
    """The first tokens of all documents."""
    return set((dataset.document_starts + 1).tolist())


def document_order(dataset: ShuffledDocumentDataset, epoch: int = 0) -> list[int]:
    """The first tokens of the documents in the order in which the epoch has them."""
    return [target for row in rows_of(dataset, epoch) for _, target in row if target in first_tokens(dataset)]


@settings(deadline=None)
@given(datasets(), st.integers(0, 3))
def test_each_document_is_whole_and_read_once_after_the_preceding_one(
    dataset: ShuffledDocumentDataset, epoch: int
) -> None:
    rows = rows_of(dataset, epoch)
    pairs = [pair for row in rows for pair in row]
    targets = [target for _, target in pairs]
    assert [input_token for input_token, _ in pairs] == [BOS, *targets[:-1]]
    assert sorted(targets) == dataset.tokens[:].tolist()
    starts = first_tokens(dataset)
    assert all(row[0][1] in starts for row in rows)
    assert all(after == before + 1 or after in starts for before, after in itertools.pairwise(targets))


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 20))
def test_pieces_are_documents_cut_at_each_multiple_of_the_length(lengths: list[int], length: int) -> None:
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.uint64)
    wanted = [int(start) + first for start, of in zip(starts, lengths, strict=True) for first in range(0, of, length)]
    pieces = cut(starts, sum(lengths), length)
    assert (pieces.tolist(), pieces.dtype) == (wanted, np.uint64)


@pytest.mark.parametrize("lengths", [[12] * 97, np.random.default_rng(3).integers(1, 30, 211).tolist()])
@pytest.mark.parametrize("seed", range(3))
def test_rows_end_at_the_document_boundary_nearest_to_equal_lengths(lengths: list[int], seed: int) -> None:
    dataset = dataset_of(lengths, batch_size=7, segment_length=17, seed=seed)
    rows, starts = rows_of(dataset), first_tokens(dataset)
    boundaries = [index for index, (_, target) in enumerate(itertools.chain(*rows)) if target in starts]
    row_ends = np.cumsum([len(row) for row in rows])[:-1].tolist()
    for row_end, equal in zip(row_ends, (np.arange(1, 7) * sum(lengths) // 7).tolist(), strict=True):
        assert row_end == min(boundaries, key=lambda boundary: (abs(boundary - equal), -boundary))  # a tie: the later


def test_document_longer_than_a_row_leaves_every_other_row_a_document() -> None:
    for seed in range(11):
        rows = rows_of(dataset_of([101, 1, 1, 2, 1], batch_size=5, segment_length=7, seed=seed))
        assert sorted(map(len, rows)) == [1, 1, 1, 2, 101]  # one document in each of the five rows


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 11), st.integers(0, 2))
def test_shards_concatenate_to_the_batch_of_a_single_process(
    lengths: list[int], num_shards: int, rows_per_shard: int, segment_length: int, epoch: int
) -> None:
    lengths = [*lengths, *[3] * (num_shards * rows_per_shard)]
    batch_size = num_shards * rows_per_shard - (rows_per_shard > 1)  # the last shard may have fewer rows
    single = dataset_of(lengths, batch_size=batch_size, segment_length=segment_length)
    shards = [replace(single, shard=Shard(index, num_shards)) for index in range(num_shards)]
    assert {shard.segments_in(epoch) for shard in shards} == {single.segments_in(epoch)}
    for index, expected in enumerate(read_epoch(single, epoch)):
        position = DatasetPosition(epoch=epoch, segment_index=index)
        batches = [shard.read(position) for shard in shards]
        for name in ("inputs_BX", "targets_BT", "loss_mask_BT"):
            np.testing.assert_array_equal(
                np.concatenate([getattr(batch, name) for batch in batches]), getattr(expected, name)
            )


def test_orders_of_epochs_and_seeds_are_independent() -> None:
    orders = [
        tuple(document_order(dataset_of([2] * 97, batch_size=3, segment_length=7, seed=seed), epoch))
        for seed in (0, 1, 2**32, 2**63 - 1)
        for epoch in (0, 1, 2)
    ]
    assert len(set(orders)) == len(orders)
    num_ascending = [sum(a < b for a, b in itertools.pairwise(order)) for order in orders]
    assert all(30 < number < 66 for number in num_ascending)  # 48 of 96 are expected; the standard deviation is 2.9


def test_order_comes_from_random_integers_that_every_numpy_version_draws() -> None:
    generator = np.random.PCG64(np.random.SeedSequence(5, spawn_key=(3,)))  # seed 5, epoch 3
    random_integers = [int(generator.random_raw()) for _ in range(11)]
    order = sorted(range(11), key=random_integers.__getitem__)
    # NumPy guarantees these integers for all versions, so this order must never change.
    assert order == [10, 4, 9, 3, 2, 1, 6, 0, 5, 7, 8]
    dataset = dataset_of([1] * 11, batch_size=2, segment_length=3, seed=5)
    assert document_order(dataset, epoch=3) == [index + 1 for index in order]
