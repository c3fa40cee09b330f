"""Every token is a target once, whatever the stages of the length warm-up."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformer_xl.training.pieces import Piece, Place, in_loss, read_piece

from transformer_xl.config import TrainConfig
from transformer_xl.text.segments import DatasetPosition, SegmentDataset, Shard, TokenDataset
from transformer_xl.text.shuffled import ShuffledDocumentDataset
from transformer_xl.training.distributed import SINGLE_PROCESS, DistributedContext


def pieces_of(stream: TokenDataset, config: TrainConfig, *, epochs: int) -> list[tuple[Place, Piece]]:
    place, found = Place(0, DatasetPosition()), []
    while place.position.epoch < epochs:
        piece = read_piece(stream, place, config, SINGLE_PROCESS)
        found.append((place, piece))
        place = piece.after
    return found


def make_stream(order: Literal["text", "shuffled"], number: int, rows: int, segment: int) -> TokenDataset:
    tokens = np.arange(1, number + 1, dtype=np.uint32)
    if order == "text":
        return SegmentDataset(tokens, batch_size=rows, segment_length=segment, bos_token_id=0)
    starts = np.arange(0, number, 3).astype(np.uint64)
    return ShuffledDocumentDataset(tokens, starts, batch_size=rows, segment_length=segment, bos_token_id=0, seed=7)


@pytest.mark.parametrize("order", ["text", "shuffled"])
@given(
    number=st.integers(24, 211),
    batch_size=st.integers(1, 5),
    first=st.integers(1, 3),
    doublings=st.integers(1, 3),
    warmup_steps=st.integers(1, 97),
)
@settings(max_examples=40, deadline=None)
def test_every_target_counts_once_an_epoch(order, number, rows, first, doublings, warmup) -> None:
    segment = first * 2**doublings
    config = TrainConfig(
        segment_length=segment,
        memory_length=0,
        batch_size=rows,
        initial_segment_length=first,
        segment_warmup_steps=warmup,
    )
    stream = make_stream(order, number, rows, segment)
    found = pieces_of(stream, config, epochs=3)
    for epoch in range(3):
        of_epoch = [piece.segment for place, piece in found if place.position.epoch == epoch]
        seen = Counter(token for one in of_epoch for token in one.targets_BT[one.loss_mask_BT].tolist())
        assert seen == Counter(range(1, number + 1))
        assert [one.is_first for one in of_epoch] == [True] + [False] * (len(of_epoch) - 1)
        assert all(one.loss_mask_BT.any() for one in of_epoch)
    assert [place.step for place, _ in found] == [*range(len(found))]


def test_lengths_double_where_segments_begin() -> None:
    """Stages of 5 steps; a segment that has begun is read to its end in the length it began with."""
    config = TrainConfig(
        segment_length=8, memory_length=12, batch_size=2, initial_segment_length=2, segment_warmup_steps=10
    )
    found = pieces_of(make_stream("text", 79, 2, 8), config, epochs=1)
    assert [piece.segment.inputs_BT.shape[1] for _, piece in found] == [2] * 8 + [4] * 2 + [8] * 2
    assert [piece.memory for _, piece in found] == [3] * 8 + [6] * 2 + [12] * 2
    assert [place.piece for place, _ in found] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 0]
    whole = [make_stream("text", 79, 2, 8).read(DatasetPosition(segment_index=index)) for index in range(5)]
    for name in ("inputs_BT", "targets_BT", "loss_mask_BT"):
        read = np.concatenate([getattr(piece.segment, name) for _, piece in found], 1)
        np.testing.assert_array_equal(read, np.concatenate([getattr(segment, name) for segment in whole], 1))


def test_without_a_length_warmup_steps_read_segments() -> None:
    config = TrainConfig(segment_length=8, memory_length=12, batch_size=2)
    found = pieces_of(make_stream("text", 79, 2, 8), config, epochs=2)
    assert len(found) == 10
    assert {piece.memory for _, piece in found} == {12}
    assert {place.piece for place, _ in found} == {0}


@pytest.mark.parametrize("order", ["text", "shuffled"])
@given(
    number=st.integers(24, 211),
    batch_size=st.integers(1, 5),
    doublings=st.integers(1, 3),
    warmup_steps=st.integers(1, 97),
)
@settings(max_examples=40, deadline=None)
def test_half_loss_leaves_no_step_without_targets(order, number, rows, doublings, warmup) -> None:
    """What is left out is at an epoch's end, where all rows end within the first half of a piece."""
    segment = 3 * 2**doublings
    config = TrainConfig(
        segment_length=segment,
        memory_length=0,
        batch_size=rows,
        initial_segment_length=3,
        segment_warmup_steps=warmup,
        loss="half",
    )
    stream = make_stream(order, number, rows, segment)
    if number < rows * segment:  # refused before training begins
        return
    found = pieces_of(stream, config, epochs=3)
    assert all(in_loss(piece.segment.loss_mask_BT, config).any() for _, piece in found)
    assert [place.step for place, _ in found] == [*range(len(found))]
    for epoch in range(3):
        of_epoch = [piece.segment for place, piece in found if place.position.epoch == epoch]
        seen = Counter(token for one in of_epoch for token in one.targets_BT[one.loss_mask_BT].tolist())
        left_out = Counter(range(1, number + 1)) - seen
        assert max(seen.values()) == 1
        assert len(left_out) <= rows * (segment // 2)
        assert of_epoch[0].is_first


def test_half_loss_leaves_out_a_short_last_segment() -> None:
    """Rows of 10 and 11 tokens in segments of 8: 3 are no more than half a segment; of 12 and 13, 5 are more."""
    config = TrainConfig(segment_length=8, memory_length=12, batch_size=2, loss="half")
    for number, segments in ((21, 1), (25, 2)):
        found = pieces_of(make_stream("text", number, 2, 8), config, epochs=2)
        assert [(place.position.epoch, place.position.segment_index) for place, _ in found] == [
            (epoch, segment) for epoch in range(2) for segment in range(segments)
        ]
    # rows that changed can put a resumed run there: it goes on with the next epoch
    piece = read_piece(
        make_stream("text", 21, 2, 8), Place(5, DatasetPosition(segment_index=1)), config, SINGLE_PROCESS
    )
    assert piece.segment.is_first
    assert piece.after == Place(6, DatasetPosition(epoch=2))


def test_processes_agree_on_what_is_left_out() -> None:
    """Rows of 8 and 9 tokens in segments of 8: in the second segment only the other process has something."""

    class Other(DistributedContext):
        def any(self, flag: bool) -> bool:
            assert not flag
            return True

    config = TrainConfig(segment_length=8, memory_length=0, batch_size=2)
    stream = SegmentDataset(
        np.arange(17, dtype=np.uint32), batch_size=2, segment_length=8, bos_token_id=0, shard=Shard(0, 2)
    )
    piece = read_piece(stream, Place(0, DatasetPosition()), config, Other())
    assert piece.after == Place(1, DatasetPosition(segment_index=1))
