"""The benchmarks are scripts, not part of the package: their folder is where Python looks first, as when they run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(autouse=True)
def without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernel runs on a CPU too where its interpreter is on, and takes minutes."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
