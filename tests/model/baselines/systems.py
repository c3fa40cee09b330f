"""The paper's other systems, small."""

from __future__ import annotations

from typing import Any

from transformer_xl.config import ARCHITECTURES

SYSTEMS: dict[str, dict[str, Any]] = {
    "lstm": {"architecture": "lstm"},
    "qrnn, window 1": {"architecture": "qrnn", "qrnn_kernel_size": 1},
    "qrnn, window 2": {"architecture": "qrnn"},
    "shaw": {"architecture": "shaw", "max_relative_positions": 5},
    "sinusoidal": {"architecture": "vaswani"},
    "learned": {"architecture": "al-rfou", "max_position_embeddings": 17},
}
WITH_MEMORY = [name for name, system in SYSTEMS.items() if ARCHITECTURES[system["architecture"]].has_memory]
RECURRENT = [name for name in WITH_MEMORY if name != "shaw"]
