"""Run several txl commands at a time, each in its own process, to train independent runs on all cores.

Small models scale badly over threads, so many one-thread processes finish sooner than one process at a time with all
threads. The output of each process goes to a log file. Ctrl-C, SIGTERM or a failure stops all of them, and each saves a
checkpoint.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from transformer_xl.config import UserError
from transformer_xl.files import write_text
from transformer_xl.progress import ProgressBar

PROGRAM = (sys.executable, "-m", "transformer_xl")
POLL_SECONDS = 1.0  # between updates of the progress bar


@dataclass(frozen=True)
class Command:
    """A txl command."""

    arguments: Sequence[str]
    """What follows `txl` on the command line."""
    output: Path | None = None
    """File for its standard output, written once it has succeeded; None: the log."""


@dataclass(frozen=True)
class Job:
    """Commands that run one after another."""

    name: str
    commands: Callable[[], Sequence[Command]]
    """Called when the job starts."""
    size: int = 1
    """Amount of work, in the unit of `done`."""
    done: Callable[[], int] = lambda: 0
    """Called for the amount of work done so far."""


@dataclass
class _WorkerPool:
    """Threads that take jobs from one queue; each runs one process at a time."""

    logs: Path
    threads: int
    pass_fds: tuple[int, ...]
    """File descriptors that the processes inherit, so that a lock is held until the last of them has ended."""
    jobs: queue.SimpleQueue[Job] = field(default_factory=queue.SimpleQueue)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    finished: list[Job] = field(default_factory=list)
    failure: str | None = None
    stopping: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def work(self) -> None:
        """Run jobs until none is left."""
        try:
            while not self.stopping:
                job = self.jobs.get_nowait()
                if all(self._run(job, command) for command in job.commands()):
                    self.finished.append(job)
        except queue.Empty:
            return
        except BaseException:
            self.stop()
            raise

    def _run(self, job: Job, command: Command) -> bool:
        """Run a command; return whether it succeeded."""
        log = self.logs / f"{job.name}.log"
        with log.open("ab") as log_file:
            log_file.write(f"$ txl {' '.join(command.arguments)}\n".encode())
            log_file.flush()
            begin = log_file.tell()
            with self.lock:
                if self.stopping:
                    return False
                process = subprocess.Popen(
                    [*PROGRAM, *command.arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if command.output else log_file,
                    stderr=log_file,
                    env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
                    start_new_session=True,  # Ctrl-C reaches only this process, which then signals each of them once
                    pass_fds=self.pass_fds,
                )
                self.running[job.name] = process
            output, _ = process.communicate()
        with self.lock:
            del self.running[job.name]
        if process.returncode:
            self._fail(f"{job.name} failed: {_reason(process.returncode, log, begin)}; see {log}")
            return False
        if command.output:
            write_text(command.output, output.decode())
        return True

    def _fail(self, reason: str) -> None:
        with self.lock:
            first, self.failure = not self.stopping, self.failure or (None if self.stopping else reason)
        if first:
            self.stop()

    def stop(self) -> None:
        """Ask every process to save a checkpoint and end."""
        with self.lock:
            self.stopping = True
            for process in self.running.values():
                process.send_signal(signal.SIGTERM)


def run_parallel(
    title: str, jobs: Sequence[Job], logs: Path, *, workers: int, threads: int, pass_fds: tuple[int, ...] = ()
) -> None:
    """Run jobs, `workers` of them at a time, and show their progress.

    Args:
        title: title of the progress bar.
        jobs: in the order in which they start.
        logs: folder for the log of each job.
        workers: number of jobs at a time.
        threads: number of threads of each process (OMP_NUM_THREADS).
        pass_fds: open file descriptors that the processes inherit.

    Raises:
        UserError: a job failed; the others were stopped and have saved checkpoints.
    """
    worker_pool = _WorkerPool(logs, threads, pass_fds)
    for job in jobs:
        worker_pool.jobs.put(job)
    executor = ThreadPoolExecutor(workers)
    with ProgressBar(title, sum(job.size for job in jobs), "steps", seconds_between_lines=60.0) as bar:
        shown = _done(jobs)
        bar.begin_at(shown)
        tasks = [executor.submit(worker_pool.work) for _ in range(workers)]
        with _stopped_at_exit(worker_pool, tasks):
            while wait(tasks, timeout=POLL_SECONDS).not_done:
                now = _done(jobs)
                bar.advance(
                    now - shown,
                    f"{len(worker_pool.finished)} of {len(jobs)} done, now {', '.join(worker_pool.running)}",
                )
                shown = now
    for task in tasks:
        task.result()
    if worker_pool.failure:
        raise UserError(worker_pool.failure)


@contextmanager
def _stopped_at_exit(worker_pool: _WorkerPool, tasks: Sequence[Future[None]]) -> Iterator[None]:
    """However the block ends, ask every process to save and wait for it; a second Ctrl-C kills them."""
    try:
        yield
    finally:
        try:
            if wait(tasks, timeout=0).not_done:
                worker_pool.stop()
            wait(tasks)
        except BaseException:
            for process in list(worker_pool.running.values()):
                process.kill()
            raise


def _done(jobs: Sequence[Job]) -> int:
    return sum(min(job.size, job.done()) for job in jobs)


def _reason(status: int, log: Path, begin: int) -> str:
    """Return why a command failed: its signal, or the last line of its log after the position `begin`."""
    if status < 0:
        what = signal.Signals(-status).name
        return f"it was killed by {what}" + (", perhaps because memory ran out" if what == "SIGKILL" else "")
    text = log.read_bytes()[begin:].decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("txl: error: ") if lines else f"exit status {status} without a message"
