"""The training loop: segment after segment of the text, each row's memory carried on, until the steps are done.

sums over a segment -> divide once -> backward -> clip -> step -> (now and then) validate, keep the best, checkpoint
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from transformer_xl.config import RunConfig, TrainConfig, UserError
from transformer_xl.device import autocast
from transformer_xl.evaluation.metrics import Sums
from transformer_xl.evaluation.scoring import Plan, sum_nats
from transformer_xl.files import explained, remove_leftovers, write_text
from transformer_xl.model.kernels import choose
from transformer_xl.run_folder import RunFolder, build_model
from transformer_xl.text.segments import SegmentStream, Stream, check_training
from transformer_xl.text.shuffled import ShuffledStream
from transformer_xl.text.token_store import Corpus
from transformer_xl.training.checkpoint import Progress, TrainingState, load_state, save_state
from transformer_xl.training.optimizers import build_optimizer, learning_rate, set_learning_rate

Figures = dict[str, Any]


class Reporter(Protocol):
    """Hears what happens, to show it."""

    def step(self, step: int, tokens: int) -> None:
        """A step was queued that reads so many tokens."""
        ...

    def validating(self, read: int, tokens: int) -> None:
        """So many of the validation's tokens were read."""
        ...

    def figures(self, figures: Figures) -> None:
        """A line of figures was written to metrics.jsonl."""
        ...


class Silence:
    """Shows nothing."""

    def step(self, step: int, tokens: int) -> None:
        """Nothing."""

    def validating(self, read: int, tokens: int) -> None:
        """Nothing."""

    def figures(self, figures: Figures) -> None:
        """Nothing."""


class _Stopped(Exception):
    """A validation was asked to stop."""


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    step: int
    finished: bool
    """False: it was asked to stop before."""
    best_nats_per_token: float | None
    seconds: float


@dataclass(frozen=True)
class _Queued:
    """A step the device may still be busy with: its numbers are fetched one step later."""

    step: int
    numbers: Tensor
    """Sum of nats, count of targets and norm of the gradient, in one tensor so that one fetch brings them all."""


class Training:
    """One run being trained: the state, and what to do with it."""

    def __init__(
        self, folder: RunFolder, corpus: Corpus, device: torch.device, reporter: Reporter | None = None
    ) -> None:
        """Builds model and optimiser with first weights from the run's seed.

        Raises:
            UserError: the corpus is too short for the settings.
        """
        self.folder, self.device, self.reporter = folder, device, reporter or Silence()
        self.config: TrainConfig = folder.config.train
        self.corpus = corpus
        self.stream = training_stream(corpus, self.config)
        torch.manual_seed(self.config.seed)
        model = build_model(folder.config).to(device).train()
        memory = model.initial_memory(self.config.rows)
        self.state = TrainingState(model, build_optimizer(model, self.config), memory, Progress())
        self._queued: _Queued | None = None
        self._saved: Progress | None = None
        self._started = time.perf_counter()

    def resume(self) -> None:
        """Goes back to the newest checkpoint, and takes later lines out of metrics.jsonl."""
        if self.folder.newest_state() or self.folder.figures():  # else killed before its first checkpoint: it begins
            load_state(self.folder, self.state)
            self._saved = self.state.progress
        progress = self.state.progress
        remove_leftovers(self.folder.path)
        known_until = {"train": progress.step, "valid": progress.validated}
        kept = [line for line in self.folder.figures() if line["step"] <= known_until.get(line["split"], 0)]
        write_text(self.folder.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> Outcome:
        """Trains until the steps are done or `should_stop` says so; either way a checkpoint is written.

        Raises:
            UserError: the loss is no longer a finite number, or the disk is full; the last checkpoint stays good.
        """
        config, state = self.config, self.state
        self._started = time.perf_counter() - state.progress.seconds
        while True:
            step = state.progress.step
            # a resumed run may have been stopped in the middle of a validation: then it is done now
            whole = step == 0 or step == state.progress.validated or not self._due(config.evaluate_every)
            whole = whole or self._validate(should_stop)
            stopped = should_stop()
            if stopped or self._due(config.save_every):
                self._save()
            if stopped or step >= config.steps:
                break
            self._step()
        progress = state.progress
        return Outcome(step, whole and step >= config.steps, progress.best_nats, progress.seconds)

    def _due(self, every: int) -> bool:
        step = self.state.progress.step
        return step % every == 0 or step >= self.config.steps

    def _step(self) -> None:
        config, state = self.config, self.state
        progress = state.progress
        segment = self.stream.read(progress.position)
        if segment.starts:
            state.memory = state.model.initial_memory(config.rows)
        tokens = int(segment.counted_BT.sum())
        inputs_BT, counted_BT = (
            torch.from_numpy(array).to(self.device, non_blocking=True)
            for array in (segment.inputs_BT, segment.counted_BT)
        )
        targets_BT = torch.from_numpy(segment.targets_BT)  # on the CPU, as `nats` likes them
        if config.loss == "half":
            counted_BT[:, : config.segment // 2] = False
        set_learning_rate(state.optimizer, learning_rate(progress.step, config))
        with autocast(self.device, config.precision):
            hidden_BTD, state.memory = state.model(inputs_BT, state.memory)
            nats_BT = state.model.nats(hidden_BTD, targets_BT)
        nats, count = (nats_BT * counted_BT).sum(), counted_BT.sum()
        (nats / count.clamp(min=1)).backward()
        norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), config.clip)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        numbers = torch.stack([nats.detach(), count.to(nats.dtype), norm.to(nats.dtype)])
        # the step before is fetched only now, with this one queued: the device never waits for the host
        self._fetch()
        step = progress.step + 1
        self._queued = _Queued(step, numbers)
        state.progress = state.progress.model_copy(
            update={"step": step, "position": self.stream.after(progress.position)}
        )
        self.reporter.step(step, tokens)

    def _fetch(self) -> None:
        """Adds the queued step's numbers to the sums; every `log_every` steps writes a line of figures."""
        queued, self._queued = self._queued, None
        if queued is None:
            return
        nats, count, norm = queued.numbers.tolist()
        if not (math.isfinite(nats) and math.isfinite(norm)):
            what = f"the loss became {nats}" if not math.isfinite(nats) else f"the gradient's norm became {norm}"
            newest = self.folder.newest_state()
            raise UserError(
                f"{what} at step {queued.step}; {newest} is the last good checkpoint. Go on from it with a lower "
                f"rate: txl train --resume {self.folder.path} --train.learning_rate {self.config.learning_rate / 2:g}"
            )
        progress = self.state.progress
        nats, tokens = progress.interval_nats + nats, progress.interval_tokens + round(count)
        if queued.step % self.config.log_every == 0 and tokens:
            self._write_figures("train", queued.step, self._sums("train", nats, tokens), {"gradient_norm": norm})
            nats, tokens = 0.0, 0
        self.state.progress = progress.model_copy(update={"interval_nats": nats, "interval_tokens": tokens})

    def _validate(self, should_stop: Callable[[], bool]) -> bool:
        """Scores the validation text and keeps the best weights; false if it was stopped before its end."""
        self._fetch()
        progress, config, model = self.state.progress, self.config, self.state.model
        if "valid" not in self.corpus.splits:
            return True
        tokens = self.corpus.split("valid").first(config.evaluate_tokens)
        rows = max(1, min(config.rows, len(tokens) // config.segment))
        plan = Plan(config.segment, model.reach, rows, config.precision)
        read = 0

        def tell(more: int) -> None:
            nonlocal read
            read += more
            self.reporter.validating(read, len(tokens))
            if should_stop():
                raise _Stopped

        model.eval()
        try:
            nats = sum_nats(model, tokens, self.corpus.vocabulary.start_id, plan, tell)
        except _Stopped:
            return False
        finally:
            model.train()
        sums = self._sums("valid", nats, len(tokens))
        if not math.isfinite(nats):
            raise UserError(f"the validation loss became {nats} at step {progress.step}; lower --train.learning_rate")
        best = progress.best_nats
        if best is None or sums.nats_per_token < best:
            best = sums.nats_per_token
            self.folder.save_weights(model)
        self.state.progress = progress.model_copy(update={"best_nats": best, "validated": progress.step})
        self._write_figures("valid", progress.step, sums, {})
        return True

    def _sums(self, split: str, nats: float, tokens: int) -> Sums:
        """Of part of a split, whose bytes are taken to be its share."""
        return Sums(nats, tokens, tokens * self.corpus.split(split).bytes_per_token)

    def _save(self) -> None:
        self._fetch()
        if self.state.progress == self._saved:
            return
        seconds = time.perf_counter() - self._started
        self.state.progress = self._saved = self.state.progress.model_copy(update={"seconds": seconds})
        save_state(self.folder, self.state)
        if self.state.progress.step >= self.config.steps and "valid" not in self.corpus.splits:
            self.folder.save_weights(self.state.model)  # the last weights are the best known

    def _write_figures(self, split: str, step: int, sums: Sums, more: Figures) -> None:
        figures: Figures = {
            "split": split,
            "step": step,
            "nats_per_token": sums.nats_per_token,
            "bits_per_byte": sums.bits_per_byte,
            **more,
            "learning_rate": learning_rate(step - 1, self.config),
            "seconds": round(time.perf_counter() - self._started, 3),
        }
        file = self.folder.path / "metrics.jsonl"
        with explained(f"writing {file}"), file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(figures) + "\n")
        self.reporter.figures(figures)


def check(config: RunConfig, corpus: Corpus, device: torch.device) -> None:
    """Finds out, before a run folder is made, whether training can begin.

    Raises:
        UserError: the text is too short for rows and segment, or the settings name what does not exist.
    """
    training_stream(corpus, config.train)
    choose(config.model.kernel, device, torch.float32)


def training_stream(corpus: Corpus, config: TrainConfig) -> Stream:
    """The training text as segments, in the order the settings ask for.

    Raises:
        UserError: it is too short for rows and segment, or has too few documents to shuffle.
    """
    split = corpus.split("train")
    sizes = {"rows": config.rows, "segment": config.segment, "start_id": corpus.vocabulary.start_id}
    if config.order == "shuffled":
        stream = ShuffledStream(split.tokens, split.document_starts, **sizes, seed=config.seed)
    else:
        stream = SegmentStream(split.tokens, **sizes)
    check_training(stream)
    return stream
