"""Validation: the loss of the validation text with the weights as they are, while training.

The text is read in as many rows as a training batch has, shared over the processes as in training.

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

_SUMS_AT_ONCE = 512  # sums left on the device before they are fetched, so that it need not wait for each


class Validator:
    """The validation text of a corpus, as one training run scores it."""

    def __init__(self, corpus: Corpus, config: TrainConfig, world: DistributedContext) -> None:
        """Open the text.

        Args:
            corpus: it must have a split `valid`.
            config: settings of training; `eval_tokens` may cut the text short.
            world: the processes that share the work.

        Raises:
            UserError: the text has fewer tokens than there are processes.
        """
        tokens = corpus.split("valid").first(config.eval_tokens)
        self.num_tokens = len(tokens)
        self.text_id = f"{self.num_tokens} tokens of {corpus.record.splits['valid'].sha256}"
        """Tells this text from any other: losses of different texts must not be compared."""
        self.dataset = validation_dataset(tokens, corpus.tokenizer.bos_token_id, config, world)
        self._config, self._world = config, world

    def sum_losses(
        self, model: nn.Module, memory: Memory, on_progress: Callable[[int], None], should_stop: Callable[[], bool]
    ) -> float | None:
        """Score the text, in all processes together.

        Args:
            model: a `ModelWithLoss`, as the processes share it.
            memory: an empty memory for the rows of this process.
            on_progress: called after each segment with the number of tokens scored so far, by all processes.
            should_stop: asked after each segment; where it says yes, scoring ends without a result.

        Returns:
            The sum of all losses in nats, added up in float64, the same in every process; None if it was stopped.
        """
        device, dataset = memory.valid_B.device, self.dataset
        total, num_scored = 0.0, 0
        waiting: list[Tensor] = []
        with _evaluation_mode(model):
            for index in range(dataset.num_segments):
                segment = dataset.read(DatasetPosition(segment_index=index))
                inputs_BT = to_device(torch.from_numpy(segment.inputs_BT), device)
                loss_mask_BT = to_device(torch.from_numpy(segment.loss_mask_BT), device)
                with autocast(device, self._config.dtype):
                    nats_BT, _, memory = model(inputs_BT, segment.targets_BT, memory)
                waiting.append((nats_BT * loss_mask_BT).sum())
                if len(waiting) == _SUMS_AT_ONCE:
                    total += _fetch_sum(waiting)
                    waiting.clear()
                num_scored += int(segment.loss_mask_BT.sum())
                on_progress(min(self.num_tokens, round(num_scored * dataset.batch_size / dataset.local_batch_size)))
                if should_stop():
                    return None
        total += _fetch_sum(waiting) if waiting else 0.0
        at = device if device.type == "cuda" else "cpu"  # MPS has no float64
        return float(self._world.sum(torch.tensor(total, dtype=torch.float64, device=at)))


def validation_dataset(
    tokens: Tokens, bos_token_id: int, config: TrainConfig, world: DistributedContext
) -> SegmentDataset:
    """Cut the validation text into rows that are read side by side.

    There are as many rows as in a training batch, fewer if the text does not fill a segment of each, but at least one
    for each process; and a few fewer where so many would leave a process without any.

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


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Turn off dropout and gradients for the time of the block."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _fetch_sum(sums: list[Tensor]) -> float:
    return float(torch.stack(sums).cpu().double().sum())
