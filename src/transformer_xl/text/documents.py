"""What text is made of before it has tokens: splits, and documents that are read in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")


@dataclass(frozen=True)
class Document:
    """One text of a corpus."""

    name: str
    """Where it comes from, for messages."""
    chunks: Iterable[bytes]
    """Its bytes in pieces cut anywhere; they can be gone through more than once, and are read only then."""
    num_bytes: int = 0
    """How many there will be, to show how far reading is; 0: not known."""
