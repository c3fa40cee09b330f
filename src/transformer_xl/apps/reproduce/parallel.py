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
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformer_xl.config import UserError
from transformer_xl.files import write_text
from transformer_xl.progress import ProgressBar

PROGRAM = (sys.executable, "-P", "-m", "transformer_xl")  # the command `txl`, which takes no modules of its folder
POLL_SECONDS = 1.0  # between two looks at the processes


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
        pass_fds: file descriptors that the processes inherit, so that the caller's lock of the folder with all runs is
            held until the last of them has ended.

    Raises:
        UserError: a job failed; the others were stopped and have saved checkpoints.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    waiting, tasks = deque(jobs), dict[str, Iterator[subprocess.Popen[bytes]]]()
    processes: dict[str, subprocess.Popen[bytes]] = {}  # the running one of each job, by its name
    # seconds_between_lines: where the output is not a terminal, progress is printed as lines
    with ProgressBar(title, sum(job.size for job in jobs), "steps", seconds_between_lines=60.0) as bar:
        done = _done(jobs)
        bar.begin_at(done)
        try:
            while waiting or tasks:
                while waiting and len(tasks) < workers:
                    job = waiting.popleft()
                    tasks[job.name] = _run(job, logs / f"{job.name}.log", environment, pass_fds)
                for name, task in list(tasks.items()):
                    if process := next(task, None):
                        processes[name] = process
                    else:
                        del tasks[name], processes[name]
                previous, done = done, _done(jobs)
                num_ended = len(jobs) - len(waiting) - len(tasks)
                bar.advance(done - previous, f"{num_ended} of {len(jobs)} done, now {', '.join(tasks)}")
                time.sleep(POLL_SECONDS if tasks else 0)
        finally:
            _stop(processes.values())


def _run(
    job: Job, log: Path, environment: Mapping[str, str], pass_fds: tuple[int, ...]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the commands of a job one after another, and yield the process of each for as long as it runs.

    Raises:
        UserError: a command failed.
    """
    for command in job.commands:
        with log.open("ab") as log_file, tempfile.TemporaryFile() as output:
            log_file.write(f"$ txl {' '.join(command.arguments)}\n".encode())
            log_file.flush()
            begin = log_file.tell()
            process = subprocess.Popen(
                [*PROGRAM, *command.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output if command.output else log_file,
                stderr=log_file,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches only this process, which then signals each of them once
                pass_fds=pass_fds,
            )
            yield process
            while process.poll() is None:
                yield process
            if process.returncode:
                raise UserError(f"{job.name} failed: {_reason(process.returncode, log, begin)}; see {log}")
            if command.output:
                output.seek(0)
                write_text(command.output, output.read().decode())


def _stop(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Ask every process that still runs to save a checkpoint and end, and wait for that."""
    try:
        for process in processes:
            process.send_signal(signal.SIGTERM)  # does nothing if it has ended
        for process in processes:
            process.wait()
    except BaseException:  # a second Ctrl-C
        for process in processes:
            process.kill()
        raise


def _done(jobs: Sequence[Job]) -> int:
    return sum(min(job.size, job.done()) for job in jobs)


def _reason(status: int, log: Path, begin: int) -> str:
    """Return why a command failed: its signal, or the last line of its log after the position `begin`."""
    if status < 0:
        name = signal.Signals(-status).name
        return f"it was killed by {name}" + (", perhaps because memory ran out" if name == "SIGKILL" else "")
    lines = [line for line in log.read_bytes()[begin:].decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("txl: error: ") if lines else f"exit status {status} without a message"
