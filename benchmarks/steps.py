"""Compare the training speed of the attention kernels: tokens per second of whole optimizer steps.

    python benchmarks/steps.py [--kernels reference,sdpa] [--n-layers 4] ... [--rounds 5] [--out FILE]

The models start with the same weights and train on the same tokens, in one process. The order of the kernels alternates
between rounds (A B C, then C B A, ...), so that other load on the machine affects all of them. Speeds are medians over
the rounds; a ratio is the median of each round's ratio to the first kernel. The losses are compared as well, to detect
a kernel that is fast because it computes something else.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from attention_cases import wait
from environment import command, commit, cpu_features, cpu_model, device_name, positive, results_file, say, write
from trainee import Trainee

from transformer_xl import __version__
from transformer_xl.config import TrainConfig, TransformerXLConfig
from transformer_xl.device import resolve_dtype, set_threads
from transformer_xl.ops.kernels import KERNELS


class Runner:
    """A model in training with one kernel, and its losses."""

    def __init__(self, kernel: str, sizes: argparse.Namespace) -> None:
        """Build the model, with weights from the same seed for every kernel."""
        model = TransformerXLConfig(
            n_layers=sizes.n_layers,
            d_model=sizes.d_model,
            n_heads=sizes.n_heads,
            d_ff=4 * sizes.d_model,
            dropout=0.0,  # so that losses can be compared
            attn_implementation=kernel,
        )
        self.sizes = sizes
        train = TrainConfig(
            batch_size=sizes.batch_size,
            segment_length=sizes.segment_length,
            memory_length=sizes.memory_length,
            dtype=sizes.dtype,
        )
        self.trainee = Trainee(model, train, sizes.device)
        self.generator = torch.Generator().manual_seed(2)
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """Run one optimizer step on new random tokens."""
        tokens_BT = torch.randint(
            0, 256, (self.sizes.batch_size, self.sizes.segment_length + 1), generator=self.generator
        )
        self.losses.append(self.trainee.step(tokens_BT[:, :-1], tokens_BT[:, 1:]))

    def tokens_per_second(self, steps: int) -> float:
        """Run that many steps and return their speed."""
        wait(self.sizes.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        wait(self.sizes.device)
        return steps * self.sizes.batch_size * self.sizes.segment_length / (time.perf_counter() - start)


def measure(sizes: argparse.Namespace) -> dict[str, Any]:
    """Return the speeds of the kernels in all rounds, their medians and ratios, and the largest loss difference."""
    kernels: list[str] = sizes.kernels
    runners = {kernel: Runner(kernel, sizes) for kernel in kernels}
    filling_steps = -(-sizes.memory_length // sizes.segment_length)
    for runner in runners.values():
        runner.tokens_per_second(1 + filling_steps)  # warm-up, until the memory is full
    rates: dict[str, list[float]] = {kernel: [] for kernel in kernels}
    for number in range(sizes.rounds):
        for kernel in kernels if number % 2 == 0 else reversed(kernels):
            rates[kernel].append(runners[kernel].tokens_per_second(sizes.steps))
        last = ", ".join(f"{kernel} {speeds[-1]:,.0f} tokens/s" for kernel, speeds in rates.items())
        say(f"round {number + 1} of {sizes.rounds}: {last}")
    first = kernels[0]
    losses = {kernel: torch.stack(runner.losses).cpu() for kernel, runner in runners.items()}
    return {
        "compared_with": first,
        "kernels": {
            kernel: {
                "median_tokens_per_second": round(statistics.median(speeds), 1),
                **ratio(speeds, rates[first]),
                "largest_loss_difference": float((losses[kernel] - losses[first]).abs().max()),
                "tokens_per_second": [round(rate, 1) for rate in speeds],
            }
            for kernel, speeds in rates.items()
        },
    }


def ratio(rates: list[float], others: list[float]) -> dict[str, Any]:
    """Return the median and range of the ratios of two lists of speeds, round by round."""
    ratios = [rate / other for rate, other in zip(rates, others, strict=True)]
    return {
        "median_ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def environment(sizes: argparse.Namespace) -> dict[str, Any]:
    """Return what is needed to repeat the measurement: command, versions, hardware and sizes."""
    return {
        "command": command(),
        "commit": commit(),
        "versions": {"transformer_xl": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {
            "cpu": cpu_model(),
            "features": cpu_features(),
            "threads": torch.get_num_threads(),
            "device": device_name(sizes.device),
        },
        "sizes": {
            name: value for name, value in vars(sizes).items() if name not in ("out", "threads", "device", "kernels")
        },
        "dtype": resolve_dtype(torch.device(sizes.device), sizes.dtype),
    }


def fitting(device: str) -> list[str]:
    """Return the names of the kernels that work on a device, slowest first."""
    return [kernel.name for kernel in reversed(KERNELS.values()) if kernel.fits(torch.device(device), torch.float32)]


def main() -> None:
    """Measure the kernels, print the results and write them to a file."""
    parser = argparse.ArgumentParser(description="Training speed of the attention kernels, side by side.")
    for name, default in (
        ("n-layers", 4),
        ("d-model", 256),
        ("n-heads", 4),
        ("segment-length", 128),
        ("memory-length", 128),
        ("batch-size", 8),
    ):
        kind = int if name == "memory-length" else positive
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"default {default}")
    parser.add_argument("--kernels", help="names separated by commas; default: all that work, slowest first")
    parser.add_argument(
        "--steps", type=positive, default=6, help="optimizer steps of a kernel in one round (default 6)"
    )
    parser.add_argument("--rounds", type=positive, default=5, help="default 5")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=positive, help="CPU threads; default: torch's default")
    parser.add_argument("--out", type=Path, help="default: results/steps-SEGMENT_LENGTH-PROCESSOR.json")
    sizes = parser.parse_args()
    sizes.out = sizes.out or results_file(f"steps-{sizes.segment_length}")
    sizes.kernels = sizes.kernels.split(",") if sizes.kernels else fitting(sizes.device)
    set_threads(sizes.threads)
    results = {**environment(sizes), **measure(sizes)}
    for kernel, figures in results["kernels"].items():
        low, high = figures["ratio_range"]
        times = f"{figures['median_ratio']:.2f} times {results['compared_with']} ({low:.2f} to {high:.2f})"
        apart = f"losses within {figures['largest_loss_difference']:.1e}"
        print(f"{kernel:<10} {figures['median_tokens_per_second']:>10,.0f} tokens/s, {times}, {apart}")
    write(results, sizes.out)


if __name__ == "__main__":
    main()
