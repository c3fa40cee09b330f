"""Measure each attention kernel: whether its results are right, its time, and how its memory grows.

    python benchmarks/kernels.py [--kernels sdpa,cpu] [--dtypes float32,bfloat16] [--batch-size 4] [--out FILE]

First the outputs and all gradients of every kernel are compared with the reference kernel in float64; if one is wrong,
the program exits with status 1. Times are medians, of the forward pass alone (as in evaluation) and of forward and
backward pass (as in training); for each shape, all kernels are measured one after the other. Memory is measured in a
new process for each kernel and length: the peak of one forward and backward pass beyond its inputs, and what is saved
between the two passes. It is measured for growing keys S with constant queries T, and for both growing together
(T = M, the memory slots), where anything stored for every pair of query and key would grow by 4 at each doubling. The
reference kernel stores a position key for every pair, so it is left out of long shapes, and out of the memory
measurements unless it is named.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from arguments import above_zero, listed, one_of, positive
from attention_cases import Shape, check, check_dropout, draw, peak_beyond, times
from environment import results_file, say, surroundings, warn_if_busy, write

from transformer_xl.config import UserError
from transformer_xl.device import has_bfloat16, set_threads
from transformer_xl.ops.kernels import KERNELS, choose

CHECKED_SHAPES = (
    Shape(2, 37, 23, 3, 38),
    Shape(2, 64, 64, 2, 64, attention_window=50),
    Shape(3, 20, 45, 2, 41, empty_slots=17),
    Shape(1, 1, 63, 2, 80),
    Shape(2, 33, 0, 2, 64),
)
REFERENCE_MAX_PAIRS = 2**16  # queries times keys, each of which has a position key


def fitting(device: str, dtype: str) -> list[str]:
    """Return the names of the kernels that work with a device and dtype, slowest first."""
    return [k.name for k in reversed(KERNELS.values()) if k.fits(torch.device(device), getattr(torch, dtype))]


def checks(kernels: list[str], dtypes: list[str], device: str) -> list[dict[str, Any]]:
    """Check every kernel for the listed shapes, and with dropout."""
    found = []
    for kernel in kernels:
        for dtype in dtypes:
            found += [check(kernel, replace(shape, dtype=dtype, device=device)) for shape in CHECKED_SHAPES]
        found += check_dropout(kernel, Shape(2, 64, 64, 4, 32, dropout=0.2, device=device))
    return found


def timed_shapes(sizes: argparse.Namespace) -> list[Shape]:
    """Return shapes with T = M, with a window, with a long memory, and with dropout."""
    base = Shape(sizes.batch_size, 0, 0, sizes.n_heads, sizes.d_head, device=sizes.device)
    shapes = [replace(base, queries=length, memory_length=length) for length in sizes.lengths]
    middle = sizes.lengths[len(sizes.lengths) // 2]
    shapes.append(replace(base, queries=middle, memory_length=middle, attention_window=middle))
    shapes.append(replace(base, queries=middle, memory_length=3 * middle))
    shapes.append(replace(base, queries=middle, memory_length=middle, dropout=0.1))
    return [replace(shape, dtype=dtype) for dtype in sizes.dtypes for shape in shapes]


def time_all(sizes: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the times of every kernel for every shape."""
    lines = []
    for shape in timed_shapes(sizes):
        for kernel in sizes.kernels:
            too_large = kernel == "reference" and shape.queries * shape.keys > REFERENCE_MAX_PAIRS
            if not KERNELS[kernel].fits(torch.device(sizes.device), getattr(torch, shape.dtype)) or too_large:
                continue
            line = {"kernel": kernel, "shape": asdict(shape), **times(kernel, shape, seconds=sizes.seconds)}
            lines.append(line)
            say(
                f"{shape.words():<48} {kernel:<10} forward {line['forward_seconds'] * 1e3:9.3f} ms, "
                f"with backward {line['forward_backward_seconds'] * 1e3:9.3f} ms, "
                f"{line['forward_backward_tflops']:.3f} TFLOP/s"
            )
    return lines


def peak_beyond_inputs(kernel: str, shape: Shape) -> dict[str, int]:
    """Return the peak memory of a forward and backward pass beyond its inputs."""
    # memory that torch allocates at first use
    small, small_mask = draw(replace(shape, queries=8, memory_length=8, batch_size=1))
    KERNELS[kernel].attend(small, small_mask, shape.dropout).sum().backward()
    inputs, mask = draw(shape)

    def both_passes() -> None:
        out_BTNH = KERNELS[kernel].attend(inputs, mask, shape.dropout)
        torch.autograd.grad(out_BTNH, inputs.tensors(), torch.ones_like(out_BTNH))

    return {"peak_bytes": peak_beyond(both_passes, shape.device)}


def memory_growth(sizes: argparse.Namespace) -> list[dict[str, Any]]:
    """Return for each kernel the bytes at every length and their growth per doubling, in both ways to grow."""
    found = []
    base = Shape(1, 0, 0, sizes.n_heads, sizes.d_head, device=sizes.device, dtype=sizes.dtypes[0])
    for kernel in sizes.kernels:
        if kernel == "reference" and not sizes.named:
            continue
        for way in ("keys", "both"):
            lines = []
            for keys in sizes.memory_keys:
                queries = sizes.memory_queries if way == "keys" else keys // 2
                shape = replace(base, queries=queries, memory_length=keys - queries)
                words = [sys.executable, __file__, "--one", json.dumps([kernel, asdict(shape)])]
                words += ["--threads", str(sizes.threads)] if sizes.threads else []
                printed = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
                lines.append({"queries": queries, "keys": keys, **json.loads(printed)})
            growth = growth_of([line["peak_bytes"] for line in lines])
            found.append({"kernel": kernel, "grows": way, "ratio_per_doubling": growth, "lengths": lines})
            peaks = ", ".join(f"S {line['keys']}: {line['peak_bytes'] / 2**20:,.0f} MiB" for line in lines)
            say(f"memory of {kernel}, {way} growing: {peaks}; {growth:.2f} for each doubling")
    return found


def growth_of(sizes: list[int]) -> float:
    """Return the growth factor for each doubling: 2 is linear, 4 quadratic; NaN for fewer than three lengths.

    It is a least-squares fit to the logarithms of the differences between successive lengths, so that a constant part
    of the memory has no effect.
    """
    logs = [math.log2(max(1, after - before)) for before, after in pairwise(sizes)]
    return 2 ** statistics.linear_regression(range(len(logs)), logs).slope if len(logs) > 1 else math.nan


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Times and memory of the attention kernels.")
    parser.add_argument("--kernels", help="names separated by commas; default: all that work")
    parser.add_argument(
        "--dtypes",
        type=listed(one_of(["float32", "bfloat16", "float16"])),
        help="default: float32, and bfloat16 if the hardware has instructions for it",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--batch-size", type=positive, default=4, help="default 4")
    parser.add_argument("--n-heads", type=positive, default=8, help="default 8")
    parser.add_argument("--d-head", type=positive, default=64, help="default 64")
    parser.add_argument(
        "--lengths", type=listed(positive), default="64,128,256,512,1024", help="T = M of the timed shapes"
    )
    parser.add_argument("--memory-queries", type=positive, default=512, help="T if only the keys grow (default 512)")
    parser.add_argument("--memory-keys", default="1024,2048,4096,8192", help="S of the memory measurements, or none")
    parser.add_argument("--seconds", type=above_zero, default=1.0, help="minimum time of one measurement (default 1)")
    parser.add_argument("--threads", type=positive, help="CPU threads; default: torch's default")
    parser.add_argument("--out", type=Path, default=results_file("kernels"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    sizes = parser.parse_args()
    both = has_bfloat16(torch.device(sizes.device))
    sizes.dtypes = sizes.dtypes or ["float32", *(["bfloat16"] if both else [])]
    sizes.named = bool(sizes.kernels)
    sizes.kernels = sizes.kernels.split(",") if sizes.kernels else fitting(sizes.device, "float32")
    try:
        for name in sizes.kernels:
            choose(name, torch.device(sizes.device), torch.float32)  # which loads the native operators
        sizes.memory_keys = [positive(keys) for keys in sizes.memory_keys.split(",") if keys != "none"]
    except (UserError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    return sizes


def main() -> None:
    """Check and measure the kernels, and write the results to a file."""
    sizes = parsed()
    set_threads(sizes.threads)
    if sizes.one:
        kernel, shape = json.loads(sizes.one)
        print(json.dumps(peak_beyond_inputs(kernel, Shape(**shape))))
        return
    load = warn_if_busy()
    checked = checks(sizes.kernels, sizes.dtypes, sizes.device)
    wrong = [line for line in checked if not line["ok"]]
    for line in wrong:
        say(f"WRONG {line['kernel']}: {line['what']}: error {line['error']:.1e}, allowed {line['allowed']:.1e}")
    if wrong:
        sys.exit(1)
    say(f"{len(checked)} checks passed")
    results = {
        **surroundings(sizes.device, load),
        "checks": checked,
        "times": time_all(sizes),
        "memory": memory_growth(sizes) if sizes.memory_keys else [],
    }
    write(results, sizes.out)


if __name__ == "__main__":
    main()
