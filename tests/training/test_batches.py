"""Every token is a target once, whatever the stages of the segment warm-up."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import TrainConfig
from transformer_xl.text.segments import DatasetPosition, SegmentDataset, Shard, TokenDataset
from transformer_xl.text.shuffled import ShuffledDocumentDataset
from transformer_xl.training.batches import BatchPosition, StepBatch, read_batch, trained_targets
from transformer_xl.training.distributed import SINGLE_PROCESS, DistributedContext


def batches_of(dataset: TokenDataset, config: TrainConfig, *, epochs: int) -> list[tuple[BatchPosition, StepBatch]]:
    position, found = BatchPosition(0, DatasetPosition()), []
    while position.segment.epoch < epochs:
        batch = read_batch(dataset, position, config, SINGLE_PROCESS)
        found.append((position, batch))
        position = batch.next
    return found


def make_dataset(number: int, rows: int, segment_length: int, *, shuffled: bool = False) -> TokenDataset:
    tokens = np.arange(1, number + 1, dtype=np.uint32)
    sizes = {"batch_size": rows, "segment_length": segment_length, "bos_token_id": 0}
    if not shuffled:
        return SegmentDataset(tokens, **sizes)
    return ShuffledDocumentDataset(tokens, np.arange(0, number, 3).astype(np.uint64), **sizes, seed=7)


@pytest.mark.parametrize("shuffled", [False, True])
@given(
    number=st.integers(24, 211),
    rows=st.integers(1, 5),
    first=st.integers(1, 3),
    doublings=st.integers(1, 3),
    warmup=st.integers(1, 97),
)
@settings(max_examples=40, deadline=None)
def test_every_target_counts_once_an_epoch(
    *, shuffled: bool, number: int, rows: int, first: int, doublings: int, warmup: int
) -> None:
    length = first * 2**doublings
    config = TrainConfig(
        segment_length=length,
        memory_length=0,
        batch_size=rows,
        initial_segment_length=first,
        segment_warmup_steps=warmup,
    )
    found = batches_of(make_dataset(number, rows, length, shuffled=shuffled), config, epochs=3)
    for epoch in range(3):
        of_epoch = [step.batch for position, step in found if position.segment.epoch == epoch]
        seen = Counter(token for one in of_epoch for token in one.targets_BT[one.loss_mask_BT].tolist())
        assert seen == Counter(range(1, number + 1))
        assert [one.is_first for one in of_epoch] == [True] + [False] * (len(of_epoch) - 1)
        assert all(one.loss_mask_BT.any() for one in of_epoch)
    assert [position.step for position, _ in found] == [*range(len(found))]


def test_lengths_double_where_segments_begin() -> None:
    """Stages of 5 steps; a segment that has begun is read to its end in the length it began with."""
    config = TrainConfig(
        segment_length=8, memory_length=12, batch_size=2, initial_segment_length=2, segment_warmup_steps=10
    )
    found = batches_of(make_dataset(79, 2, 8), config, epochs=1)
    assert [step.batch.inputs_BT.shape[1] for _, step in found] == [2] * 8 + [4] * 2 + [8] * 2
    assert [step.memory_length for _, step in found] == [3] * 8 + [6] * 2 + [12] * 2
    assert [position.part for position, _ in found] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 0]
    whole = [make_dataset(79, 2, 8).read(DatasetPosition(segment_index=index)) for index in range(5)]
    for name in ("inputs_BT", "targets_BT", "loss_mask_BT"):
        read = np.concatenate([getattr(step.batch, name) for _, step in found], 1)
        np.testing.assert_array_equal(read, np.concatenate([getattr(segment, name) for segment in whole], 1))


def test_without_a_segment_warmup_steps_read_whole_segments() -> None:
    config = TrainConfig(segment_length=8, memory_length=12, batch_size=2)
    found = batches_of(make_dataset(79, 2, 8), config, epochs=2)
    assert len(found) == 10
    assert {step.memory_length for _, step in found} == {12}
    assert {position.part for position, _ in found} == {0}


@pytest.mark.parametrize("shuffled", [False, True])
@given(number=st.integers(24, 211), rows=st.integers(1, 5), doublings=st.integers(1, 3), warmup=st.integers(1, 97))
@settings(max_examples=40, deadline=None)
def test_half_loss_leaves_no_step_without_targets(
    *, shuffled: bool, number: int, rows: int, doublings: int, warmup: int
) -> None:
    """What is left out is at an epoch's end, where all rows end within the first half of a batch."""
    length = 3 * 2**doublings
    config = TrainConfig(
        segment_length=length,
        memory_length=0,
        batch_size=rows,
        initial_segment_length=3,
        segment_warmup_steps=warmup,
        loss="half",
    )
    if number < rows * length:  # refused before training begins
        return
    found = batches_of(make_dataset(number, rows, length, shuffled=shuffled), config, epochs=3)
    assert all(trained_targets(step.batch.loss_mask_BT, config).any() for _, step in found)
    assert [position.step for position, _ in found] == [*range(len(found))]
    for epoch in range(3):
        of_epoch = [step.batch for position, step in found if position.segment.epoch == epoch]
        seen = Counter(token for one in of_epoch for token in one.targets_BT[one.loss_mask_BT].tolist())
        left_out = Counter(range(1, number + 1)) - seen
        assert max(seen.values()) == 1
        assert len(left_out) <= rows * (length // 2)
        assert of_epoch[0].is_first


def test_half_loss_leaves_out_a_short_last_segment() -> None:
    """Rows of 10 and 11 tokens in segments of 8: 3 are no more than half a segment; of 12 and 13, 5 are more."""
    config = TrainConfig(segment_length=8, memory_length=12, batch_size=2, loss="half")
    for number, segments in ((21, 1), (25, 2)):
        found = batches_of(make_dataset(number, 2, 8), config, epochs=2)
        positions = [(position.segment.epoch, position.segment.segment_index) for position, _ in found]
        assert positions == [(epoch, segment) for epoch in range(2) for segment in range(segments)]
    # a changed batch size can put a resumed run there: it continues with the next epoch
    batch = read_batch(
        make_dataset(21, 2, 8), BatchPosition(5, DatasetPosition(segment_index=1)), config, SINGLE_PROCESS
    )
    assert batch.batch.is_first
    assert batch.next == BatchPosition(6, DatasetPosition(epoch=2))


def test_processes_agree_on_what_is_left_out() -> None:
    """Rows of 8 and 9 tokens in segments of 8: in the second segment only the other process has something."""

    class Other(DistributedContext):
        def any(self, flag: bool) -> bool:
            assert not flag
            return True

    config = TrainConfig(segment_length=8, memory_length=0, batch_size=2)
    tokens = np.arange(17, dtype=np.uint32)
    dataset = SegmentDataset(tokens, batch_size=2, segment_length=8, bos_token_id=0, shard=Shard(0, 2))
    batch = read_batch(dataset, BatchPosition(0, DatasetPosition()), config, Other())
    assert batch.next == BatchPosition(1, DatasetPosition(segment_index=1))
