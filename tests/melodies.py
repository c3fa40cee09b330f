"""The melodies of examples/melodies.py, for tests with MIDI files."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MODULE: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "melodies.py"))
TICKS: int = _MODULE["TICKS"]
MELODIES: dict[str, tuple[int, str]] = _MODULE["MELODIES"]
notes_of: Callable[[str], list[tuple[int, int, int]]] = _MODULE["notes_of"]
midi_file: Callable[..., bytes] = _MODULE["midi_file"]
main: Callable[[Path], None] = _MODULE["main"]


def melody(name: str = "minuet", quarters_per_minute: int = 100) -> bytes:
    """Return a melody as a MIDI file."""
    beats, notes = MELODIES[name]
    return midi_file(notes_of(notes), beats_per_bar=beats, quarters_per_minute=quarters_per_minute)
