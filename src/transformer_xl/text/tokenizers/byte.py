"""Byte tokens: the 256 byte values, for text in any encoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transformer_xl.text.tokenizers.base import EncodedChunk, Tokenizer


@dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """A tokenizer whose ids are the 256 byte values; the newline (byte 10) is put before a text."""

    kind = "byte"
    is_cheap_to_encode = True

    @property
    @override
    def vocab_size(self) -> int:
        return 256

    @property
    @override
    def bos_token_id(self) -> int:
        return ord("\n")

    @cached_property
    @override
    def is_newline_V(self) -> npt.NDArray[np.bool_]:
        return np.arange(256) == ord("\n")

    @override
    def last_boundary(self, text: bytes) -> int:
        return len(text)

    @override
    def encode_chunk(self, chunk: bytes) -> EncodedChunk:
        return EncodedChunk(np.frombuffer(chunk, dtype=np.uint8).copy())  # torch warns about read-only views

    @override
    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        return self.check_ids(ids).astype(np.uint8).tobytes()

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}

    @classmethod
    @override
    def from_json(cls, values: Mapping[str, Any]) -> ByteTokenizer:
        return cls()
