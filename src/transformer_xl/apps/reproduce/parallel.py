"""Run several txl commands at a time, each in its own process, to train independent runs on all cores.

Small models gain little from more threads, so many one-thread processes finish sooner than one process at a time with
all threads. The output of each process goes to a log file. Ctrl-C, SIGTERM or a failure stops all of them, and each
saves a checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from transformer_xl.config import UserError
from transformer_xl.files import write_text
from transformer_xl.progress import ProgressBar

PROGRAM = (sys.executable, "-m", "transformer_xl")  # the command `txl`
POLL_SECONDS = 1.0  # time between updates of the progress bar


@dataclass(frozen=True)
class Command:
    """A txl command."""

    arguments: Sequence[str]
    """What follows `txl` on the command line."""
    output: Path | None = None
    """File for its standard output, written once the command has succeeded, or None to write it to the log."""


@dataclass(frozen=True)
class Job:
    """Commands that run one after another."""

    name: str
    commands: Sequence[Command]
    size: int = 1
    """Total amount of work: training steps, or 1 if the job does not train."""
    done: Callable[[], int] = lambda: 0
    """Returns how much of `size` is done."""


@dataclass
class _Runner:
    """Runs jobs, each in a thread that waits for its processes."""

    logs: Path
    """Folder for the log of each job."""
    threads: int
    """Threads of each process."""
    pass_fds: tuple[int, ...]
    """File descriptors that the processes inherit, so that the caller's lock of the folder with all runs is held
    until the last of them has ended."""
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """The running process of each job, by name of the job."""
    is_stopping: bool = False
    failure: str | None = None
    """Why the runner is stopping, if a command has failed."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, job: Job) -> None:
        """Run the commands of a job until one fails; do nothing if the runner is stopping."""
        try:
            for command in job.commands:
                if not self._run_command(job.name, command):
                    return
        except BaseException:
            self.stop()
            raise

    def _run_command(self, name: str, command: Command) -> bool:
        """Run a command of the job of this name; return whether it succeeded."""
        log = self.logs / f"{name}.log"
        with self.lock:
            if self.is_stopping:
                return False
            with log.open("ab") as log_file:
                log_file.write(f"$ txl {' '.join(command.arguments)}\n".encode())
                log_file.flush()
                begin = log_file.tell()
                process = self.running[name] = subprocess.Popen(
                    [*PROGRAM, *command.arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if command.output else log_file,
                    stderr=log_file,
                    env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
                    start_new_session=True,  # Ctrl-C reaches only this process, which then signals each of them once
                    pass_fds=self.pass_fds,
                )
        output, _ = process.communicate()
        with self.lock:
            del self.running[name]
        if process.returncode:
            self.stop(f"{name} failed: {_reason(process.returncode, log, begin)}; see {log}")
            return False
        if command.output:
            write_text(command.output, output.decode())
        return True

    def stop(self, failure: str | None = None) -> None:
        """Ask every process, once, to save a checkpoint and end."""
        with self.lock:
            if not self.is_stopping:
                self.is_stopping, self.failure = True, failure
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
    runner = _Runner(logs, threads, pass_fds)
    # seconds_between_lines: where the output is not a terminal, progress is printed as lines
    with ProgressBar(title, sum(job.size for job in jobs), "steps", seconds_between_lines=60.0) as bar:
        done = _done(jobs)
        bar.begin_at(done)
        executor = ThreadPoolExecutor(workers)
        tasks = [executor.submit(runner.run, job) for job in jobs]
        try:
            while (state := wait(tasks, timeout=POLL_SECONDS)).not_done:
                previous, done = done, _done(jobs)
                bar.advance(done - previous, f"{len(state.done)} of {len(jobs)} done, now {', '.join(runner.running)}")
        finally:
            try:
                if wait(tasks, timeout=0).not_done:  # Ctrl-C or SIGTERM: let every process save a checkpoint
                    runner.stop()
                wait(tasks)
            except BaseException:  # a second Ctrl-C
                for process in list(runner.running.values()):
                    process.kill()
                raise
    for task in tasks:
        task.result()
    if runner.failure:
        raise UserError(runner.failure)


def _done(jobs: Sequence[Job]) -> int:
    return sum(min(job.size, job.done()) for job in jobs)


def _reason(status: int, log: Path, begin: int) -> str:
    """Return why a command failed: its signal, or the last line of its log after the position `begin`."""
    if status < 0:
        name = signal.Signals(-status).name
        return f"it was killed by {name}" + (", perhaps because memory ran out" if name == "SIGKILL" else "")
    lines = [line for line in log.read_bytes()[begin:].decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("txl: error: ") if lines else f"exit status {status} without a message"
