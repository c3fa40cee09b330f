"""The loss of the validation text while training: its rows side by side, shared out over the processes as in training.

Shape suffixes: B rows of this process, T new tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from transformer_xl.config import TrainConfig, UserError
from transformer_xl.device import autocast
from transformer_xl.model.memory import Memory
from transformer_xl.text.segments import DatasetPosition, SegmentDataset
from transformer_xl.text.token_store import Tokens
from transformer_xl.training.distributed import DistributedContext
from transformer_xl.training.step import send

_SUMS_AT_ONCE = 512  # sums left on the device before they are fetched, so that it need not wait for each


def validation_stream(
    tokens: Tokens, bos_token_id: int, config: TrainConfig, world: DistributedContext
) -> SegmentDataset:
    """The validation text in as many of training's rows as it fills with a segment, at least one for each process.

    A few rows fewer where so many would leave a process without any.

    Raises:
        UserError: it has fewer tokens than there are processes.
    """
    if len(tokens) < world.size:
        raise UserError(
            f"the validation text has {len(tokens):,} tokens for {world.size:,} processes, and each needs one; start "
            "fewer processes, or give a longer text"
        )
    rows = max(world.size, min(config.batch_size, len(tokens) // config.segment_length))
    while (world.size - 1) * -(-rows // world.size) >= rows:  # ends at one row for each process, if not before
        rows -= 1
    segment = min(config.segment_length, -(-len(tokens) // rows))
    return SegmentDataset(tokens, batch_size=rows, segment_length=segment, bos_token_id=bos_token_id, shard=world.shard)


def sum_nats(
    scored: nn.Module, stream: SegmentDataset, memory: Memory, config: TrainConfig, tell: Callable[[int], bool]
) -> float | None:
    """The sum of the losses of this process's rows, in nats (added up in float64).

    Args:
        scored: a `ScoredModel` in evaluation mode, perhaps wrapped.
        stream: the text.
        memory: an empty one for the rows.
        config: says in which number format to compute.
        tell: hears how many tokens a segment had, and says whether to stop; then there is no sum.
    """
    device, total = memory.valid_B.device, 0.0
    sums: list[Tensor] = []
    for index in range(stream.num_segments):
        segment = stream.read(DatasetPosition(segment_index=index))
        inputs_BT, loss_mask_BT = (
            send(torch.from_numpy(array), device) for array in (segment.inputs_BT, segment.loss_mask_BT)
        )
        with autocast(device, config.dtype):
            nats_BT, _, memory = scored(inputs_BT, segment.targets_BT, memory)
        sums.append((nats_BT * loss_mask_BT).sum())
        if len(sums) == _SUMS_AT_ONCE:
            total += _fetch(sums)
            sums.clear()
        if tell(int(segment.loss_mask_BT.sum())):
            return None
    return total + (_fetch(sums) if sums else 0.0)


def _fetch(sums: list[Tensor]) -> float:
    return float(torch.stack(sums).cpu().double().sum())
