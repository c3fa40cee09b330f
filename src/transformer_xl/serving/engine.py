"""The thread that runs the models: it steps all running sequences together; they join and leave between steps.

    engine = Engine([served], max_rows=64)
    engine.start()
    engine.submit(TextJob(served, prompt_ids, config, 16, listener))    the listener gets Delta, then Finished

In each round, up to `READING_SLICE` tokens of prompts are read, each prompt alone, and then each batch makes a step:
all sequences of one model and memory length. So what is read does not depend on other requests, and a step computes
each row from its own tokens and memory; others can only change its shape, and with that the last bits.

Shape suffixes: B batch rows, T tokens, D model width, V vocabulary, R most likely tokens, G rows with the same
settings; L layers, N heads, P distances.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.analysis.attention_maps import attention_of_last, require_attention_terms
from transformer_xl.config import UserError
from transformer_xl.device import MemoryUse, require_memory
from transformer_xl.generation.batch import PREFILL_SEGMENT
from transformer_xl.generation.sampling import sample
from transformer_xl.model.memory import Memory
from transformer_xl.serving.jobs import Delta, Event, Failed, Finished, Sample, ScoredToken, TextJob
from transformer_xl.serving.prompt_reader import PromptReader
from transformer_xl.serving.rows import MemoryState, RowBatch, row_state
from transformer_xl.serving.served_model import READING_SLICE, ServedModel

_MAX_LOGITS = 2**22  # logits that are computed at once for the tokens of a prompt
_PATIENCE_SECONDS = 5.0  # for which a job lets those pass that need fewer rows
_DAMAGED = "the model's logits are not finite numbers for this text: its weights, or the session's memory, are damaged"
_FAILED = "the model failed on this request; the server's log says why"


class QueueFullError(Exception):
    """As many requests wait as may wait."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(retry_after)
        self.retry_after = retry_after
        """Seconds after which another attempt may succeed."""


@dataclass
class Counters:
    """What the engine has done since it was started."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_rows: int = 0
    """Rows of all steps together."""
    busy_seconds: float = 0.0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0


@dataclass(eq=False)
class _Reading:
    """A job whose prompt is being read."""

    job: TextJob
    scoring: PromptReader | None
    """Reads for log-probabilities alone, where text is generated with another memory."""
    reader: PromptReader | None
    """Reads what is generated from, and also for log-probabilities unless `scoring` does."""


class Engine:
    """Runs jobs in a thread of its own."""

    def __init__(self, models: Iterable[ServedModel], *, max_rows: int = 64, max_waiting: int = 256) -> None:
        """Prepare the engine.

        Args:
            models: the models that jobs may use.
            max_rows: number of sequences that are read or generated at once.
            max_waiting: number of jobs that may wait for that.

        Raises:
            UserError: the memory of so many sequences certainly does not fit on the device.
        """
        self.models = {served.name: served for served in models}
        self.max_rows, self.max_waiting = max_rows, max_waiting
        self.counters = Counters()
        self.error: str | None = None
        """Why the thread has died; None while it lives."""
        self.on_death: Callable[[], object] = lambda: None
        """Called in the thread when it dies."""
        for served in self.models.values():
            size = max_rows * served.row_bytes(served.max_memory_length)
            name = f"a memory of {max_rows:,} x {served.generation_slots(served.max_memory_length):,} tokens"
            use = MemoryUse(name, size, "lower --max-batch or --memory-length")
            require_memory("serving", [use], served.device)
        self._lock = threading.Condition()
        self._waiting: dict[str, deque[TextJob]] = {}  # of each owner, in turns
        self._is_stopping = False
        self._reading: deque[_Reading] = deque()
        self._batches: dict[tuple[str, int], RowBatch[Sample]] = {}
        self._running: dict[TextJob, list[Sample]] = {}
        self._thread = threading.Thread(target=self._run, name="txl-model", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """End the thread after the current round, and wait for that; jobs that are not finished fail."""
        with self._lock:
            self._is_stopping = True
            self._lock.notify()
        if wait and self._thread.is_alive():
            self._thread.join()

    def submit(self, *jobs: TextJob) -> None:
        """Let jobs wait for their turn; all of them, or none.

        Raises:
            QueueFullError: too many jobs wait.
            UserError: the engine has stopped.
        """
        with self._lock:
            if self._is_stopping or self.error:
                raise UserError("the server is stopping")
            waiting = self._num_waiting()
            # a request on its own may have more prompts than may wait
            if waiting and waiting + len(jobs) > self.max_waiting:
                raise QueueFullError(self._retry_after(waiting))
            for job in jobs:
                self._waiting.setdefault(job.owner, deque()).append(job)
            self._lock.notify()

    def cancel(self, job: TextJob) -> None:
        """Stop a job; its listener is not called any more, except for what is already on its way."""
        job.is_cancelled.set()
        with self._lock:
            self._lock.notify()

    @property
    def num_waiting(self) -> int:
        """Number of jobs that wait."""
        with self._lock:
            return self._num_waiting()

    @property
    def num_running(self) -> int:
        """Number of sequences that are read or generated."""
        return sum(job.num_samples for job in list(self._running))

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or runs."""
        return not self.num_waiting and not self._running

    def _num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _retry_after(self, waiting: int) -> int:
        """Return in how many seconds about half of those that wait will have had their turn."""
        rate = self.counters.finished / max(1.0, self.counters.busy_seconds)
        return max(1, min(60, round(0.5 * waiting / rate))) if rate else 5

    # The thread

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    while not (self._is_stopping or self._waiting or self._running):
                        self._lock.wait()
                    if self._is_stopping:
                        break
                start = time.perf_counter()
                self._round()
                self.counters.busy_seconds += time.perf_counter() - start
        except BaseException:
            traceback.print_exc()
            self.error = _FAILED
            self.on_death()
        finally:
            message, status = (self.error, 500) if self.error else ("the server is stopping", 503)
            with self._lock:
                self._is_stopping = True
                left = [*self._running, *(job for jobs in self._waiting.values() for job in jobs)]
                self._waiting.clear()
            for job in left:
                self._end(job, Failed(message, status))

    def _round(self) -> None:
        for job in [job for job in self._running if job.is_cancelled.is_set()]:
            self.counters.cancelled += 1
            self._drop(job)
        for job in self._admitted():
            with self._failures([job]):
                self._begin(job)
        budget = READING_SLICE
        while self._reading and budget > 0:
            reading = self._reading.popleft()
            with self._failures([reading.job]), reading.job.served.computing():
                budget -= self._read(reading)
        for key, batch in list(self._batches.items()):
            served = self.models[key[0]]
            if len(batch):
                with self._failures({one.job for one in batch.all()}), served.computing():
                    self._step(served, batch)
            if not len(batch):
                self._keep_empty(key)

    def _keep_empty(self, kept: tuple[str, int]) -> None:
        """Keep the storage of an empty batch for the next sequences, and no other empty batch of the same model."""
        for key, batch in list(self._batches.items()):
            if key != kept and key[0] == kept[0] and not len(batch):
                del self._batches[key]

    def _admitted(self) -> list[TextJob]:
        """Take jobs that wait, those of each owner in turns, while there are rows for them."""
        admitted: list[TextJob] = []
        free = self.max_rows - self.num_running
        with self._lock:
            for owner in list(self._waiting):
                jobs = [job for job in self._waiting[owner] if not job.is_cancelled.is_set()]
                self.counters.cancelled += len(self._waiting[owner]) - len(jobs)
                self._waiting[owner] = deque(jobs)
                if not jobs:
                    del self._waiting[owner]
            while (owner := self._next_owner(free)) is not None:
                jobs = self._waiting[owner]
                job = jobs.popleft()
                free -= job.num_samples
                admitted.append(job)
                del self._waiting[owner]
                if jobs:
                    self._waiting[owner] = jobs  # at the end: the others come first
        return admitted

    def _next_owner(self, free: int) -> str | None:
        """Return whose job is next for this number of free rows; None: nobody's.

        A job with more samples lets the others go first, but only for a while, or it might wait for ever.
        """
        now = time.monotonic()
        for owner, jobs in self._waiting.items():
            job = jobs[0]
            if job.num_samples <= free:
                return owner
            job.passed_since = job.passed_since or now
            if now - job.passed_since >= _PATIENCE_SECONDS:
                break
        return None

    def _begin(self, job: TextJob) -> None:
        """Prepare to read the prompt of a job."""
        self._running[job] = []
        if job.shows_attention:
            self._reading.append(_Reading(job, None, self._attention_reader(job)))
            return
        served, ids = job.served, job.input_ids
        read = ids if job.max_tokens else ids[:-1]  # the newest token is read when one is to follow it
        first = 0 if job.state is None else 1  # the newest token of a state is read by itself, as by `generate`
        # a text is scored as by `score`; if that has the memory to generate with, it is read only once
        is_shared = job.score_prompt and (job.state is not None or (served.has_memory and job.memory_length > 0))
        scoring = reader = None
        with served.computing():
            if job.score_prompt and not is_shared:
                memory = served.scoring_memory(job.memory_length, len(ids))
                bounds = _segments_from_start(len(ids) - 1, served.plan.segment_length, 0)
                scoring = PromptReader(served, memory, ids[:-1], bounds, job.memory_length)
            if scoring is None or job.max_tokens or job.keep_state:
                if job.state is not None:
                    memory = served.restored(job.state, len(ids))
                elif is_shared:
                    memory = served.scoring_memory(job.memory_length, len(ids))
                else:
                    memory = served.generation_memory(job.memory_length, len(ids))
                if is_shared:
                    bounds = _segments_from_start(len(read), served.plan.segment_length, first)
                else:
                    bounds = _segments_from_end(len(read), first)
                reader = PromptReader(served, memory, read, bounds, served.generation_slots(job.memory_length))
        self._reading.append(_Reading(job, scoring, reader))

    @staticmethod
    def _attention_reader(job: TextJob) -> PromptReader:
        """Return what reads the tokens before those whose attention is computed, in the segments of `score`."""
        served, ids = job.served, job.input_ids
        with served.computing():
            memory = served.scoring_memory(job.memory_length, len(ids))
        num_read = len(ids) - _num_traced(job)
        bounds = _segments_from_start(num_read, served.plan.segment_length, 0)
        return PromptReader(served, memory, ids[:num_read], bounds, job.memory_length)

    def _attention(self, job: TextJob, memory: Memory) -> Tensor:
        """Return the attention (L, N, P) of the last token of a job, after the tokens in `memory`."""
        served, num_traced = job.served, _num_traced(job)
        if served.is_trimmed:  # what the segment of the last token sees before it
            offset = (len(job.input_ids) - 1) % served.plan.segment_length
            memory = memory.limited([job.memory_length + offset])
        tokens_BT = torch.tensor([job.input_ids[-num_traced:]], device=served.device)
        attention_LNP = attention_of_last(require_attention_terms(served.model), tokens_BT, memory)
        if not bool(attention_LNP.isfinite().all()):
            raise UserError(_DAMAGED)
        return attention_LNP

    def _read(self, reading: _Reading) -> int:
        """Read a slice of a prompt, and return its number of tokens."""
        job, scoring, reader = reading.job, reading.scoring, reading.reader
        num_read = 0
        current = scoring if scoring is not None and not scoring.is_done else reader
        if current is not None and not current.is_done:
            start, stop = current.read_slice()
            num_read = stop - start
            self.counters.prompt_tokens += num_read
            if job.score_prompt and (current is scoring or scoring is None):
                assert current.hidden_BTD is not None
                targets = job.input_ids[start + 1 : stop + 1]
                scored = self._score(job, current.hidden_BTD[:, : len(targets)], targets)
                job.prompt_tokens += scored
        if (scoring is None or scoring.is_done) and (reader is None or reader.is_done):
            self._start_generating(reading)
        else:
            self._reading.append(reading)
        return num_read

    def _score(self, job: TextJob, hidden_BTD: Tensor, targets: list[int]) -> list[ScoredToken]:
        """Return the tokens that hidden states predict, (1, T, D), with their log-probabilities."""
        model, tokens = job.served.model, list[ScoredToken]()
        width = max(1, _MAX_LOGITS // model.config.vocab_size)
        for start in range(0, len(targets), width):
            logits_TV = model.logits(hidden_BTD[:, start : start + width])[0]
            tokens += _scored(logits_TV, targets[start : start + width], job.num_logprobs or 0)
        if any(token.logprob is None for token in tokens):
            raise UserError(_DAMAGED)
        return tokens

    def _start_generating(self, reading: _Reading) -> None:
        """Let the samples of a job whose prompt is read join a batch with their first token, or finish the job."""
        job, reader = reading.job, reading.reader
        if job.shows_attention:
            assert reader is not None
            self._end(job, Finished(None, self._attention(job, reader.memory)))
            return
        if job.score_prompt and job.state is None and not job.add_bos:
            job.prompt_tokens.insert(0, ScoredToken(job.prompt_ids[0]))  # nothing predicts it
        served = job.served
        if not job.max_tokens:
            state = None
            if job.keep_state:
                assert reader is not None
                state = self._state(reader.memory, 0, job.input_ids[-1], job)
            job.pending += [Delta(index, "", (), (), "length") for index in range(job.num_samples)]
            self._end(job, Finished(state))
            return
        assert reader is not None
        assert reader.hidden_BTD is not None
        slots = served.generation_slots(job.memory_length) if served.is_trimmed else reader.memory.length
        key = served.name, slots
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = RowBatch(slots, self.max_rows)
        samples = [Sample.create(job, index) for index in range(job.num_samples)]
        self._running[job] = list(samples)  # another list: those that end leave it while the first tokens are chosen
        for one in samples:
            batch.join(one, reader.memory, int(reader.memory.valid_B[0]))
        self._choose(served, batch, samples, reader.hidden_BTD[:, -1:].expand(len(samples), -1, -1))

    def _step(self, served: ServedModel, batch: RowBatch[Sample]) -> None:
        """Read the newest token of each sequence and choose the next one."""
        samples, hidden_B1D = batch.step(served.model, lambda one: one.newest)
        self.counters.steps += 1
        self.counters.step_rows += len(samples)
        self._choose(served, batch, samples, hidden_B1D)

    def _choose(self, served: ServedModel, batch: RowBatch[Sample], samples: list[Sample], hidden_B1D: Tensor) -> None:
        """Choose the next token of each sequence from its hidden state, and end those that are finished."""
        damaged: list[Sample] = []
        token_ids, logits_BV = _choose_tokens(served, samples, hidden_B1D, damaged)
        scored: dict[int, ScoredToken] = {}
        rows = [row for row, one in enumerate(samples) if one.job.num_logprobs is not None]
        if rows:
            assert logits_BV is not None
            count = max(samples[row].job.num_logprobs or 0 for row in rows)
            tokens = _scored(logits_BV[rows], [token_ids[row] for row in rows], count)
            scored = dict(zip(rows, tokens, strict=True))
        for row, one in enumerate(samples):
            if one in damaged:
                if one.job in self._running:
                    self._end(one.job, Failed(_DAMAGED, 422))
                continue
            job, token = one.job, scored.get(row, ScoredToken(token_ids[row]))
            if job.num_logprobs is not None:
                token = ScoredToken(token.token_id, token.logprob, token.top[: job.num_logprobs])
            delta = one.add(token)
            self.counters.generated_tokens += 1
            job.num_generated += 1
            job.pending.append(delta)
            if delta.finish_reason is not None:
                self._finish(batch, one)
            elif job.streams:
                self._tell(job)

    def _finish(self, batch: RowBatch[Sample], one: Sample) -> None:
        """Remove a finished sequence; the last one of a job finishes that."""
        job, state = one.job, None
        if job.keep_state:
            state, job.kept_ids = self._state(*batch.memory_of(one), one.newest, job), one.builder.token_ids
        batch.leave(one)
        self._running[job].remove(one)
        if not self._running[job]:
            self._end(job, Finished(state))
        elif job.streams:
            self._tell(job)

    def _state(self, memory: Memory, row: int, newest: int, job: TextJob) -> MemoryState:
        """Return a copy of the memory of a sequence."""
        served = job.served
        slots = served.generation_slots(job.memory_length) if served.is_trimmed else memory.length
        return row_state(memory, row, newest, slots, drop_empty=served.is_trimmed)

    def _tell(self, job: TextJob) -> None:
        events, job.pending = job.pending, list[Event]()
        if not job.is_cancelled.is_set():
            job.listener(events)

    def _end(self, job: TextJob, event: Finished | Failed) -> None:
        """Remove a job and tell its listener how it ended."""
        self._drop(job)
        job.pending.append(event)
        if isinstance(event, Finished):
            self.counters.finished += 1
        else:
            self.counters.failed += 1
        # a listener that fails, such as one whose event loop is closed, must not stop the other jobs
        with suppress(Exception):
            self._tell(job)

    def _drop(self, job: TextJob) -> None:
        """Remove a job and all its sequences."""
        for one in self._running.pop(job, []):
            for batch in self._batches.values():
                batch.leave(one)
        self._reading = deque(reading for reading in self._reading if reading.job is not job)

    @contextmanager
    def _failures(self, jobs: Collection[TextJob]) -> Iterator[None]:
        """Let an error of the block end these jobs only; the log has its traceback, the listener a plain message."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, UserError):
                traceback.print_exc()
            failed = Failed(str(error), 422) if isinstance(error, UserError) else Failed(_FAILED)
            for job in jobs:
                self._end(job, failed)


def _num_traced(job: TextJob) -> int:
    """Return how many of the last tokens are read when attention is computed: one, or those of its segment.

    Empty slots that are attended cannot be limited to what a segment sees, so such a model reads it at once.
    """
    return 1 if job.served.is_trimmed else (len(job.input_ids) - 1) % job.served.plan.segment_length + 1


def _segments_from_end(length: int, first: int) -> list[int]:
    """Return the bounds of the segments in which `generate` prefills; before them, `first` tokens are one segment."""
    return sorted({0, first, *range(length, first, -PREFILL_SEGMENT)})


def _segments_from_start(length: int, segment_length: int, first: int) -> list[int]:
    """Return the bounds of the segments in which `score` reads; before them, `first` tokens are one segment."""
    return sorted({0, min(first, length), *range(first, length, segment_length), length})


def _choose_tokens(
    served: ServedModel, samples: list[Sample], hidden_B1D: Tensor, damaged: list[Sample]
) -> tuple[list[int], Tensor | None]:
    """Choose the next token of each sequence, as `generate` does.

    Args:
        served: the model.
        samples: the sequences.
        hidden_B1D: their hidden states.
        damaged: to which those are added whose logits are not finite; their token has no meaning.

    Returns:
        the tokens, and the logits (B, V) or, if the most likely ones were enough, None.
    """
    model = served.model
    counts = [one.job.config.num_candidates for one in samples]
    needs_all = None in counts or any(one.job.num_logprobs is not None for one in samples)
    logits_BV = logits_BR = ids_BR = None
    # what is computed for one row must not depend on what others need, unless that saves whole clusters
    if needs_all or not model.softmax.num_tails:
        logits_BV = model.logits(hidden_B1D)[:, 0]
        is_finite_B = logits_BV.amax(-1).isfinite()
    else:
        logits_B1R, ids_B1R = model.topk(hidden_B1D, max(count for count in counts if count))
        logits_BR, ids_BR = logits_B1R[:, 0], ids_B1R[:, 0]
        is_finite_B = logits_BR[:, 0].isfinite()
    damaged += [one for one, is_finite in zip(samples, is_finite_B.tolist(), strict=True) if not is_finite]
    groups: dict[tuple[object, ...], list[int]] = {}
    for row, one in enumerate(samples):
        config = one.job.config
        key = config.is_greedy, config.temperature, config.top_k, config.top_p, config.min_p
        groups.setdefault(key, []).append(row)
    chosen = [0] * len(samples)
    for rows in groups.values():
        rows = [row for row in rows if samples[row] not in damaged]
        if not rows:
            continue
        config, count = samples[rows[0]].job.config, counts[rows[0]]
        ids_GR = None
        if logits_BV is None:
            assert logits_BR is not None
            assert ids_BR is not None
            logits_GV, ids_GR = logits_BR[rows, :count], ids_BR[rows, :count]
        else:
            logits_GV = logits_BV[rows]
            if count is not None:
                logits_GV, ids_GR = logits_GV.topk(min(count, logits_GV.shape[-1]))
        index_G = sample(logits_GV, config, [samples[row].generator for row in rows])
        token_G = index_G if ids_GR is None else ids_GR.gather(-1, index_G[:, None])[:, 0]
        for row, token_id in zip(rows, token_G.tolist(), strict=True):
            chosen[row] = token_id
    return chosen, logits_BV


def _scored(logits_TV: Tensor, token_ids: list[int], num_top: int) -> list[ScoredToken]:
    """Return tokens with log-probabilities, all from the same softmax; None where they are not finite."""
    logprob_TV = logits_TV.float().log_softmax(-1)
    chosen = logprob_TV.gather(-1, torch.tensor(token_ids, device=logprob_TV.device)[:, None])[:, 0].tolist()
    if not num_top:
        return [ScoredToken(*pair) for pair in zip(token_ids, map(_finite, chosen), strict=True)]
    top_TR, ids_TR = logprob_TV.topk(min(num_top, logprob_TV.shape[-1]))
    tops = [tuple(zip(*pair, strict=True)) for pair in zip(ids_TR.tolist(), top_TR.tolist(), strict=True)]
    return [ScoredToken(*entry) for entry in zip(token_ids, map(_finite, chosen), tops, strict=True)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
