"""Which samples have a row of the batches: API keys share the rows, and the requests of a key share what it has.

A sample gets a row between two steps, as soon as one is free. Where none is, one is taken back from whoever has more:
at once where that leaves both with a fairer share, and else after `TURN` tokens, so that more keys than rows can take
turns. Its sample goes on later with the same memory, and gives the same text.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from transformer_xl.apps.serve.jobs import Sample, TextJob

TURN = 64
"""Tokens after which a row may pass from one of two samples with the same right to it to the other."""


class RowScheduler:
    """The samples that wait for a row, and those that have one."""

    def __init__(self, max_rows: int) -> None:
        """Share `max_rows` rows."""
        self._max_rows = max_rows
        # of each job; those whose turn it is come first
        self._waiting: dict[TextJob, deque[Sample]] = {}
        self._holding: dict[TextJob, deque[Sample]] = {}

    def add(self, samples: Sequence[Sample]) -> None:
        """Let samples of one job wait for a row."""
        if samples:
            self._waiting.setdefault(samples[0].job, deque()).extend(samples)

    def remove(self, one: Sample) -> None:
        """Remove a sample, whether it waits or has a row."""
        for samples_by_job in (self._waiting, self._holding):
            if one in samples_by_job.get(one.job, ()):
                _take(samples_by_job, one)

    def next_change(self) -> tuple[Sample, Sample | None] | None:
        """Return the sample that gets a row now, and the one that loses it if none is free, or None if all is fair."""
        if not self._waiting:
            return None
        rows = Counter[str]()
        for job, samples in self._holding.items():
            rows[job.owner] += len(samples)
        first: dict[str, TextJob] = {}  # of each owner, the job with the fewest rows
        for job in self._waiting:
            if job.owner not in first or self._num_rows(job) < self._num_rows(first[job.owner]):
                first[job.owner] = job
        for job in sorted(first.values(), key=lambda one: rows[one.owner]):
            loser = None
            if rows.total() >= self._max_rows and (loser := self._loser(job, rows)) is None:
                continue
            one = self._waiting[job][0]
            _take(self._waiting, one)
            if job in self._waiting:  # at the end: others with as few rows come first
                self._waiting[job] = self._waiting.pop(job)
            if loser is not None:
                _take(self._holding, loser)
                self._waiting[loser.job] = self._waiting.pop(loser.job, deque())
                self._waiting[loser.job].appendleft(loser)
            self._holding.setdefault(job, deque()).append(one)
            one.turn_begin = one.builder.num_tokens
            return one, loser
        return None

    def _num_rows(self, job: TextJob) -> int:
        return len(self._holding.get(job, ()))

    def _loser(self, job: TextJob, rows: Counter[str]) -> Sample | None:
        """Return the sample whose row a job has more right to, of another owner rather than of another job."""
        best, loser = (False, 0, 0), None
        for other, samples in self._holding.items():
            is_foreign = other.owner != job.owner
            more = rows[other.owner] - rows[job.owner] if is_foreign else len(samples) - self._num_rows(job)
            one = min(samples, key=lambda one: one.turn_begin - one.builder.num_tokens)  # has had its row for longest
            is_over = more > 1 or (more == 1 and one.builder.num_tokens - one.turn_begin >= TURN)
            if is_over and (is_foreign, more, len(samples)) > best:
                best, loser = (is_foreign, more, len(samples)), one
        return loser


def _take(samples_by_job: dict[TextJob, deque[Sample]], one: Sample) -> None:
    """Remove a sample of a job, which has an entry as long as it has samples."""
    samples_by_job[one.job].remove(one)
    if not samples_by_job[one.job]:
        del samples_by_job[one.job]
