"""Files that are not text, which a package reads as integers, such as MIDI files.

A package names a function in the entry points of the group `transformer_xl.file_codecs`; the name is that of the
tokenizer in `prepare(..., tokenizer=name)`. The function takes an `IntegerTokenizer` that it made before, or None for
a new one, and returns a `FileCodec`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from transformer_xl.config import UserError
from transformer_xl.text.tokenizers.integer import IntegerTokenizer

MIDI_SUFFIXES = (".mid", ".midi")
"""Of files that are not taken for text, whether a codec is there or not."""


class FileCodecError(UserError):
    """A file that a codec cannot read, or integers that it cannot write."""


class FileCodec(Protocol):
    """Reads files as integers."""

    kind: str
    """What the files are, such as `MIDI`."""

    @property
    def tokenizer(self) -> IntegerTokenizer:
        """The tokenizer, which contains what the integers mean."""
        ...

    def encode_file(self, path: Path) -> list[int]:
        """Return the integers of a file.

        Raises:
            FileCodecError: it is not such a file.
            UserError: it cannot be read.
        """
        ...


def find_codec(name: str, tokenizer: IntegerTokenizer | None = None) -> FileCodec | None:
    """Return the codec that was registered under a name, or None.

    Args:
        name: the name.
        tokenizer: the tokenizer of a corpus that the codec made before, or None for a new one.

    Raises:
        UserError: a package that the codec needs is not installed.
    """
    for entry in entry_points(group="transformer_xl.file_codecs", name=name):
        return entry.load()(tokenizer)
    return None
