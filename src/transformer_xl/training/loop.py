"""The training loop: segment after segment of the text, each row's memory carried on, until the steps are done.

read -> step (step.py) -> fetch the numbers of the step before -> (now and then) validate, keep the best, checkpoint
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from transformer_xl.config import RelativeConfig, RunConfig, TrainConfig, UserError
from transformer_xl.evaluation.metrics import Sums
from transformer_xl.files import remove_leftovers
from transformer_xl.model.build import build_model
from transformer_xl.model.kernels import choose
from transformer_xl.run_folder import RunFolder
from transformer_xl.text.segments import (
    SINGLE_SHARD,
    DatasetPosition,
    SegmentDataset,
    Shard,
    TokenDataset,
    check_training,
)
from transformer_xl.text.shuffled import ShuffledDocumentDataset
from transformer_xl.text.token_store import Corpus
from transformer_xl.training.averaging import WeightAverage
from transformer_xl.training.checkpoint import TrainerState, TrainingState, load_state, save_state
from transformer_xl.training.compiling import compile_layers
from transformer_xl.training.distributed import ALONE, DistributedContext
from transformer_xl.training.optimizers import build_optimizers
from transformer_xl.training.pieces import Place, read_piece
from transformer_xl.training.reporting import Figures, MetricsLog, check_log
from transformer_xl.training.schedules import learning_rate, set_learning_rate
from transformer_xl.training.step import ScoredModel, TrainStep, chunks_of, evaluating, whole_weights
from transformer_xl.training.validation import sum_nats, validation_stream

_BETWEEN_QUESTIONS = 10  # steps between two times that several processes ask each other whether to stop


class Callback(Protocol):
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


@dataclass(frozen=True)
class TrainResult:
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
    """What `Learner.step` gave, in one tensor so that one fetch brings them all."""


class Trainer:
    """One run being trained: the state, and what to do with it."""

    def __init__(
        self,
        folder: RunFolder,
        corpus: Corpus,
        device: torch.device,
        reporter: Callback | None = None,
        world: DistributedContext = ALONE,
    ) -> None:
        """Builds model and optimisers with first weights from the run's seed, the same in every process.

        Raises:
            UserError: the corpus is too short for the settings, or they ask for what this machine cannot do.
        """
        self.folder, self.device, self.reporter, self.world = folder, device, reporter or Silence(), world
        self.config: TrainConfig = folder.config.train
        self.corpus = corpus
        self.stream = training_stream(corpus, self.config, world.shard)
        torch.manual_seed(self.config.seed)
        model = build_model(folder.config.model, memory_length=self.config.memory_length).to(device).train()
        if world.rank:  # each process drops out other activations
            world.seed(self.config.seed, 0)
        model.activation_checkpointing = self.config.activation_checkpointing
        compile_layers(model, device, self.config.compile)
        scored = world.wrap(ScoredModel(model, own_memory=self.config.compile == "cudagraphs"), self.config.parallelism)
        optimizers = build_optimizers(model, self.config)  # of the weights as they are shared out
        average = None if self.config.weight_average == "none" else WeightAverage(model, self.config)
        self.learner = TrainStep(scored, optimizers, self.config, device, world)
        self.chunks = [len(rows) for rows in chunks_of(self.stream.shard_rows, self.config, world.size)]
        memories = tuple(model.initial_memory(rows) for rows in self.chunks)
        self.state = TrainingState(model, optimizers, memories, TrainerState(), average)
        self._queued: _Queued | None = None
        self._saved: TrainerState | None = None
        self._started = time.perf_counter()
        self._pace = _Pace()
        self._log = MetricsLog(folder)

    def resume(self) -> list[str]:
        """Goes back to the newest checkpoint, and takes later lines out of metrics.jsonl.

        Returns:
            what the user should know (see `load_state`).
        """
        remarks: list[str] = []
        folder = self.folder
        # with nothing of these it was killed before its first checkpoint, and begins; a converted run has weights alone
        if folder.latest_checkpoint() or folder.metrics() or (folder.path / "model.safetensors").exists():
            remarks = load_state(self.folder, self.state, self.world)
            self._know_best()
            if self._is_other_text():
                remarks.append("the validation text is another than before: the best weights are looked for anew")
            self._saved = self.state.progress
        progress = self.state.progress
        if progress.position.segment_index >= self.stream.segments_in(
            progress.position.epoch
        ):  # other rows, other edges
            position = DatasetPosition(epoch=progress.position.epoch + 1)
            self.state.progress = progress.model_copy(update={"position": position})
        with self.world.together():
            if self.world.is_first:
                remove_leftovers(self.folder.path)
                self._log.go_on(progress.step, progress.validated)
        return remarks

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> TrainResult:
        """Trains until the steps are done or `should_stop` says so; either way a checkpoint is written.

        Raises:
            UserError: the loss is no longer a finite number, or the disk is full; the last checkpoint stays good.
        """
        config, state = self.config, self.state
        self._started = time.perf_counter() - state.progress.seconds
        self._pace = _Pace()
        while True:
            step = state.progress.step
            # a resumed run may have been stopped in the middle of a validation: then it is done now
            whole = step == 0 or step == state.progress.validated or not self._due(config.eval_interval)
            whole = whole or self._validate(should_stop)
            stopped = self._asked(should_stop)
            if stopped or self._due(config.checkpoint_interval):
                self._save()
            if stopped or step >= config.max_steps:
                break
            self._step()
        self._log.close()
        progress = state.progress
        return TrainResult(step, whole and step >= config.max_steps, progress.best_nats, progress.seconds)

    def _due(self, every: int) -> bool:
        step = self.state.progress.step
        return step % every == 0 or step >= self.config.max_steps

    def _asked(self, should_stop: Callable[[], bool]) -> bool:
        """Whether to stop here; several processes agree on it, which takes time and is not done after every step."""
        if self.world.size == 1:
            return should_stop()
        times = (_BETWEEN_QUESTIONS, self.config.eval_interval, self.config.checkpoint_interval)
        return any(self._due(every) for every in times) and self.world.any(should_stop())

    def _step(self) -> None:
        state, progress = self.state, self.state.progress
        place = Place(progress.step, progress.position, progress.piece)
        piece = read_piece(self.stream, place, self.config, self.world)
        if piece.segment.is_first:
            state.memories = tuple(state.model.initial_memory(rows) for rows in self.chunks)
        if state.memories[0].length != piece.memory:
            state.memories = tuple(memory.resized(piece.memory) for memory in state.memories)
        set_learning_rate(state.optimizers, learning_rate(progress.step, self.config))
        done = progress.step / self.config.max_steps
        numbers, state.memories = self.learner.step(piece.segment, state.memories, done=done)
        if state.average is not None:
            state.average.update(piece.after.step)
        # the step before is fetched only now, with this one queued: the device never waits for the host
        self._fetch()
        self._queued = _Queued(piece.after.step, numbers)
        state.progress = state.progress.model_copy(
            update={"step": piece.after.step, "position": piece.after.position, "piece": piece.after.piece}
        )
        here = int(piece.segment.loss_mask_BT.sum())
        self.reporter.step(piece.after.step, round(here * self.config.batch_size / self.stream.shard_rows))

    def _fetch(self) -> None:
        """Adds the queued step's numbers to the sums; every `log_every` steps writes a line of figures."""
        queued, self._queued = self._queued, None
        if queued is None:
            return
        nats, count, norm, read = queued.numbers.tolist()
        if not (math.isfinite(nats) and math.isfinite(norm)):
            what = f"the loss became {nats}" if not math.isfinite(nats) else f"the gradient's norm became {norm}"
            newest = self.folder.latest_checkpoint()
            raise UserError(
                f"{what} at step {queued.step}; {newest} is the last good checkpoint. Go on from it with a lower "
                f"rate: txl train --resume {self.folder.path} --train.learning_rate {self.config.learning_rate / 2:g}"
            )
        progress = self.state.progress
        nats, tokens = progress.interval_nats + nats, progress.interval_tokens + round(count)
        self._pace.tokens += round(read)
        if queued.step % self.config.log_interval == 0 and tokens:
            more = {"grad_norm": norm, "tokens_per_second": self._pace.restart()}
            self._write_figures("train", queued.step, self._sums("train", nats, tokens), more)
            nats, tokens = 0.0, 0
        self.state.progress = progress.model_copy(update={"interval_nats": nats, "interval_tokens": tokens})

    def _validate(self, should_stop: Callable[[], bool]) -> bool:
        """Scores the validation text and keeps the best weights; false if it was stopped before its end."""
        self._fetch()
        if "valid" not in self.corpus.splits:
            return True
        state, model, begin = self.state, self.state.model, time.perf_counter()
        tokens = self.corpus.split("valid").first(self.config.eval_tokens)
        stream = validation_stream(tokens, self.corpus.tokenizer.bos_token_id, self.config, self.world)
        read, segments = 0, 0

        def tell(more: int) -> bool:
            nonlocal read, segments
            read, segments = read + more, segments + 1
            self.reporter.validating(min(len(tokens), round(read * stream.batch_size / stream.shard_rows)), len(tokens))
            if self.world.size == 1:
                return should_stop()
            return segments % _BETWEEN_QUESTIONS == 0 and self.world.any(should_stop())

        with ExitStack() as stack:
            if state.average is not None:
                stack.enter_context(state.average.in_place_of(model))
            with evaluating(self.learner.scored):
                nats = sum_nats(self.learner.scored, stream, model.initial_memory(stream.shard_rows), self.config, tell)
            if nats is None:
                return False
            nats = self._over_all(nats)
            sums = self._sums("valid", nats, len(tokens))
            step, best = state.progress.step, None if self._is_other_text() else state.progress.best_nats
            if not math.isfinite(nats):
                raise UserError(f"the validation loss became {nats} at step {step}; lower --train.learning_rate")
            if best is None or sums.nats_per_token < best:
                best = sums.nats_per_token
                self._keep_weights(best)
        known = {"best_nats": best, "best_of": validation_text(self.corpus, self.config), "validated": step}
        state.progress = state.progress.model_copy(update=known)
        self._write_figures("valid", step, sums, {})
        self._pace.pause(time.perf_counter() - begin)
        return True

    def _is_other_text(self) -> bool:
        """Whether the lowest loss so far is of another text than the next will be: they cannot be compared."""
        before, now = self.state.progress.best_of, validation_text(self.corpus, self.config)
        return before is not None and now is not None and before != now

    def _over_all(self, number: float) -> float:
        """The sum of a number over all processes."""
        at = self.device if self.device.type == "cuda" else "cpu"  # MPS has no float64
        return float(self.world.sum(torch.tensor(number, dtype=torch.float64, device=at)))

    def _sums(self, split: str, nats: float, tokens: int) -> Sums:
        """Of part of a split, whose bytes are taken to be its share."""
        return Sums(nats, tokens, tokens * self.corpus.split(split).bytes_per_token)

    def _save(self) -> None:
        self._fetch()
        state, begin = self.state, time.perf_counter()
        if state.progress == self._saved:
            return
        state.progress = self._saved = state.progress.model_copy(update={"seconds": begin - self._started})
        # in a checkpoint memory has its full length, so that it fits whatever the stage of the length warm-up
        state.memories = tuple(memory.resized(self.config.memory_length) for memory in state.memories)
        save_state(self.folder, state, self.world)
        if state.progress.step >= self.config.max_steps and "valid" not in self.corpus.splits:
            with ExitStack() as stack:  # the last weights, or their average, are the best known
                if state.average is not None:
                    stack.enter_context(state.average.in_place_of(state.model))
                self._keep_weights(None)
        self._pace.pause(time.perf_counter() - begin)

    def _keep_weights(self, nats: float | None) -> None:
        """Keeps the weights that the model has now as the run's best, with their validation loss."""
        weights = whole_weights(self.state.model, self.world)
        if self.world.is_first:
            self.folder.save_weights(weights, step=self.state.progress.step, nats=nats)

    def _know_best(self) -> None:
        """The best weights may be of a later step than the checkpoint (a crash): then their loss is to be beaten.

        Where they were lost, any are better.
        """
        with self.world.together():
            there = self.world.is_first and (self.folder.path / "model.safetensors").exists()
            told = json.dumps([there, self.folder.best_known() if there else None])
        (there, best), progress = json.loads(self.world.gather(told)[0]), self.state.progress
        if not there:
            self.state.progress = progress.model_copy(update={"best_nats": None})
        elif best is not None and best[0] > progress.validated:
            self.state.progress = progress.model_copy(update={"best_nats": best[1]})

    def _write_figures(self, split: str, step: int, sums: Sums, more: Figures) -> None:
        if not self.world.is_first:
            return
        figures: Figures = {
            "split": split,
            "step": step,
            "nats_per_token": sums.nats_per_token,
            "bits_per_byte": sums.bits_per_byte,
            **more,
            "learning_rate": learning_rate(step - 1, self.config),
            "seconds": round(time.perf_counter() - self._started, 3),
        }
        self._log.write(figures)
        self.reporter.figures(figures)


class _Pace:
    """Tokens a second of training since the last line of figures, without validations and checkpoints."""

    def __init__(self) -> None:
        self.tokens, self._begin = 0, time.perf_counter()

    def pause(self, seconds: float) -> None:
        """Takes out time that went into something else."""
        self._begin += seconds

    def restart(self) -> float:
        """Gives the pace, and begins anew."""
        now = time.perf_counter()
        pace = self.tokens / max(1e-9, now - self._begin)
        self.tokens, self._begin = 0, now
        return round(pace, 1)


def validation_text(corpus: Corpus, config: TrainConfig) -> str | None:
    """What is scored at each validation, in a word that no other text has; none: the corpus has no such text."""
    if "valid" not in corpus.splits:
        return None
    tokens = len(corpus.split("valid").first(config.eval_tokens))
    return f"{tokens} tokens of {corpus.record.splits['valid'].sha256}"


def check(config: RunConfig, corpus: Corpus, device: torch.device, world: DistributedContext = ALONE) -> None:
    """Finds out, before a run folder is made, whether training can begin.

    Raises:
        UserError: the text is too short for rows and segment, or the settings name what does not exist.
    """
    training_stream(corpus, config.train, world.shard)
    if "valid" in corpus.splits:
        tokens = corpus.split("valid").first(config.train.eval_tokens)
        validation_stream(tokens, corpus.tokenizer.bos_token_id, config.train, world)
    if isinstance(config.model, RelativeConfig):
        choose(config.model.attn_implementation, device, torch.float32)
    check_log(config.train)


def training_stream(corpus: Corpus, config: TrainConfig, shard: Shard = SINGLE_SHARD) -> TokenDataset:
    """The training text as segments, in the order the settings ask for.

    Raises:
        UserError: it is too short for rows and segment, or has too few documents to shuffle.
    """
    split = corpus.split("train")
    stream: TokenDataset
    bos_token_id = corpus.tokenizer.bos_token_id
    sizes = {
        "batch_size": config.batch_size,
        "segment_length": config.segment_length,
        "bos_token_id": bos_token_id,
        "shard": shard,
    }
    if config.shuffle_documents:
        stream = ShuffledDocumentDataset(split.tokens, split.document_starts, **sizes, seed=config.seed)
    else:
        stream = SegmentDataset(split.tokens, **sizes)
    check_training(stream)
    return stream
