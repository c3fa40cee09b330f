"""Characters as tokens: Unicode code points, with bytes to fall back on.

Ids 0 .. C - 1 are the C characters found in the text the vocabulary was learned from, the most frequent first. Where
it is not closed, ids C .. C + 255 are the 256 byte values, and any other character is written as its UTF-8 bytes, so
that every Unicode text comes back exactly. A closed vocabulary refuses other characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer_xl.text.tokenizer import (
    EncodedChunk,
    EncodingError,
    StreamDecoder,
    TokenArray,
    Utf8StreamDecoder,
    check_ids,
    decode_utf8,
    to_bytes,
    token_dtype,
)
from transformer_xl.text.tokenizers.words import check_counts

_NUM_CODES = 0x110000


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """(characters,) the code points of a text without surrogates, read only."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def whole_characters(text: bytes) -> int:
    """The length of UTF-8 text without the character that its end cuts; of what is not UTF-8, about its length."""
    for length in range(1, min(4, len(text)) + 1):
        byte = text[-length]
        if byte & 0xC0 != 0x80:  # the first byte of a character, which says how many there are
            wanted = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - length if wanted > length else len(text)
    return len(text)


@dataclass(frozen=True, eq=False)
class CharTokenizer:
    """Characters in the order of their ids, and whether there are others."""

    characters: str
    """(C,) the characters that are tokens."""
    counts: npt.NDArray[np.int64] | None
    """(V,) how often each token stood in the text they were learned from; none: not known, or not falling."""
    closed: bool = False
    """Other characters are refused; otherwise they are written as bytes."""

    kind = "characters"
    adds_final_newline = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the tables, which are made again where they are needed."""
        return CharTokenizer, (self.characters, self.counts, self.closed)

    @property
    def vocab_size(self) -> int:
        """Number of characters, and 256 where other characters become bytes."""
        return len(self.characters) + (0 if self.closed else 256)

    @cached_property
    def bos_token_id(self) -> int:
        """The line end; where a closed vocabulary has none, its most frequent character."""
        place = self.characters.find("\n")
        return place if place >= 0 else 0 if self.closed else len(self.characters) + ord("\n")

    @property
    def is_newline_V(self) -> npt.NDArray[np.bool_]:
        """(V,) the line end, as a character and as a byte."""
        return np.array([content == b"\n" for content in self._contents])

    @cached_property
    def _contents(self) -> list[bytes]:
        characters = [character.encode("utf-8") for character in self.characters]
        return characters if self.closed else [*characters, *(bytes([byte]) for byte in range(256))]

    @cached_property
    def _ids(self) -> npt.NDArray[np.int32]:
        """Ids by code point; -1: not one of the characters."""
        ids = np.full(_NUM_CODES, -1, dtype=np.int32)
        ids[code_points(self.characters)] = np.arange(len(self.characters))
        return ids

    def last_boundary(self, text: bytes) -> int:
        """The end, or the start of the character that is not whole there."""
        return whole_characters(text)

    def encode_chunk(self, piece: bytes) -> EncodedChunk:
        """The characters of the piece, bytes for those that are not in the vocabulary.

        Raises:
            BadText: it is not UTF-8, or holds a character that a closed vocabulary lacks.
        """
        text = decode_utf8(piece)
        ids = self._ids[code_points(text)]
        other = np.flatnonzero(ids < 0)
        if other.size:
            first = int(other[0])
            if self.closed:
                raise EncodingError(
                    len(text[:first].encode("utf-8")),
                    f"the character {text[first]!r} (U+{ord(text[first]):04X}) is not one of the {self.vocab_size} of this "
                    "vocabulary; take it out, or leave the vocabulary open",
                )
            contents = [text[place].encode("utf-8") for place in other]
            lengths = np.ones(len(ids), dtype=np.int64)
            lengths[other] = [len(content) for content in contents]
            ids = np.repeat(ids, lengths)
            ids[ids < 0] = np.frombuffer(b"".join(contents), dtype=np.uint8).astype(np.int32) + len(self.characters)
        return EncodedChunk(ids.astype(token_dtype(self.vocab_size)))

    def encode(self, text: str | bytes) -> TokenArray:
        """The characters of a text; raises what `encode_piece` and `as_bytes` do."""
        return self.encode_chunk(to_bytes(text)).ids

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of these ids, with replacement signs for bytes that make no character; raises as `decode_bytes`."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """The text of these ids in UTF-8.

        Raises:
            UserError: an id that is not of this vocabulary.
        """
        return b"".join(map(self._contents.__getitem__, check_ids(ids, self).tolist()))

    def stream_decoder(self) -> StreamDecoder:
        """A decoder that holds back a character until all its bytes are there."""
        return Utf8StreamDecoder(self)

    def to_json(self) -> dict[str, Any]:
        """The characters, their counts, and whether there are others."""
        counts = None if self.counts is None else self.counts.tolist()
        return {"kind": self.kind, "closed": self.closed, "characters": list(self.characters), "counts": counts}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CharTokenizer:
        """What `to_json` wrote.

        Raises:
            ValueError: what is wrong with the values.
        """
        characters, closed = values.get("characters"), values.get("closed")
        if not isinstance(closed, bool):
            raise ValueError(f"closed is {closed!r}, wanted true or false")
        if not isinstance(characters, list) or not all(isinstance(one, str) and len(one) == 1 for one in characters):
            raise ValueError("its characters are not a list of single characters")
        if len(set(characters)) < len(characters) or (closed and not characters):
            raise ValueError("its characters are none at all, or one stands there twice")
        joined = "".join(characters)
        joined.encode("utf-8")  # half of a surrogate pair is refused
        tokenizer = cls(joined, None, closed)
        return cls(joined, check_counts(values.get("counts"), tokenizer.vocab_size), closed)
