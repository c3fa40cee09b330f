"""Measures whether training stays as fast as it began, and how much of a step goes into reading its batch.

    python benchmarks/sustained_training.py --corpus DIR [--recipe enwik8-12l] [--minutes 10.5] [--dtype bfloat16]
        [--batch-size 4] [--segment-length 512] [--out FILE]

It trains as `txl train` does, in a temporary folder, without validation and checkpoints on the way. Before it begins,
the operating system is asked to forget the corpus (Linux), so that the first batches come from the disk. The results
are tokens per second in each full minute, without the first step, and the share of the time that batches took to read.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from environment import command, commit, cpu_features, cpu_model, positive, results_file, say, warn_if_busy, write
from implementations.competitor_ours import Clock
from typing_extensions import override

from transformer_xl import train
from transformer_xl.cli.main import keep_freed_memory
from transformer_xl.config import UserError
from transformer_xl.training import stepper
from transformer_xl.training.trainer import Trainer

_MANY_STEPS = 100_000_000  # of which the first run


class MinuteClock(Clock):
    """Counts the tokens of each minute too."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.minutes: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        """Tokens and seconds of each minute in which steps ended."""
        self.read_seconds: list[float] = []

    @override
    def on_step(self, trainer: Trainer, num_tokens: int) -> None:
        num_before = len(self.step_seconds)
        super().on_step(trainer, num_tokens)
        for seconds in self.step_seconds[num_before:]:
            minute = self.minutes[int(sum(self.step_seconds) // 60)]
            minute[0] += num_tokens
            minute[1] += seconds
        if num_before == 0 and not self.step_seconds:
            self.read_seconds.clear()  # as the first step is not counted

    def timed(self, read: Any) -> Any:
        """Return a function that reads a batch, and notes how long it takes."""

        def read_batch(*arguments: Any) -> Any:
            start = time.perf_counter()
            batch = read(*arguments)
            self.read_seconds.append(time.perf_counter() - start)
            return batch

        return read_batch


def forget(folder: Path) -> None:
    """Ask the operating system to drop the files of a folder from its cache."""
    os.sync()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Measure, print the results and write them to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder made by txl prepare")
    parser.add_argument("--recipe", default="enwik8-12l")
    parser.add_argument("--minutes", type=float, default=10.5)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--batch-size", type=positive, default=4)
    parser.add_argument("--segment-length", type=positive, default=512)
    parser.add_argument("--threads", type=positive, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=results_file("sustained-training"))
    args = parser.parse_args()
    if not args.corpus.is_dir():
        parser.error(f"--corpus {args.corpus}: no such folder; make one with txl prepare")
    keep_freed_memory()  # as `txl train` does
    torch.set_num_threads(args.threads)
    load, clock = warn_if_busy(), MinuteClock(60 * args.minutes)
    forget(args.corpus)
    stepper.read_batch = clock.timed(stepper.read_batch)
    sizes = {"batch_size": args.batch_size, "segment_length": args.segment_length}
    settings = {
        **sizes,
        "memory_length": args.segment_length,
        "dtype": args.dtype,
        "max_steps": _MANY_STEPS,
        "eval_interval": _MANY_STEPS,
        "eval_tokens": 4096,
        "checkpoint_interval": _MANY_STEPS,
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(args.recipe, args.corpus, Path(folder) / "run", train=settings, callbacks=[clock], progress=False)
        except UserError as error:
            parser.error(str(error))
    minutes = [tokens / seconds for tokens, seconds in clock.minutes.values() if seconds > 50]
    seconds = sum(clock.step_seconds)
    read = clock.read_seconds[: len(clock.step_seconds)]
    results = {
        "command": command(),
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": {"cpu": cpu_model(), "features": cpu_features(), "threads": args.threads, "load": load},
        "recipe": args.recipe,
        "dtype": args.dtype,
        **sizes,
        "steps": len(clock.step_seconds),
        "tokens_per_second": round(sum(tokens for tokens, _ in clock.minutes.values()) / seconds, 1),
        "tokens_per_second_by_minute": [round(speed, 1) for speed in minutes],
        "last_minute_to_first": round(minutes[-1] / minutes[0], 3) if len(minutes) > 1 else None,
        "share_of_reading": round(sum(read) / seconds, 6),
        "longest_reading_seconds": round(max(read), 6),
    }
    say(
        f"{results['tokens_per_second']:,.0f} tokens/s; last full minute {results['last_minute_to_first']} times the "
        f"first; reading {results['share_of_reading']:.3%} of the time, at most "
        f"{results['longest_reading_seconds'] * 1e3:.1f} ms"
    )
    write(results, args.out)


if __name__ == "__main__":
    main()
