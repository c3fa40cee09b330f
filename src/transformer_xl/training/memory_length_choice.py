"""Measurement of memory lengths when training ends: by default evaluation uses the one chosen from them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from transformer_xl.config import UserError
from transformer_xl.evaluation.memory_lengths import candidate_lengths, measure_memory_lengths, num_measured_tokens
from transformer_xl.progress import ProgressBar, note, say
from transformer_xl.run import load_run
from transformer_xl.training.trainer import Trainer


class _Interrupted(Exception):
    """The measurement ends without a result."""


def record_memory_lengths(trainer: Trainer, is_interrupted: Callable[[], bool], *, progress: bool) -> None:
    """Measure the best weights of a run at several memory lengths, and record the losses with the weights.

    Nothing is measured where there is nothing to choose, or if the last weights were not validated. With several
    processes the first one measures, on a model of its own. A measurement that fails leaves the run as it is.

    Args:
        trainer: the trainer, after training.
        is_interrupted: whether to end the measurement; called after each segment.
        progress: show a progress bar and messages on standard error.
    """
    # the other processes wait at the end of their process group
    is_validated = trainer.validator is not None and trainer.state.validation_step == trainer.state.step
    if not (trainer.world.is_first and is_validated):
        return
    train = trainer.config
    num_tokens = num_measured_tokens(
        trainer.folder.config,
        trainer.corpus.split("valid"),
        trained_tokens=trainer.state.step * train.batch_size * train.segment_length,
    )
    lengths = candidate_lengths(trainer.folder.config, num_tokens)
    if not lengths:
        return
    bar = ProgressBar("memory lengths", num_tokens * len(lengths), "tokens") if progress else None

    def advance(num_scored: int) -> None:
        if is_interrupted():
            raise _Interrupted
        if bar is not None:
            bar.advance(num_scored)

    try:
        with bar or nullcontext():
            run = load_run(trainer.folder, trainer.device)  # the best weights, as they are on disk
            measured = measure_memory_lengths(run, trainer.corpus.split("valid"), num_tokens, lengths, advance)
            trainer.folder.save_memory_lengths(measured)
    except _Interrupted:
        return
    except (UserError, torch.OutOfMemoryError) as error:
        if progress:
            note(f"evaluation uses the memory length of training, because measuring others failed: {error}")
        return
    if progress:
        say(f"memory length {measured.chosen:,}: {measured.describe()}; evaluation and generation use it")
