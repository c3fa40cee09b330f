"""Shuffled documents: each once an epoch, whole, in an order of its own; and the position is all there is to resume."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.text.segments import SINGLE_SHARD, Batch, DatasetPosition, Shard, TokenDataset, check_training
from transformer_xl.text.shuffled import ShuffledDocumentDataset
from transformer_xl.text.token_store import TokenShards

START = 7919
UNHURRIED = settings(deadline=None)
LENGTHS = st.lists(st.integers(1, 13), min_size=1, max_size=43)


def stream_of(
    lengths: list[int], *, batch_size: int, segment_length: int, seed: int = 5, shard: Shard = SINGLE_SHARD
) -> ShuffledDocumentDataset:
    """Documents of these lengths; the token at index i is i + 1, so that each can be told from the others."""
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint16)
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.uint64)
    return ShuffledDocumentDataset(
        tokens, starts, batch_size=batch_size, segment_length=segment_length, bos_token_id=START, seed=seed, shard=shard
    )


@st.composite
def streams(draw: st.DrawFn) -> ShuffledDocumentDataset:
    lengths = draw(LENGTHS)
    rows = draw(st.integers(1, min(len(lengths), 7)))
    return stream_of(
        lengths, batch_size=rows, segment_length=draw(st.integers(1, 17)), seed=draw(st.integers(0, 2**63 - 1))
    )


def epoch_of(stream: TokenDataset, epoch: int = 0) -> Iterator[Batch]:
    for index in range(stream.segments_in(epoch)):
        yield stream.read(DatasetPosition(epoch=epoch, segment_index=index))


def rows_of(stream: TokenDataset, epoch: int = 0) -> list[list[tuple[int, int]]]:
    """The (input, target) pairs of each row, in the order they are read."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(stream.local_batch_size)]
    for segment in epoch_of(stream, epoch):
        for row, pairs in enumerate(rows):
            counted = segment.loss_mask_BT[row]
            assert not counted[np.argmin(counted) :].any() or counted.all()  # never a gap
            if counted.any():
                assert len(pairs) % stream.segment_length == 0  # nor one before
            pairs += zip(
                segment.inputs_BT[row][counted].tolist(), segment.targets_BT[row][counted].tolist(), strict=True
            )
    return rows


def documents_read(stream: ShuffledDocumentDataset, epoch: int = 0) -> list[int]:
    """The first tokens of the documents in the order they are read."""
    firsts = set((stream.document_starts + 1).tolist())
    return [target for row in rows_of(stream, epoch) for _, target in row if target in firsts]


@UNHURRIED
@given(streams(), st.integers(0, 3))
def test_every_document_is_read_whole_and_once_after_the_one_before_it(
    stream: ShuffledDocumentDataset, epoch: int
) -> None:
    rows = rows_of(stream, epoch)
    pairs = [pair for row in rows for pair in row]
    targets = [target for _, target in pairs]
    assert [given for given, _ in pairs] == [START, *targets[:-1]]
    assert sorted(targets) == stream.tokens[:].tolist()
    firsts = set((stream.document_starts + 1).tolist())
    for row in rows:
        assert row[0][1] in firsts
    for before, target in itertools.pairwise(targets):
        assert target == before + 1 or target in firsts


@pytest.mark.parametrize("lengths", [[13] * 97, np.random.default_rng(3).integers(1, 30, 211).tolist()])
def test_rows_are_cut_at_the_nearest_document(lengths: list[int]) -> None:
    for seed in range(5):
        stream = stream_of(lengths, batch_size=7, segment_length=17, seed=seed)
        rows = rows_of(stream)
        firsts = set((stream.document_starts + 1).tolist())
        edges = [index for index, (_, target) in enumerate(itertools.chain(*rows)) if target in firsts]
        cuts = np.cumsum([len(row) for row in rows])[:-1].tolist()
        for cut, wanted in zip(cuts, (np.arange(1, 7) * sum(lengths) // 7).tolist(), strict=True):
            assert abs(cut - wanted) == min(abs(edge - wanted) for edge in edges)


def test_a_document_longer_than_a_row_leaves_its_neighbours_one() -> None:
    for seed in range(11):
        rows = rows_of(stream_of([101, 1, 1, 2, 1], batch_size=5, segment_length=7, seed=seed))
        assert sorted(map(len, rows)) == [1, 1, 1, 2, 101]


@UNHURRIED
@given(streams())
def test_shape_is_always_the_same_and_padding_is_marked(stream: ShuffledDocumentDataset) -> None:
    for index, segment in enumerate(epoch_of(stream)):
        for array, dtype in (
            (segment.inputs_BT, np.int64),
            (segment.targets_BT, np.int64),
            (segment.loss_mask_BT, np.bool_),
        ):
            assert array.shape == (stream.batch_size, stream.segment_length)
            assert array.dtype == dtype
        assert (segment.inputs_BT[~segment.loss_mask_BT] == START).all()
        assert (segment.targets_BT[~segment.loss_mask_BT] == 0).all()
        assert segment.loss_mask_BT.any()
        assert segment.is_first == (index == 0)


@UNHURRIED
@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 11), st.integers(0, 2))
def test_shards_read_the_rows_of_the_whole(
    lengths: list[int], count: int, each: int, segment_length: int, epoch: int
) -> None:
    lengths = [*lengths, *[3] * (count * each)]
    rows = count * each - (each > 1)  # the last shard may have fewer
    whole = stream_of(lengths, batch_size=rows, segment_length=segment_length)
    shards = [
        stream_of(lengths, batch_size=rows, segment_length=segment_length, shard=Shard(index, count))
        for index in range(count)
    ]
    assert {shard.segments_in(epoch) for shard in shards} == {whole.segments_in(epoch)}
    for index, segment_read in enumerate(epoch_of(whole, epoch)):
        position = DatasetPosition(epoch=epoch, segment_index=index)
        read = [shard.read(position) for shard in shards]
        for name in ("inputs_BT", "targets_BT", "loss_mask_BT"):
            joined = np.concatenate([getattr(part, name) for part in read])
            assert joined.tolist() == getattr(segment_read, name).tolist()
        assert {shard.after(position) for shard in shards} == {whole.after(position)}


@UNHURRIED
@given(streams(), st.integers(0, 40), st.integers(1, 23))
def test_position_alone_goes_on_where_it_was(stream: ShuffledDocumentDataset, before: int, more: int) -> None:
    position = DatasetPosition()
    for _ in range(before):
        position = stream.after(position)
    fresh = ShuffledDocumentDataset(
        stream.tokens,
        stream.document_starts,
        batch_size=stream.batch_size,
        segment_length=stream.segment_length,
        bos_token_id=START,
        seed=stream.seed,
    )
    for _ in range(more):
        one, other = stream.read(position), fresh.read(position)
        assert one.inputs_BT.tolist() == other.inputs_BT.tolist()
        assert one.targets_BT.tolist() == other.targets_BT.tolist()
        assert one.is_first == (position.segment_index == 0)
        assert stream.after(position) == fresh.after(position)
        position = stream.after(position)


@UNHURRIED
@given(LENGTHS, st.integers(1, 11))
def test_tokens_in_shard_files_read_as_one_array(lengths: list[int], size: int) -> None:
    one = stream_of(lengths, batch_size=1, segment_length=7)
    parts = tuple(one.tokens[start : start + size] for start in range(0, len(one.tokens), size))
    other = ShuffledDocumentDataset(
        TokenShards(parts), one.document_starts, batch_size=1, segment_length=7, bos_token_id=START, seed=5
    )
    assert rows_of(one) == rows_of(other)


def test_each_epoch_and_seed_has_an_order_of_its_own() -> None:
    lengths = [2] * 97
    orders = [
        tuple(documents_read(stream_of(lengths, batch_size=3, segment_length=7, seed=seed), epoch))
        for seed in (0, 1, 2**32, 2**63 - 1)
        for epoch in (0, 1, 2)
    ]
    assert len(set(orders)) == len(orders)
    in_order = [sum(a < b for a, b in itertools.pairwise(order)) for order in orders]
    assert all(30 < rising < 66 for rising in in_order)  # 48 of 96 are expected


def test_every_position_is_as_likely() -> None:
    stream = stream_of([1] * 5, batch_size=1, segment_length=5)
    seen = np.zeros((5, 5), dtype=int)
    for epoch in range(1000):
        seen[np.arange(5), np.array(documents_read(stream, epoch)) - 1] += 1
    # 200 are expected at each of 25 positions; chi-squared with 16 degrees of freedom is above 39 once in a thousand
    assert ((seen - 200) ** 2 / 200).sum() < 39


def test_the_order_is_that_of_numbers_numpy_promises_to_keep() -> None:
    generator = np.random.PCG64(np.random.SeedSequence(5, spawn_key=(3,)))
    drawn = [int(generator.random_raw()) for _ in range(11)]
    order = sorted(range(11), key=drawn.__getitem__)
    assert order == [10, 4, 9, 3, 2, 1, 6, 0, 5, 7, 8]
    assert documents_read(stream_of([1] * 11, batch_size=2, segment_length=3, seed=5), 3) == [
        index + 1 for index in order
    ]


def test_small_case_by_hand() -> None:
    """Documents 1 2, 3 4 5, 6, 7 8."""
    stream = stream_of([2, 3, 1, 2], batch_size=2, segment_length=3, seed=1)
    first, second = epoch_of(stream)
    # read as 3 4 5, 7 8, 6, 1 2, and cut into rows behind the 8
    assert first.inputs_BT.tolist() == [[START, 3, 4], [8, 6, 1]]
    assert first.targets_BT.tolist() == [[3, 4, 5], [6, 1, 2]]
    assert first.loss_mask_BT.all()
    assert second.inputs_BT.tolist() == [[5, 7, START], [START, START, START]]
    assert second.targets_BT.tolist() == [[7, 8, 0], [0, 0, 0]]
    assert second.loss_mask_BT.tolist() == [[True, True, False], [False, False, False]]


def test_what_cannot_be_read_side_by_side_is_refused() -> None:
    with pytest.raises(UserError, match=r"3 documents, and a batch of 4 sequences .*--document-unit line"):
        stream_of([5, 5, 5], batch_size=4, segment_length=1)
    with pytest.raises(UserError, match=r"batch size 0 and segment length 3 .* at least 1"):
        stream_of([5, 5, 5], batch_size=0, segment_length=3)
    with pytest.raises(UserError, match=r"1 sequences, 1 for each process, .* 2 processes without any"):
        stream_of([5, 5, 5], batch_size=1, segment_length=3, shard=Shard(1, 2))
    check_training(stream_of([5, 5, 5], batch_size=3, segment_length=5))
    with pytest.raises(UserError, match="15 tokens, and a batch of 3 sequences of 7 tokens needs 21"):
        check_training(stream_of([5, 5, 5], batch_size=3, segment_length=7))
