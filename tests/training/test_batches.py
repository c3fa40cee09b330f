"""In every epoch each token is a target once.

With `loss: half`, only the second half of a segment's targets is in the loss. `rows` are batch rows.

Shape suffixes: B batch rows, T tokens of a segment.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import TrainConfig
from transformer_xl.text.segments import DatasetPosition, SegmentDataset, Shard, TokenDataset
from transformer_xl.text.shuffled import ShuffledDocumentDataset
from transformer_xl.training.batches import StepBatch, read_batch, trained_targets
from transformer_xl.training.distributed import SINGLE_PROCESS, DistributedContext
from transformer_xl.training.schedules import random_length


def batches_of(dataset: TokenDataset, config: TrainConfig, *, epochs: int) -> list[tuple[DatasetPosition, StepBatch]]:
    """Return the batch of each step of the first epochs, with its position."""
    position, actual = DatasetPosition(), []
    while position.epoch < epochs:
        batch = read_batch(dataset, position, len(actual), config, SINGLE_PROCESS)
        actual.append((position, batch))
        position = batch.next
    return actual


def make_dataset(num_tokens: int, rows: int, segment_length: int, *, shuffled: bool = False) -> TokenDataset:
    """Return a text of the tokens 1, 2, 3, ...; if shuffled, in documents of 3 tokens. Token 0 precedes the text."""
    tokens = np.arange(1, num_tokens + 1, dtype=np.uint32)
    sizes = {"batch_size": rows, "segment_length": segment_length, "bos_token_id": 0}
    if not shuffled:
        return SegmentDataset(tokens, **sizes)
    return ShuffledDocumentDataset(tokens, np.arange(0, num_tokens, 3).astype(np.uint64), **sizes, seed=7)


@pytest.mark.parametrize("shuffled", [False, True])
@given(
    num_tokens=st.integers(40, 307),
    rows=st.integers(1, 5),
    context=st.integers(0, 13),
    is_random=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_inputs_begin_with_the_tokens_before_the_segment(
    *, shuffled: bool, num_tokens: int, rows: int, context: int, is_random: bool, seed: int
) -> None:
    """Each token is a target once, after the tokens of its row before it: `context` of them, if the row has so many.

    Segments have 8 tokens, or random lengths, to which the learning rate is in proportion.
    """
    config = TrainConfig(
        segment_length=8,
        memory_length=0,
        batch_size=rows,
        extended_context_length=context,
        random_segment_lengths=is_random,
        seed=seed,
    )
    dataset = make_dataset(num_tokens, rows, 1 if is_random else 8, shuffled=shuffled)
    for epoch in range(2):
        all_steps = enumerate(batches_of(dataset, config, epochs=2))
        steps = [(number, position, step) for number, (position, step) in all_steps if position.epoch == epoch]
        read = [list[int]() for _ in range(rows)]  # the targets of each row so far
        for number, position, step in steps:
            batch, length = step.batch, step.batch.targets_BT.shape[1]
            num_before = position.segment_index * dataset.segment_length
            assert batch.inputs_BX.shape == (rows, min(context, num_before) + length)
            if is_random:
                longest = max(len(row) for row in rows_of(dataset, epoch)) - num_before
                assert length == min(random_length(number, config), longest)
            assert step.learning_rate_ratio == (length / 8 if is_random else 1)
            for row, targets in enumerate(read):
                count = int(batch.loss_mask_BT[row].sum())
                assert batch.loss_mask_BT[row].tolist() == [index < count for index in range(length)]
                new = batch.targets_BT[row, :count].tolist()
                inputs = batch.inputs_BX[row, : min(context, num_before) + count].tolist()
                assert inputs[1:] == [*targets, *new][len(targets) - min(context, num_before) : -1] or not count
                targets += new
        assert read == rows_of(dataset, epoch)
        assert Counter(token for targets in read for token in targets) == Counter(range(1, num_tokens + 1))


def rows_of(dataset: TokenDataset, epoch: int) -> list[list[int]]:
    """Return the tokens of each batch row in an epoch."""
    parts = [
        dataset.read(DatasetPosition(epoch=epoch, segment_index=index)) for index in range(dataset.segments_in(epoch))
    ]
    return [
        [t for part in parts for t in part.targets_BT[row][part.loss_mask_BT[row]].tolist()]
        for row in range(dataset.batch_size)
    ]


@pytest.mark.parametrize("shuffled", [False, True])
@given(
    num_tokens=st.integers(24, 211),
    rows=st.integers(1, 5),
    length=st.integers(2, 24),
    loss=st.sampled_from(["full", "half"]),
)
@settings(max_examples=60, deadline=None)
def test_every_token_is_a_target_once_per_epoch(
    *, shuffled: bool, num_tokens: int, rows: int, length: int, loss: Any
) -> None:
    """With `loss: half`, a step is omitted at the end of an epoch if all rows end in the first half of its tokens."""
    if loss == "half" and num_tokens < rows * length:  # a text too short for one full segment is refused earlier
        return
    config = TrainConfig(
        segment_length=length,
        memory_length=0,
        batch_size=rows,
        loss=loss,
    )
    steps = batches_of(make_dataset(num_tokens, rows, length, shuffled=shuffled), config, epochs=3)
    for epoch in range(3):
        batches = [step.batch for position, step in steps if position.epoch == epoch]
        targets = Counter(token for batch in batches for token in batch.targets_BT[batch.loss_mask_BT].tolist())
        omitted = Counter(range(1, num_tokens + 1)) - targets
        assert set(targets.values()) == {1}
        assert len(omitted) <= (rows * (length // 2) if loss == "half" else 0)
        assert [batch.is_first for batch in batches] == [True] + [False] * (len(batches) - 1)
        assert all(trained_targets(batch.loss_mask_BT, config).any() for batch in batches)


def test_half_loss_skips_a_short_last_segment() -> None:
    """The half loss uses the last 4 targets of a segment of 8.

    21 tokens are rows of 10 and 11, whose second segment has at most 3 targets, none of them in the loss. 25 tokens are
    rows of 12 and 13, whose second segment has 4 and 5 targets, the fifth of them in the loss.
    """
    config = TrainConfig(segment_length=8, memory_length=12, batch_size=2, loss="half")
    for number, segments in ((21, 1), (25, 2)):
        actual = batches_of(make_dataset(number, 2, 8), config, epochs=2)
        positions = [(position.epoch, position.segment_index) for position, _ in actual]
        assert positions == [(epoch, segment) for epoch in range(2) for segment in range(segments)]
    # after a change of batch size, a resumed run can be at a segment without targets in the loss; it then reads the
    # first segment of the next epoch, which is the only one of that epoch
    batch = read_batch(make_dataset(21, 2, 8), DatasetPosition(segment_index=1), 5, config, SINGLE_PROCESS)
    assert batch.batch.is_first
    assert batch.next == DatasetPosition(epoch=2)


def test_processes_skip_the_same_segments() -> None:
    """Rows of 8 and 9 tokens in segments of 8: in the second segment, only the other process has a target.

    This process must not skip that segment.
    """

    class OtherHasTargets(DistributedContext):
        """Communication with another process that has targets left."""

        def any(self, flag: bool) -> bool:
            assert not flag
            return True

    config = TrainConfig(segment_length=8, memory_length=0, batch_size=2)
    tokens = np.arange(17, dtype=np.uint32)
    dataset = SegmentDataset(tokens, batch_size=2, segment_length=8, bos_token_id=0, shard=Shard(index=0, count=2))
    batch = read_batch(dataset, DatasetPosition(), 0, config, OtherHasTargets())
    assert batch.next == DatasetPosition(segment_index=1)
