"""One run that says how the package does on a CUDA device: right first, then kernels, then whole training steps.

    python benchmarks/gpu.py [--out FILE] [--peak-tflops 989] [--minutes 8] [--parts correctness,kernels,...]

correctness  every kernel, the Triton one too, held to the reference in float64 over many shapes, with dropout and
             determinism; training compiled, and with CUDA graphs, held to training step by step. A table and status 1
             where anything is off; nothing is timed then.
kernels      times of each kernel, forward and with backward, over T and S.
training     whole steps of three recipes in bfloat16, as they are, compiled, and as CUDA graphs: tokens a second,
             peak memory, and model flops utilisation (operations that `step_cost` counts, over seconds and peak).
peers        the same beside other implementations, those that this Python has.

A part that fails does not take the others with it, but the status is 1 then; so is a part cut short for time.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import step_times
import torch
from attention_cases import Shape, check, check_deterministic, check_dropout, times
from environment import RESULTS, command, commit, cpu_model, device_name, say, write

from transformer_xl.model.kernels import KERNELS

RECIPES = ("enwik8-12l", "enwik8-24l", "wikitext-103-standard")
LEFT = "left out: no time left (--minutes)"


def checked_shapes(*, quick: bool) -> list[Shape]:
    """Ragged lengths and head widths, windows, empty slots, long and no memory."""
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


def fitting(device: str, dtype: str) -> list[str]:
    """Kernels to compare there: all that fit, but the reference, which they are held to."""
    found = [k.name for k in KERNELS.values() if k.fits(torch.device(device), getattr(torch, dtype))]
    return [name for name in found if name != "reference"]


def correctness(sizes: argparse.Namespace) -> list[dict[str, Any]]:
    """Every kernel at every shape in every number format; dropout; determinism; then compiled training."""
    lines = []
    for dtype in ("float32", "bfloat16", *([] if sizes.quick else ["float16"])):
        for kernel in fitting(sizes.device, dtype):
            few = sizes.quick or dtype == "float16"  # each needs compiling
            shapes = [replace(shape, dtype=dtype, device=sizes.device) for shape in checked_shapes(quick=few)]
            lines += [attempt(kernel, shape.words(), lambda k=kernel, s=shape: [check(k, s)]) for shape in shapes]
    for kernel in fitting(sizes.device, "float32"):
        for width in (32,) if sizes.quick else (32, 41, 64):
            shape = Shape(2, 64, 64, 4, width, dropout=0.2, device=sizes.device)
            lines.append(attempt(kernel, shape.words(), lambda k=kernel, s=shape: check_dropout(k, s)))
        if kernel in ("triton", "cpu"):
            shape = Shape(2, 65, 70, 2, 64, device=sizes.device)
            lines.append(attempt(kernel, shape.words(), lambda k=kernel, s=shape: [check_deterministic(k, s)]))
    for recipe in (RECIPES[0], *([] if sizes.quick else [RECIPES[2]])):
        lines.append(attempt("auto", f"training {recipe}", lambda r=recipe: compiled(r, sizes)))
    return [line for found in lines for line in found]


def attempt(kernel: str, what: str, work: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The work's lines, or one that says how it failed."""
    try:
        return work()
    except Exception as error:  # whatever it is, the other checks are wanted too
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return [{"kernel": kernel, "what": f"{what}: {said}", "error": None, "allowed": None, "ok": False}]


def compiled(recipe: str, sizes: argparse.Namespace) -> list[dict[str, Any]]:
    """Losses of some steps of training, with other kernels and compiled, beside the reference kernel step by step."""
    ways = {"as it is": "none"}
    ways |= {} if sizes.quick else {"compiled": "layers"}
    ways |= {"CUDA graphs": "cudagraphs"} if sizes.device.startswith("cuda") else {}
    lines = []
    for dtype, allowed in (("float32", 1e-4), *([] if sizes.quick else [("bfloat16", 2e-2)])):
        train = {"dtype": dtype}
        wanted = step_times.losses(recipe, sizes.device, 6, train, {"attn_implementation": "reference"})
        for name, how in ways.items():
            found = step_times.losses(recipe, sizes.device, 6, {**train, "compile": how}, {})
            error = max(abs(one - other) for one, other in zip(found, wanted, strict=True))
            what = f"losses of training {recipe} in {dtype}, {name}"
            ok = error <= allowed  # false where it is not a number
            lines.append({"kernel": "auto", "what": what, "error": error, "allowed": allowed, "ok": ok})
    return lines


def kernel_times(sizes: argparse.Namespace) -> list[dict[str, Any]]:
    """Times over T = M, and over the memory, in bfloat16 and the longest in float32."""
    base = Shape(2, 16, 16, 2, 16) if sizes.quick else Shape(16, 512, 512, 8, 64)
    lengths = (
        [(16, 16)] if sizes.quick else [(128, 128), (512, 512), (1024, 1024), (2048, 2048), (512, 3584), (128, 8064)]
    )
    lines = []
    for dtype, chosen in (("bfloat16", lengths), ("float32", lengths[1:2])):
        for queries, memory in chosen:
            shape = replace(base, queries=queries, memory_length=memory, dtype=dtype, device=sizes.device)
            for kernel in [*fitting(sizes.device, dtype), "reference"]:
                if kernel == "reference" and queries * (queries + memory) > 2**16:
                    continue  # it has a position key for every pair
                if time.monotonic() > sizes.until:
                    return [*lines, {"shape": asdict(shape), "kernel": kernel, "failed": LEFT}]
                lines.append(
                    {"kernel": kernel, "shape": asdict(shape), **guarded(lambda k=kernel, s=shape: times(k, s))}
                )
                say(f"{shape.words():<44} {kernel:<10} {told(lines[-1])}")
    return lines


def training(sizes: argparse.Namespace) -> list[dict[str, Any]]:
    """Whole steps of the recipes: the way that is surest to work first, for all of them."""
    ways = ("none", "layers", "cudagraphs") if sizes.device.startswith("cuda") else ("none",)
    lines = []
    for how in ways:
        for recipe in RECIPES:
            named = {"recipe": recipe, "compile": how}
            if time.monotonic() > sizes.until:
                lines.append({**named, "failed": LEFT})
                continue
            train = {"dtype": "float32" if sizes.quick else "bfloat16", "compile": how}
            lines.append(
                {
                    **named,
                    **guarded(
                        lambda r=recipe, t=train: step_times.measure(
                            r, sizes.device, t, small=sizes.quick, peak=sizes.peak_tflops
                        )
                    ),
                }
            )
            say(f"{recipe:<24} {how:<7} {told(lines[-1])}")
    return lines


def peers(sizes: argparse.Namespace) -> list[dict[str, Any]]:
    """`training.py` with the other implementations that this Python has."""
    names = ["ours-bfloat16", "ours-bfloat16+compile"]
    for package, implementation in (
        ("x-transformers", "x-transformers-bfloat16"),
        ("transformers", "transformers-float32"),
    ):
        try:
            if package == "x-transformers" or version(package).startswith("4.37."):
                version(package)
                names.append(implementation)
        except PackageNotFoundError:
            pass
    if len(names) == 2:
        return [{"left_out": "no x-transformers and no transformers 4.37 in this Python"}]
    words = [sys.executable, str(Path(__file__).parent / "training.py"), "--device", "cuda", "--batch-size", "22"]
    words += ["--peers", sys.executable, "--implementations", ",".join(names), "--steps", "20", "--rounds", "5"]
    out = sizes.out.with_name(sizes.out.stem + "-peers.json")
    subprocess.run([*words, "--out", str(out)], check=True, timeout=max(30.0, sizes.until - time.monotonic()))
    return [{"results": out.name}]


def guarded(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the work gives, or how it failed."""
    try:
        return work()
    except Exception:  # one figure less; the others are wanted
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {"failed": traceback.format_exc(limit=-3)}


def told(line: dict[str, Any]) -> str:
    """A line of figures in words."""
    if "failed" in line:
        return f"FAILED: {line['failed'].strip().splitlines()[-1]}"
    if "forward_seconds" in line:
        return (
            f"forward {line['forward_seconds'] * 1e3:8.3f} ms ({line['forward_tflops']:6.1f} TFLOP/s), with backward "
            f"{line['forward_backward_seconds'] * 1e3:8.3f} ms ({line['forward_backward_tflops']:6.1f} TFLOP/s)"
        )
    share, most = line["model_flops_utilisation"], line["peak_device_bytes"]
    return (
        f"{line['step_seconds'] * 1e3:8.2f} ms, {line['tokens_per_second']:,.0f} tokens/s, "
        f"batch size {line['batch_size']}, "
        f"{line['tflops']:.1f} TFLOP/s"
        + (f", {share:.1%} of the peak" if share is not None else "")
        + (f", {most / 2**30:.2f} GiB" if most is not None else "")
    )


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "correctness": correctness,
    "kernels": kernel_times,
    "training": training,
    "peers": peers,
}


def run(sizes: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Runs the parts; gives what they found, and the exit status."""
    results: dict[str, Any] = {}
    status = 0
    for name in sizes.parts:
        began = time.monotonic()
        try:
            lines = PARTS[name](sizes)
        except Exception:  # the other parts are wanted
            lines = [{"failed": traceback.format_exc(limit=-3)}]
            say(f"{name} FAILED: {lines[0]['failed'].strip().splitlines()[-1]}")
        results[name] = {"seconds": round(time.monotonic() - began, 1), "lines": lines}
        off = [line for line in lines if "failed" in line or line.get("ok") is False]
        status |= bool(off)
        if name == "correctness":
            for line in off:
                error = "" if line["error"] is None else f": error {line['error']:.1e}, allowed {line['allowed']:.1e}"
                print(f"WRONG {line['kernel']:<8} {line['what']}{error}")
            print(f"correctness: {len(lines) - len(off)} of {len(lines)} checks passed")
            if off:
                break
    return results, int(status)


def parsed() -> argparse.Namespace:
    """The command line; ends the program where there is no CUDA."""
    parser = argparse.ArgumentParser(description="Correctness and speed on a CUDA device, in one run.")
    parser.add_argument("--out", type=Path, help="default results/gpu-NAME.json, NAME that of the device")
    parser.add_argument("--peak-tflops", type=float, help="the device's peak in bfloat16, where it is not known here")
    parser.add_argument("--minutes", type=float, default=8.0, help="start nothing after so many (default 8)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"default {','.join(PARTS)}")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)
    sizes = parser.parse_args()
    if sizes.device.startswith("cuda") and not torch.cuda.is_available():
        say("no CUDA device here (torch.cuda.is_available() is false); run this on a machine with one")
        sys.exit(2)
    sizes.parts = sizes.parts.split(",")
    if unknown := [part for part in sizes.parts if part not in PARTS]:
        parser.error(f"no part '{unknown[0]}'; there are {', '.join(PARTS)}")
    sizes.until = time.monotonic() + 60 * sizes.minutes
    sizes.peak_tflops = sizes.peak_tflops or step_times.peak_tflops(sizes.device)
    name = re.sub(r"[^a-z0-9]+", "-", device_name(sizes.device).lower()).strip("-")
    sizes.out = sizes.out or RESULTS / f"gpu-{name}.json"
    return sizes


def main() -> None:
    """Runs the parts, writes what they found, and ends with their status."""
    sizes = parsed()
    cuda = sizes.device.startswith("cuda")
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    described = {
        "command": command(),
        "commit": commit(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton}
        | {"python": platform.python_version()},
        "machine": {
            "device": device_name(sizes.device),
            "device_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
            "capability": list(torch.cuda.get_device_capability()) if cuda else None,
            "cpu": cpu_model(),
            "threads": torch.get_num_threads(),
            "peak_tflops": sizes.peak_tflops,
        },
    }
    for what, of in described.items():
        print(f"{what}: {of}")
    results, status = run(sizes)
    write({**described, "status": status, **results}, sizes.out)
    sys.exit(status)


if __name__ == "__main__":
    main()
