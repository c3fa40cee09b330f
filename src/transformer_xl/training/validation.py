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

from transformer_xl.config import RunConfig, TrainConfig, UserError
from transformer_xl.device import autocast, resolve_dtype, to_device
from transformer_xl.model.memory import Memory
from transformer_xl.ops.linear import packed_weights
from transformer_xl.text.segments import DatasetPosition, SegmentDataset, TokenDataset
from transformer_xl.text.token_store import Corpus, Tokens
from transformer_xl.training.distributed import DistributedContext
from transformer_xl.xlnet.objective import PermutedDataset

_SUMS_PER_FETCH = 512  # loss sums fetched from the device at once, to avoid a synchronization for each segment


class Validator:
    """The validation text of a corpus, as one training run scores it."""

    def __init__(self, corpus: Corpus, run: RunConfig, world: DistributedContext) -> None:
        """Open the validation text.

        Args:
            corpus: a corpus that has a validation text.
            run: settings; `train.eval_tokens` may truncate the text.
            world: the processes among which the batch rows are divided.

        Raises:
            UserError: the text has fewer tokens than processes.
        """
        split, config = corpus.split("valid"), run.train
        tokens = split.first(config.eval_tokens)
        self.num_tokens = len(tokens)
        self.text_id = f"{self.num_tokens} tokens of {corpus.record.splits['valid'].sha256}"
        """Identifies this text, because losses of different texts must not be compared."""
        self.dataset = validation_dataset(tokens, corpus.tokenizer.bos_token_id, config, world)
        rows, in_order, model = self.dataset.batch_size, None, run.model.orders
        is_even = not run.model.reads_backward or self.dataset.local_batch_size % 2 == rows % (2 * world.size) == 0
        if model is not None and is_even and len(tokens) >= rows * config.segment_length:
            in_order = PermutedDataset(
                tokens,
                split.document_starts[split.document_starts < len(tokens)],
                batch_size=rows,
                segment_length=config.segment_length,
                bos_token_id=corpus.tokenizer.bos_token_id,
                shard=world.shard,
                seed=0,  # the same orders in each validation
                model=model,
            )
        self.in_order: TokenDataset | None = in_order
        """The text as it is predicted in training, if that is not from left to right and it is long enough."""
        self._config, self._world = config, world

    def nats_in_order(self, model: nn.Module, memory: Memory, should_stop: Callable[[int, int], bool]) -> float | None:
        """Return the loss of the predicted tokens of `in_order` in nats per token, or None if stopped or there is none.

        Arguments are those of `sum_losses`.
        """
        sums = None if self.in_order is None else self._sums(self.in_order, model, memory, should_stop)
        return sums[0] / sums[1] if sums else None

    def sum_losses(self, model: nn.Module, memory: Memory, should_stop: Callable[[int, int], bool]) -> float | None:
        """Compute the total loss of the text from left to right without dropout; all processes take part.

        Args:
            model: a `ModelWithLoss`, wrapped for the processes, in training mode.
            memory: an empty memory for the rows of this process.
            should_stop: called after each segment, with the number of segments and the number of tokens (of all
                processes) scored so far; if it returns true, scoring ends without a result.

        Returns:
            The sum of all losses in nats, accumulated in float64, the same in every process; or None if stopped.
        """
        sums = self._sums(self.dataset, model, memory, should_stop)
        return sums and sums[0]

    @torch.no_grad()
    def _sums(
        self, dataset: TokenDataset, model: nn.Module, memory: Memory, should_stop: Callable[[int, int], bool]
    ) -> tuple[float, float] | None:
        """Return the sum of the losses and the number of targets, over all processes, or None if stopped."""
        device = memory.valid_B.device
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
                order = segment.order_B2T  # None: from left to right
                order = () if order is None else (None, to_device(torch.from_numpy(order), device))
                with autocast(device, self._config.dtype):
                    losses_BT, _, memory = model(inputs_BX, segment.targets_BT, memory, *order)
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
        sums = torch.tensor([total, num_scored], dtype=torch.float64, device=sum_device)
        nats, num_targets = self._world.sum(sums).tolist()
        return nats, num_targets


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
