"""Checks and measures the package on a CUDA device: correctness, attention kernels, then complete training steps.

    python benchmarks/gpu.py [--out FILE] [--peak-tflops 989] [--minutes 8] [--parts correctness,kernels,...]
        [--peers PYTHON]

correctness  compares each kernel with the reference in float64 over many shapes, also with dropout, and checks that it
             is deterministic; compares compiled training and CUDA graphs with the reference kernel, not compiled. If
             anything differs, it prints what, the exit status is 1, and nothing is timed.
kernels      seconds of each kernel, forward and forward with backward, over the number of queries T and keys S; beside
             them, in bfloat16, torch's FlexAttention and, as a bound, FlashAttention with rotary positions.
training     training steps of three recipes in bfloat16, eager, compiled and with CUDA graphs: tokens per second, peak
             memory, and model FLOPs utilization (FLOPs by `step_cost` / seconds / peak FLOP/s of the device).
peers        training compared with other implementations that are installed for the Python of --peers.

If a part fails or runs out of time, the others still run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import step_times
import torch
from arguments import above_zero, listed, one_of
from attention_cases import Shape, check, check_deterministic, check_dropout, times
from environment import RESULTS, command, commit, cpu_features, cpu_model, device_name, say, write

from transformer_xl.ops.kernels import KERNELS

RECIPES = ("enwik8-12l", "enwik8-24l", "wikitext-103-standard")
OUT_OF_TIME = "left out: no time left (--minutes)"


def checked_shapes(*, quick: bool) -> list[Shape]:
    """Return shapes with odd lengths and head widths, attention windows, empty memory slots, long and no memory.

    The positional arguments are batch size, queries, memory slots, heads and head width.
    """
    small = [
        Shape(2, 37, 23, 2, 41),
        Shape(2, 20, 45, 2, 38, empty_slots=17),
        Shape(1, 33, 0, 1, 80, attention_window=9),
    ]
    if quick:
        return small
    widths = [Shape(2, 97, 131, 2, width) for width in (32, 38, 41, 64, 80, 128)]
    return [
        *small,
        *widths,
        Shape(2, 256, 256, 2, 64),
        Shape(1, 512, 512, 2, 64),
        Shape(1, 384, 384, 1, 128, attention_window=300),
        Shape(3, 150, 150, 2, 41, empty_slots=150),
        Shape(2, 64, 64, 2, 64, attention_window=1),
        Shape(2, 100, 300, 2, 64, attention_window=333, empty_slots=77),
        Shape(2, 1, 255, 4, 64),
        Shape(2, 1, 0, 4, 64),
        Shape(1, 16, 2500, 2, 64),
        Shape(16, 65, 63, 8, 64),
    ]


def kernels_for(device: str, dtype: str) -> list[str]:
    """Return the names of the kernels that support the device and dtype, without the reference."""
    kernels = [kernel for name, kernel in KERNELS.items() if name != "reference"]
    return [kernel.name for kernel in kernels if kernel.fits(torch.device(device), getattr(torch, dtype))]


def correctness(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Check each kernel at each shape and dtype, its dropout and determinism, then compiled training."""
    lines = []
    for dtype in ("float32", "bfloat16", *([] if args.quick else ["float16"])):
        for kernel in kernels_for(args.device, dtype):
            quick = args.quick or dtype == "float16"  # Triton compiles a kernel for each shape
            shapes = [replace(shape, dtype=dtype, device=args.device) for shape in checked_shapes(quick=quick)]
            lines += [attempt(kernel, shape.words(), lambda k=kernel, s=shape: [check(k, s)]) for shape in shapes]
    for kernel in kernels_for(args.device, "float32"):
        for width in (32,) if args.quick else (32, 41, 64):
            shape = Shape(2, 64, 64, 4, width, dropout=0.2, device=args.device)
            lines.append(attempt(kernel, shape.words(), lambda k=kernel, s=shape: check_dropout(k, s)))
        if kernel in ("triton", "cpu"):
            shape = Shape(2, 65, 70, 2, 64, device=args.device)
            lines.append(attempt(kernel, shape.words(), lambda k=kernel, s=shape: [check_deterministic(k, s)]))
    for recipe in (RECIPES[0], *([] if args.quick else [RECIPES[2]])):
        lines.append(attempt("auto", f"training {recipe}", lambda r=recipe: compiled(r, args)))
    return [line for check_lines in lines for line in check_lines]


def attempt(kernel: str, what: str, work: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the results of `work`, or one failed result with the exception; the other checks still run."""
    try:
        return work()
    except Exception as error:
        message = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return [{"kernel": kernel, "what": f"{what}: {message}", "error": None, "allowed": None, "ok": False}]


def compiled(recipe: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare losses of training, eager, compiled and with CUDA graphs, with those of the reference kernel."""
    modes = {"eager": "none"}
    modes |= {} if args.quick else {"compiled": "layers"}
    modes |= {"CUDA graphs": "cudagraphs"} if args.device.startswith("cuda") else {}
    lines = []
    for dtype, allowed in (("float32", 1e-4), *([] if args.quick else [("bfloat16", 2e-2)])):
        train = {"dtype": dtype}
        expected = step_times.losses(recipe, args.device, 6, train, {"attn_implementation": "reference"})
        for name, mode in modes.items():
            losses = step_times.losses(recipe, args.device, 6, {**train, "compile": mode}, {})
            error = max(abs(loss - reference) for loss, reference in zip(losses, expected, strict=True))
            what = f"losses of training {recipe} in {dtype}, {name}"
            ok = error <= allowed  # false if error is nan
            lines.append({"kernel": "auto", "what": what, "error": error, "allowed": allowed, "ok": ok})
    return lines


def kernel_times(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the kernels over T (queries) and M (memory slots) in bfloat16, and at one length in float32."""
    base = Shape(2, 16, 16, 2, 16) if args.quick else Shape(16, 512, 512, 8, 64)
    lengths = (
        [(16, 16)] if args.quick else [(128, 128), (512, 512), (1024, 1024), (2048, 2048), (512, 3584), (128, 8064)]
    )
    lines = []
    for dtype, dtype_lengths in (("bfloat16", lengths), ("float32", lengths[1:2])):
        for queries, memory in dtype_lengths:
            shape = replace(base, queries=queries, memory_length=memory, dtype=dtype, device=args.device)
            others = ["flash-rotary", "flex"] if dtype == "bfloat16" and args.device.startswith("cuda") else []
            for kernel in [*kernels_for(args.device, dtype), "reference", *others]:
                if kernel == "reference" and queries * (queries + memory) > 2**16:
                    continue  # too large: it computes a position key for every pair of query and key
                if kernel == "flex" and queries not in (512, 2048):
                    continue  # compiled for each length, half a minute
                if time.monotonic() > args.until:
                    return [*lines, {"shape": asdict(shape), "kernel": kernel, "failed": OUT_OF_TIME}]
                seconds = guarded(lambda k=kernel, s=shape: times(k, s))
                lines.append({"kernel": kernel, "shape": asdict(shape), **seconds})
                say(f"{shape.words():<44} {kernel:<10} {summary(lines[-1])}")
    return lines


def training(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time training steps of the recipes, first without compilation, which is the most likely to work."""
    modes = ("none", "layers", "cudagraphs") if args.device.startswith("cuda") else ("none",)
    lines = []
    for mode in modes:
        for recipe in RECIPES:
            line: dict[str, Any] = {"recipe": recipe, "compile": mode}
            if time.monotonic() > args.until:
                lines.append({**line, "failed": OUT_OF_TIME})
                continue
            train = {"dtype": "float32" if args.quick else "bfloat16", "compile": mode}
            measure = partial(step_times.measure, small=args.quick, peak=args.peak_tflops)
            lines.append(line | guarded(lambda r=recipe, t=train, m=measure: m(r, args.device, t)))
            say(f"{recipe:<24} {mode:<7} {summary(lines[-1])}")
    return lines


def peers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run `training.py` with the other implementations that are installed for the Python of the peers."""
    names = ["ours-bfloat16", "ours-bfloat16+compile", "ours-float32"]
    if installed("x-transformers", args.peers):
        names += ["x-transformers-bfloat16", "x-transformers-float32"]
    if (installed("transformers", args.peers) or "").startswith("4.37."):
        names.append("transformers-float32")
    if len(names) == 3:
        return [{"left_out": f"no x-transformers and no transformers 4.37 for {args.peers}"}]
    words = [sys.executable, str(Path(__file__).parent / "training.py"), "--device", "cuda", "--batch-size", "22"]
    words += ["--peers", args.peers, "--implementations", ",".join(names), "--steps", "20", "--rounds", "5"]
    out = args.out.with_name(args.out.stem + "-peers.json")
    subprocess.run([*words, "--out", str(out)], check=True, timeout=max(30.0, args.until - time.monotonic()))
    return [{"results": out.name}]


def installed(package: str, python: str = sys.executable) -> str | None:
    """Return the version of a package that is installed for a Python, or None."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return found.stdout.strip() or None


def guarded(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `work`, or its traceback as `failed`; the other measurements still run."""
    try:
        return work()
    except Exception:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {"failed": traceback.format_exc(limit=-3)}


def summary(line: dict[str, Any]) -> str:
    """Return a measurement as one line of text."""
    if "failed" in line:
        return f"FAILED: {line['failed'].strip().splitlines()[-1]}"
    if "forward_seconds" in line:
        return (
            f"forward {line['forward_seconds'] * 1e3:8.3f} ms ({line['forward_tflops']:6.1f} TFLOP/s), with backward "
            f"{line['forward_backward_seconds'] * 1e3:8.3f} ms ({line['forward_backward_tflops']:6.1f} TFLOP/s)"
        )
    utilization, peak_bytes = line["model_flops_utilisation"], line["peak_device_bytes"]
    return (
        f"{line['step_seconds'] * 1e3:8.2f} ms, {line['tokens_per_second']:,.0f} tokens/s, "
        f"batch size {line['batch_size']}, {line['tflops']:.1f} TFLOP/s"
        + (f", {utilization:.1%} of the peak" if utilization is not None else "")
        + (f", {peak_bytes / 2**30:.2f} GiB" if peak_bytes is not None else "")
    )


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "correctness": correctness,
    "kernels": kernel_times,
    "training": training,
    "peers": peers,
}


def run(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Run the parts, and return their results and the exit status."""
    results: dict[str, Any] = {}
    status = 0
    for name in args.parts:
        start = time.monotonic()
        try:
            lines = PARTS[name](args)
        except Exception:  # the other parts still run
            lines = [{"failed": traceback.format_exc(limit=-3)}]
            say(f"{name} FAILED: {lines[0]['failed'].strip().splitlines()[-1]}")
        results[name] = {"seconds": round(time.monotonic() - start, 1), "lines": lines}
        failed = [line for line in lines if "failed" in line or line.get("ok") is False]
        status |= bool(failed)
        if name == "correctness":
            for line in failed:
                error = "" if line["error"] is None else f": error {line['error']:.1e}, allowed {line['allowed']:.1e}"
                print(f"WRONG {line['kernel']:<8} {line['what']}{error}")
            print(f"correctness: {len(lines) - len(failed)} of {len(lines)} checks passed")
            if failed:
                break
    return results, int(status)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line, and exit if there is no CUDA device."""
    parser = argparse.ArgumentParser(description="Checks correctness and measures speed on a CUDA device.")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/gpu-DEVICE.json")
    parser.add_argument(
        "--peak-tflops", type=above_zero, help="peak of the device in bfloat16, if it is not known here"
    )
    parser.add_argument(
        "--minutes", type=above_zero, default=8.0, help="start no measurement after this time (default 8)"
    )
    parser.add_argument(
        "--parts", type=listed(one_of(PARTS)), default=",".join(PARTS), help=f"default {','.join(PARTS)}"
    )
    parser.add_argument(
        "--peers", default=sys.executable, help="Python that has other implementations (default this one)"
    )
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        say("no CUDA device (torch.cuda.is_available() is false); run this where there is one")
        sys.exit(2)
    args.until = time.monotonic() + 60 * args.minutes
    args.peak_tflops = args.peak_tflops or step_times.peak_tflops(args.device)
    name = re.sub(r"[^a-z0-9]+", "-", device_name(args.device).lower()).strip("-")
    args.out = args.out or RESULTS / f"gpu-{name}.json"
    return args


def main() -> None:
    """Run the parts, write their results to a file, and exit with their status."""
    args = parse_arguments()
    cuda = args.device.startswith("cuda")
    description = {
        "command": command(),
        "commit": commit(),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": installed("triton"),
            "python": platform.python_version(),
        },
        "machine": {
            "device": device_name(args.device),
            "device_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
            "capability": list(torch.cuda.get_device_capability()) if cuda else None,
            "cpu": cpu_model(),
            "features": cpu_features(),
            "threads": torch.get_num_threads(),
            "peak_tflops": args.peak_tflops,
        },
    }
    for name, value in description.items():
        print(f"{name}: {value}")
    results, status = run(args)
    write({**description, "status": status, **results}, args.out)
    sys.exit(status)


if __name__ == "__main__":
    main()
