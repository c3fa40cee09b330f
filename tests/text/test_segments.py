"""Segments: every token a target exactly once, after the token before it; and a position is all there is to resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError, check_settings
from transformer_xl.text.segments import Batch, DatasetPosition, SegmentDataset, Shard, check_training
from transformer_xl.text.token_store import TokenShards

START = 7919
UNHURRIED = settings(deadline=None)


@st.composite
def streams(draw: st.DrawFn) -> SegmentDataset:
    """Streams of any size; the token at index i is i + 1, so that each index can be told from the others."""
    length = draw(st.integers(1, 211))
    rows = draw(st.integers(1, min(length, 13)))
    tokens = np.arange(1, length + 1, dtype=np.uint16)
    return SegmentDataset(tokens, batch_size=rows, segment_length=draw(st.integers(1, 17)), bos_token_id=START)


def epoch(stream: SegmentDataset) -> list[Batch]:
    return [stream.read(DatasetPosition(segment_index=index)) for index in range(stream.num_segments)]


@UNHURRIED
@given(streams())
def test_every_token_is_a_target_once_after_the_token_before_it(stream: SegmentDataset) -> None:
    targets: list[int] = []
    for segment in epoch(stream):
        counted = segment.targets_BT[segment.loss_mask_BT]
        inputs = segment.inputs_BT[segment.loss_mask_BT]
        targets.extend(counted.tolist())
        assert inputs.tolist() == [START if target == 1 else target - 1 for target in counted.tolist()]
    assert sorted(targets) == stream.tokens[:].tolist()


@UNHURRIED
@given(st.data())
def test_every_token_is_a_target_once_under_any_rows_segment_and_shards(data: st.DataObject) -> None:
    length, count = data.draw(st.integers(1, 211)), data.draw(st.integers(1, 5))
    each = data.draw(st.integers(1, max(1, 13 // count)))  # the last shard may have fewer
    rows = each * (count - 1) + data.draw(st.integers(1, each))
    if length < rows:
        length = rows
    tokens = np.arange(1, length + 1, dtype=np.uint16)
    segment = data.draw(st.integers(1, 17))
    whole = SegmentDataset(tokens, batch_size=rows, segment_length=segment, bos_token_id=START)
    shards = [
        SegmentDataset(tokens, batch_size=rows, segment_length=segment, bos_token_id=START, shard=Shard(index, count))
        for index in range(count)
    ]
    assert {shard.segments_in(5) for shard in shards} == {whole.num_segments}
    targets: list[int] = []
    position = DatasetPosition()
    for _ in range(whole.num_segments):
        read = [shard.read(position) for shard in shards]
        shared = [len(part) for part in torch.arange(rows).chunk(count)]  # as torch shares out a sharded tensor
        assert [part.targets_BT.shape for part in read] == [(own, segment) for own in shared]
        assert [shard.local_batch_size for shard in shards] == shared
        for name in ("inputs_BT", "targets_BT", "loss_mask_BT"):
            joined = np.concatenate([getattr(part, name) for part in read])
            assert joined.tolist() == getattr(whole.read(position), name).tolist()
        targets.extend(token for part in read for token in part.targets_BT[part.loss_mask_BT].tolist())
        assert len({shard.after(position) for shard in shards}) == 1
        position = whole.after(position)
    assert sorted(targets) == tokens.tolist()
    assert position == DatasetPosition(epoch=1)


@UNHURRIED
@given(st.lists(st.integers(1, 13), min_size=1, max_size=7), st.integers(1, 5), st.integers(1, 11))
def test_tokens_in_shard_files_read_as_one_array(lengths: list[int], batch_size: int, segment_length: int) -> None:
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint16)
    rows = min(batch_size, len(tokens))
    joined = TokenShards(tuple(np.split(tokens, np.cumsum(lengths)[:-1])))
    one = SegmentDataset(tokens, batch_size=rows, segment_length=segment_length, bos_token_id=START)
    other = SegmentDataset(joined, batch_size=rows, segment_length=segment_length, bos_token_id=START)
    for first, second in zip(epoch(one), epoch(other), strict=True):
        assert first.inputs_BT.tolist() == second.inputs_BT.tolist()
        assert first.targets_BT.tolist() == second.targets_BT.tolist()


@UNHURRIED
@given(streams())
def test_batch_rows_are_contiguous_ranges_of_the_text(stream: SegmentDataset) -> None:
    segments = epoch(stream)
    length = len(stream.tokens)
    for row in range(stream.batch_size):
        read = [token for segment in segments for token in segment.targets_BT[row][segment.loss_mask_BT[row]].tolist()]
        begin, end = row * length // stream.batch_size, (row + 1) * length // stream.batch_size
        assert read == list(range(begin + 1, end + 1))
        assert abs(len(read) - length / stream.batch_size) < 1
        counted = np.concatenate([segment.loss_mask_BT[row] for segment in segments])
        assert counted[: len(read)].all()
        assert not counted[len(read) :].any()


@UNHURRIED
@given(streams())
def test_shape_is_always_the_same_and_padding_is_marked(stream: SegmentDataset) -> None:
    segments = epoch(stream)
    for index, segment in enumerate(segments):
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
@given(streams(), st.data())
def test_reading_again_and_elsewhere_changes_nothing(stream: SegmentDataset, data: st.DataObject) -> None:
    positions = st.builds(
        DatasetPosition, epoch=st.integers(0, 3), segment_index=st.integers(0, stream.num_segments - 1)
    )
    position = data.draw(positions)
    first = stream.read(position)
    expected = first.inputs_BT.copy(), first.targets_BT.copy(), first.loss_mask_BT.copy()
    first.inputs_BT[:] = first.targets_BT[:] = -1
    stream.read(data.draw(positions))
    again = stream.read(position)
    for array, wanted in zip((again.inputs_BT, again.targets_BT, again.loss_mask_BT), expected, strict=True):
        assert (array == wanted).all()
    assert stream.tokens[:].tolist() == list(range(1, len(stream.tokens) + 1))


@UNHURRIED
@given(streams())
def test_trimmed_keeps_what_counts(stream: SegmentDataset) -> None:
    for segment in epoch(stream):
        short = segment.trimmed()
        assert short.inputs_BT.shape == short.targets_BT.shape == short.loss_mask_BT.shape
        assert short.targets_BT[short.loss_mask_BT].tolist() == segment.targets_BT[segment.loss_mask_BT].tolist()
        assert short.inputs_BT[short.loss_mask_BT].tolist() == segment.inputs_BT[segment.loss_mask_BT].tolist()
        assert short.loss_mask_BT.any(axis=0).all()
        assert short.is_first == segment.is_first
        if stream.batch_size == 1:
            assert short.loss_mask_BT.all()


@UNHURRIED
@given(streams(), st.integers(0, 40), st.integers(0, 40))
def test_saved_position_goes_on_where_it_was(stream: SegmentDataset, before: int, more: int) -> None:
    position = DatasetPosition()
    for _ in range(before):
        position = stream.after(position)
    assert position.epoch * stream.num_segments + position.segment_index == before
    saved = json.dumps(position.model_dump())
    restored = check_settings(DatasetPosition, json.loads(saved), "state")
    assert restored == position
    for _ in range(more):
        position, restored = stream.after(position), stream.after(restored)
        one, other = stream.read(position), stream.read(restored)
        assert one.targets_BT.tolist() == other.targets_BT.tolist()
        assert one.is_first == other.is_first == (position.segment_index == 0)


def test_small_case_by_hand() -> None:
    stream = SegmentDataset(
        np.array([3, 5, 7, 11, 13], dtype=np.uint8), batch_size=2, segment_length=2, bos_token_id=10
    )
    first, second = epoch(stream)
    assert first.inputs_BT.tolist() == [[10, 3], [5, 7]]
    assert first.targets_BT.tolist() == [[3, 5], [7, 11]]
    assert second.inputs_BT.tolist() == [[10, 10], [11, 10]]
    assert second.targets_BT.tolist() == [[0, 0], [13, 0]]
    assert second.loss_mask_BT.tolist() == [[False, False], [True, False]]
    assert second.trimmed().inputs_BT.tolist() == [[10], [11]]


def test_reads_from_a_memory_map_only_what_it_needs(tmp_path: Path) -> None:
    class Watched(np.ndarray[Any, np.dtype[np.uint8]]):
        def __getitem__(self, key: slice) -> Any:
            asked.append(key.stop - key.start)
            return np.asarray(self)[key]

    asked: list[int] = []
    np.arange(199, dtype=np.uint8).tofile(tmp_path / "tokens")
    mapped = np.memmap(tmp_path / "tokens", dtype=np.uint8, mode="r")
    segment = SegmentDataset(mapped.view(Watched), batch_size=3, segment_length=7, bos_token_id=10).read(
        DatasetPosition(segment_index=2)
    )
    assert sum(asked) <= 2 * 3 * 7
    assert segment.targets_BT.tolist() == [list(range(begin + 14, begin + 21)) for begin in (0, 66, 132)]


def test_positions_are_values() -> None:
    position = DatasetPosition(epoch=2, segment_index=3)
    assert position == DatasetPosition(epoch=2, segment_index=3)
    with pytest.raises(UserError, match=r"state: unknown setting 'segment_indx' \(did you mean 'segment_index'\?\)"):
        check_settings(DatasetPosition, {"epoch": 0, "segment_indx": 1}, "state")
    with pytest.raises(UserError, match=r"state: segment_index: .*greater than or equal to 0"):
        check_settings(DatasetPosition, {"segment_index": -1}, "state")


def test_too_few_tokens_are_refused() -> None:
    tokens = np.arange(6, dtype=np.uint8)
    with pytest.raises(
        UserError, match="6 tokens, and a batch of 7 sequences needs one for each; lower the batch size"
    ):
        SegmentDataset(tokens, batch_size=7, segment_length=1, bos_token_id=10)
    with pytest.raises(UserError, match="0 tokens, and a batch of 1 sequences"):
        SegmentDataset(tokens[:0], batch_size=1, segment_length=1, bos_token_id=10)
    for rows, segment in ((0, 3), (3, 0)):
        with pytest.raises(UserError, match=f"batch size {rows} and segment length {segment} .* at least 1"):
            SegmentDataset(tokens, batch_size=rows, segment_length=segment, bos_token_id=10)


def test_rows_that_leave_a_shard_without_any_are_refused() -> None:
    tokens = np.arange(97, dtype=np.uint8)
    with pytest.raises(
        UserError,
        match=r"4 sequences, 2 for each process, .* 3 processes without any; give --train.batch-size 6, or start 2",
    ):
        SegmentDataset(tokens, batch_size=4, segment_length=1, bos_token_id=10, shard=Shard(0, 3))
    with pytest.raises(UserError, match=r"2 sequences, 1 for each process, .*; give --train.batch-size 3, or start 2"):
        SegmentDataset(tokens, batch_size=2, segment_length=1, bos_token_id=10, shard=Shard(1, 3))


def test_training_needs_a_segment_in_each_row() -> None:
    tokens = np.zeros(15, dtype=np.uint8)
    check_training(SegmentDataset(tokens, batch_size=3, segment_length=5, bos_token_id=10))
    check_training(SegmentDataset(tokens, batch_size=2, segment_length=7, bos_token_id=10))
    with pytest.raises(
        UserError,
        match=r"14 tokens, and a batch of 3 sequences of 5 tokens needs 15; lower --train.batch-size",
    ):
        check_training(SegmentDataset(tokens[:14], batch_size=3, segment_length=5, bos_token_id=10))
