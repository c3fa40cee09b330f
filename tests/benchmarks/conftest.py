"""The benchmarks are scripts, not part of the package: their folder is where Python looks first, as when they run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
