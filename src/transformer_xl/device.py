"""The device that computes: CUDA, Apple's MPS or the CPU; its threads, dtypes and memory."""

from __future__ import annotations

import platform
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch

from transformer_xl.config import UserError, nearest

_MOST_THREADS = 4096  # torch takes any number, and dies of a very large one

Precision = Literal["auto", "float32", "bfloat16"]


def available_devices() -> list[str]:
    """Names of the devices of this machine, best first."""
    found = ["cuda"] if torch.cuda.is_available() else []
    found += ["mps"] if torch.backends.mps.is_available() else []
    return [*found, "cpu"]


def choose_device(name: str = "auto") -> torch.device:
    """The named device (`cuda`, `cuda:1`, `mps`, `cpu`), or the best there is.

    Raises:
        UserError: it does not exist on this machine.
    """
    found = available_devices()
    if name == "auto":
        return torch.device(found[0])
    kind, colon, index = name.partition(":")
    known_index = index.isascii() and index.isdecimal() and int(index) < _count(kind)
    if kind not in found or (colon and not known_index):
        known = ["auto", *found]
        raise UserError(f"no device '{name}' on this machine{nearest(name, known)}; there are {', '.join(known)}")
    return torch.device(name)


def _count(kind: str) -> int:
    return torch.cuda.device_count() if kind == "cuda" else 1


def set_threads(number: int | None) -> None:
    """Sets how many CPU threads one operation uses; none leaves torch's own choice.

    Raises:
        UserError: fewer than one.
    """
    if number is None:
        return
    if not 1 <= number <= _MOST_THREADS:
        raise UserError(f"--threads {number}: wanted 1 or more, up to {_MOST_THREADS:,}")
    torch.set_num_threads(number)


def environment(device: torch.device) -> dict[str, Any]:
    """Where a figure was measured: device, threads, versions, and the processor as far as the system names it."""
    return {
        "device": str(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
    }


def _processor() -> str:
    """Its name where Linux says it, and the instructions that decide."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in said.get("flags", "").split()]
    return " ".join([said.get("model name", platform.processor()), *flags]).strip()


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the device multiplies bfloat16 matrices in hardware (else it is slower than float32)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    # on x86, oneDNN says yes to emulation too
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return not x86 or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def autocast(device: torch.device, dtype: Precision) -> AbstractContextManager[object]:
    """Return a context in which matrix products run in the given dtype; weights and sums stay float32."""
    if resolve_dtype(device, dtype) == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def resolve_dtype(device: torch.device, dtype: Precision) -> str:
    """Return the name of the dtype of matrix products under `autocast`; auto: bfloat16 where it is in hardware."""
    is_bfloat16 = dtype == "bfloat16" or (dtype == "auto" and has_bfloat16(device))
    return "bfloat16" if is_bfloat16 else "float32"


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to the device without waiting for it: with CUDA only a copy from pinned memory does not wait."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def peak_memory_bytes() -> int | None:
    """Most memory used by this process so far: on the GPU if one was used, else resident (none: not known)."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":  # no such count there without a further package
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
