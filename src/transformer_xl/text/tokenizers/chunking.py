"""Splits long documents into chunks whose concatenated tokens equal those of the whole document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from transformer_xl.text.tokenizers.base import EncodingError, Tokenizer

ENCODE_CHUNK_BYTES = 4 * 2**20
"""Approximate size of the chunks that are encoded at once."""
MAX_UNSPLIT_BYTES = 16 * 2**20
"""Maximum number of consecutive bytes without a split position, since they have to be held in memory."""


def split_chunks(tokenizer: Tokenizer, chunks: Iterable[bytes], size: int = ENCODE_CHUNK_BYTES) -> Iterator[bytes]:
    """Split a document at positions that do not change its tokens; little more than one chunk is held in memory.

    Args:
        tokenizer: finds the positions, and determines whether a final newline is added.
        chunks: the document in chunks of any size.
        size: approximate size of the new chunks in bytes, at most `MAX_UNSPLIT_BYTES`.

    Raises:
        EncodingError: more than `MAX_UNSPLIT_BYTES` cannot be split; the position is relative to the document.
    """
    assert 0 < size <= MAX_UNSPLIT_BYTES
    # `limit` is the length of the buffer at which the next split is attempted.
    buffer, buffer_start, limit, last_byte = bytearray(), 0, size, b""
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            addition = rest[: limit - len(buffer)]
            rest = rest[len(addition) :]
            buffer += addition
            if len(buffer) < limit:
                break
            text = bytes(buffer)
            end = tokenizer.last_boundary(text)
            if end:
                yield text[:end]
                buffer, buffer_start, last_byte = bytearray(text[end:]), buffer_start + end, text[end - 1 : end]
            elif len(buffer) > MAX_UNSPLIT_BYTES:
                # the comparison is true if the text has no whitespace, except at its start
                raise EncodingError(buffer_start, _NO_SPACE if text.split(None, 1) == [text.lstrip()] else _NO_NEWLINE)
            limit = min(len(buffer) + size, MAX_UNSPLIT_BYTES + 1)
    last_byte = bytes(buffer[-1:]) or last_byte
    if tokenizer.adds_final_newline and last_byte not in (b"", b"\n"):
        buffer += b"\n"
    if buffer:
        yield bytes(buffer)


_NO_SPACE = "no whitespace in 16 MiB, so this is probably not text; leave it out, or use tokenizer=byte"
_NO_NEWLINE = (
    "no newline in 16 MiB, nor whitespace at which this tokenizer can split the text; break the line, or leave it out"
)


def last_whitespace(text: bytes) -> int:
    """Return the position after the last ASCII whitespace in `text`, or 0 if there is none."""
    return 1 + max(text.rfind(character) for character in b" \n\t\r\v\f")


def last_match_in_line(pattern: re.Pattern[bytes], text: bytes) -> int:
    """Return the start of the last match in the last line, or the start of that line if nothing matches."""
    line_start = text.rfind(b"\n") + 1
    return max((match.start() for match in pattern.finditer(text, line_start)), default=line_start)
