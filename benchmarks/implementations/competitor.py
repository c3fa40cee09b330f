"""Process that trains one contestant of `equal_time.py`, scores it, and prints one line of JSON.

    python -m implementations.competitor '{"implementation": "competitor_nanogpt", "steps": 600, ...}'

The argument is an `Assignment` as JSON. The process ends when its standard input is closed, so it does not outlive the
process that started it. It needs only torch, numpy and the packages of its implementation, so
it also runs in the environment of the other implementations (benchmarks/peers.txt).

Shape suffixes: B batch rows, T tokens of a segment, K tokens of a text, C tokens of a text's chunk.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

WARMUP_SHARE = 0.05
"""Fraction of the time over which the learning rate of the other implementations increases linearly."""


@dataclass(frozen=True)
class Assignment:
    """What one process trains: a contestant with one choice of settings and one seed."""

    implementation: str
    """Name of a module in this folder."""
    settings: dict[str, Any]
    """Settings of this implementation; its module explains them."""
    steps: int | None
    """Number of training steps; None: only measure how long a step takes."""
    seconds: float
    """Time for which steps are measured."""
    seed: int
    folder: str
    """Folder with train.npy, valid.npy and test.npy: token ids."""
    corpus: str
    """The corpus folder that they come from."""
    vocab_size: int
    first_token: int
    """The token before the text, from which its first token is predicted."""
    dtype: str
    """float32 or bfloat16."""
    once: bool = False
    """Whether blocks of the text are drawn without replacement."""

    def tokens(self, split: str) -> Tensor:
        """Return the token ids of a split, as int64, shape (K,)."""
        return torch.from_numpy(np.load(Path(self.folder) / f"{split}.npy").astype(np.int64))

    def inputs_and_targets(self, split: str) -> tuple[Tensor, Tensor]:
        """Return the inputs of a split, which begin with `first_token`, and the targets: every token of the split."""
        targets_K = self.tokens(split)
        return torch.cat([torch.tensor([self.first_token]), targets_K[:-1]]), targets_K

    def autocast(self) -> torch.autocast:
        """Return a context in which matrix products are computed in the dtype."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bfloat16")


class Competitor(Protocol):
    """A model in training."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    note: str
    versions: dict[str, str]
    learning_rate: float
    min_rate_ratio: float
    """Learning rate at the end, as a fraction of the peak."""
    contexts: Sequence[int]
    """Context lengths, in tokens, to choose from when scoring."""

    def loss(self) -> Tensor:
        """Return the mean loss in nats of the next batch."""
        ...

    def nats(self, inputs_K: Tensor, targets_K: Tensor, context: int) -> Iterator[Tensor]:
        """Yield the losses of all targets in nats, in text order, in parts; each token is scored exactly once."""
        ...


class RandomBlocks:
    """Blocks from random places of the training text: from anywhere, as nanoGPT draws them, or each block once."""

    def __init__(self, assignment: Assignment) -> None:
        self._train_K, self._once = assignment.tokens("train"), assignment.once
        self._batch_size, self._length = assignment.settings["batch_size"], assignment.settings["block_size"]
        self._starts: list[int] = []

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (B, T)."""
        if len(self._starts) < self._batch_size:
            num_starts = len(self._train_K) - self._length
            if self._once:
                self._starts = (torch.randperm(-(-num_starts // self._length)) * self._length).tolist()
            else:
                self._starts = torch.randint(num_starts, (self._batch_size,)).tolist()
        starts, self._starts = self._starts[: self._batch_size], self._starts[self._batch_size :]
        blocks_BT = torch.stack([self._train_K[start : start + self._length + 1] for start in starts])
        return blocks_BT[:, :-1].contiguous(), blocks_BT[:, 1:].contiguous()  # nanoGPT calls view on them


def in_pieces(train_K: Tensor, length: int) -> Tensor:
    """Return the text in pieces of so many tokens in random order, as `train.shuffle_length` reads it."""
    pieces = train_K.split(length)
    return torch.cat([pieces[index] for index in torch.randperm(len(pieces)).tolist()])


class ConsecutiveSegments:
    """Consecutive segments of batch rows that each read another part of the text, again and again."""

    def __init__(self, train_K: Tensor, batch_size: int, segment_length: int) -> None:
        row_length = (len(train_K) - 1) // batch_size
        self._inputs_BC = train_K[: batch_size * row_length].view(batch_size, row_length)
        self._targets_BC = train_K[1 : batch_size * row_length + 1].view(batch_size, row_length)
        self._length, self._position = segment_length, 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (B, T)."""
        if self._position + self._length > self._inputs_BC.shape[1]:
            self._position = 0
        part = slice(self._position, self._position + self._length)
        self._position += self._length
        return self._inputs_BC[:, part], self._targets_BC[:, part]


def overlapping_windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, first scored, stop) of windows of at most `context` tokens that score every token exactly once.

    Each window but the first scores its last `stride` tokens, so these see at least `context - stride` earlier ones.
    """
    stop = min(context, length)
    yield 0, 0, stop
    while stop < length:
        scored, stop = stop, min(stop + stride, length)
        yield max(0, stop - context), scored, stop


def window_nats(
    inputs_K: Tensor, targets_K: Tensor, context: int, logits: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """Yield the losses of a model without memory, from overlapping windows with a stride of an eighth.

    Args:
        inputs_K: input token ids.
        targets_K: target token ids.
        context: tokens of a window.
        logits: function of token ids (B, T) that returns logits (B, T, V).
    """
    windows = list(overlapping_windows(len(inputs_K), context, max(1, context // 8)))
    for group in [windows[:1], *(windows[first : first + 16] for first in range(1, len(windows), 16))]:
        full = [window for window in group if window[2] - window[0] == group[0][2] - group[0][0]]
        for batch in [full] if len(full) == len(group) else [[window] for window in group]:
            logits_BTV = logits(torch.stack([inputs_K[start:stop] for start, _, stop in batch])).float()
            for logits_TV, (start, scored, stop) in zip(logits_BTV, batch, strict=True):
                yield torch.nn.functional.cross_entropy(
                    logits_TV[scored - start :], targets_K[scored:stop], reduction="none"
                )


def rate_factor(progress: float, min_rate_ratio: float) -> float:
    """Return the learning rate as a fraction of its peak: linear warm-up, then cosine decay to `min_rate_ratio`.

    Args:
        progress: the fraction of the training that has passed.
        min_rate_ratio: the fraction at the end.
    """
    if progress < WARMUP_SHARE:
        return max(progress / WARMUP_SHARE, 0.01)
    decay = (min(1.0, progress) - WARMUP_SHARE) / (1 - WARMUP_SHARE)
    return min_rate_ratio + (1 - min_rate_ratio) * 0.5 * (1 + math.cos(math.pi * decay))


def train_step(competitor: Competitor, assignment: Assignment, progress: float, max_grad_norm: float = 1.0) -> None:
    """Run one optimizer step; a competitor may have a method `schedule` instead of this schedule and the clipping.

    Args:
        competitor: the model in training.
        assignment: its assignment.
        progress: the fraction of the training that has passed, which sets the learning rate.
        max_grad_norm: the norm to which gradients are clipped.
    """
    with assignment.autocast():
        loss = competitor.loss()
    loss.backward()
    if schedule := getattr(competitor, "schedule", None):
        schedule(progress)
    else:
        for group in competitor.optimizer.param_groups:
            group["lr"] = competitor.learning_rate * rate_factor(progress, competitor.min_rate_ratio)
        torch.nn.utils.clip_grad_norm_(competitor.model.parameters(), max_grad_norm)
    competitor.optimizer.step()
    competitor.optimizer.zero_grad(set_to_none=True)


def step_seconds(competitor: Competitor, assignment: Assignment) -> float:
    """Return the mean duration of the steps in a time, without the first."""
    train_step(competitor, assignment, 0.5)
    durations: list[float] = []
    while sum(durations) < assignment.seconds or len(durations) < 10:
        start = time.perf_counter()
        train_step(competitor, assignment, 0.5)
        durations.append(time.perf_counter() - start)
    return mean_of_tens(durations)


def mean_of_tens(durations: Sequence[float]) -> float:
    """Return the mean over a multiple of ten steps: an optimizer may do more in each tenth, which a median hides."""
    return statistics.mean(durations[: len(durations) // 10 * 10])


@torch.no_grad()
def score(competitor: Competitor, assignment: Assignment, split: str, context: int) -> float:
    """Return the mean loss of a split in nats per token."""
    inputs_K, targets_K = assignment.inputs_and_targets(split)
    total, count = 0.0, 0
    competitor.model.eval()
    with assignment.autocast():
        for nats in competitor.nats(inputs_K, targets_K, context):
            total += float(nats.double().sum())
            count += nats.numel()
    if count != len(targets_K):
        raise AssertionError(f"{count} of {len(targets_K)} tokens were scored")
    return total / count


def compete(competitor: Competitor, assignment: Assignment) -> dict[str, Any]:
    """Train, choose the context that is best on the validation text, and score the test text with it.

    With `steps` None only measure how long a step takes.
    """
    if assignment.steps is None:
        return {"step_seconds": step_seconds(competitor, assignment)}
    for step in range(assignment.steps):
        train_step(competitor, assignment, step / assignment.steps)
    valid = {context: score(competitor, assignment, "valid", context) for context in competitor.contexts}
    best = min(valid, key=lambda context: valid[context])
    return {
        "parameters": sum(parameter.numel() for parameter in competitor.model.parameters()),
        "note": competitor.note,
        "versions": {"torch": torch.__version__, **competitor.versions},
        "steps": assignment.steps,
        "valid_nats_per_token": valid[best],
        "valid_nats_per_token_by_context": {str(context): nats for context, nats in valid.items()},
        "context": best,
        "test_nats_per_token": score(competitor, assignment, "test", best),
    }


def exit_with_parent() -> None:
    """End this process when its standard input is closed, as it is when the process that started it ends."""
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    """Read the assignment, train and score, and print the result as one line of JSON."""
    threading.Thread(target=exit_with_parent, daemon=True).start()
    values = json.loads(sys.argv[1])
    assignment = Assignment(**{field.name: values[field.name] for field in dataclasses.fields(Assignment)})
    torch.manual_seed(assignment.seed)
    module = importlib.import_module(f"implementations.{assignment.implementation}")
    run = getattr(module, "compete", None)  # this package trains with its own loop
    result = run(assignment) if run else compete(module.build(assignment), assignment)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
