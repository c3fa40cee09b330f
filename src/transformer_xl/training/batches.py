"""The batch of one training step: a segment of the text, or a part of a segment during the segment warm-up.

With random segment lengths, the dataset's segments have one token, and a step reads as many of them as were drawn.

A warm-up from a quarter of the segment length trains on each segment in four steps, later in two, finally in one.
Because segments are split into parts, every token is a target exactly once, and the order of the text is the same as
without a warm-up. At the end of an epoch, parts without targets are skipped.

Shape suffixes: B batch rows of this process, T new tokens of the step, X = T and the extended context before them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transformer_xl.config import TrainConfig
from transformer_xl.text.segments import Batch, DatasetPosition, TokenDataset
from transformer_xl.training.distributed import DistributedContext
from transformer_xl.training.schedules import num_halvings, random_length


@dataclass(frozen=True)
class BatchPosition:
    """The position of training in the text."""

    step: int
    """Number of steps done."""
    segment: DatasetPosition
    """The segment of the next step."""
    part: int = 0
    """Number of parts of that segment already trained on."""


@dataclass(frozen=True)
class StepBatch:
    """The batch of a step, and the position of the next step."""

    batch: Batch
    """The tokens; `is_first` is true only at the beginning of an epoch."""
    memory_length: int
    """Number of memory slots that the step attends to."""
    learning_rate_ratio: float
    """Factor of the learning rate of the step, which is in proportion to a random segment length."""
    next: BatchPosition


def read_batch(
    dataset: TokenDataset, position: BatchPosition, config: TrainConfig, world: DistributedContext
) -> StepBatch:
    """Return this process's batch rows at a position; the next position is the same in all processes.

    Args:
        dataset: the training text, of which each process reads its own batch rows.
        position: position of the step.
        config: settings of training.
        world: the processes that train together.
    """
    # after a change of batch size, the position may be in the padding at the end of an epoch
    position = _skip_empty(dataset, position, config, world)
    num_segments, ratio = 1, 1.0
    if config.random_segment_lengths:
        num_left = dataset.segments_in(position.segment.epoch) - position.segment.segment_index
        num_segments = min(random_length(position.step, config), num_left)
        ratio = num_segments / config.segment_length
    context_length = dataset.context_length(position.segment, config.extended_context_length)
    segment = dataset.read(position.segment, num_segments=num_segments, context_length=context_length)
    columns = slice(num_segments) if config.random_segment_lengths else _columns(position, config)
    if columns.stop < segment.targets_BT.shape[1]:
        after = BatchPosition(position.step + 1, position.segment, position.part + 1)
    else:
        after = BatchPosition(position.step + 1, dataset.after(position.segment, num_segments))
    part = Batch(
        np.ascontiguousarray(segment.inputs_BX[:, columns.start : columns.stop + context_length]),
        np.ascontiguousarray(segment.targets_BT[:, columns]),
        np.ascontiguousarray(segment.loss_mask_BT[:, columns]),
        is_first=segment.is_first and position.part == 0,
    )
    memory_length = config.memory_length >> _num_halvings(position, config)
    return StepBatch(part, memory_length, ratio, _skip_empty(dataset, after, config, world))


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
    dataset: TokenDataset, position: BatchPosition, config: TrainConfig, world: DistributedContext
) -> BatchPosition:
    """Return the position, or the start of the next epoch if no process has targets left in this one.

    The last segment of an epoch ends in padding, and a step without targets would update the weights by momentum alone.
    """
    segment = position.segment
    if segment.segment_index + 1 < dataset.segments_in(segment.epoch):
        return position  # only the last segment of an epoch can be without targets
    loss_mask_BT = dataset.read(segment).loss_mask_BT[:, _columns(position, config)]
    if world.any(bool(trained_targets(loss_mask_BT, config).any())):
        return position
    return BatchPosition(position.step, dataset.after(segment))


def _columns(position: BatchPosition, config: TrainConfig) -> slice:
    """Return which columns of the segment's (B, T) arrays belong to the part at this position."""
    width = config.segment_length >> _num_halvings(position, config)
    return slice(position.part * width, (position.part + 1) * width)


def _num_halvings(position: BatchPosition, config: TrainConfig) -> int:
    return num_halvings(position.step - position.part, config)  # all parts have the length of the segment's first step
