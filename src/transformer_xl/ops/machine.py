"""Facts about the machine: devices, kernels and libraries that are used on it, and how fast it multiplies matrices.

Shape suffixes: R rows, I input width.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch.utils.benchmark import Timer

from transformer_xl.device import available_devices, has_bfloat16, resolve_dtype
from transformer_xl.ops.kernels import KERNELS, choose
from transformer_xl.ops.linear import PackedLinear, fastest_matmul_library
from transformer_xl.ops.native import status

_MEASURED = {
    "large": (2048, 2048, 2048),
    "2,048 tokens": (2048, 512, 2048),
    "64 tokens": (64, 512, 2048),
    "1 token": (1, 512, 2048),
}
"""Rows and widths of the products that `--measure` times: a large one, which shows what the processor reaches at best,
and those of a feed-forward layer in training, in serving and in generation."""


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Return versions, devices, and the values that settings with `auto` resolve to on this machine."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "devices": available_devices(),
        "threads": torch.get_num_threads(),
        "dtype_auto": resolve_dtype(device, "auto"),
        **({"training_matmul_library": fastest_matmul_library()} if device.type == "cpu" else {}),
        "native_operators": status().text,
        "attn_implementation_auto": choose("auto", device, torch.float32).name,
        "attn_implementations": [name for name, kernel in KERNELS.items() if kernel.fits(device, torch.float32)],
    }


def product_speeds(device: torch.device) -> dict[str, Any]:
    """Return GFLOP/s of products by dtype and size: of torch's Linear, and on a CPU of those that the layers use too.

    These are the products of training, and those with packed weights, where no gradients are computed.
    """
    speeds = dict[str, Any]()
    ways: dict[str, tuple[type[torch.nn.Linear], bool]] = {"torch": (torch.nn.Linear, False)}
    if device.type == "cpu":
        ways |= {"training": (PackedLinear, True), "packed": (PackedLinear, False)}
    for dtype in [torch.float32, *([torch.bfloat16] if has_bfloat16(device) else [])]:
        for name, (rows, width_in, width_out) in _MEASURED.items():
            x_RI = torch.randn(rows, width_in, device=device, dtype=dtype)
            speeds[f"{str(dtype).removeprefix('torch.')}, {name}"] = found = dict[str, float]()
            for way, (layer_class, with_gradients) in ways.items():
                layer = layer_class(width_in, width_out, bias=False, device=device, dtype=dtype)
                if isinstance(layer, PackedLinear) and not with_gradients:
                    layer.pack(dtype)
                timer = Timer("layer(x)", globals={"layer": layer, "x": x_RI}, num_threads=torch.get_num_threads())
                with torch.set_grad_enabled(with_gradients):
                    seconds = min(timer.blocked_autorange(min_run_time=0.25).times)
                found[way] = round(2e-9 * rows * width_in * width_out / seconds, 1)
    return speeds
