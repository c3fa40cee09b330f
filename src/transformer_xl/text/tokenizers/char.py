"""Character tokens: Unicode code points, with a fallback to bytes.

Ids 0 .. C - 1 are the C characters of the vocabulary, the most frequent first. With byte fallback, ids C .. C + 255 are
the 256 byte values, and any other character is encoded as its UTF-8 bytes, so that decoding restores every Unicode
text exactly. Without byte fallback, other characters are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transformer_xl.text.tokenizers.base import (
    EncodedChunk,
    EncodingError,
    Tokenizer,
    check_counts,
    decode_utf8,
    token_dtype,
)

_NUM_CODE_POINTS = 0x110000


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """Return the code points of a text without surrogates, shape (characters,), as a read-only array."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def whole_characters(text: bytes) -> int:
    """Return the length of UTF-8 text without an incomplete last character; approximate for other bytes."""
    for length in range(1, min(4, len(text)) + 1):
        byte = text[-length]
        if byte & 0xC0 != 0x80:  # the first byte of a character determines its length
            char_length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - length if char_length > length else len(text)
    return len(text)


@dataclass(frozen=True, eq=False)
class CharTokenizer(Tokenizer):
    """A tokenizer whose ids are frequent characters, followed by the byte values for all others."""

    characters: str
    """(C,) the characters that are tokens."""
    counts: npt.NDArray[np.int64] | None = None
    """(V,) how often each token occurred in the training text; None if unknown or not descending."""
    byte_fallback: bool = True
    """Whether other characters are encoded as bytes; otherwise they are refused."""

    kind = "char"

    @property
    @override
    def vocab_size(self) -> int:
        return len(self.characters) + 256 * self.byte_fallback

    @cached_property
    @override
    def bos_token_id(self) -> int:
        """The newline, or the most frequent character if the vocabulary has no newline."""
        index = self.characters.find("\n")
        return index if index >= 0 else len(self.characters) + ord("\n") if self.byte_fallback else 0

    @cached_property
    @override
    def is_newline_V(self) -> npt.NDArray[np.bool_]:
        """(V,) the newline, as a character and as a byte."""
        return np.array([content == b"\n" for content in self._token_bytes])

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        characters = [character.encode("utf-8") for character in self.characters]
        return [*characters, *(bytes([byte]) for byte in range(256))] if self.byte_fallback else characters

    @cached_property
    def _id_of_code_point(self) -> npt.NDArray[np.int32]:
        """Ids by code point; -1 for characters that are not in the vocabulary."""
        ids = np.full(_NUM_CODE_POINTS, -1, dtype=np.int32)
        ids[code_points(self.characters)] = np.arange(len(self.characters))
        return ids

    @override
    def last_boundary(self, text: bytes) -> int:
        return whole_characters(text)

    @override
    def encode_chunk(self, chunk: bytes) -> EncodedChunk:
        text = decode_utf8(chunk)
        ids = self._id_of_code_point[code_points(text)]
        other = np.flatnonzero(ids < 0)
        if other.size:
            first = int(other[0])
            if not self.byte_fallback:
                raise EncodingError(
                    len(text[:first].encode("utf-8")),
                    f"the character {text[first]!r} (U+{ord(text[first]):04X}) is not one of the {self.vocab_size} of "
                    "this vocabulary, which has no byte fallback; remove it, or take another tokenizer",
                )
            contents = [text[index].encode("utf-8") for index in other]
            lengths = np.ones(len(ids), dtype=np.int64)
            lengths[other] = [len(content) for content in contents]
            ids = np.repeat(ids, lengths)
            ids[ids < 0] = np.frombuffer(b"".join(contents), dtype=np.uint8).astype(np.int32) + len(self.characters)
        return EncodedChunk(ids.astype(token_dtype(self.vocab_size)))

    @override
    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        return b"".join(map(self._token_bytes.__getitem__, self.check_ids(ids).tolist()))

    @override
    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "byte_fallback": self.byte_fallback,
            "characters": list(self.characters),
            "counts": None if self.counts is None else self.counts.tolist(),
        }

    @classmethod
    @override
    def from_json(cls, values: Mapping[str, Any]) -> CharTokenizer:
        characters, byte_fallback = values.get("characters"), values.get("byte_fallback")
        if not isinstance(byte_fallback, bool):
            raise ValueError(f"byte_fallback is {byte_fallback!r}, expected true or false")
        if not isinstance(characters, list) or not all(isinstance(one, str) and len(one) == 1 for one in characters):
            raise ValueError("its characters are not a list of single characters")
        if len(set(characters)) < len(characters) or not (byte_fallback or characters):
            raise ValueError("it has no characters, or one of them twice")
        joined = "".join(characters)
        joined.encode("utf-8")  # raises for an unpaired surrogate
        vocab_size = len(joined) + 256 * byte_fallback
        return cls(joined, check_counts(values.get("counts"), vocab_size), byte_fallback)
