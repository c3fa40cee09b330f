"""The device to compute on (CUDA, Apple's MPS or the CPU), its threads, its dtypes and its memory use."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.filesize import decimal

from transformer_xl import __version__
from transformer_xl.config import UserError, check_type, nearest

_MAX_THREADS = 4096  # torch itself has no limit, and crashes with a very large number
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_SMALL_BYTES = 2**26  # not worth a look at what is available

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
        check_type(number, int, "threads", "give an integer")
        if not 1 <= number <= _MAX_THREADS:
            raise UserError(f"threads={number}: must be between 1 and {_MAX_THREADS:,}")
        torch.set_num_threads(number)


def environment(device: torch.device) -> dict[str, Any]:
    """Describe where something was computed: versions, the commit where there is one, device, threads, processor."""
    return {
        "transformer_xl": __version__,
        "commit": _commit(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
    }


def _commit() -> str | None:
    """Return the commit that the package is run from, with -dirty after it if files have changed since."""
    clone = Path(__file__).parents[2]
    if not (clone / ".git").exists():
        return None
    with suppress(OSError, subprocess.SubprocessError):
        words = ["git", "-C", str(clone), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    return None


def _processor() -> str:
    """Return the processor's model name and its SIMD extensions that affect speed, as far as Linux reports them."""
    found = processor_field("flags").split()
    flags = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in found]
    return " ".join([processor_field("model name") or platform.processor(), *flags]).strip()


def processor_field(name: str) -> str:
    """Return a field of the last processor in /proc/cpuinfo, or an empty text where Linux does not report it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return fields.get(name, "")


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
    """Return a context that computes matrix products in the dtype, whatever that of the caller's autocast is.

    Weights and sums stay float32.
    """
    if resolve_dtype(device, dtype) == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    is_on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


def resolve_dtype(
    device: torch.device, dtype: Precision, weights: torch.dtype = torch.float32
) -> Literal["float32", "bfloat16"]:
    """Return the dtype name of matrix products under `autocast`; `auto` is bfloat16 if hardware and weights support it.

    Weights of float64 and float16 do not: autocast mixes their dtype with its own. Products are in theirs then.

    Raises:
        UserError: there is no such dtype, or it is bfloat16 and the weights do not support it.
    """
    if dtype not in get_args(Precision):
        raise UserError(f"no dtype {dtype!r}; give auto, float32 or bfloat16 as text")
    is_supported = weights in (torch.float32, torch.bfloat16)
    if dtype == "bfloat16" and not is_supported:
        raise UserError(
            f"bfloat16 is not for weights of {weights}; give auto for their dtype, or call float() of the model"
        )
    is_bfloat16 = dtype == "bfloat16" or (dtype == "auto" and is_supported and has_bfloat16(device))
    return "bfloat16" if is_bfloat16 else "float32"


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to the device without waiting for the copy; CUDA requires pinned memory for that."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def require_memory(task: str, num_bytes: int, device: torch.device, advice: str) -> None:
    """Check, before anything is allocated, that a task can fit into memory: otherwise the kernel may kill the process.

    Args:
        task: what needs the memory, with the sizes that decide how much; the message begins with it.
        num_bytes: a lower bound of what it needs at the same time (`model/sizes.py`).
        device: device that holds it.
        advice: what to do if there is not enough.

    Raises:
        UserError: it needs more than is available.
    """
    available = available_memory_bytes(device) if num_bytes > _SMALL_BYTES else None
    if available is not None and num_bytes > available:
        raise UserError(
            f"{task} needs at least {decimal(num_bytes)} of memory, and {decimal(max(0, available))} are available on "
            f"{device}; {advice}"
        )


def available_memory_bytes(device: torch.device) -> int | None:
    """Return how much more memory this process can use on the device, or None if it is unknown.

    For the CPU it is the smallest of what the system, the control groups of a container and the process's own limit
    leave, with swap and the file cache, which the kernel frees when it is needed.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    meminfo = _numbers(_PROC / "meminfo")
    limits = [limit + meminfo.get("SwapFree:", 0) * 1024 for limit in _cgroup_bytes()]
    if "MemAvailable:" in meminfo:
        limits.append((meminfo["MemAvailable:"] + meminfo.get("SwapFree:", 0)) * 1024)
    elif hasattr(os, "sysconf") and {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= os.sysconf_names.keys():
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))  # macOS: all that is installed
    with suppress(ImportError, OSError):
        import resource  # not on Windows

        address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
        if address_space != resource.RLIM_INFINITY:
            used_pages = int((_PROC / "self/statm").read_text().split()[0])
            limits.append(address_space - used_pages * resource.getpagesize())
    return min(limits, default=None)


def _cgroup_bytes() -> Iterator[int]:
    """Yield how many bytes each control group of this process leaves (version 2); the file cache counts as free.

    In a container, the path of the group may be that outside of it; then the root that it sees is its own group.
    """
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for path in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        group = _CGROUPS / path
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # no such file, or the limit is the word max
                limit, usage = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
                statistics = _numbers(folder / "memory.stat")
                yield limit - usage + statistics.get("active_file", 0) + statistics.get("inactive_file", 0)
            if folder == _CGROUPS:
                break


def _numbers(file: Path) -> dict[str, int]:
    """Return the numbers of a system file with a name and a number in each line; empty if there is no such file."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
