"""What one step reads: a segment of the text, or during the length warm-up a piece of one.

A warm-up that begins with a quarter of the segment reads each segment in four steps, then in two, then whole. The
number of pieces changes only where a segment begins, so every token is a target exactly once, and the text is read in
the order it always is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from transformer_xl.config import TrainConfig
from transformer_xl.text.segments import Segment, Stream, StreamPosition
from transformer_xl.training.distributed import World
from transformer_xl.training.schedules import halvings


@dataclass(frozen=True)
class Place:
    """Where training stands in the text."""

    step: int
    """Steps done."""
    position: StreamPosition
    """The segment that is being read, or comes next."""
    piece: int = 0
    """Pieces of it that were read."""


@dataclass(frozen=True)
class Piece:
    """What a step reads, and what comes after it."""

    segment: Segment
    """The tokens; `starts` only in an epoch's first piece."""
    memory: int
    """M: memory slots beside them."""
    after: Place


def read_piece(stream: Stream, place: Place, config: TrainConfig, world: World) -> Piece:
    """What the next step reads of this process's rows; all processes agree on what comes after."""
    halved = halvings(place.step - place.piece, config)  # the stage of the step that began this segment
    segment, width = stream.read(place.position), config.segment >> halved
    begin, end = place.piece * width, (place.piece + 1) * width
    done = end >= config.segment
    if not done and place.position.segment + 1 == stream.segments_in(place.position.epoch):
        # an epoch's last segment is padding from somewhere on, and steps of padding alone would do harm
        done = not world.any(bool(segment.counted_BT[:, end:].any()))
    following = stream.after(place.position) if done else place.position
    cut = Segment(
        np.ascontiguousarray(segment.inputs_BT[:, begin:end]),
        np.ascontiguousarray(segment.targets_BT[:, begin:end]),
        np.ascontiguousarray(segment.counted_BT[:, begin:end]),
        starts=segment.starts and place.piece == 0,
    )
    return Piece(cut, config.memory >> halved, Place(place.step + 1, following, 0 if done else place.piece + 1))
