"""Character tokens: Unicode code points, with a fallback to bytes.

Ids 0 .. C - 1 are the C characters of the vocabulary, the most frequent first. With byte fallback, ids C .. C + 255 are
the 256 byte values, and a character that is not in the vocabulary is encoded as its UTF-8 bytes, so that decoding
restores every Unicode text exactly. Without byte fallback, encoding such a character is an error.

Shape suffix: V vocabulary.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transformer_xl.text.tokenizers.base import (
    ByteLevelTokenizer,
    EncodedChunk,
    EncodingError,
    check_counts,
    decode_utf8,
    token_dtype,
)
from transformer_xl.text.tokenizers.byte import ALL_BYTES

_NUM_CODE_POINTS = 0x110000  # Unicode has the code points 0 to 0x10FFFF


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """Return the code points of a text without surrogates, shape (characters,), as a read-only array."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


@dataclass(frozen=True, eq=False, repr=False)
class CharTokenizer(ByteLevelTokenizer):
    """A tokenizer whose first ids are characters, and whose other 256 ids (with byte fallback) are the byte values."""

    characters: str
    """The C characters that are tokens, in the order of their ids."""
    counts: npt.NDArray[np.int64] | None = None
    """(V,) how often each token occurred in the training text; None if unknown or not descending."""
    byte_fallback: bool = True
    """Whether other characters are encoded as bytes; otherwise encoding them is an error."""

    kind = "char"

    @cached_property
    @override
    def bos_token_id(self) -> int:
        """The newline: its character, else its byte; without either, the most frequent character."""
        index = self.characters.find("\n")
        return index if index >= 0 else len(self.characters) + ord("\n") if self.byte_fallback else 0

    @cached_property
    @override
    def token_bytes(self) -> list[bytes]:
        """(V,) the UTF-8 bytes of each character, then the byte values if the tokenizer has byte fallback."""
        return [*map(str.encode, self.characters), *(ALL_BYTES if self.byte_fallback else [])]

    @cached_property
    def _id_of_code_point(self) -> npt.NDArray[np.int32]:
        """The id of each code point, or -1 if the character is not in the vocabulary."""
        ids = np.full(_NUM_CODE_POINTS, -1, dtype=np.int32)
        ids[code_points(self.characters)] = np.arange(len(self.characters))
        return ids

    @override
    def last_boundary(self, text: bytes) -> int:
        """Return the length of the text without an incomplete last character."""
        tail = text[-4:]  # a UTF-8 character has up to 4 bytes
        _, num_complete = codecs.utf_8_decode(tail, "replace", False)
        return len(text) - len(tail) + num_complete

    @override
    def encode_chunk(self, chunk: bytes) -> EncodedChunk:
        text = decode_utf8(chunk)
        ids = self._id_of_code_point[code_points(text)]
        unknown = np.flatnonzero(ids < 0)
        if unknown.size and not self.byte_fallback:
            index = int(unknown[0])
            raise EncodingError(
                len(text[:index].encode("utf-8")),
                f"the character {text[index]!r} (U+{ord(text[index]):04X}) is not one of the {self.vocab_size} of this "
                "vocabulary, which has no byte fallback; remove it, or use another tokenizer",
            )
        if unknown.size:
            utf8 = [text[index].encode("utf-8") for index in unknown]
            lengths = np.ones(len(ids), dtype=np.int64)
            lengths[unknown] = [len(content) for content in utf8]
            ids = np.repeat(ids, lengths)
            ids[ids < 0] = np.frombuffer(b"".join(utf8), dtype=np.uint8).astype(np.int32) + len(self.characters)
        return EncodedChunk(ids.astype(token_dtype(self.vocab_size)))

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
        if not (
            isinstance(characters, list)
            and all(isinstance(one, str) and len(one) == 1 for one in characters)
            and len(set(characters)) == len(characters)
            and (byte_fallback or characters)
        ):
            raise ValueError("its characters are not a list of different single characters")
        tokenizer = cls("".join(characters), byte_fallback=byte_fallback)
        # vocab_size raises a ValueError for an unpaired surrogate, which has no UTF-8 bytes
        return replace(tokenizer, counts=check_counts(values.get("counts"), tokenizer.vocab_size))
