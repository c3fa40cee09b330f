"""Compares speed and memory of training with other implementations, at the size of the paper's small enwik8 model.

    python benchmarks/training.py [--peers .venv-peers/bin/python] [--implementations ours-float32,...] [--rounds 5] ...

An implementation is NAME-DTYPE or NAME-DTYPE+VARIANT: ours-float32, ours-bfloat16, ours-float32+compile,
transformers-float32, x-transformers-float32, x-transformers-bfloat16+bias, ... Each runs in a separate process with all
cores, the others ("peers") with the Python of another virtual environment. They take turns (A B C, then C B A, ...), so
only one computes at any time, and disturbances by other programs affect all. A step is forward with a full memory,
cross-entropy, backward, gradient clipping and fused Adam. Results are medians over the rounds; a ratio is the median of
each round's ratio to the first implementation. Losses on the same text show whether an implementation really learns.

nanogpt-float32 is nanoGPT, without memory, from the checkout that the variable NANOGPT names; it is for small models:

    NANOGPT=DIR python benchmarks/training.py --implementations ours-float32,nanogpt-float32 --n-layers 4 --d-model 256
        --n-heads 4 --d-ff 1024 --batch-size 32 --segment-length 64 --memory-length 64 --dropout 0 --out FILE

By default all run in float32, and all but transformers, whose loss fails under bfloat16 autocast, also in bfloat16 if
the processor has instructions for it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from arguments import positive
from environment import (
    command,
    commit,
    cpu_features,
    cpu_model,
    device_name,
    refuse,
    results_file,
    say,
    warn_if_busy,
    write,
)

from transformer_xl.device import has_bfloat16

HERE = Path(__file__).parent
PEERS = Path(".venv-peers/bin/python")
MODULES = {
    "ours": "ours", "transformers": "peer_transformers", "x-transformers": "peer_x_transformers",
    "nanogpt": "peer_nanogpt",
}  # fmt: skip
STANDARD = ("ours-{}", "transformers-{}", "x-transformers-{}", "x-transformers-{}+bias")
NO_BFLOAT16 = "transformers in bfloat16: its loss fails under autocast (bfloat16 into a float32 buffer)"
# makes glibc keep blocks above 32 MiB, which it otherwise returns to the system as soon as they are freed
TUNED_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}
SIZES = {
    "n_layers": 12,
    "d_model": 512,
    "n_heads": 8,
    "d_head": 64,
    "d_ff": 2048,
    "vocab_size": 204,
    "batch_size": 4,
    "segment_length": 512,
    "memory_length": 512,
}
RATES = {"dropout": 0.1, "learning_rate": 2.5e-4, "max_grad_norm": 0.25}
REST_SECONDS = 0.5  # threads of the previous implementation spin for a moment before they sleep


@dataclass(frozen=True)
class Entry:
    """An implementation to measure."""

    name: str
    module: str
    dtype: str
    variant: str

    @staticmethod
    def parse(name: str, modules: dict[str, str]) -> Entry:
        """Parse NAME-DTYPE or NAME-DTYPE+VARIANT; exit with a message if there is no such implementation.

        Args:
            name: the name of the implementation, as on the command line.
            modules: for each NAME, the module in implementations/.
        """
        rest, _, variant = name.partition("+")
        who, _, dtype = rest.rpartition("-")
        if who not in modules or dtype not in ("float32", "bfloat16"):
            refuse(f"no implementation '{name}'; must be NAME-DTYPE, NAME one of {', '.join(modules)}")
        if who == "nanogpt" and not (Path(os.environ.get("NANOGPT", "")) / "model.py").is_file():
            refuse(f"'{name}' needs a checkout of nanoGPT: NANOGPT=DIR python benchmarks/training.py ...")
        return Entry(name, modules[who], dtype, variant)


class Worker:
    """A process that runs one implementation; see implementations/worker.py."""

    def __init__(self, entry: Entry, args: argparse.Namespace) -> None:
        """Start the process, and wait until its model is built and its memory is full."""
        self.entry = entry
        task = {name: getattr(args, name) for name in (*SIZES, *RATES, "device")}
        task |= {"implementation": entry.module, "dtype": entry.dtype, "variant": entry.variant}
        task |= {"clamp_length": getattr(args, "clamp_length", None)}
        python = str(args.peers.absolute()) if entry.module.startswith("peer") else sys.executable
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(args.threads),
            **(TUNED_MALLOC if args.tuned_malloc else {}),
        }
        self.process = subprocess.Popen(
            [python, "-m", "implementations.worker", json.dumps(task)],
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.built = self._response()
        # an inference implementation fills its memory when it is built, so these steps only warm up
        warmup = 2 if "inference" in entry.module else 1 + -(-args.memory_length // args.segment_length)
        self.steps(warmup + (3 if "compile" in entry.variant else 0))

    def steps(self, number: int) -> dict[str, Any]:
        """Run so many steps, and return their `seconds` and mean `loss`."""
        assert self.process.stdin
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return self._response()

    def end(self) -> dict[str, Any]:
        """End the process, and return its peak memory."""
        assert self.process.stdin
        with self.process:  # closes the pipes and waits
            self.process.stdin.close()
            peaks = self._response()
        beyond_libraries = peaks["peak_resident_bytes"] - peaks["resident_bytes_before_model"]
        return {**peaks, "peak_resident_bytes_beyond_libraries": beyond_libraries}

    def _response(self) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):  # libraries may print other lines
                return json.loads(line)
        self.process.wait()
        sys.exit(f"{self.entry.name} ended with status {self.process.returncode}; see its error above")


def measure(entries: list[Entry], args: argparse.Namespace) -> dict[str, Any]:
    """Run the implementations in turns, and return their rates, medians, ratios, losses and memory."""
    workers = {}
    for entry in entries:
        workers[entry.name] = Worker(entry, args)
        built = workers[entry.name].built
        say(f"{entry.name}: {built['parameters']:,} parameters, {built['threads']} threads; {built['note']}")
    rates: dict[str, list[float]] = {name: [] for name in workers}
    losses: dict[str, list[float]] = {name: [] for name in workers}
    names = list(workers)
    for number in range(args.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            time.sleep(REST_SECONDS)
            result = workers[name].steps(args.steps)
            rates[name].append(args.steps * args.batch_size * args.segment_length / result["seconds"])
            losses[name].append(result["loss"])
        last = ", ".join(f"{name} {of[-1]:,.0f}" for name, of in rates.items())
        say(f"round {number + 1} of {args.rounds}, tokens/s: {last}")
    first = rates[names[0]]
    return {
        "compared_with": names[0],
        "implementations": {
            name: {**metrics(rates[name], first), "losses": losses[name], **worker.built, **worker.end()}
            for name, worker in workers.items()
        },
    }


def metrics(rates: list[float], first: list[float]) -> dict[str, Any]:
    """Return an implementation's median rate, and the ratios of its rates to those of the first implementation."""
    ratios = [rate / other for rate, other in zip(rates, first, strict=True)]
    return {
        "median_tokens_per_second": round(statistics.median(rates), 1),
        "median_ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "tokens_per_second": [round(rate, 1) for rate in rates],
    }


def choose_entries(args: argparse.Namespace) -> tuple[list[Entry], list[str]]:
    """Return the implementations to measure, and for those left out by default a sentence that explains why."""
    if args.implementations:
        return [Entry.parse(name, MODULES) for name in args.implementations.split(",")], []
    names = [name.format("float32") for name in STANDARD]
    left_out = []
    if has_bfloat16(torch.device(args.device)):
        names += [name.format("bfloat16") for name in STANDARD if not name.startswith("transformers")]
        left_out.append(NO_BFLOAT16)
    else:
        left_out.append("bfloat16: the processor has no instructions for it; --implementations measures it anyway")
    if not args.peers.exists():
        left_out.append(f"other implementations: no Python at {args.peers}; 'make bench' installs one")
        names = [name for name in names if name.startswith("ours")]
    return [Entry.parse(name, MODULES) for name in names], left_out


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training speed and memory compared with other implementations.")
    for name, default in {**SIZES, **RATES}.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, help=f"default {default:g}")
    parser.add_argument("--implementations", help="names separated by commas; the others are compared with the first")
    parser.add_argument(
        "--peers", type=Path, default=PEERS, help=f"Python with the other implementations (default {PEERS})"
    )
    parser.add_argument("--steps", type=positive, default=2, help="optimizer steps in each round (default 2)")
    parser.add_argument("--rounds", type=positive, default=5, help="default 5")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--threads", type=positive, default=os.cpu_count(), help="CPU threads (default: one for each core)"
    )
    parser.add_argument(
        "--tuned-malloc", action="store_true", help="let glibc keep large blocks, for every implementation"
    )
    parser.add_argument("--out", type=Path, default=results_file("training"))
    return parser.parse_args()


def main() -> None:
    """Measure, print the results and write them to a file."""
    args = parse_arguments()
    load = warn_if_busy()
    entries, left_out = choose_entries(args)
    for line in left_out:
        say(f"left out: {line}")
    not_sizes = ("implementations", "peers", "out", "device", "threads")
    results = {
        "command": command(),
        "commit": commit(),
        "python": platform.python_version(),
        "machine": {
            "cpu": cpu_model(),
            "features": cpu_features(),
            "cores": os.cpu_count(),
            "threads": args.threads,
            "device": device_name(args.device),
            "load_average_before": load,
        },
        "sizes": {name: value for name, value in vars(args).items() if name not in not_sizes},
        "environment": TUNED_MALLOC if args.tuned_malloc else {},
        "left_out": left_out,
        **measure(entries, args),
    }
    for name, of in results["implementations"].items():
        low, high = of["ratio_range"]
        print(
            f"{name:<30} {of['parameters'] / 1e6:6.1f}M parameters {of['median_tokens_per_second']:9,.0f} tokens/s "
            f"({of['median_ratio']:.2f} times {results['compared_with']}, {low:.2f} to {high:.2f}), "
            f"peak {of['peak_resident_bytes'] / 2**20:,.0f} MiB "
            f"({of['peak_resident_bytes_beyond_libraries'] / 2**20:,.0f} beyond libraries), loss {of['losses'][-1]:.3f}"
        )
    write(results, args.out)


if __name__ == "__main__":
    main()
