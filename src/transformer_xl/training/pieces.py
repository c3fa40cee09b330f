"""What one step reads: a segment of the text, or during the length warm-up a piece of one.

A warm-up that begins with a quarter of the segment reads each segment in four steps, then in two, then whole. The
number of pieces changes only where a segment begins, so every token is a target exactly once, and the text is read in
the order it always is. Where an epoch ends in pieces without any target to learn from, they are left out.

Shape suffixes: B rows of this process, T new tokens of the piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transformer_xl.config import TrainConfig
from transformer_xl.text.segments import Batch, DatasetPosition, TokenDataset
from transformer_xl.training.distributed import DistributedContext
from transformer_xl.training.schedules import halvings


@dataclass(frozen=True)
class Place:
    """Where training stands in the text."""

    step: int
    """Steps done."""
    position: DatasetPosition
    """The segment that is being read, or comes next."""
    piece: int = 0
    """Pieces of it that were read."""


@dataclass(frozen=True)
class Piece:
    """What a step reads, and what comes after it."""

    segment: Batch
    """The tokens; `starts` only in an epoch's first piece."""
    memory: int
    """M: memory slots beside them."""
    after: Place


def read_piece(stream: TokenDataset, place: Place, config: TrainConfig, world: DistributedContext) -> Piece:
    """What the next step reads of this process's rows; all processes agree on what comes after."""
    place = _with_targets(stream, place, config, world)  # rows that changed may have put it where there are none
    segment, columns = stream.read(place.position), _columns(place, config)
    if columns.stop < config.segment_length:
        after = Place(place.step + 1, place.position, place.piece + 1)
    else:
        after = Place(place.step + 1, stream.after(place.position))
    cut = Batch(
        np.ascontiguousarray(segment.inputs_BT[:, columns]),
        np.ascontiguousarray(segment.targets_BT[:, columns]),
        np.ascontiguousarray(segment.loss_mask_BT[:, columns]),
        is_first=segment.is_first and place.piece == 0,
    )
    return Piece(cut, config.memory_length >> _halved(place, config), _with_targets(stream, after, config, world))


def in_loss(loss_mask_BT: npt.NDArray[np.bool_], config: TrainConfig) -> npt.NDArray[np.bool_]:
    """Which of the counted targets of a piece training learns from: a copy, without the first half for `half`."""
    loss_mask_BT = loss_mask_BT.copy()
    if config.loss == "half":
        loss_mask_BT[:, : loss_mask_BT.shape[1] // 2] = False
    return loss_mask_BT


def _with_targets(stream: TokenDataset, place: Place, config: TrainConfig, world: DistributedContext) -> Place:
    """The place itself; the next epoch's beginning, if from there on no process has anything to learn from.

    An epoch's last segment is padding from somewhere on, and steps without targets would do harm.
    """
    position = place.position
    if position.segment_index + 1 < stream.segments_in(position.epoch):
        return place  # the longest row goes on beyond it
    loss_mask_BT = stream.read(position).loss_mask_BT[:, _columns(place, config)]
    if world.any(bool(in_loss(loss_mask_BT, config).any())):
        return place
    return Place(place.step, stream.after(position))


def _columns(place: Place, config: TrainConfig) -> slice:
    """Which places of its segment the piece has."""
    width = config.segment_length >> _halved(place, config)
    return slice(place.piece * width, (place.piece + 1) * width)


def _halved(place: Place, config: TrainConfig) -> int:
    return halvings(place.step - place.piece, config)  # the stage of the step that began this segment
