"""Validation: the loss of the validation text with the current weights, during training.

The text is split into as many rows as a training batch, distributed over the processes as in training.

Shape suffixes: B rows of this process, T new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from transformer_xl.config import TrainConfig, UserError
from transformer_xl.device import autocast, to_device
from transformer_xl.model.memory import Memory
from transformer_xl.text.segments import DatasetPosition, SegmentDataset
from transformer_xl.text.token_store import Corpus, Tokens
from transformer_xl.training.distributed import DistributedContext

_SUMS_PER_FETCH = 512  # loss sums fetched from the device at once, to avoid a synchronization for each segment


class Validator:
    """The validation text of a corpus, as one training run scores it."""

    def __init__(self, corpus: Corpus, config: TrainConfig, world: DistributedContext) -> None:
        """Open the text.

        Args:
            corpus: a corpus with a split `valid`.
            config: settings of training; `eval_tokens` may truncate the text.
            world: the processes that share the work.

        Raises:
            UserError: the text has fewer tokens than processes.
        """
        tokens = corpus.split("valid").first(config.eval_tokens)
        self.num_tokens = len(tokens)
        self.text_id = f"{self.num_tokens} tokens of {corpus.record.splits['valid'].sha256}"
        """Identifies this text, because losses of different texts must not be compared."""
        self.dataset = validation_dataset(tokens, corpus.tokenizer.bos_token_id, config, world)
        self._config, self._world = config, world

    def sum_losses(
        self, model: nn.Module, memory: Memory, on_progress: Callable[[int], None], should_stop: Callable[[], bool]
    ) -> float | None:
        """Compute the total loss of the text; all processes take part.

        Args:
            model: a `ModelWithLoss`, wrapped for the processes.
            memory: an empty memory for the rows of this process.
            on_progress: called after each segment with the number of tokens scored so far, by all processes.
            should_stop: called after each segment; if it returns true, scoring ends without a result.

        Returns:
            The sum of all losses in nats, accumulated in float64, the same in every process; or None if stopped.
        """
        device, dataset = memory.valid_B.device, self.dataset
        total, num_scored = 0.0, 0
        pending: list[Tensor] = []
        with _evaluation_mode(model):
            for index in range(dataset.num_segments):
                segment = dataset.read(DatasetPosition(segment_index=index))
                inputs_BT = to_device(torch.from_numpy(segment.inputs_BT), device)
                loss_mask_BT = to_device(torch.from_numpy(segment.loss_mask_BT), device)
                with autocast(device, self._config.dtype):
                    nats_BT, _, memory = model(inputs_BT, segment.targets_BT, memory)
                pending.append((nats_BT * loss_mask_BT).sum())
                if len(pending) == _SUMS_PER_FETCH:
                    total += _fetch_sum(pending)
                    pending.clear()
                num_scored += int(segment.loss_mask_BT.sum())
                on_progress(min(self.num_tokens, round(num_scored * dataset.batch_size / dataset.local_batch_size)))
                if should_stop():
                    return None
        total += _fetch_sum(pending) if pending else 0.0
        sum_device = device if device.type == "cuda" else "cpu"  # MPS has no float64
        return float(self._world.sum(torch.tensor(total, dtype=torch.float64, device=sum_device)))


def validation_dataset(
    tokens: Tokens, bos_token_id: int, config: TrainConfig, world: DistributedContext
) -> SegmentDataset:
    """Split the validation text into rows that are read in parallel.

    The number of rows is the batch size, reduced if the text is too short to fill a segment in each row or if a
    process would get no rows, but at least one for each process.

    Raises:
        UserError: the text has fewer tokens than processes.
    """
    if len(tokens) < world.size:
        raise UserError(
            f"the validation text has {len(tokens):,} tokens for {world.size:,} processes, and each needs one; start "
            "fewer processes, or use a longer text"
        )
    rows = max(world.size, min(config.batch_size, len(tokens) // config.segment_length))
    while (world.size - 1) * -(-rows // world.size) >= rows:  # ends at the latest with one row for each process
        rows -= 1
    segment = min(config.segment_length, -(-len(tokens) // rows))
    return SegmentDataset(tokens, batch_size=rows, segment_length=segment, bos_token_id=bos_token_id, shard=world.shard)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients within the block."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _fetch_sum(sums: list[Tensor]) -> float:
    return float(torch.stack(sums).cpu().double().sum())
