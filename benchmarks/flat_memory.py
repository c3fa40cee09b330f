"""Measures whether resident memory stays constant while a very long text is scored, and draws a chart.

    python benchmarks/flat_memory.py [--max-tokens 10000000] [--batch-size 1] [--out FILE] [--chart FILE]

A tiny model scores random tokens as one stream, with memory carried from the first to the last. All tokens are in RAM
from the beginning, so any growth comes from scoring. Linux only, because it reads /proc.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from environment import RESULTS, command, commit, cpu_model, positive, results_file, say, warn_if_busy, write
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from transformer_xl import ContextLimits, EvaluationPlan, TransformerXL, TransformerXLConfig
from transformer_xl.evaluation.evaluate import stream_losses
from transformer_xl.evaluation.plan import TokenizedText

MIB = 2**20
SETTLED = 0.1  # fraction of the text after which allocators and buffers have reached their size
MODEL = {"n_layers": 2, "d_model": 32, "n_heads": 2, "d_head": 16, "d_ff": 64, "dropout": 0.0}
PLAN = EvaluationPlan(segment_length=256, context_limits=ContextLimits(256))


def resident_bytes() -> int:
    """Return the resident memory of this process now."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def measure(num_tokens: int, batch_size: int, *, num_samples: int = 200) -> dict[str, Any]:
    """Score random tokens, and return their loss and speed and about `num_samples` samples of resident memory."""
    torch.manual_seed(5)
    model = TransformerXL(TransformerXLConfig(**MODEL), memory_length=PLAN.context_limits.memory_length).eval()
    tokens_K = np.random.default_rng(5).integers(0, 256, num_tokens, dtype=np.uint8)
    samples: list[tuple[int, int]] = [(0, resident_bytes())]
    done, start = 0, time.perf_counter()

    def sample(count: int) -> None:
        nonlocal done
        done += count
        if done >= len(samples) * num_tokens // num_samples or done == num_tokens:
            samples.append((done, resident_bytes()))

    text, plan = TokenizedText(tokens_K, bos_token_id=10), replace(PLAN, batch_size=batch_size)
    nats = sum(chunk.sum for chunk in stream_losses(model, text, plan, sample))
    seconds = time.perf_counter() - start
    assert done == num_tokens
    settled = [resident for position, resident in samples if position >= SETTLED * num_tokens]
    return {
        "nats_per_token": nats / num_tokens,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(num_tokens / seconds),
        "resident_bytes": {"start": samples[0][1], "least_settled": min(settled), "most_settled": max(settled)},
        "samples": samples,
    }


def chart(results: dict[str, Any]) -> Figure:
    """Return a chart of resident memory over the number of tokens scored."""
    positions, resident = zip(*results["samples"], strict=True)
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([position / 1e6 for position in positions], [size / MIB for size in resident], color="#0072B2")
    axes.set_xlabel("tokens scored, millions")
    axes.set_ylabel("resident memory, MiB")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    return figure


def main() -> None:
    """Measure, write the results to a file, and draw the chart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=positive, default=10_000_000)
    parser.add_argument("--batch-size", type=positive, default=1)
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--out", type=Path, default=results_file("flat-memory"))
    parser.add_argument("--chart", type=Path, default=RESULTS.parents[1] / "docs" / "evaluation-memory.svg")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    load = warn_if_busy()
    results = {
        "command": command(),
        "commit": commit(),
        "torch": torch.__version__,
        "machine": {"cpu": cpu_model(), "python": platform.python_version(), "threads": args.threads, "load": load},
        "tokens": args.max_tokens,
        "batch_size": args.batch_size,
        "model": MODEL,
        "segment_length": PLAN.segment_length,
        "memory_length": PLAN.context_limits.memory_length,
        **measure(args.max_tokens, args.batch_size),
    }
    resident = results["resident_bytes"]
    say(f"resident: {resident['least_settled'] / MIB:.1f} to {resident['most_settled'] / MIB:.1f} MiB once settled")
    write(results, args.out)
    mpl.rcParams["svg.hashsalt"] = "transformer-xl"  # otherwise SVG ids are random
    FigureCanvasSVG(chart(results)).print_svg(args.chart, metadata={"Date": None})
    say(f"chart in {args.chart}")


if __name__ == "__main__":
    main()
