"""The batch of one training step: a segment of the text, or with random segment lengths a drawn number of tokens.

With random segment lengths, the dataset's segments have one token, and a step reads as many of them as were drawn.
At the end of an epoch, a segment without targets is skipped.

Shape suffixes: B batch rows of this process, T new tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transformer_xl.config import TrainConfig
from transformer_xl.text.segments import Batch, DatasetPosition, TokenDataset
from transformer_xl.training.distributed import DistributedContext
from transformer_xl.training.schedules import random_length


@dataclass(frozen=True)
class StepBatch:
    """The batch of a step, and the position of the next step."""

    batch: Batch
    """The tokens; `is_first` is true only at the beginning of an epoch."""
    learning_rate_ratio: float
    """Factor of the learning rate of the step, which is in proportion to a random segment length."""
    next: DatasetPosition


def read_batch(
    dataset: TokenDataset, position: DatasetPosition, step: int, config: TrainConfig, world: DistributedContext
) -> StepBatch:
    """Return this process's batch rows at a position; the next position is the same in all processes.

    Args:
        dataset: the training text, of which each process reads its own batch rows.
        position: the segment of the step.
        step: index of the step, from 0.
        config: settings of training.
        world: the processes that train together.
    """
    # after a change of batch size, the position may be in the padding at the end of an epoch
    position = _skip_empty(dataset, position, config, world)
    num_segments, ratio = 1, 1.0
    if config.random_segment_lengths:
        num_left = dataset.segments_in(position.epoch) - position.segment_index
        num_segments = min(random_length(step, config), num_left)
        ratio = num_segments / config.segment_length
    context_length = dataset.context_length(position, config.extended_context_length)
    batch = dataset.read(position, num_segments=num_segments, context_length=context_length)
    return StepBatch(batch, ratio, _skip_empty(dataset, dataset.after(position, num_segments), config, world))


def trained_targets(loss_mask_BT: npt.NDArray[np.bool_], config: TrainConfig) -> npt.NDArray[np.bool_]:
    """Return the mask of the targets in the loss: all except padding, or with `loss: half` those of the second half.

    Args:
        loss_mask_BT: false for padding.
        config: settings of training.

    Returns:
        A new array of the same shape.
    """
    loss_mask_BT = loss_mask_BT.copy()
    if config.loss == "half":
        loss_mask_BT[:, : loss_mask_BT.shape[1] // 2] = False
    return loss_mask_BT


def _skip_empty(
    dataset: TokenDataset, position: DatasetPosition, config: TrainConfig, world: DistributedContext
) -> DatasetPosition:
    """Return the position, or the start of the next epoch if no process has targets left in this one.

    The last segment of an epoch ends in padding, and a step without targets would update the weights by momentum alone.
    """
    if position.segment_index + 1 < dataset.segments_in(position.epoch):
        return position  # only the last segment of an epoch can be without targets
    if world.any(bool(trained_targets(dataset.read(position).loss_mask_BT, config).any())):
        return position
    return dataset.after(position)
