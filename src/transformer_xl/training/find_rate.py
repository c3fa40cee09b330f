"""Finds a learning rate by short trainings: `find_learning_rate`, a public function.

Each short training is a whole one with fewer steps: from the same initial weights, over the same text, with warm-up
and decay shortened in proportion. So none inherits anything from a training with another rate, as in a range test,
where the loss of a rate is that of all rates before it. Rates are compared by the loss of the text that follows, which
all trials score alike. No trial has read it: trainings are so short that it ends with the first epoch. Only a text too
short even for that is scored again, with a note.

    rates four times apart  ->  rates twice apart around the best  ->  lowest point of a parabola  ->  whole length

A short training needs a larger rate than a long one. So the best rate of trainings with n steps is multiplied by
(n / max_steps) ** 0.5 for Muon and ** 0.125 for Adam. The square root is what theory gives where the noise of gradients
limits the rate; Adam's rate is rather limited by stability, which hardly depends on the length. docs/log.md has the
measurements.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from transformer_xl.config import RunConfig, TrainConfig, UserError, check_type, checked_names, given_settings
from transformer_xl.device import autocast, choose_device, set_threads
from transformer_xl.display import Displayed
from transformer_xl.model.memory import Memory
from transformer_xl.progress import ProgressBar, note, say
from transformer_xl.run_folder import build_checked
from transformer_xl.text.token_store import Corpus
from transformer_xl.training.data import open_data, training_dataset
from transformer_xl.training.stepper import Stepper
from transformer_xl.training.train import complete_settings, corpus_folder, ignore

if TYPE_CHECKING:
    from transformer_xl.config import ModelConfig
    from transformer_xl.config.typed_settings import ModelSettings, TrainSettings

_TIMED_STEPS = 5
_MIN_STEPS = (8, 20)  # of a training in each round; fewer say nothing about a rate
_SHARES = (0.35, 0.95)  # of the time that is left at the beginning of each round
_USUAL_TRIALS = 4  # in a round: three, and one more because the best rate was at an end
_MAX_TRIALS = 8  # in a round
_SCORED_FRACTION = 0.25  # segments scored after a training, relative to its steps
_MIN_SPREAD = 1e-3  # of the losses, relative; rates that differ less are all too small to teach anything
_LENGTH_EXPONENT, _MUON_LENGTH_EXPONENT = 0.125, 0.5  # see above


@dataclass(frozen=True)
class RateTrial:
    """One short training."""

    learning_rate: float
    """Its peak learning rate."""
    steps: int
    """Number of its optimizer steps."""
    nats_per_token: float | None
    """Loss of the text that follows the trained one, in nats per token; None if it was not finite."""


@dataclass(frozen=True, repr=False)
class LearningRateResult(Displayed):
    """The result of `find_learning_rate`."""

    learning_rate: float
    """The proposed peak learning rate."""
    device: str
    """Device of the short trainings."""
    seconds: float
    """Time they took."""
    trials: tuple[RateTrial, ...]
    """All short trainings, in order."""
    notes: tuple[str, ...] = ()
    """What makes the proposal less certain than usual."""


@checked_names
def find_learning_rate(
    config: str | Path | RunConfig | None,
    corpus: Corpus | Path | str,
    *,
    model: ModelSettings | ModelConfig | None = None,
    train: TrainSettings | TrainConfig | None = None,
    seconds: float = 50.0,
    device: str = "auto",
    threads: int | None = None,
    progress: bool = True,
) -> LearningRateResult:
    """Propose a learning rate for a training, by short trainings with different rates; nothing is written.

    It is found for the model, the optimizer, the batch and the lengths of the settings, in one process. The rate of
    the settings is where the search begins. The short trainings of the last round have hundreds of steps for a small
    model and at least 20 for a large one, for which the given time may not suffice.

    Args:
        config: as for `train`.
        corpus: as for `train`; only its training text is read.
        model: settings of the model that replace those of `config`.
        train: settings of training that replace those of `config`.
        seconds: about how long to search, if that is enough for the least number of steps.
        device: as for `train`.
        threads: as for `train`.
        progress: show a progress bar and messages on standard error.

    Returns:
        The proposed rate and the losses of all short trainings.

    Raises:
        UserError: settings or corpus are invalid, torchrun started several processes, no rate gives a finite loss, or
            the loss is the same at all rates.
    """
    check_type(seconds, (int, float), "seconds", "give a number of seconds")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("a learning rate is found in one process; start it without torchrun")
    set_threads(threads)
    chosen = choose_device(device)
    overrides = given_settings(model=model, train=train)
    checked, opened = complete_settings(config, corpus_folder(corpus), overrides, say if progress else ignore)
    open_data(checked, opened, chosen)
    opened.verify("train")
    with torch.random.fork_rng(devices=[chosen] if chosen.type == "cuda" else []):
        return _Search(checked, opened, chosen, seconds, show_progress=progress).run()


class _Search:
    """The rounds of short trainings."""

    def __init__(
        self, config: RunConfig, corpus: Corpus, device: torch.device, seconds: float, *, show_progress: bool
    ) -> None:
        self._config, self._corpus, self._device = config, corpus, device
        self._start = time.perf_counter()
        self._end = self._start + seconds
        self._trials: list[RateTrial] = []
        self._notes: list[str] = []
        timed = _Training(config, corpus, device, config.train.learning_rate, _TIMED_STEPS)
        times = [time.perf_counter()]
        for _ in range(_TIMED_STEPS):
            timed.step()
            times.append(time.perf_counter())
        self._step_seconds = median(stop - start for start, stop in pairwise(times))
        # approximate if segment lengths are random
        tokens = config.train.segment_length if config.train.random_segment_lengths else 1
        self._epoch_steps = timed.stepper.dataset.segments_in(epoch=0) // tokens
        # as many as leave text that was not read for scoring
        self._max_steps = min(config.train.max_steps, int(self._epoch_steps / (1 + _SCORED_FRACTION)))
        expected = max(seconds, _USUAL_TRIALS * sum(_MIN_STEPS) * self._step_seconds)
        if show_progress and expected > 1.2 * seconds:
            say(f"a step takes {self._step_seconds:.2g} s, so this takes about {expected:,.0f} s")
        num_steps = round(expected / self._step_seconds)
        self._bar = ProgressBar("find rate", num_steps, "steps") if show_progress else None

    def run(self) -> LearningRateResult:
        with self._bar or nullcontext():
            rate = self._rounds()
        seconds = time.perf_counter() - self._start
        self._add_notes()
        if self._bar is not None:
            for text in self._notes:
                note(text)
        return LearningRateResult(rate, str(self._device), seconds, tuple(self._trials), tuple(self._notes))

    def _add_notes(self) -> None:
        config = self._config.train
        if self._max_steps < min(_MIN_STEPS[1], config.max_steps):
            self._notes.append(
                "the text is so short that the trainings were scored on text that they had read; the rate may be the "
                "one that learns it by heart fastest"
            )
        elif config.max_steps > self._epoch_steps:
            self._notes.append(
                f"training reads the text {config.max_steps / self._epoch_steps:.1f} times, and these trainings less "
                "than once; a lower rate may be better, as it learns the text by heart more slowly"
            )
        if config.weight_average != "none":
            self._notes.append(f"the rate is that without train.weight_average {config.weight_average}")

    def _rounds(self) -> float:
        config = self._config.train
        _, losses = self._round(0, config.learning_rate, factor=4)
        lowest, highest = min(losses.values()), max(losses.values())
        if highest - lowest < _MIN_SPREAD * lowest:
            raise UserError(
                f"the loss is the same at all learning rates from {min(losses):.2g} to {max(losses):.2g}, so they are "
                "too small to teach the model anything; begin the search with a larger train.learning_rate"
            )
        steps, losses = self._round(1, _best(losses), factor=2)
        best = _best(losses)
        if best in (min(losses), max(losses)):
            end = "lowest" if best == min(losses) else "highest"
            self._notes.append(
                f"the best rate was the {end} of those tried, so one beyond it may be better; search again with "
                f"train.learning_rate={best:.2g}"
            )
        exponent = _MUON_LENGTH_EXPONENT if config.has_muon else _LENGTH_EXPONENT
        rate = _lowest_point(losses) * (steps / config.max_steps) ** exponent
        return float(f"{rate:.2g}")

    def _round(self, index: int, middle: float, factor: float) -> tuple[int, dict[float, float]]:
        """Train with rates around one, and with further ones while the best is at an end.

        Returns:
            The number of steps of each training, and the losses by rate.
        """
        left = max(0.0, self._end - time.perf_counter())
        # scoring a segment takes about a third of a step, which also has a backward pass
        steps = _SHARES[index] * left / (_USUAL_TRIALS * self._step_seconds * (1 + _SCORED_FRACTION / 3))
        steps = max(min(round(steps), self._max_steps), min(_MIN_STEPS[index], self._config.train.max_steps))
        losses = {rate: self._trial(rate, steps) for rate in (middle / factor, middle, middle * factor)}
        while len(losses) < _MAX_TRIALS:
            best = _best(losses)
            is_finite = math.isfinite(losses[best])
            if min(losses) < best < max(losses) and is_finite:
                break
            is_late = index == 1 and len(losses) >= _USUAL_TRIALS and time.perf_counter() > self._end
            if is_late and is_finite:
                break
            rate = max(losses) * factor if best == max(losses) and is_finite else min(losses) / factor
            losses[rate] = self._trial(rate, steps)
        if not math.isfinite(min(losses.values())):
            raise UserError(
                f"the loss is not finite at any learning rate from {min(losses):.2g} to {max(losses):.2g}; begin the "
                "search with a smaller train.learning_rate, or check train.max_grad_norm and train.dtype"
            )
        return steps, losses

    def _trial(self, rate: float, steps: int) -> float:
        training = _Training(self._config, self._corpus, self._device, rate, steps)
        nats = training.nats_per_token(self._bar)
        finite = nats if math.isfinite(nats) else None
        self._trials.append(RateTrial(rate, steps, finite))
        return math.inf if finite is None else nats


def _best(losses: Mapping[float, float]) -> float:
    """Return the rate with the lowest loss, the largest of them if there are several."""
    return min(losses, key=lambda rate: (losses[rate], -rate))


def _lowest_point(losses: Mapping[float, float]) -> float:
    """Return the rate where the parabola through the losses of the best rate and its neighbors is lowest."""
    rates = sorted(losses)
    index = rates.index(_best(losses))
    around = [losses[rate] for rate in rates[max(0, index - 1) : index + 2]]
    if len(around) < 3 or not all(map(math.isfinite, around)) or around[0] + around[2] == 2 * around[1]:
        return rates[index]
    offset = 0.5 * (around[0] - around[2]) / (around[0] - 2 * around[1] + around[2])  # in steps between the rates
    return rates[index] * (rates[index] / rates[index - 1]) ** offset


class _Training:
    """One short training, from the run's initial weights."""

    def __init__(self, config: RunConfig, corpus: Corpus, device: torch.device, rate: float, steps: int) -> None:
        self.config, self._device = _shortened(config.train, rate, steps), device
        dataset = training_dataset(corpus, config.model_copy(update={"train": self.config}))
        torch.manual_seed(self.config.seed)
        self.stepper = Stepper(build_checked(config).to(device), dataset, self.config, device)

    def nats_per_token(self, bar: ProgressBar | None) -> float:
        """Train, and return the loss of the following segments in nats per token; infinity as soon as it is not
        finite."""
        for _ in range(self.config.max_steps):
            nats = self.step()
            if bar is not None:
                bar.advance(1, f"lr {self.config.learning_rate:.2g}, {nats:.3f} nats")
            if not math.isfinite(nats):
                return math.inf
        return self._score(max(2, round(_SCORED_FRACTION * self.config.max_steps)))

    def step(self) -> float:
        """Take a step, and return its loss in nats per token."""
        nats, num_targets, grad_norm, _ = self.stepper.step()[0].tolist()
        return nats / max(num_targets, 1) if math.isfinite(grad_norm) else math.nan

    @torch.no_grad()
    def _score(self, num_segments: int) -> float:
        """Return the loss of the next segments, without dropout, in nats per token."""
        total, num_targets, stepper, device = 0.0, 0, self.stepper, self._device
        stepper.model.eval()
        for _ in range(num_segments):
            batch = stepper.next_batch().batch
            memories: list[Memory] = []
            for indices, memory in zip(stepper.micro_batches, stepper.memories, strict=True):
                rows = slice(indices.start, indices.stop)
                inputs_BX = torch.from_numpy(batch.inputs_BX[rows]).to(device)
                mask_BT = torch.from_numpy(batch.loss_mask_BT[rows]).to(device)
                with autocast(device, self.config.dtype):
                    order = (
                        () if batch.order_B2T is None else (None, torch.from_numpy(batch.order_B2T[rows]).to(device))
                    )
                    losses_BT, _, memory = stepper.wrapped_model(inputs_BX, batch.targets_BT[rows], memory, *order)
                total += float((losses_BT * mask_BT).sum())
                num_targets += int(mask_BT.sum())
                memories.append(memory)
            stepper.memories = tuple(memories)
        return total / max(num_targets, 1)


def _shortened(config: TrainConfig, rate: float, steps: int) -> TrainConfig:
    """Return the settings of a training with this peak rate and fewer steps, with a schedule of the same form."""
    fraction = steps / config.max_steps
    changes = {
        "learning_rate": rate,
        "max_steps": steps,
        "warmup_steps": round(fraction * config.warmup_steps),
        "decay_steps": int(fraction * config.decay_steps),
        "weight_average": "none",
        "compile": "none",  # compiling takes longer than the steps
    }
    return config.model_copy(update=changes)
