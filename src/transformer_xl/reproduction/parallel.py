"""Several command lines of txl at a time, each in a process of its own: independent trainings fill a machine so.

Small models use one core better than several, so many one-thread processes finish sooner than one after the other with
all threads. What a process says goes into its log. Ctrl-C, SIGTERM or a failure stops all of them, and each saves.
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
POLL_SECONDS = 1.0  # seconds between two looks at what is done


@dataclass(frozen=True)
class Command:
    """Words after `txl`."""

    words: Sequence[str]
    output: Path | None = None
    """Where its standard output goes, whole, once it has ended well; none: into the log."""


@dataclass(frozen=True)
class Job:
    """Commands that follow one another."""

    name: str
    commands: Callable[[], Sequence[Command]]
    """Asked when the job begins."""
    size: int = 1
    """How much there is to do, as `done` counts it."""
    done: Callable[[], int] = lambda: 0
    """How much is done already."""


@dataclass
class _WorkerPool:
    """Workers that take jobs from one queue."""

    logs: Path
    threads: int
    held: tuple[int, ...]
    """File descriptors that processes keep open, so that a lock stands until the last has ended."""
    jobs: queue.SimpleQueue[Job] = field(default_factory=queue.SimpleQueue)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    finished: list[Job] = field(default_factory=list)
    failure: str | None = None
    stopping: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def work(self) -> None:
        """Takes jobs until there are no more."""
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
        """Whether the command ended well."""
        log = self.logs / f"{job.name}.log"
        words = [*PROGRAM, *command.words]
        with log.open("ab") as said:
            said.write(f"$ txl {' '.join(command.words)}\n".encode())
            said.flush()
            begin = said.tell()
            with self.lock:
                if self.stopping:
                    return False
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if command.output else said,
                    stderr=said,
                    env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
                    start_new_session=True,  # Ctrl-C reaches us alone, and each process is told once
                    pass_fds=self.held,
                )
                self.running[job.name] = process
            output, _ = process.communicate()
        with self.lock:
            del self.running[job.name]
        if process.returncode:
            self._fail(f"{job.name} failed: {_reason(process.returncode, log, begin)}; {log} has all it said")
            return False
        if command.output:
            write_text(command.output, output.decode())
        return True

    def _fail(self, why: str) -> None:
        with self.lock:
            first, self.failure = not self.stopping, self.failure or (None if self.stopping else why)
        if first:
            self.stop()

    def stop(self) -> None:
        """Asks every process to save and end."""
        with self.lock:
            self.stopping = True
            for process in self.running.values():
                process.send_signal(signal.SIGTERM)


def run_parallel(
    title: str, jobs: Sequence[Job], logs: Path, *, workers: int, threads: int, held: tuple[int, ...] = ()
) -> None:
    """Runs all jobs, so many at a time.

    Args:
        title: what the progress bar says.
        jobs: in the order in which they begin.
        logs: folder for what each of them says.
        workers: jobs at a time.
        threads: of each.
        held: open file descriptors that the processes inherit.

    Raises:
        UserError: a job failed; the others were stopped, and have saved.
    """
    crew = _WorkerPool(logs, threads, held)
    for job in jobs:
        crew.jobs.put(job)
    pool = ThreadPoolExecutor(workers)
    with ProgressBar(title, sum(job.size for job in jobs), "steps", seconds_between_lines=60.0) as bar:
        shown = _done(jobs)
        bar.begin_at(shown)
        tasks = [pool.submit(crew.work) for _ in range(workers)]
        with _none_left_behind(crew, tasks):
            while wait(tasks, timeout=POLL_SECONDS).not_done:
                now = _done(jobs)
                bar.advance(now - shown, f"{len(crew.finished)} of {len(jobs)} done, now {', '.join(crew.running)}")
                shown = now
    for task in tasks:
        task.result()
    if crew.failure:
        raise UserError(crew.failure)


@contextmanager
def _none_left_behind(crew: _WorkerPool, tasks: Sequence[Future[None]]) -> Iterator[None]:
    """Whatever ends the work, every process is told to save, and waited for; a second Ctrl-C kills them."""
    try:
        yield
    finally:
        try:
            if wait(tasks, timeout=0).not_done:
                crew.stop()
            wait(tasks)
        except BaseException:
            for process in list(crew.running.values()):
                process.kill()
            raise


def _done(jobs: Sequence[Job]) -> int:
    return sum(min(job.size, job.done()) for job in jobs)


def _reason(status: int, log: Path, begin: int) -> str:
    """Why a command failed, by its status and what it said last, from a place in its log on."""
    if status < 0:
        what = signal.Signals(-status).name
        return f"it was ended by {what}" + (", perhaps for want of memory" if what == "SIGKILL" else "")
    text = log.read_bytes()[begin:].decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("txl: error: ") if lines else f"status {status}, and it said nothing"
