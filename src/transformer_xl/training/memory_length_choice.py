"""The memory length with which a run is evaluated by default: measured when training ends, on the validation text.

A longer memory than in training can lower the loss or raise it. So after training the best weights score the beginning
of the validation text at half the trained length, at that length, and at 2, 4 and 8 times as much.

Suffix: N segments of the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch

from transformer_xl.checkpoint_record import MemoryLengths
from transformer_xl.config import WITHOUT_MEMORY, EvaluationConfig, RunConfig, UserError
from transformer_xl.evaluation.evaluate import stream_losses
from transformer_xl.evaluation.plan import EvaluationPlan, ProgressCallback, TokenizedText
from transformer_xl.progress import ProgressBar, note, say
from transformer_xl.run import Run, load_run
from transformer_xl.text.token_store import TokenSplit
from transformer_xl.training.trainer import Trainer

_FACTORS = (0.5, 1, 2, 4, 8)  # of the trained length
_MAX_TOKENS = 32_768  # of the validation text; with long memories, as many as fill the longest 8 times
_FILLS = 8  # lengths must fit into the text this often, so that most of it is read with a full memory
_TRAINING_SHARE = 64  # at most 1 token for each 64 of training: all lengths together take about 3% of the training time
_TOLERANCE = 0.001  # fraction of the loss that is no reason for another length
_SegmentNats = npt.NDArray[np.float64]


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
        say(f"memory length {measured.chosen:,}: {measured.describe()}; evaluation with memory and generation use it")


def num_measured_tokens(config: RunConfig, split: TokenSplit, *, trained_tokens: int) -> int:
    """Return the number of tokens of the validation text to score at each length.

    Args:
        config: settings of the run.
        split: the validation text.
        trained_tokens: number of tokens that the run was trained on. A bound on the time would make the result depend
            on the machine's load.
    """
    longest = math.ceil(max(_FACTORS)) * config.train.memory_length
    return min(max(_MAX_TOKENS, _FILLS * longest), split.num_tokens, trained_tokens // _TRAINING_SHARE)


def candidate_lengths(config: RunConfig, num_tokens: int) -> list[int]:
    """Return the memory lengths to compare, in rising order; empty if there is nothing to choose.

    That is the case if the run states a memory length for evaluation, evaluates without memory, has a state of fixed
    size, or if the text is too short for the lengths of training.

    Args:
        config: settings of the run.
        num_tokens: length of the text.
    """
    evaluation, trained = config.evaluation, config.train.memory_length
    is_fixed = evaluation.memory_length is not None or evaluation.method in WITHOUT_MEMORY
    longest = num_tokens // _FILLS
    if is_fixed or config.model.is_recurrent or not 0 < trained <= longest:
        return []
    plan = EvaluationPlan.resolve(config, EvaluationConfig(method="memory"))
    if plan.segment_length > longest:
        return []
    lengths = {int(factor * trained) for factor in _FACTORS}
    if (window := plan.context_limits.attention_window) is not None:  # more slots than fill the window change nothing
        lengths = {min(length, max(trained, window - 1)) for length in lengths}
    return sorted(length for length in lengths if 0 < length <= longest)


def measure_memory_lengths(
    run: Run, split: TokenSplit, num_tokens: int, lengths: Sequence[int], progress: ProgressCallback | None = None
) -> MemoryLengths:
    """Score the beginning of a text at several memory lengths, and choose the one to evaluate with.

    Each loss is that of `evaluate(run, split, memory_length=LENGTH, max_tokens=num_tokens)`.

    Args:
        run: a trained run.
        split: its validation text.
        num_tokens: number of tokens to score, from the start of the text.
        lengths: the memory lengths to compare, from `candidate_lengths`; at least one.
        progress: called with the number of tokens scored since the last call.

    Returns:
        The losses and the chosen length.

    Raises:
        UserError: a memory does not fit on the device, or weights are not finite.
    """
    config, trained = run.config, run.config.train.memory_length
    text = TokenizedText(split.first(num_tokens), run.tokenizer.bos_token_id, split.document_starts)
    nats, segment_nats = dict[int, float](), dict[int, _SegmentNats]()
    for length in lengths:
        plan = EvaluationPlan.resolve(config, EvaluationConfig(method="memory", memory_length=length))
        scored = stream_losses(plan.model_of(run), text, plan, progress)
        by_position = {losses.position: losses.sum for losses in scored}
        nats[length] = sum(by_position.values(), 0.0) / num_tokens  # in the order in which `evaluate` adds them
        segment_nats[length] = np.array([by_position[position] for position in sorted(by_position)])
        if length > trained and is_worse(segment_nats[length], segment_nats[trained]):
            break  # an even longer memory is further from training
    plan = EvaluationPlan.resolve(config, EvaluationConfig(method="memory"))
    return MemoryLengths(
        chosen=choose_length(segment_nats, trained),
        nats_per_token=nats,
        num_tokens=num_tokens,
        segment_length=plan.segment_length,
        attention_window=plan.context_limits.attention_window,
        clamp_length=plan.context_limits.clamp_length,
    )


def choose_length(segment_nats: Mapping[int, _SegmentNats], trained: int) -> int:
    """Return the memory length to use by default: the trained one, unless another one is certainly better.

    Lengths are compared by what they cost at worst: the difference of their loss from that of the trained length plus
    two standard errors, estimated from the differences of single segments. Of the lengths that at worst cost at most
    0.1% of the loss more than the best, the trained one is returned, else the shortest, because it is the fastest.

    Args:
        segment_nats: losses of the segments of a text, in nats, by memory length.
        trained: the memory length of training, which must be among them.
    """
    trained_N = segment_nats[trained]
    worst = {length: sum(_difference(nats_N, trained_N)) for length, nats_N in segment_nats.items()}
    limit = min(worst.values()) + _TOLERANCE * trained_N.sum()
    good = [length for length, cost in worst.items() if cost <= limit]
    return trained if trained in good else min(good)


def is_worse(nats_N: _SegmentNats, other_N: _SegmentNats) -> bool:
    """Return whether the losses of segments are certainly higher than others: by more than two standard errors."""
    difference, uncertainty = _difference(nats_N, other_N)
    return difference > uncertainty


def _difference(nats_N: _SegmentNats, other_N: _SegmentNats) -> tuple[float, float]:
    """Return the difference of two total losses of the same segments, and two standard errors of it."""
    difference_N = nats_N - other_N
    uncertainty = 2 * math.sqrt(len(difference_N)) * float(difference_N.std(ddof=1))
    return float(difference_N.sum()), uncertainty
