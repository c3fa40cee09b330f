"""Tests of `SegmentDataset`: each token is a target exactly once per epoch, and a position is its whole state.

Shape suffixes: B batch rows, T new tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.text.segments import SINGLE_SHARD, Batch, DatasetPosition, SegmentDataset, Shard, check_training

BOS = 7919  # no token of the texts


def dataset_of(num_tokens: int, batch_size: int, segment_length: int, shard: Shard = SINGLE_SHARD) -> SegmentDataset:
    """A text whose token at index i is i + 1, so that each token shows its index."""
    tokens = np.arange(1, num_tokens + 1, dtype=np.uint16)
    return SegmentDataset(tokens, batch_size=batch_size, segment_length=segment_length, bos_token_id=BOS, shard=shard)


@st.composite
def datasets(draw: st.DrawFn) -> SegmentDataset:
    num_tokens = draw(st.integers(1, 211))
    return dataset_of(num_tokens, draw(st.integers(1, min(num_tokens, 13))), draw(st.integers(1, 17)))


def first_epoch(dataset: SegmentDataset) -> list[Batch]:
    return [dataset.read(DatasetPosition(segment_index=index)) for index in range(dataset.segments_in(0))]


@settings(deadline=None)
@given(datasets())
def test_each_row_is_a_contiguous_part_of_the_text_with_padding_only_at_its_end(dataset: SegmentDataset) -> None:
    batches = first_epoch(dataset)
    num_tokens = len(dataset.tokens)
    inputs, targets, mask = (
        np.concatenate([getattr(batch, name) for batch in batches], axis=1)
        for name in ("inputs_BX", "targets_BT", "loss_mask_BT")
    )
    for row in range(dataset.batch_size):
        start, stop = row * num_tokens // dataset.batch_size, (row + 1) * num_tokens // dataset.batch_size
        length = stop - start
        assert targets[row, :length].tolist() == list(range(start + 1, stop + 1))
        # The token before index `start` is `start`, since the token at index i is i + 1; the first row has none.
        assert inputs[row, :length].tolist() == [start or BOS, *range(start + 1, stop)]
        assert mask[row].tolist() == [index < length for index in range(mask.shape[1])]
        assert (inputs[row, length:] == BOS).all()
        assert not targets[row, length:].any()
    for index, batch in enumerate(batches):
        assert batch.inputs_BX.shape == batch.targets_BT.shape == (dataset.batch_size, dataset.segment_length)
        assert (batch.inputs_BX.dtype, batch.targets_BT.dtype, batch.loss_mask_BT.dtype) == (np.int64, np.int64, bool)
        assert batch.loss_mask_BT.any()
        assert batch.is_first == (index == 0)


@settings(deadline=None)
@given(st.data())
def test_shards_concatenate_to_the_batch_of_a_single_process(data: st.DataObject) -> None:
    num_shards = data.draw(st.integers(1, 5))
    rows_per_shard = data.draw(st.integers(1, max(1, 13 // num_shards)))  # the last shard may have fewer
    batch_size = rows_per_shard * (num_shards - 1) + data.draw(st.integers(1, rows_per_shard))
    num_tokens, segment_length = data.draw(st.integers(batch_size, 211)), data.draw(st.integers(1, 17))
    single = dataset_of(num_tokens, batch_size, segment_length)
    shards = [
        dataset_of(num_tokens, batch_size, segment_length, Shard(index, num_shards)) for index in range(num_shards)
    ]
    torch_sizes = [len(part) for part in torch.arange(batch_size).chunk(num_shards)]
    assert [shard.local_batch_size for shard in shards] == torch_sizes
    position = DatasetPosition()
    for expected in first_epoch(single):
        batches = [shard.read(position) for shard in shards]
        for name in ("inputs_BX", "targets_BT", "loss_mask_BT"):
            np.testing.assert_array_equal(
                np.concatenate([getattr(batch, name) for batch in batches]), getattr(expected, name)
            )
        assert {shard.after(position) for shard in shards} == {single.after(position)}
        position = single.after(position)
    assert position == DatasetPosition(epoch=1)


def test_reading_a_segment_reads_only_its_tokens_from_the_memory_map(tmp_path: Path) -> None:
    class Recorder(np.ndarray[Any, np.dtype[np.uint8]]):
        def __getitem__(self, key: slice) -> Any:
            read_lengths.append(key.stop - key.start)
            return np.asarray(self)[key]

    read_lengths: list[int] = []
    np.arange(199, dtype=np.uint8).tofile(tmp_path / "tokens")
    tokens = np.memmap(tmp_path / "tokens", dtype=np.uint8, mode="r").view(Recorder)
    dataset = SegmentDataset(tokens, batch_size=3, segment_length=7, bos_token_id=10)
    batch = dataset.read(DatasetPosition(segment_index=2))
    assert sum(read_lengths) <= 2 * 3 * 7  # inputs and targets of 3 rows of 7 tokens
    # The rows begin at 0, 199 // 3 and 2 * 199 // 3, and the third segment 2 * 7 tokens later.
    assert batch.targets_BT.tolist() == [list(range(row_start + 14, row_start + 21)) for row_start in (0, 66, 132)]


@pytest.mark.parametrize(
    ("num_tokens", "batch_size", "segment_length", "shard", "message"),
    [
        (6, 7, 1, SINGLE_SHARD, "6 tokens, .* 7 sequences .*lower the batch size"),
        (0, 1, 1, SINGLE_SHARD, "0 tokens, .* 1 sequences"),
        (6, 0, 3, SINGLE_SHARD, "batch size 0 .* at least 1"),
        (6, 3, 0, SINGLE_SHARD, "segment length 0 .* at least 1"),
        (97, 4, 1, Shard(index=0, count=3), "4 sequences, 2 for each process, .*train.batch_size=6, or start 2"),
        (97, 2, 1, Shard(index=1, count=3), "2 sequences, 1 for each process, .*train.batch_size=3, or start 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    num_tokens: int, batch_size: int, segment_length: int, shard: Shard, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        dataset_of(num_tokens, batch_size, segment_length, shard)


def test_training_requires_one_segment_for_each_row() -> None:
    check_training(dataset_of(15, batch_size=3, segment_length=5), 5)
    with pytest.raises(UserError, match=r"14 tokens, .* 3 sequences of 5 tokens needs 15; lower train.batch_size"):
        check_training(dataset_of(14, batch_size=3, segment_length=5), 5)
