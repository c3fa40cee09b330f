"""Lets the tests of serving import the helpers of this folder and of tests/integrations."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "integrations")]
