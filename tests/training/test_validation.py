"""The validation text can be divided among any number of processes, up to its number of tokens.

The text is split into batch rows, which are divided among the processes; each process reads its rows in segments of 4.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from transformer_xl.config import TrainConfig, UserError
from transformer_xl.text.segments import DatasetPosition, SegmentDataset
from transformer_xl.training.distributed import DistributedContext
from transformer_xl.training.validation import validation_dataset


def datasets(tokens: int, size: int, *, rows: int) -> list[SegmentDataset]:
    """Return the dataset of each of `size` processes, for a text of `tokens` tokens and a batch size of `rows`."""
    config = TrainConfig(batch_size=rows, segment_length=4, memory_length=4)
    text = np.arange(tokens, dtype=np.uint32)
    return [validation_dataset(text, 0, config, DistributedContext(rank=rank, size=size)) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_every_process_gets_rows_and_every_token_is_scored_once(size: int) -> None:
    for segments in range(1, 41):
        tokens = max(size, segments * 4 + 3)  # a text with an incomplete last segment, and a token for each process
        shared = datasets(tokens, size, rows=64)
        assert len({one.batch_size for one in shared}) == 1
        # the largest number of rows with at least one full segment each that leaves no process without a row; a process
        # gets the number of rows divided by the number of processes, rounded up, until none are left
        fills = max(size, tokens // 4)
        fitting = [rows for rows in range(size, fills + 1) if (size - 1) * -(-rows // size) < rows]
        assert shared[0].batch_size == max(fitting)
        assert all(one.local_batch_size > 0 for one in shared)
        read = [one.read(DatasetPosition(segment_index=index)) for one in shared for index in range(one.segments_in(0))]
        seen = Counter(token for segment in read for token in segment.targets_BT[segment.loss_mask_BT].tolist())
        assert seen == Counter(range(tokens))


def test_batch_size_is_the_maximum_number_of_rows() -> None:
    assert [one.local_batch_size for one in datasets(tokens=400, size=3, rows=8)] == [3, 3, 2]


@pytest.mark.parametrize("tokens", [0, 3])
def test_fewer_tokens_than_processes_are_refused(tokens: int) -> None:
    message = f"the validation text has {tokens} tokens for 4 processes, and each needs one; start fewer processes"
    with pytest.raises(UserError, match=message):
        datasets(tokens, size=4, rows=8)
