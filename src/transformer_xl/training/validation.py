"""Validation: the loss of the validation text with the current weights, or their average, at intervals of training.

The text is split into as many batch rows as a training batch has, and these are distributed over the processes as in
training.

Shape suffixes: B batch rows of this process, T new tokens, X = T and the extended context before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from transformer_xl.config import TrainConfig, UserError
from transformer_xl.device import autocast, resolve_dtype, to_device
from transformer_xl.model.memory import Memory
from transformer_xl.ops.linear import packed_weights
from transformer_xl.text.segments import DatasetPosition, SegmentDataset
from transformer_xl.text.token_store import Corpus, Tokens
from transformer_xl.training.distributed import DistributedContext

_SUMS_PER_FETCH = 512  # loss sums fetched from the device at once, to avoid a synchronization for each segment


class Validator:
    """The validation text of a corpus, as one training run scores it."""

    def __init__(self, corpus: Corpus, config: TrainConfig, world: DistributedContext) -> None:
        """Open the validation text.

        Args:
            corpus: a corpus that has a validation text.
            config: settings of training; `eval_tokens` may truncate the text.
            world: the processes among which the batch rows are divided.

        Raises:
            UserError: the text has fewer tokens than processes.
        """
        tokens = corpus.split("valid").first(config.eval_tokens)
        self.num_tokens = len(tokens)
        self.text_id = f"{self.num_tokens} tokens of {corpus.record.splits['valid'].sha256}"
        """Identifies this text, because losses of different texts must not be compared."""
        self.dataset = validation_dataset(tokens, corpus.tokenizer.bos_token_id, config, world)
        self._config, self._world = config, world

    @torch.no_grad()
    def sum_losses(self, model: nn.Module, memory: Memory, should_stop: Callable[[int, int], bool]) -> float | None:
        """Compute the total loss of the text without dropout; all processes take part.

        Args:
            model: a `ModelWithLoss`, wrapped for the processes, in training mode.
            memory: an empty memory for the rows of this process.
            should_stop: called after each segment, with the number of segments and the number of tokens (of all
                processes) scored so far; if it returns true, scoring ends without a result.

        Returns:
            The sum of all losses in nats, accumulated in float64, the same in every process; or None if stopped.
        """
        device, dataset = memory.valid_B.device, self.dataset
        total, num_scored = 0.0, 0
        pending: list[Tensor] = []
        with ExitStack() as stack:
            model.eval()
            stack.callback(model.train)
            if self._config.compile == "none":  # packed weights would make compiled layers compile again
                is_low = resolve_dtype(device, self._config.dtype) == "bfloat16"
                stack.enter_context(packed_weights(model, torch.bfloat16 if is_low else torch.float32))
            for index in range(dataset.segments_in(epoch=0)):
                position = DatasetPosition(segment_index=index)
                context_length = dataset.context_length(position, self._config.extended_context_length)
                segment = dataset.read(position, context_length=context_length)
                inputs_BX = to_device(torch.from_numpy(segment.inputs_BX), device)
                loss_mask_BT = to_device(torch.from_numpy(segment.loss_mask_BT), device)
                with autocast(device, self._config.dtype):
                    losses_BT, _, memory = model(inputs_BX, segment.targets_BT, memory)
                pending.append((losses_BT * loss_mask_BT).sum())
                if len(pending) == _SUMS_PER_FETCH or index + 1 == dataset.segments_in(epoch=0):
                    total += float(torch.stack(pending).cpu().double().sum())
                    pending.clear()
                num_scored += int(segment.loss_mask_BT.sum())
                # tokens of all processes, estimated from the batch rows of this one without communication
                estimate = min(self.num_tokens, round(num_scored * dataset.batch_size / dataset.local_batch_size))
                if should_stop(index + 1, estimate):
                    return None
        sum_device = device if device.type == "cuda" else "cpu"  # MPS has no float64
        return float(self._world.sum(torch.tensor(total, dtype=torch.float64, device=sum_device)))


def validation_dataset(
    tokens: Tokens, bos_token_id: int, config: TrainConfig, world: DistributedContext
) -> SegmentDataset:
    """Split the validation text into batch rows that are scored in parallel.

    The number of rows is the batch size of training. It is reduced if the text is too short to fill one segment of each
    row, or if a process would get no rows; it is at least the number of processes.

    Raises:
        UserError: the text has fewer tokens than processes.
    """
    if len(tokens) < world.size:
        raise UserError(
            f"the validation text has {len(tokens):,} tokens for {world.size:,} processes, and each needs one; start "
            "fewer processes, or use a longer text"
        )
    rows = max(world.size, min(config.batch_size, len(tokens) // config.segment_length))
    # Each process but the last gets ceil(rows / size) rows, which must leave at least one for the last process. That is
    # the case at the latest when there is one row for each process.
    while (world.size - 1) * math.ceil(rows / world.size) >= rows:
        rows -= 1
    length = min(config.segment_length, math.ceil(len(tokens) / rows))
    return SegmentDataset(tokens, batch_size=rows, segment_length=length, bos_token_id=bos_token_id, shard=world.shard)
