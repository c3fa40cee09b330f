"""Scoring and generation beside transformers' Transformer-XL, at the size of the paper's enwik8 model, memory 2,100.

    python benchmarks/inference.py [--peers .venv-peers/bin/python] [--rounds 5] [--implementations ours-float32,...]

As in `training.py`, each implementation is a process of its own with all cores, they take turns, and ratios are formed
round by round. Scoring computes the losses of segments of 80 tokens (the paper's evaluation); generation samples one
token at a time from the 40 most likely. The memory is full from the start.

The results include the limit that memory bandwidth sets to generation: the measured read speed of this machine divided
by the bytes that each token has to read (weights, keys, values and position keys once).
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, command, commit, cpu_features, cpu_model, say, warn_if_busy, write
from training import PEERS, RATES, SIZES, Entry, measure

from transformer_xl.device import has_bfloat16

MODULES = {"ours": "ours_inference", "transformers": "peer_transformers_inference"}
JOBS = {"scoring": {"segment_length": 80, "steps": 4}, "generation": {"segment_length": 1, "steps": 24}}
READ_BYTES = 2**29  # far more than any cache


def read_bytes_per_second(rounds: int = 9) -> float:
    """How fast all threads together read memory: the median of summing up half a gigabyte."""
    numbers = torch.ones(READ_BYTES // 4)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - began)
    return READ_BYTES / statistics.median(seconds)


def bytes_per_token(sizes: argparse.Namespace, number_bytes: int) -> int:
    """What generating one token has to read: every weight, and keys, values and position keys of the memory."""
    inner = sizes.n_heads * sizes.d_head
    layer = 4 * sizes.d_model * inner + 2 * sizes.d_model * sizes.d_ff
    distances = sizes.memory_length if sizes.clamp_length is None else min(sizes.memory_length, sizes.clamp_length + 1)
    kept = (2 * sizes.memory_length + distances) * inner
    return number_bytes * (sizes.n_layers * (layer + kept) + sizes.vocab_size * sizes.d_model)


def chosen(sizes: argparse.Namespace) -> tuple[list[Entry], list[str]]:
    """Who takes part, transformers first, and what to say about who does not."""
    said, names = [], ["transformers-float32", "ours-float32"]
    if has_bfloat16(torch.device("cpu")):
        names.append("ours-bfloat16")
    else:
        said.append("bfloat16: this machine has no instructions for it")
    if not sizes.peers.exists():
        said.append(f"transformers: no Python at {sizes.peers}; 'make bench' makes one")
        names.remove("transformers-float32")
    names = sizes.implementations.split(",") if sizes.implementations else names
    return [Entry.parse(name, MODULES) for name in names], said


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Scoring and generation beside transformers' Transformer-XL.")
    for name, default in {**SIZES, **RATES, "memory_length": 2100, "batch_size": 1, "clamp_length": 820}.items():
        if name != "segment_length":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument(
        "--implementations", help="names with commas between; the first is what others are compared with"
    )
    parser.add_argument("--jobs", default=",".join(JOBS), help="scoring, generation or both")
    parser.add_argument("--peers", type=Path, default=PEERS, help=f"the Python that has the peers (default {PEERS})")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: one for each core)")
    parser.add_argument("--out", type=Path, default=RESULTS / "inference.json", help="default results/inference.json")
    return parser.parse_args()


def main() -> None:
    """Measures, prints the figures and writes them to a file."""
    sizes = parsed()
    sizes.device, sizes.tuned_malloc = "cpu", False
    load = warn_if_busy()
    entries, said = chosen(sizes)
    for line in said:
        say(f"left out: {line}")
    speed = read_bytes_per_second()
    limits = {
        name: round(speed / bytes_per_token(sizes, number_bytes), 1)
        for name, number_bytes in (("float32", 4), ("bfloat16", 2))
    }
    jobs: dict[str, Any] = {}
    for name in sizes.jobs.split(","):
        say(name)
        job = copy.copy(sizes)
        vars(job).update(JOBS[name])
        jobs[name] = {**JOBS[name], **measure(entries, job)}
    results = {
        "command": command(),
        "commit": commit(),
        "python": platform.python_version(),
        "machine": {
            "cpu": cpu_model(),
            "features": cpu_features(),
            "cores": os.cpu_count(),
            "threads": sizes.threads,
            "load_average_before": load,
            "read_bytes_per_second": round(speed),
        },
        "sizes": {name: getattr(sizes, name) for name in (*SIZES, "clamp_length") if name != "segment_length"},
        "left_out": said,
        "bytes_per_generated_token_float32": bytes_per_token(sizes, 4),
        "generation_limit_tokens_per_second": limits,
        "jobs": jobs,
    }
    show(results)
    write(results, sizes.out)


def show(results: dict[str, Any]) -> None:
    """The figures, for people."""
    for job, found in results["jobs"].items():
        for name, of in found["implementations"].items():
            print(
                f"{job:<11} {name:<24} {of['median_tokens_per_second']:9,.1f} tokens/s "
                f"({of['median_ratio']:.3f} times {found['compared_with']}, "
                f"{of['ratio_range'][0]:.3f} to {of['ratio_range'][1]:.3f}), "
                f"peak {of['peak_resident_bytes'] / 2**20:,.0f} MiB"
            )
    read = results["machine"]["read_bytes_per_second"] / 1e9
    most = ", ".join(f"{limit:,.0f} in {name}" for name, limit in results["generation_limit_tokens_per_second"].items())
    print(f"memory is read at {read:.1f} GB/s: at most {most} generated tokens/s")


if __name__ == "__main__":
    main()
