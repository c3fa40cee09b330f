"""Whether generation keeps its speed: tokens a second in the first and the last thousand of a long text.

    python benchmarks/long_generation.py [--max-new-tokens 20000] [--memory-length 512] [--out ...json]

A model with random weights writes one row; memory is full before the first thousand begins, as it is ever after.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, command, commit, cpu_model, say, warn_if_busy, write

from transformer_xl import TransformerXL, TransformerXLConfig
from transformer_xl.generation.batch import BatchGenerator

MODEL = {"n_layers": 6, "d_model": 256, "n_heads": 4, "d_ff": 1024, "dropout": 0.0}
THOUSAND = 1000


def measure(tokens: int, memory_length: int, part: int = THOUSAND) -> dict[str, Any]:
    """Seconds of every `part` tokens, one after the other."""
    torch.manual_seed(3)
    model = TransformerXL(TransformerXLConfig(**MODEL), memory_length=memory_length).eval()
    prompt = torch.randint(256, (memory_length + part,)).tolist()
    generator = BatchGenerator(model, [prompt])
    seconds = []
    for number in range(tokens // part):
        began = time.perf_counter()
        for _ in range(part):
            generator.step()
        seconds.append(time.perf_counter() - began)
        say(f"{(number + 1) * part:,} tokens: the last {part:,} at {part / seconds[-1]:,.1f} a second")
    return {
        "seconds_of_each_part": [round(value, 4) for value in seconds],
        "first_tokens_per_second": part / seconds[0],
        "last_tokens_per_second": part / seconds[-1],
        "last_over_first": seconds[0] / seconds[-1],
    }


def main() -> None:
    """Measures, prints the figures and writes them to a file."""
    parser = argparse.ArgumentParser(description="Whether generation keeps its speed.")
    parser.add_argument("--max-new-tokens", type=int, default=20_000)
    parser.add_argument("--memory-length", type=int, default=512)
    parser.add_argument("--out", type=Path, default=RESULTS / "long-generation.json")
    given = parser.parse_args()
    load = warn_if_busy()
    results = {
        "command": command(),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "load_average_before": load},
        "model": MODEL,
        "tokens": given.max_new_tokens,
        "memory_length": given.memory_length,
        **measure(given.max_new_tokens, given.memory_length),
    }
    print(
        f"first thousand {results['first_tokens_per_second']:,.1f} tokens/s, "
        f"last {results['last_tokens_per_second']:,.1f} ({results['last_over_first']:.3f} of the first)"
    )
    write(results, given.out)


if __name__ == "__main__":
    main()
