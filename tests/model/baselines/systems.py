"""The paper's other systems, small."""

from __future__ import annotations

from typing import Any

SYSTEMS: dict[str, dict[str, Any]] = {
    "lstm": {"kind": "lstm", "memory": 11},
    "qrnn, window 1": {"kind": "qrnn", "qrnn_kernel_size": 1, "memory": 11},
    "qrnn, window 2": {"kind": "qrnn", "memory": 11},
    "shaw": {"encoding": "shaw", "learned_positions": 5, "memory": 11},
    "sinusoidal": {"encoding": "sinusoidal"},
    "learned": {"encoding": "learned", "learned_positions": 17},
}
WITH_MEMORY = [name for name, system in SYSTEMS.items() if "memory" in system]
RECURRENT = [name for name in WITH_MEMORY if name != "shaw"]
