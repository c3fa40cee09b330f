"""Measures whether generation keeps its speed: tokens per second in the first and the last thousand of a long text.

    python benchmarks/long_generation.py [--max-new-tokens 20000] [--memory-length 512] [--out ...json]

A model with random weights generates one sequence. A prompt fills its memory before the first thousand tokens.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
from environment import command, commit, cpu_model, positive, results_file, say, warn_if_busy, write

from transformer_xl import TransformerXL, TransformerXLConfig
from transformer_xl.generation.batch import BatchGenerator
from transformer_xl.inference import prepare_inference

MODEL = {"n_layers": 6, "d_model": 256, "n_heads": 4, "d_ff": 1024, "dropout": 0.0}
PART = 1000  # tokens that are timed together


def measure(num_tokens: int, memory_length: int) -> dict[str, Any]:
    """Generate tokens, and return the seconds of each thousand and the speed of the first and the last."""
    torch.manual_seed(3)
    model = TransformerXL(TransformerXLConfig(**MODEL), memory_length=memory_length).eval()
    prompt = torch.randint(256, (memory_length + PART,)).tolist()
    generator = BatchGenerator(prepare_inference(model), [prompt])
    seconds = []
    for index in range(num_tokens // PART):
        start = time.perf_counter()
        for _ in range(PART):
            generator.step()
        seconds.append(time.perf_counter() - start)
        say(f"{(index + 1) * PART:,} tokens: the last {PART:,} at {PART / seconds[-1]:,.1f} tokens/s")
    return {
        "seconds_of_each_part": [round(value, 4) for value in seconds],
        "first_tokens_per_second": PART / seconds[0],
        "last_tokens_per_second": PART / seconds[-1],
        "last_over_first": seconds[0] / seconds[-1],
    }


def main() -> None:
    """Measure, print the results and write them to a file."""
    parser = argparse.ArgumentParser(description="Speed of generation at the beginning and end of a long text.")
    parser.add_argument("--max-new-tokens", type=positive, default=20_000)
    parser.add_argument("--memory-length", type=int, default=512)
    parser.add_argument("--out", type=Path, default=results_file("long-generation"))
    args = parser.parse_args()
    load = warn_if_busy()
    results = {
        "command": command(),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "load_average_before": load},
        "model": MODEL,
        "tokens": args.max_new_tokens,
        "memory_length": args.memory_length,
        **measure(args.max_new_tokens, args.memory_length),
    }
    print(
        f"first thousand {results['first_tokens_per_second']:,.1f} tokens/s, "
        f"last {results['last_tokens_per_second']:,.1f} ({results['last_over_first']:.3f} of the first)"
    )
    write(results, args.out)


if __name__ == "__main__":
    main()
