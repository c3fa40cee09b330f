"""Make `oracles.py` and `systems.py` importable for the tests in this folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
