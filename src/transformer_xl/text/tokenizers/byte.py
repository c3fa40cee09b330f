"""Byte tokens: the 256 byte values, for text in any encoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transformer_xl.text.tokenizers.base import ByteLevelTokenizer, EncodedChunk

ALL_BYTES = [bytes([value]) for value in range(256)]


@dataclass(frozen=True, repr=False)
class ByteTokenizer(ByteLevelTokenizer):
    """A tokenizer whose ids are the 256 byte values; the newline (byte 10) is also the beginning-of-sequence token."""

    kind = "byte"
    is_cheap_to_encode = True
    token_bytes = ALL_BYTES
    bos_token_id = ord("\n")

    @override
    def last_boundary(self, text: bytes) -> int:
        return len(text)

    @override
    def encode_chunk(self, chunk: bytes) -> EncodedChunk:
        return EncodedChunk(np.frombuffer(chunk, dtype=np.uint8).copy())  # a view would be read-only

    @override
    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        return self.check_ids(ids).astype(np.uint8).tobytes()  # faster than concatenating the bytes one by one

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}

    @classmethod
    @override
    def from_json(cls, values: Mapping[str, Any]) -> ByteTokenizer:
        return cls()
