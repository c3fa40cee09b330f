"""Whether memory stays flat on a text without end: resident memory against tokens scored, as figures and as a chart.

    python benchmarks/flat_memory.py [--max-tokens 10000000] [--batch-size 1] [--out FILE] [--chart FILE]

A tiny model scores drawn tokens as one stream, with memory that goes on from the first to the last. The tokens lie in
memory from the beginning, so whatever is added comes from scoring. Linux only: there a process can ask what it holds.
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
from environment import RESULTS, command, commit, cpu_model, say, warn_if_busy, write
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from transformer_xl import ContextLimits, EvaluationPlan, TransformerXL, TransformerXLConfig
from transformer_xl.evaluation.evaluate import stream_losses
from transformer_xl.evaluation.plan import TokenizedText

MIB = 2**20
SETTLED = 0.1  # share of the text after which buffers have their size
MODEL = {"n_layers": 2, "d_model": 32, "n_heads": 2, "d_head": 16, "d_ff": 64, "dropout": 0.0}
PLAN = EvaluationPlan(segment_length=256, context_limits=ContextLimits(256))


def resident_bytes() -> int:
    """What this process holds in memory now."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def measure(num_tokens: int, batch_size: int, *, num_samples: int = 200) -> dict[str, Any]:
    """Resident memory while so many tokens are scored, at about `num_samples` places."""
    torch.manual_seed(5)
    model = TransformerXL(TransformerXLConfig(**MODEL), memory_length=PLAN.context_limits.memory_length).eval()
    tokens_K = np.random.default_rng(5).integers(0, 256, num_tokens, dtype=np.uint8)
    samples: list[tuple[int, int]] = [(0, resident_bytes())]
    done, begin = 0, time.perf_counter()

    def sample(count: int) -> None:
        nonlocal done
        done += count
        if done >= len(samples) * num_tokens // num_samples or done == num_tokens:
            samples.append((done, resident_bytes()))

    text, plan = TokenizedText(tokens_K, bos_token_id=10), replace(PLAN, batch_size=batch_size)
    nats = sum(chunk.sum for chunk in stream_losses(model, text, plan, sample))
    seconds = time.perf_counter() - begin
    assert done == num_tokens
    settled = [held for place, held in samples if place >= SETTLED * num_tokens]
    return {
        "nats_per_token": nats / num_tokens,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(num_tokens / seconds),
        "resident_bytes": {"start": samples[0][1], "least_settled": min(settled), "most_settled": max(settled)},
        "samples": samples,
    }


def chart(results: dict[str, Any]) -> Figure:
    """Resident memory against tokens."""
    places, held = zip(*results["samples"], strict=True)
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([place / 1e6 for place in places], [amount / MIB for amount in held], color="#0072B2")
    axes.set_xlabel("tokens scored, millions")
    axes.set_ylabel("resident memory, MiB")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=10_000_000)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "flat-memory.json")
    parser.add_argument("--chart", type=Path, default=RESULTS.parents[1] / "docs" / "evaluation-memory.svg")
    sizes = parser.parse_args()
    torch.set_num_threads(sizes.threads)
    load = warn_if_busy()
    results = {
        "command": command(),
        "commit": commit(),
        "torch": torch.__version__,
        "machine": {"cpu": cpu_model(), "python": platform.python_version(), "threads": sizes.threads, "load": load},
        "tokens": sizes.max_tokens,
        "batch_size": sizes.batch_size,
        "model": MODEL,
        "segment_length": PLAN.segment_length,
        "memory_length": PLAN.context_limits.memory_length,
        **measure(sizes.max_tokens, sizes.batch_size),
    }
    held = results["resident_bytes"]
    say(f"resident: {held['least_settled'] / MIB:.1f} to {held['most_settled'] / MIB:.1f} MiB once settled")
    write(results, sizes.out)
    mpl.rcParams["svg.hashsalt"] = "transformer-xl"  # else each drawing names its parts anew
    FigureCanvasSVG(chart(results)).print_svg(sizes.chart, metadata={"Date": None})
    say(f"chart in {sizes.chart}")


if __name__ == "__main__":
    main()
