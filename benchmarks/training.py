"""Training speed and memory beside other implementations that carry a memory, at the size of the paper's enwik8 model.

    python benchmarks/training.py [--peers .venv-peers/bin/python] [--implementations ours-float32,...] [--rounds 5] ...

An implementation is NAME-DTYPE or NAME-DTYPE+VARIANT: ours-float32, ours-bfloat16, ours-float32+compile,
transformers-float32, x-transformers-float32, x-transformers-bfloat16+bias, ... Each is a process of its own, in its
own environment, with all cores. They are started one after the other, wait idle, and take turns (A B C, then C B A,
...), so only one computes at any time and whatever else the machine does falls on all. Steps are whole: forward with a
memory that is full and carried on, cross-entropy, backward, clip, fused Adam. Figures are medians over the rounds; a
ratio is the median of each round's ratio to the first implementation. The losses on the same text stand beside them, so
that an implementation that is fast because it learns nothing is seen.

Without --implementations all run in float32, and all but transformers also in bfloat16 where the machine has
instructions for it: the loss of transformers fails under bfloat16 autocast.
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
from environment import RESULTS, command, commit, cpu_features, cpu_model, device_name, say, warn_if_busy, write

from transformer_xl.device import has_bfloat16

HERE = Path(__file__).parent
PEERS = Path(".venv-peers/bin/python")
MODULES = {"ours": "ours", "transformers": "peer_transformers", "x-transformers": "peer_x_transformers"}
STANDARD = ("ours-{}", "transformers-{}", "x-transformers-{}", "x-transformers-{}+bias")
NO_BFLOAT16 = "transformers in bfloat16: its loss fails under autocast (bfloat16 into a float32 buffer)"
# keeps large blocks in the process: glibc gives those above 32 MiB back to the system as soon as they are free
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
REST_SECONDS = 0.5  # threads of the one before spin a little before they sleep


@dataclass(frozen=True)
class Entry:
    """An implementation by name."""

    name: str
    module: str
    dtype: str
    variant: str

    @staticmethod
    def parse(name: str, modules: dict[str, str]) -> Entry:
        """NAME-DTYPE or NAME-DTYPE+VARIANT of these modules; ends the program where it is neither."""
        rest, _, variant = name.partition("+")
        who, _, dtype = rest.rpartition("-")
        if who not in modules or dtype not in ("float32", "bfloat16"):
            sys.exit(f"no implementation '{name}'; wanted NAME-DTYPE, NAME one of {', '.join(modules)}")
        return Entry(name, modules[who], dtype, variant)


class Worker:
    """An implementation's process."""

    def __init__(self, entry: Entry, sizes: argparse.Namespace) -> None:
        """Starts it and waits until it is built and its memory is full (one that reads has filled it by itself)."""
        self.entry = entry
        task = {name: getattr(sizes, name) for name in (*SIZES, *RATES, "device")}
        task |= {"implementation": entry.module, "dtype": entry.dtype, "variant": entry.variant}
        task |= {"clamp_length": getattr(sizes, "clamp_length", None)}
        python = str(sizes.peers.absolute()) if entry.module.startswith("peer") else sys.executable
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(sizes.threads),
            **(TUNED_MALLOC if sizes.tuned_malloc else {}),
        }
        self.process = subprocess.Popen(
            [python, "-m", "implementations.worker", json.dumps(task)],
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.built = self._answer()
        filling = 2 if "inference" in entry.module else 1 + -(-sizes.memory_length // sizes.segment_length)
        self.first = self.steps(filling + (3 if "compile" in entry.variant else 0))

    def steps(self, number: int) -> dict[str, Any]:
        """Seconds and mean loss of so many steps."""
        assert self.process.stdin
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self) -> dict[str, Any]:
        """Lets it end; gives the most memory it had."""
        assert self.process.stdin
        self.process.stdin.close()
        found = self._answer()
        self.process.wait()
        return found

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):  # libraries may print what they like
                return json.loads(line)
        self.process.wait()
        sys.exit(f"{self.entry.name} ended with status {self.process.returncode}; what it wrote stands above")


def measure(entries: list[Entry], sizes: argparse.Namespace) -> dict[str, Any]:
    """Lets the implementations take turns; gives all rates, medians, ratios, losses and memory."""
    workers = {}
    for entry in entries:
        workers[entry.name] = Worker(entry, sizes)
        built = workers[entry.name].built
        say(f"{entry.name}: {built['parameters']:,} parameters, {built['threads']} threads; {built['note']}")
    rates: dict[str, list[float]] = {name: [] for name in workers}
    losses: dict[str, list[float]] = {name: [] for name in workers}
    names = list(workers)
    for number in range(sizes.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            time.sleep(REST_SECONDS)
            took = workers[name].steps(sizes.steps)
            rates[name].append(sizes.steps * sizes.batch_size * sizes.segment_length / took["seconds"])
            losses[name].append(took["loss"])
        last = ", ".join(f"{name} {of[-1]:,.0f}" for name, of in rates.items())
        say(f"round {number + 1} of {sizes.rounds}, tokens/s: {last}")
    first = rates[names[0]]
    return {
        "compared_with": names[0],
        "implementations": {
            name: {**metrics(rates[name], first), "losses": losses[name], **worker.built, **memory(worker.end())}
            for name, worker in workers.items()
        },
    }


def metrics(rates: list[float], first: list[float]) -> dict[str, Any]:
    """Median rate, and how many times the first implementation's, round by round."""
    ratios = [rate / other for rate, other in zip(rates, first, strict=True)]
    return {
        "median_tokens_per_second": round(statistics.median(rates), 1),
        "median_ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "tokens_per_second": [round(rate, 1) for rate in rates],
    }


def memory(ended: dict[str, Any]) -> dict[str, Any]:
    """The most memory of a process, and what of it came after torch and the libraries were loaded."""
    more = ended["peak_resident_bytes"] - ended["resident_bytes_before_model"]
    return {**ended, "peak_resident_bytes_beyond_libraries": more}


def chosen(sizes: argparse.Namespace) -> tuple[list[Entry], list[str]]:
    """Who takes part, and what to say about who does not."""
    if sizes.implementations:
        return [Entry.parse(name, MODULES) for name in sizes.implementations.split(",")], []
    names = [name.format("float32") for name in STANDARD]
    said = []
    if has_bfloat16(torch.device(sizes.device)):
        names += [name.format("bfloat16") for name in STANDARD if not name.startswith("transformers")]
        said.append(NO_BFLOAT16)
    else:
        said.append(
            "bfloat16: this machine has no instructions for it; name the implementations to measure it all the same"
        )
    if not sizes.peers.exists():
        said.append(f"the peers: no Python at {sizes.peers}; 'make bench' makes one")
        names = [name for name in names if name.startswith("ours")]
    return [Entry.parse(name, MODULES) for name in names], said


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Training speed and memory beside other implementations.")
    for name, default in {**SIZES, **RATES}.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, help=f"default {default:g}")
    parser.add_argument(
        "--implementations", help="names with commas between; the first is what others are compared with"
    )
    parser.add_argument("--peers", type=Path, default=PEERS, help=f"the Python that has the peers (default {PEERS})")
    parser.add_argument("--steps", type=int, default=2, help="optimiser steps of a turn (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: one for each core)")
    parser.add_argument(
        "--tuned-malloc", action="store_true", help="let glibc keep large blocks, for every implementation"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "training.json", help="default results/training.json")
    return parser.parse_args()


def main() -> None:
    """Measures, prints the figures and writes them to a file."""
    sizes = parsed()
    load = warn_if_busy()
    entries, said = chosen(sizes)
    for line in said:
        say(f"left out: {line}")
    left_out = ("implementations", "peers", "out", "device", "threads")
    results = {
        "command": command(),
        "commit": commit(),
        "python": platform.python_version(),
        "machine": {
            "cpu": cpu_model(),
            "features": cpu_features(),
            "cores": os.cpu_count(),
            "threads": sizes.threads,
            "device": device_name(sizes.device),
            "load_average_before": load,
        },
        "sizes": {name: value for name, value in vars(sizes).items() if name not in left_out},
        "environment": TUNED_MALLOC if sizes.tuned_malloc else {},
        "left_out": said,
        **measure(entries, sizes),
    }
    for name, of in results["implementations"].items():
        low, high = of["ratio_range"]
        print(
            f"{name:<30} {of['parameters'] / 1e6:6.1f}M parameters {of['median_tokens_per_second']:9,.0f} tokens/s "
            f"({of['median_ratio']:.2f} times {results['compared_with']}, {low:.2f} to {high:.2f}), "
            f"peak {of['peak_resident_bytes'] / 2**20:,.0f} MiB "
            f"({of['peak_resident_bytes_beyond_libraries'] / 2**20:,.0f} beyond libraries), loss {of['losses'][-1]:.3f}"
        )
    write(results, sizes.out)


if __name__ == "__main__":
    main()
