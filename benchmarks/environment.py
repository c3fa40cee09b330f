"""What someone else needs to measure the same: machine, versions, commit; and how results are written."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def commit() -> str:
    """The commit measured, with a mark where files have changed since."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_model() -> str:
    """The processor's name, where the system tells it."""
    table = Path("/proc/cpuinfo")
    names = [line for line in table.read_text().splitlines() if line.startswith("model name")] if table.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """Instructions that decide how fast matrices are multiplied, where the system tells them."""
    table = Path("/proc/cpuinfo")
    lines = [line for line in table.read_text().splitlines() if line.startswith("flags")] if table.exists() else []
    there = set(lines[0].split()) if lines else set()
    return [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if name in there]


def device_name(device: str) -> str:
    """What computes."""
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def command() -> str:
    """The command line, so that it can be typed again at the root of the project."""
    script = Path(sys.argv[0])
    return shlex.join(["python", f"benchmarks/{script.name}", *sys.argv[1:]])


def warn_if_busy() -> float | None:
    """Says so where other work runs on the machine; gives the load average of the last minute."""
    try:
        load = os.getloadavg()[0]
    except OSError:
        return None
    if load > 0.5:
        say(f"warning: load average {load:.2f} before the start; figures of a busy machine are worth little")
    return round(load, 2)


def say(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)


def write(results: dict[str, Any], out: Path) -> None:
    """Writes results as JSON."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    say(f"results in {out}")
