"""Process that runs one implementation for `training.py` or `inference.py`, and computes steps on request.

    python -m implementations.worker '{"implementation": "ours", "dtype": "float32", ...}'

The argument is a `Task` as JSON. The process prints one line of JSON that describes the model. Then it reads a number
of steps from each line of standard input, and prints a line of JSON with their seconds and mean loss. At the end of the
input it prints its peak memory and exits. It needs only torch and the implementation's packages, so it also runs in the
environment of the other implementations (benchmarks/peers.txt).
"""

from __future__ import annotations

import importlib
import json
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from implementations.task import Implementation, Task
from torch import Tensor


def text(num_bytes: int) -> bytes:
    """Return at least `num_bytes` of the source of Python's standard library, a text that needs no download."""
    library = Path(sysconfig.get_paths()["stdlib"])
    content = b""
    for path in sorted(library.rglob("*.py")):
        if "site-packages" not in path.parts and len(content) < num_bytes:
            content += path.read_bytes()
    return content


class Segments:
    """Consecutive segments of a text; each batch row reads another part of it, again and again.

    Shape suffixes: B batch rows, T tokens of a segment, A all tokens (of the text or of a row).
    """

    def __init__(self, task: Task) -> None:
        content = bytearray(text(task.batch_size * task.segment_length * 300))  # 300 segments before it repeats
        ids_A = torch.frombuffer(content, dtype=torch.uint8) % task.vocab_size
        length = (len(ids_A) // task.batch_size - 1) // task.segment_length * task.segment_length + 1
        self.ids_BA = ids_A[: task.batch_size * length].view(task.batch_size, length).long()
        self.task, self.position = task, 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (B, T), on the CPU."""
        if self.position + self.task.segment_length >= self.ids_BA.shape[1]:
            self.position = 0
        start, self.position = self.position, self.position + self.task.segment_length
        return self.ids_BA[:, start : self.position], self.ids_BA[:, start + 1 : self.position + 1]


def resident_bytes(name: str) -> int:
    """Return this process's resident memory now (name VmRSS) or at its peak (VmHWM); 0 if unknown (not on Linux)."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def synchronize(device: str) -> None:
    """Wait until the device has finished all submitted work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def run(implementation: Implementation, segments: Segments, steps: int, device: str) -> dict[str, float]:
    """Run so many steps, and return their total seconds and mean loss."""
    losses = []
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        losses.append(implementation.step(*segments.next()).detach())
    synchronize(device)
    return {"seconds": time.perf_counter() - start, "loss": float(torch.stack(losses).float().mean())}


def peak_memory(device: str, before: int) -> dict[str, int]:
    """Return the peak memory so far, and `before`, the resident memory before the model was built."""
    peaks = {"peak_resident_bytes": resident_bytes("VmHWM"), "resident_bytes_before_model": before}
    if device.startswith("cuda"):
        peaks["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    return peaks


def warm_libraries(device: str) -> None:
    """Train a tiny model for a step, so that what torch loads late is not counted as the implementation's memory."""
    tiny = torch.nn.Linear(2, 2).to(device)
    tiny(torch.ones(1, 2, device=device)).sum().backward()
    torch.optim.Adam(tiny.parameters(), fused=True).step()


def respond(values: dict[str, Any]) -> None:
    """Print one line of JSON for the process that started this one."""
    print(json.dumps(values), flush=True)


def main() -> None:
    """Build the implementation and describe it, then run the requested steps."""
    task = Task(**json.loads(sys.argv[1]))
    module = importlib.import_module(f"implementations.{task.implementation}")
    warm_libraries(task.device)
    before = resident_bytes("VmRSS")
    torch.manual_seed(1)
    implementation: Implementation = module.Runner(task)
    segments = Segments(task)
    respond(
        {
            "parameters": sum(parameter.numel() for parameter in implementation.model.parameters()),
            "threads": torch.get_num_threads(),
            "note": implementation.note,
            "versions": {"torch": torch.__version__, **implementation.versions},
        }
    )
    for line in sys.stdin:
        respond(run(implementation, segments, int(line), task.device))
    respond(peak_memory(task.device, before))


if __name__ == "__main__":
    main()
