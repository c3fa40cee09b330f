"""Compares scoring and generation with transformers' Transformer-XL, at the size of the paper's small enwik8 model.

    python benchmarks/inference.py [--peers .venv-peers/bin/python] [--rounds 5] [--implementations ours-float32,...]

As in `training.py`, each implementation runs in a separate process with all cores, they take turns, and ratios are
computed for each round. Scoring computes the losses of segments of 80 tokens with a memory of 2,100, as the paper's
evaluation; generation samples one token at a time from the 40 most likely. The memory is full from the start.

The results include the upper limit that RAM bandwidth sets to generation: the measured read speed of this computer
divided by the bytes that each token must read (weights, keys, values and position keys, each once). `+int8` has the
matrices of linear layers in 8 bits, where torchao is installed; keys and values stay in the dtype before it.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from arguments import listed, one_of, positive
from environment import command, commit, cpu_features, cpu_model, results_file, say, warn_if_busy, write
from training import PEERS, RATES, SIZES, Entry, measure

from transformer_xl.device import has_bfloat16

MODULES = {"ours": "ours_inference", "transformers": "peer_transformers_inference"}
JOBS = {"scoring": {"segment_length": 80, "steps": 4}, "generation": {"segment_length": 1, "steps": 24}}
READ_BYTES = 2**29  # far more than any cache


def read_bytes_per_second(rounds: int = 9) -> float:
    """Return how fast all threads together read RAM: the median speed of summing up half a gigabyte of float32."""
    values = torch.ones(READ_BYTES // 4)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - start)
    return READ_BYTES / statistics.median(seconds)


def bytes_per_token(args: argparse.Namespace, value_bytes: int) -> int:
    """Return the bytes that generating a token reads: all weights, and the memory's keys, values and position keys."""
    inner = args.n_heads * args.d_head
    layer = 4 * args.d_model * inner + 2 * args.d_model * args.d_ff
    num_position_keys = (
        args.memory_length if args.clamp_length is None else min(args.memory_length, args.clamp_length + 1)
    )
    cached = (2 * args.memory_length + num_position_keys) * inner
    return value_bytes * (args.n_layers * (layer + cached) + args.vocab_size * args.d_model)


def choose_entries(args: argparse.Namespace) -> tuple[list[Entry], list[str]]:
    """Return the implementations to measure, transformers first, and a sentence for each that is left out."""
    left_out, names = [], ["transformers-float32", "ours-float32"]
    if has_bfloat16(torch.device("cpu")):
        names += ["ours-bfloat16", *(["ours-bfloat16+int8"] if find_spec("torchao") else [])]
    else:
        left_out.append("bfloat16: the processor has no instructions for it")
    if not args.peers.exists():
        left_out.append(f"transformers: no Python at {args.peers}; 'make bench' installs one")
        names.remove("transformers-float32")
    names = args.implementations.split(",") if args.implementations else names
    return [Entry.parse(name, MODULES) for name in names], left_out


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Scoring and generation compared with transformers' Transformer-XL.")
    for name, default in {**SIZES, **RATES, "memory_length": 2100, "batch_size": 1, "clamp_length": 820}.items():
        if name != "segment_length":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--implementations", help="names separated by commas; the others are compared with the first")
    parser.add_argument("--jobs", type=listed(one_of(JOBS)), default=",".join(JOBS), help="scoring, generation or both")
    parser.add_argument(
        "--peers", type=Path, default=PEERS, help=f"Python with the other implementations (default {PEERS})"
    )
    parser.add_argument("--rounds", type=positive, default=5, help="default 5")
    parser.add_argument(
        "--threads", type=positive, default=os.cpu_count(), help="CPU threads (default: one for each core)"
    )
    parser.add_argument("--out", type=Path, default=results_file("inference"))
    return parser.parse_args()


def main() -> None:
    """Measure, print the results and write them to a file."""
    args = parse_arguments()
    args.device, args.tuned_malloc = "cpu", False
    load = warn_if_busy()
    entries, left_out = choose_entries(args)
    for line in left_out:
        say(f"left out: {line}")
    speed = read_bytes_per_second()
    limits = {
        name: round(speed / bytes_per_token(args, value_bytes), 1)
        for name, value_bytes in (("float32", 4), ("bfloat16", 2))
    }
    jobs: dict[str, Any] = {}
    for name in args.jobs:
        say(name)
        job_args = argparse.Namespace(**{**vars(args), **JOBS[name]})
        jobs[name] = {**JOBS[name], **measure(entries, job_args)}
    results = {
        "command": command(),
        "commit": commit(),
        "python": platform.python_version(),
        "machine": {
            "cpu": cpu_model(),
            "features": cpu_features(),
            "cores": os.cpu_count(),
            "threads": args.threads,
            "load_average_before": load,
            "read_bytes_per_second": round(speed),
        },
        "sizes": {name: getattr(args, name) for name in (*SIZES, "clamp_length") if name != "segment_length"},
        "left_out": left_out,
        "bytes_per_generated_token_float32": bytes_per_token(args, 4),
        "generation_limit_tokens_per_second": limits,
        "jobs": jobs,
    }
    show(results)
    write(results, args.out)


def show(results: dict[str, Any]) -> None:
    """Print the results."""
    for job, result in results["jobs"].items():
        for name, metrics in result["implementations"].items():
            print(
                f"{job:<11} {name:<24} {metrics['median_tokens_per_second']:9,.1f} tokens/s "
                f"({metrics['median_ratio']:.3f} times {result['compared_with']}, "
                f"{metrics['ratio_range'][0]:.3f} to {metrics['ratio_range'][1]:.3f}), "
                f"peak {metrics['peak_resident_bytes'] / 2**20:,.0f} MiB"
            )
    read = results["machine"]["read_bytes_per_second"] / 1e9
    limits = ", ".join(
        f"{limit:,.0f} in {name}" for name, limit in results["generation_limit_tokens_per_second"].items()
    )
    print(f"RAM is read at {read:.1f} GB/s: at most {limits} generated tokens/s")


if __name__ == "__main__":
    main()
