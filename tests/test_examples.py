"""The examples run as they are written, with fewer steps."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "train.py"))["main"](tmp_path / "out", max_steps=24, stop_at=5.3)
    out = capsys.readouterr().out
    assert re.search(r"stopped at step (11|21) of 24", out)
    assert "finished: True" in out
