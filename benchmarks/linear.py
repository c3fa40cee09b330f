"""Compares products with packed weights with torch's linear, on the CPU, for several shapes and numbers of rows.

    python benchmarks/linear.py [--threads 2] [--rows 1,8,64,512] [--training-rows 256,2048] [--out FILE]

Both take turns, and the result is the median of all turns. So that weights are read from memory, as in a model, a turn
multiplies with 40 matrices one after the other.

Then the products of training in float32, by torch's BLAS and by oneDNN: of the forward pass, and both gradients.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from arguments import listed, positive
from environment import command, commit, cpu_features, cpu_model, results_file, say, warn_if_busy, write
from torch import Tensor, nn

from transformer_xl.ops.linear import PackedLinear, multiply, multiply_weight_gradient

SHAPES = ((512, 512), (512, 2048), (2048, 512), (1024, 4096))
TRAINING_SHAPES = ((64, 64), (128, 128), (256, 256), (256, 1024), (1024, 256), *SHAPES)
MATRICES, TURNS = 40, 9


def seconds(multiply: Callable[[], list[Tensor]]) -> float:
    start = time.perf_counter()
    multiply()
    return time.perf_counter() - start


def training_products(shape: tuple[int, int], rows: int) -> dict[str, float]:
    """Return the GFLOP/s of the products of a layer in training, in float32, by each library."""
    x, weight, dout = torch.randn(rows, shape[0]), torch.randn(shape[1], shape[0]), torch.randn(rows, shape[1])
    products: dict[str, Callable[[], Tensor]] = {
        "blas_forward": lambda: nn.functional.linear(x, weight),
        "onednn_forward": lambda: multiply(x, weight),
        "blas_input_gradient": lambda: dout @ weight,
        "onednn_input_gradient": lambda: multiply(dout, weight.t()),
        "blas_weight_gradient": lambda: dout.t() @ x,
        "onednn_weight_gradient": lambda: multiply_weight_gradient(x, dout),
    }
    times: dict[str, list[float]] = {name: [] for name in products}
    repeats = max(1, 10**10 // (rows * shape[0] * shape[1] * 8))
    for turn in range(TURNS + 1):
        for name, product in products.items():
            spent = seconds(lambda product=product: [product() for _ in range(repeats)])
            if turn:
                times[name].append(spent)
    gflop = 2e-9 * rows * shape[0] * shape[1] * repeats
    return {name: round(gflop / statistics.median(one), 1) for name, one in times.items()}


def main() -> None:
    """Measure, print a line for each shape, and write the results to a file."""
    parser = argparse.ArgumentParser(description="Compares packed weights with torch's linear.")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=listed(positive), default="1,8,64,512", help="rows of the input (1,8,64,512)")
    parser.add_argument(
        "--training-rows", type=listed(positive), default="256,2048", help="rows in the products of training (256,2048)"
    )
    parser.add_argument("--out", type=Path, default=results_file("linear"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    busy, results = warn_if_busy(), []
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            packed = [PackedLinear(*shape, bias=False, dtype=dtype) for _ in range(MATRICES)]
            plain = [nn.Linear(*shape, bias=False, dtype=dtype) for _ in range(MATRICES)]
            for layer in packed:
                layer.pack(dtype)
            for rows in args.rows:
                x = torch.randn(rows, shape[0], dtype=dtype)
                with torch.inference_mode():
                    times: list[list[float]] = [[], []]
                    for turn in range(TURNS + 1):
                        for layers, into in zip((plain, packed), times, strict=True):
                            spent = seconds(lambda layers=layers, x=x: [layer(x) for layer in layers])
                            if turn:  # the first warms up
                                into.append(spent)
                before, after = (statistics.median(one) for one in times)
                gflop = 2 * rows * shape[0] * shape[1] * MATRICES / 1e9
                entry = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "shape": shape,
                    "rows": rows,
                    "linear_gflops": round(gflop / before, 1),
                    "packed_gflops": round(gflop / after, 1),
                    "ratio": round(before / after, 2),
                }
                say(str(entry))
                results.append(entry)
    training: list[dict[str, Any]] = []
    for shape in TRAINING_SHAPES:
        for rows in args.training_rows:
            training.append({"shape": shape, "rows": rows, **training_products(shape, rows)})
            say(str(training[-1]))
    values = {
        "command": command(),
        "commit": commit(),
        "cpu": cpu_model(),
        "cpu_features": cpu_features(),
        "torch": torch.__version__,
        "threads": args.threads,
        "busy": busy,
        "results": results,
        "training": training,
    }
    write(values, args.out)


if __name__ == "__main__":
    main()
