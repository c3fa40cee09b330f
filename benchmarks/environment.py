"""What all benchmarks record with their results: hardware, commit and command line; and how results are written."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

RESULTS = Path(__file__).parent / "results"
PROCESSOR_KINDS = ("amx", "avx512-bf16-zen5", "avx512-bf16", "avx512", "avx2")
"""Kinds of processors by their vector instructions, the widest first. AMD's Zen 5 computes AVX512 in units of 512 bits,
Zen 4 in two halves."""
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
_ZEN5_FAMILY = 26


def commit() -> str:
    """Return the abbreviated hash of the commit, with `-dirty` if files differ from it; `unknown` without git."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_model() -> str:
    """Return the name of the processor, as far as the system knows it, with AMD's generation from Zen 5 on."""
    name = _cpu_field("model name") or platform.processor() or platform.machine()
    return f"{name} (Zen 5)" if _is_zen5() else name


def cpu_features() -> list[str]:
    """Return the processor's vector instructions that affect the speed of matrix products; empty if unknown."""
    flags = set(_cpu_field("flags").split())
    return [name for name in _FEATURES if name in flags]


def processor_kind() -> str:
    """Return the kind of processor, one of `PROCESSOR_KINDS`, or other.

    It is part of the name of a file of results, so that those of another kind of processor stay.
    """
    if _is_zen5():
        return "avx512-bf16-zen5"
    kinds = {"amx_bf16": "amx", "avx512_bf16": "avx512-bf16", "avx512f": "avx512", "avx2": "avx2"}
    return next((kind for feature, kind in kinds.items() if feature in cpu_features()), "other")


def _is_zen5() -> bool:
    return _cpu_field("vendor_id") == "AuthenticAMD" and int(_cpu_field("cpu family") or 0) >= _ZEN5_FAMILY


def _cpu_field(name: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo, or an empty text."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")


def results_file(name: str) -> Path:
    """Return the file for results of this kind of processor, such as training-avx2.json."""
    return RESULTS / f"{name}-{processor_kind()}.json"


def device_name(device: str) -> str:
    """Return the name of a CUDA device, or the device as it is (cpu)."""
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def command() -> str:
    """Return this command line, as typed in the root folder of the project; of other folders only the name."""
    root = f"{Path(__file__).resolve().parents[1]}/"
    words = [word.removeprefix(root) for word in sys.argv[1:]]
    words = [Path(word).name if Path(word).is_absolute() else word for word in words]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def surroundings(device: str, load: float | None, packages: tuple[str, ...] = ("torch",)) -> dict[str, Any]:
    """Return command, commit, versions of packages and the machine, with its load average before the start."""
    import torch

    return {
        "command": command(),
        "commit": commit(),
        "versions": {name: version(name) for name in packages} | {"python": platform.python_version()},
        "machine": {
            "cpu": cpu_model(),
            "features": cpu_features(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": device_name(device),
            "load_average_before": load,
        },
    }


def warn_if_busy() -> float | None:
    """Warn if other processes use the CPU, and return the load average of the last minute, or None if unknown."""
    try:
        load = os.getloadavg()[0]
    except OSError:
        return None
    if load > 0.5:
        say(f"warning: load average {load:.2f} before the start; measurements on a busy computer are unreliable")
    return round(load, 2)


def refuse(text: str) -> NoReturn:
    """End the program with status 2 and a line that says what was given and what was wanted."""
    say(text)
    raise SystemExit(2)


def say(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)


def write(results: dict[str, Any], out: Path) -> None:
    """Write results to a JSON file, which an interruption leaves as it was."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    partial.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    partial.replace(out)
    say(f"results in {out}")


def read(path: Path) -> dict[str, Any]:
    """Return the results that `write` wrote; a file of anything else ends the program."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse(f"{path} cannot be read as results of a benchmark: {error}")
    if not isinstance(results, dict):
        refuse(f"{path} has no results of a benchmark; choose another file")
    return results
