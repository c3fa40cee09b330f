"""Makes the modules of benchmarks/ importable, which are scripts and no part of the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(autouse=True)
def without_triton_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable Triton's interpreter, in which the Triton kernel would run on a CPU and take minutes."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
