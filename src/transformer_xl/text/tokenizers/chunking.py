"""Splits long documents into chunks whose concatenated tokens equal those of the whole document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Protocol

from transformer_xl.text.tokenizers.base import EncodingError

ENCODE_CHUNK_BYTES = 4 * 2**20
"""Approximate size of the chunks that are encoded at once."""
MAX_UNSPLIT_BYTES = 16 * 2**20
"""Maximum number of consecutive bytes without a split position, since they have to be held in memory."""
_SEARCHED_BYTES = 256


class BoundaryFinder(Protocol):
    """The part of `Tokenizer` that `split_chunks` needs; see its documentation."""

    @property
    def adds_final_newline(self) -> bool: ...

    def last_boundary(self, text: bytes) -> int: ...


def split_chunks(tokenizer: BoundaryFinder, chunks: Iterable[bytes], size: int = ENCODE_CHUNK_BYTES) -> Iterator[bytes]:
    """Split a document again at positions that do not change its tokens; little more than one chunk is held in memory.

    Args:
        tokenizer: finds the positions, and determines whether a final newline is added.
        chunks: the document in chunks of any size.
        size: approximate size of the new chunks in bytes, at most `MAX_UNSPLIT_BYTES`.

    Raises:
        EncodingError: more than `MAX_UNSPLIT_BYTES` cannot be split; the position is relative to the document.
    """
    assert 0 < size <= MAX_UNSPLIT_BYTES
    held, position, limit, last_byte = bytearray(), 0, size, b""
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            taken = rest[: limit - len(held)]
            rest = rest[len(taken) :]
            held += taken
            if len(held) < limit:
                break
            text = bytes(held)
            cut = tokenizer.last_boundary(text)
            if cut:
                yield text[:cut]
                held, position, last_byte = bytearray(text[cut:]), position + cut, text[cut - 1 : cut]
            elif len(held) > MAX_UNSPLIT_BYTES:
                raise EncodingError(position, _NO_SPACE if text.split(None, 1) == [text.lstrip()] else _NO_NEWLINE)
            limit = min(len(held) + size, MAX_UNSPLIT_BYTES + 1)
    last_byte = bytes(held[-1:]) or last_byte
    if tokenizer.adds_final_newline and last_byte not in (b"", b"\n"):
        held += b"\n"
    if held:
        yield bytes(held)


_NO_SPACE = "no white space in 16 MiB, is this text?; leave it out, or use --tokenizer byte"
_NO_NEWLINE = (
    "no newline in 16 MiB, nor white space at which this tokenizer can split the text; break the line, or leave it out"
)


def last_whitespace(text: bytes) -> int:
    """Return the position after the last ASCII whitespace in `text`, or 0 if it has none."""
    return 1 + max(text.rfind(character) for character in b" \n\t\r\v\f")


def last_match_in_line(pattern: re.Pattern[bytes], text: bytes) -> int:
    """Return the start of the last match in the last line, or the start of that line if nothing matches."""
    line = text.rfind(b"\n") + 1
    start, width = len(text), _SEARCHED_BYTES
    position = line
    while position == line and start > line:  # search backwards, since the last match is usually near the end
        start, width = max(line, len(text) - width), 2 * width
        position = max((match.start() for match in pattern.finditer(text, start)), default=line)
    return position
