"""The thread that runs the models: it steps all running sequences together; they join and leave between steps.

    engine = Engine([served], max_rows=64)
    engine.start()
    engine.submit(TextJob(served, prompt_ids, config, 16, listener))    the listener gets Delta, then Finished

In each round, up to `READING_SLICE` tokens of prompts are read, each prompt alone and those of each API key in turns;
rows are given to samples whose prompt is read (`scheduler.py`); and each batch makes a step: all sequences of one model
and memory length. So what is read does not depend on other requests, and a step computes each row from its own tokens
and memory; others can only change its shape, and with that the last bits.

A prompt is read once, whatever is asked for; where generation and `score` see different tokens
(`ServedModel.reads_as_score`), its log-probabilities need a reading of their own.

Shape suffixes: B batch rows, T tokens, D model width, V vocabulary, R most likely tokens, G rows with the same
settings; L layers, N heads, P distances.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.apps.serve.jobs import AnswerSize, Event, Failed, Finished, Sample, ScoredToken, TextJob
from transformer_xl.apps.serve.rows import MemoryState, RowBatch, row_state
from transformer_xl.apps.serve.scheduler import RowScheduler
from transformer_xl.apps.serve.served_model import ServedModel
from transformer_xl.config import UserError
from transformer_xl.evaluation.attention_by_distance import attention_of_last, require_attention_terms
from transformer_xl.generation.sampling import sample
from transformer_xl.model.memory import Memory
from transformer_xl.reader import Reader

READING_SLICE = 128
"""Tokens of prompts that are read between two steps of the sequences that are being generated."""

MAX_VALUES = 2**22
"""Values that the answer of one request may have (`AnswerSize`); those of an owner together twice as many, and less
where several owners have some."""

_MAX_NEWS = 1_000  # pieces of all streams in a second: to send one takes longer than to generate a token
_MIN_PAUSE = 0.01  # seconds between two pieces of a stream, which nobody sees
_MAX_LOGITS = 2**22  # logits that are computed at once for the tokens of a prompt
_DAMAGED = "the model's logits are not finite numbers for this text: its weights, or the session's memory, are damaged"
_FAILED = "the model failed on this request; the server's log says why"


class QueueFullError(Exception):
    """As many requests of an owner wait as may wait."""


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


class Engine:
    """Runs jobs in a thread of its own."""

    def __init__(self, models: Iterable[ServedModel], *, max_rows: int = 64, max_waiting: int = 256) -> None:
        """Prepare the engine.

        Args:
            models: the models that jobs may use.
            max_rows: number of sequences that are generated at once, and of jobs that are read.
            max_waiting: number of jobs of each owner that may wait for that.
        """
        self.models = {served.name: served for served in models}
        self.max_rows, self.max_waiting = max_rows, max_waiting
        self.counters = Counters()
        self.error: str | None = None
        """Why the thread has died; None while it lives."""
        self.on_death: Callable[[], object] = lambda: None
        """Called in the thread when it dies."""
        self._lock = threading.Condition()
        self._waiting: dict[str, deque[TextJob]] = {}  # of each owner
        self._is_stopping = False
        # of each owner, in turns: jobs with what reads a slice in each step
        self._reading: dict[str, deque[tuple[TextJob, Iterator[None]]]] = {}
        self._batches: dict[tuple[str, int], RowBatch[Sample]] = {}
        self._running: dict[TextJob, list[Sample]] = {}
        self._rows = RowScheduler(max_rows)
        self._sizes: set[AnswerSize] = set()  # of requests that have begun and are not answered yet
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
        """Let jobs of one owner wait for their turn; all of them, or none.

        Raises:
            QueueFullError: too many jobs of their owner wait.
            UserError: the engine has stopped.
        """
        with self._lock:
            if self._is_stopping or self.error:
                raise UserError("the server is stopping")
            waiting = len(self._waiting.get(jobs[0].owner, ()))
            # a request on its own may have more prompts than may wait
            if waiting and waiting + len(jobs) > self.max_waiting:
                raise QueueFullError
            self._waiting.setdefault(jobs[0].owner, deque()).extend(jobs)
            self._lock.notify()

    def cancel(self, job: TextJob) -> None:
        """Stop a job; its listener is not called any more, except for what is already on its way."""
        job.is_cancelled.set()
        with self._lock:
            self._lock.notify()

    def release(self, size: AnswerSize) -> None:
        """Take note that a request is answered, whose size counts no longer."""
        with self._lock:
            self._sizes.discard(size)
            self._lock.notify()

    @property
    def num_waiting(self) -> int:
        """Number of jobs that wait."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    @property
    def num_running(self) -> int:
        """Number of sequences that are read or generated."""
        return sum(job.num_samples for job in list(self._running))

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or runs."""
        return not self.num_waiting and not self._running

    # The thread

    @torch.no_grad()
    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    while not (self._is_stopping or (admitted := self._admitted()) or self._running):
                        self._lock.wait()
                    if self._is_stopping:
                        break
                start = time.perf_counter()
                self._round(admitted)
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

    def _round(self, admitted: list[TextJob]) -> None:
        for job in admitted:  # first, as those that run get an answer if the thread dies
            self._running[job] = []
            self._reading.setdefault(job.owner, deque()).append((job, self._read(job)))
        for job in [job for job in self._running if job.is_cancelled.is_set()]:
            self.counters.cancelled += 1
            self._drop(job)
        until = self.counters.prompt_tokens + READING_SLICE
        while self._reading and self.counters.prompt_tokens < until:
            self._read_slice()
            self._tell_streams()
        self._share_rows()
        for key, batch in list(self._batches.items()):
            if len(batch):
                is_whole = False
                with self._failures({one.job for one in batch.all()}):
                    self._step(self.models[key[0]], batch)
                    is_whole = True
                if not is_whole:  # a failed step may have written a part of the memory, and all its jobs have ended
                    del self._batches[key]
                self._tell_streams()  # now, as the step of the next model may take long
            if not len(batch):
                self._keep_empty(key)

    def _read_slice(self) -> None:
        """Read a slice of the prompt whose turn it is."""
        owner = next(iter(self._reading))
        entries = self._reading.pop(owner)
        job, slices = entries.popleft()
        with self._failures([job]):
            for _ in slices:
                entries.append((job, slices))
                break
        if entries:
            self._reading[owner] = entries  # at the end: those of others come first

    def _share_rows(self) -> None:
        """Give rows to samples that wait for one, and take back what others have too many of."""
        while change := self._rows.next_change():
            one, loser = change
            with self._failures({sample.job for sample in change if sample is not None}):
                if loser is not None:
                    loser.memory = self._batch(loser.job).take(loser)
                assert one.memory is not None
                self._batch(one.job).join(one, one.memory, int(one.memory.valid_B[0]))
                one.memory = None

    def _batch(self, job: TextJob) -> RowBatch[Sample]:
        """Return the batch of a job's model and memory length."""
        slots = job.served.generation_slots(job.memory_length)
        key = job.served.name, slots
        if key not in self._batches:
            self._batches[key] = RowBatch(job.served.empty_memory(slots), self.max_rows)
        return self._batches[key]

    def _keep_empty(self, kept: tuple[str, int]) -> None:
        """Keep the storage of an empty batch for the next sequences, and no other empty batch of the same model."""
        for key, batch in list(self._batches.items()):
            if key != kept and key[0] == kept[0] and not len(batch):
                del self._batches[key]

    def _admitted(self) -> list[TextJob]:
        """Take jobs that wait, while fewer of their owner have begun than its share of rows, and their answer has room.

        The jobs of a request share its room, and an owner that has none gets it, so that each request ends. The caller
        holds the lock.
        """
        admitted, begun = list[TextJob](), Counter(job.owner for job in self._running)
        for owner in list(self._waiting):
            jobs = [job for job in self._waiting[owner] if not job.is_cancelled.is_set()]
            self.counters.cancelled += len(self._waiting[owner]) - len(jobs)
            self._waiting[owner] = deque(jobs)
            if not jobs:
                del self._waiting[owner]
        held = Counter[str]()
        for size in self._sizes:
            held[size.owner] += size.num_values
        num_owners = max(1, len(self._waiting.keys() | begun.keys() | held.keys()))
        share = max(1, self.max_rows // num_owners)
        for owner, jobs in list(self._waiting.items()):
            while jobs and begun[owner] < share:
                size = jobs[0].answer_size
                if size is not None and size not in self._sizes:
                    if held[owner] and held[owner] + size.num_values > 2 * MAX_VALUES // num_owners:
                        break
                    self._sizes.add(size)
                    held[owner] += size.num_values
                begun[owner] += 1
                admitted.append(jobs.popleft())
            if not jobs:
                del self._waiting[owner]
        return admitted

    def _read(self, job: TextJob) -> Iterator[None]:
        """Read the prompt of a job in slices, then let its samples begin; yield between two slices."""
        if job.shows_attention:
            yield from self._read_for_attention(job)
            return
        served, ids, is_scored = job.served, job.input_ids, job.score_prompt
        if is_scored and job.state is None and not job.add_bos:
            job.prompt_tokens.extend([ScoredToken(job.prompt_ids[0])])  # nothing predicts it
        if is_scored and job.state is None and not served.reads_as_score(job.memory_length):
            scorer = served.scoring_reader(job.memory_length, len(ids))
            yield from self._slices(job, scorer, ids[:-1], is_scored=True)
            if not job.max_tokens and not job.keep_state:
                self._finish_reading(job, scorer)
                return
            is_scored = False
            yield
        read = ids if job.max_tokens else ids[:-1]  # the newest token is read when one is to follow it
        reader = served.reader(job.memory_length, len(read), job.state)
        yield from self._slices(job, reader, read, is_scored=is_scored)
        self._finish_reading(job, reader)

    def _slices(self, job: TextJob, reader: Reader, token_ids: list[int], *, is_scored: bool = False) -> Iterator[None]:
        """Read tokens in slices, and score those that follow them in the job; yield between two slices."""
        stop = 0
        # a model whose keys cannot be limited reads whole segments
        stride = READING_SLICE if job.served.inference.limits_visible else None
        for hidden_BTD, (num_new,) in reader.read([token_ids], stride=stride):
            start, stop = stop, stop + num_new
            self.counters.prompt_tokens += num_new
            if is_scored:
                targets = job.input_ids[start + 1 : stop + 1]
                job.prompt_tokens.extend(self._score(job, hidden_BTD[:, : len(targets)], targets))
            if stop < len(token_ids):
                yield

    def _read_for_attention(self, job: TextJob) -> Iterator[None]:
        """Read the tokens before the last as `score` does, then compute its attention; yield between two slices."""
        served, ids, inference = job.served, job.input_ids, job.served.inference
        offset = (len(ids) - 1) % served.plan.segment_length
        start = len(ids) - 1 - offset  # of the segment of the last token
        reader = served.scoring_reader(job.memory_length, start)
        yield from self._slices(job, reader, ids[:start])
        memory = reader.memory
        if inference.limits_visible:  # else, the segment is read at once
            memory = memory.resized(job.memory_length + offset)
            while start < len(ids) - 1:
                yield
                tokens_BT = torch.tensor([ids[start : len(ids) - 1][:READING_SLICE]])
                num_new = tokens_BT.shape[1]
                first_visible = job.memory_length + start % served.plan.segment_length + 1
                visible_BT = torch.arange(first_visible, first_visible + num_new, device=inference.device)[None]
                _, memory = inference(tokens_BT, memory, visible=visible_BT)
                self.counters.prompt_tokens += num_new
                start += num_new
        tokens_BT = torch.tensor([ids[start:]], device=inference.device)
        with inference.computing():
            job.attention_LNP = attention_of_last(require_attention_terms(inference.model), tokens_BT, memory)
        if not bool(job.attention_LNP.isfinite().all()):
            raise UserError(_DAMAGED)
        self._end(job, Finished(None))

    def _score(self, job: TextJob, hidden_BTD: Tensor, targets: list[int]) -> list[ScoredToken]:
        """Return the tokens that hidden states predict, (1, T, D), with their log-probabilities as in `score`."""
        inference, tokens, temperature = job.served.inference, list[ScoredToken](), job.served.plan.softmax_temperature
        width = max(1, _MAX_LOGITS // inference.config.vocab_size)
        for start in range(0, len(targets), width):
            logits_TV = inference.logits(hidden_BTD[:, start : start + width])[0]
            if temperature != 1:
                logits_TV = logits_TV / temperature
            tokens += _scored(logits_TV, targets[start : start + width], job.num_logprobs or 0)
        if any(token.logprob is None for token in tokens):
            raise UserError(_DAMAGED)
        return tokens

    def _finish_reading(self, job: TextJob, reader: Reader) -> None:
        """Choose the first token of the samples of a job whose prompt is read, or finish the job."""
        served, memory = job.served, reader.held_memory
        if not job.max_tokens:
            state = self._state(memory, 0, job.input_ids[-1], job) if job.keep_state else None
            for index in range(job.num_samples):
                job.add(index, "", (), "length")
            self._end(job, Finished(state))
            return
        assert reader.last_hidden_B1D is not None
        samples = [Sample.create(job, index, memory) for index in range(job.num_samples)]
        self._running[job] = list(samples)  # another list: those that end leave it while the first tokens are chosen
        self._choose(served, samples, reader.last_hidden_B1D.expand(len(samples), -1, -1))
        self._rows.add(self._running.get(job, []))

    def _step(self, served: ServedModel, batch: RowBatch[Sample]) -> None:
        """Read the newest token of each sequence and choose the next one."""
        samples, hidden_B1D = batch.step(served.inference, lambda one: one.newest)
        self.counters.steps += 1
        self.counters.step_rows += len(samples)
        self._choose(served, samples, hidden_B1D)

    def _choose(self, served: ServedModel, samples: list[Sample], hidden_B1D: Tensor) -> None:
        """Choose the next token of each sequence from its hidden state, and end those that are finished."""
        token_ids, logits_BV = _choose_tokens(served, samples, hidden_B1D)
        scored: dict[int, ScoredToken] = {}
        rows = [row for row, one in enumerate(samples) if row in token_ids and one.job.num_logprobs is not None]
        if rows:
            assert logits_BV is not None
            count = max(samples[row].job.num_logprobs or 0 for row in rows)
            tokens = _scored(logits_BV[rows], [token_ids[row] for row in rows], count)
            scored = dict(zip(rows, tokens, strict=True))
        for row, one in enumerate(samples):
            if one.job not in self._running:  # it has failed at another sample
                continue
            if row not in token_ids:
                self._end(one.job, Failed(_DAMAGED, 422))
                continue
            self.counters.generated_tokens += 1
            one.job.num_generated += 1
            if one.add(token_ids[row], scored.get(row)) is not None:
                self._finish(one)

    def _finish(self, one: Sample) -> None:
        """Remove a finished sequence; the last one of a job finishes that."""
        job, state = one.job, None
        if job.keep_state:
            memory, row = self._batch(job).memory_of(one) if one.memory is None else (one.memory, 0)
            state, job.kept_ids = self._state(memory, row, one.newest, job), one.builder.token_ids
        self._leave(one)
        self._running[job].remove(one)
        if not self._running[job]:
            self._end(job, Finished(state))

    def _state(self, memory: Memory, row: int, newest: int, job: TextJob) -> MemoryState:
        """Return a copy of the memory of a sequence."""
        slots = job.served.generation_slots(job.memory_length)
        return row_state(memory, row, newest, slots, drop_empty=job.served.inference.limits_visible)

    def _tell_streams(self) -> None:
        """Tell the listeners of streams what is new, but none of them sooner than others leave time for."""
        streams = [job for job in self._running if job.streams]
        num_rows = min(self.max_rows, sum(len(self._running[job]) for job in streams))
        now, pause = time.monotonic(), max(_MIN_PAUSE, num_rows / _MAX_NEWS)
        for job in streams:
            if job.has_news and now - job.told >= pause:
                job.told = now
                with self._failures([job]):
                    self._tell(job)

    def _tell(self, job: TextJob, *ends: Event) -> None:
        if not job.is_cancelled.is_set():
            job.listener([*job.take_news(), *ends])

    def _end(self, job: TextJob, event: Finished | Failed) -> None:
        """Remove a job and tell its listener how it ended."""
        self._drop(job)
        if isinstance(event, Finished):
            self.counters.finished += 1
        else:
            self.counters.failed += 1
        # a listener that fails, such as one whose event loop is closed, must not stop the other jobs
        with suppress(Exception):
            self._tell(job, event)

    def _drop(self, job: TextJob) -> None:
        """Remove a job and all its sequences."""
        for one in self._running.pop(job, []):
            self._leave(one)
        self._reading = {
            owner: kept
            for owner, entries in self._reading.items()
            if (kept := deque(entry for entry in entries if entry[0] is not job))
        }

    def _leave(self, one: Sample) -> None:
        self._rows.remove(one)
        for batch in self._batches.values():
            batch.leave(one)

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


def _choose_tokens(
    served: ServedModel, samples: list[Sample], hidden_B1D: Tensor
) -> tuple[dict[int, int], Tensor | None]:
    """Choose the next token of each sequence, as `generate` does.

    Args:
        served: the model.
        samples: the sequences.
        hidden_B1D: their hidden states.

    Returns:
        the tokens by row, without the rows whose logits are not finite; and the logits (B, V), or None if the most
        likely ones were enough.
    """
    inference = served.inference
    counts = [one.job.num_candidates for one in samples]
    needs_all = None in counts or any(one.job.num_logprobs is not None for one in samples)
    # what is computed for one row must not depend on what others need, unless that saves whole clusters
    if needs_all or not inference.config.cutoffs:
        logits_BV, ids_BV = inference.logits(hidden_B1D)[:, 0], None
    else:  # of the most likely tokens
        most_likely = inference.topk(hidden_B1D, max(count for count in counts if count))
        logits_BV, ids_BV = (x_B1V[:, 0] for x_B1V in most_likely)
    groups: dict[tuple[object, ...], list[int]] = {}
    for row, is_finite in enumerate(logits_BV.amax(-1).isfinite().tolist()):
        if is_finite:
            groups.setdefault(samples[row].job.sampling, []).append(row)
    chosen: dict[int, int] = {}
    for rows in groups.values():
        config, count = samples[rows[0]].job.config, counts[rows[0]]
        all_or_some = slice(None) if len(rows) == len(samples) else rows  # a slice copies nothing
        logits_GR, ids_GR = logits_BV[all_or_some], None
        if ids_BV is not None:
            logits_GR, ids_GR = logits_GR[:, :count], ids_BV[all_or_some, :count]
        elif count is not None:
            logits_GR, ids_GR = logits_GR.topk(min(count, logits_BV.shape[-1]))
        index_G = sample(logits_GR, config, [samples[row].generator for row in rows])
        token_G = index_G if ids_GR is None else ids_GR.gather(-1, index_G[:, None])[:, 0]
        chosen |= zip(rows, token_G.tolist(), strict=True)
    return chosen, logits_BV if ids_BV is None else None


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
