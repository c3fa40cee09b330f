"""Makes the modules of benchmarks/ importable, which are scripts and no part of the package, and helpers of servers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS.parent / "benchmarks"), str(_TESTS / "apps" / "serve")]


@pytest.fixture(autouse=True)
def without_triton_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable Triton's interpreter, in which the Triton kernel would run on a CPU and take minutes."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
