"""The device to compute on (CUDA, Apple's MPS or the CPU), its threads, its dtypes and its memory use."""

from __future__ import annotations

import platform
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch

from transformer_xl.config import UserError, nearest

_MAX_THREADS = 4096  # torch itself has no limit, and crashes with a very large number

Precision = Literal["auto", "float32", "bfloat16"]
"""Data type of matrix products, as a setting; `resolve_dtype` says what auto chooses."""


def available_devices() -> list[str]:
    """Return the device types that this computer has (`cuda`, `mps`, `cpu`), fastest first."""
    available = ["cuda"] if torch.cuda.is_available() else []
    available += ["mps"] if torch.backends.mps.is_available() else []
    return [*available, "cpu"]


def choose_device(name: str | torch.device = "auto") -> torch.device:
    """Return the named device (`cuda`, `cuda:1`, `mps`, `cpu`), or the fastest available one for `auto`.

    Raises:
        UserError: this computer has no such device.
    """
    name, available = str(name), available_devices()
    if name == "auto":
        return torch.device(available[0])
    kind, colon, index = name.partition(":")
    indices = map(str, range(torch.cuda.device_count() if kind == "cuda" else 1))
    if kind not in available or (colon and index not in indices):
        known = ["auto", *available]
        raise UserError(f"no device '{name}' on this computer{nearest(name, known)}; available: {', '.join(known)}")
    return torch.device(name)


def set_threads(number: int | None) -> None:
    """Set how many CPU threads one operation uses, or keep torch's default if None.

    Raises:
        UserError: the number is below 1 or too large.
    """
    if number is not None:
        if not 1 <= number <= _MAX_THREADS:
            raise UserError(f"--threads {number}: must be between 1 and {_MAX_THREADS:,}")
        torch.set_num_threads(number)


def environment(device: torch.device) -> dict[str, Any]:
    """Describe where a speed was measured: device, threads, versions and, if known, the processor."""
    return {
        "device": str(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
    }


def _processor() -> str:
    """Return the processor's model name and its SIMD extensions that affect speed, as far as Linux reports them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in fields.get("flags", "").split()]
    return " ".join([fields.get("model name", platform.processor()), *flags]).strip()


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the device multiplies bfloat16 matrices in hardware; emulated, they are slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    # on x86, oneDNN (torch's CPU library, formerly MKL-DNN) also returns true if bfloat16 is emulated
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return not x86 or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def autocast(device: torch.device, dtype: Precision) -> AbstractContextManager[object]:
    """Return a context that computes matrix products in the dtype; weights and sums stay float32."""
    if resolve_dtype(device, dtype) == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def resolve_dtype(device: torch.device, dtype: Precision) -> str:
    """Return the dtype name of matrix products under `autocast`; `auto` is bfloat16 if the hardware supports it."""
    is_bfloat16 = dtype == "bfloat16" or (dtype == "auto" and has_bfloat16(device))
    return "bfloat16" if is_bfloat16 else "float32"


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to the device without waiting for the copy; CUDA requires pinned memory for that."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def peak_memory_bytes() -> int | None:
    """Return the peak memory of this process: GPU memory if a GPU was used, else resident memory; None if unknown."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":  # Windows needs an extra package for this
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
