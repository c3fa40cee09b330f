"""Files of earlier versions are opened, and give the numbers that were recorded when earlier/make.py made them.

The numbers of another processor differ by rounding.

The log-probabilities of the session of 0.1.0 were recorded anew when continuations began to be read as segments of
their own (they differ by up to 0.02 nats; the text is the same).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from earlier.make import PARTS

FOLDER = Path(__file__).parent / "earlier"
VERSIONS = sorted(file.parent.name for file in FOLDER.glob("*/expected.json"))


def same(actual: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal, but for the rounding of numbers."""
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(same(actual[name], expected[name]) for name in expected)
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    return actual == (pytest.approx(expected, rel=0, abs=1e-5) if isinstance(expected, float) else expected)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_files_of_earlier_versions_are_opened(version: str, part: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER / version, tmp_path / version)  # so that nothing is changed here
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))["parts"][part]
    actual = json.loads(json.dumps(PARTS[part](folder, tmp_path)))
    different = {
        name: (actual.get(name), expected[name]) for name in expected if not same(actual.get(name), expected[name])
    }
    assert not different


def test_there_are_files_of_a_version() -> None:
    assert "0.1.0" in VERSIONS
