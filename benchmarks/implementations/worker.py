"""One implementation of `training.py` or `inference.py` in a process of its own: builds the model, steps when told to.

    python -m implementations.worker '{"implementation": "ours", "precision": "float32", ...}'

Reads a number of steps a line, answers each with one line of JSON: seconds, and the mean loss of those steps. Nothing
is computed while it waits. The end of the input ends it, after a last line: the most memory it had. It needs torch and
what the implementation needs, nothing else, so it runs in the peers' environment too.
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
    """Source of Python's standard library, in the order of its paths: text that every Python has."""
    library = Path(sysconfig.get_paths()["stdlib"])
    parts, length = [], 0
    for path in sorted(library.rglob("*.py")):
        if "site-packages" not in path.parts and length < num_bytes:
            parts.append(path.read_bytes())
            length += len(parts[-1])
    return b"".join(parts)


class Segments:
    """Rows side by side, each a stretch of the text; from its end it goes on at its beginning."""

    def __init__(self, task: Task) -> None:
        ids_A = (
            torch.frombuffer(bytearray(text(task.batch_size * task.segment_length * 300)), dtype=torch.uint8)
            % task.vocab_size
        )
        length = (len(ids_A) // task.batch_size - 1) // task.segment_length * task.segment_length + 1
        self.ids_BA = ids_A[: task.batch_size * length].view(task.batch_size, length).long()
        self.task, self.place = task, 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, T), on the CPU."""
        if self.place + self.task.segment_length >= self.ids_BA.shape[1]:
            self.place = 0
        start, self.place = self.place, self.place + self.task.segment_length
        return self.ids_BA[:, start : self.place], self.ids_BA[:, start + 1 : self.place + 1]


def resident_bytes(name: str) -> int:
    """A line of this process's status: VmRSS, what it has now, or VmHWM, the most it ever had. 0 where unknown."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def wait(device: str) -> None:
    """Until the device has done what it was told."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def run(implementation: Implementation, segments: Segments, steps: int, device: str) -> dict[str, float]:
    """Takes steps against the clock."""
    losses = []
    wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        losses.append(implementation.step(*segments.next()).detach())
    wait(device)
    return {"seconds": time.perf_counter() - began, "loss": float(torch.stack(losses).float().mean())}


def peak(device: str, before: int) -> dict[str, int]:
    """The most memory so far: resident, and on the GPU."""
    found = {"peak_resident_bytes": resident_bytes("VmHWM"), "resident_bytes_before_model": before}
    if device.startswith("cuda"):
        found["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    return found


def warm_libraries(device: str) -> None:
    """Takes a step of a tiny model, so that what torch loads late does not count as the implementation's memory."""
    tiny = torch.nn.Linear(2, 2).to(device)
    tiny(torch.ones(1, 2, device=device)).sum().backward()
    torch.optim.Adam(tiny.parameters(), fused=True).step()


def answer(what: dict[str, Any]) -> None:
    """One line for the conductor."""
    print(json.dumps(what), flush=True)


def main() -> None:
    """Says what was built, then does as told."""
    task = Task(**json.loads(sys.argv[1]))
    module = importlib.import_module(f"implementations.{task.implementation}")
    warm_libraries(task.device)
    before = resident_bytes("VmRSS")
    torch.manual_seed(1)
    implementation: Implementation = module.Runner(task)
    segments = Segments(task)
    # several names may stand for one tensor
    parameters = sum(parameter.numel() for parameter in set(implementation.model.parameters()))
    versions = {"torch": torch.__version__, **implementation.versions}
    answer(
        {
            "parameters": parameters,
            "threads": torch.get_num_threads(),
            "note": implementation.note,
            "versions": versions,
        }
    )
    for line in sys.stdin:
        answer(run(implementation, segments, int(line), task.device))
    answer(peak(task.device, before))


if __name__ == "__main__":
    main()
