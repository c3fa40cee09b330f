"""The tokenizer interface, and code shared by all kinds.

A tokenizer is immutable. It is saved as `txl_tokenizer.json` and identified by its fingerprint, so that a model is
never used with the ids of another tokenizer. The input is bytes, as read from files; kinds that work on characters
decode UTF-8 themselves.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.text.tokenizers.config import TokenizerKind

TokenArray = npt.NDArray[np.unsignedinteger[Any]]


class EncodingError(UserError):
    """Text that a tokenizer cannot encode.

    Args:
        position: index of the first invalid byte in the chunk.
        reason: the problem and how to fix it, as one clause.
    """

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(position, reason)  # pickle calls the constructor with these arguments
        self.position = position
        self.reason = reason

    @override
    def __str__(self) -> str:
        return f"byte {self.position:,} of the text: {self.reason}"


@contextmanager
def document_errors(name: str, position: int = 0) -> Iterator[None]:
    """Convert encoding errors to user errors that name the document.

    Args:
        name: name of the document.
        position: byte offset of the encoded chunk in the document.

    Raises:
        UserError: replaces an EncodingError.
    """
    try:
        yield
    except EncodingError as error:
        raise UserError(f"{name}: byte {position + error.position:,}: {error.reason}") from None


@dataclass(frozen=True)
class EncodedChunk:
    """The tokens of one chunk of text."""

    ids: TokenArray
    """(T,) of dtype `token_dtype(vocab_size)`; a new array that the caller may modify."""
    num_unknown: int = 0
    """How many of the ids are the unknown token."""


class StreamDecoder(Protocol):
    """Decodes tokens one at a time, withholding text that later tokens can still change."""

    def push(self, token: int) -> str:
        """Return the text that is final after this token; often empty, never part of a character."""
        ...

    def finish(self) -> str:
        """Return the withheld text after the last token; an incomplete character becomes U+FFFD."""
        ...


class Tokenizer(ABC):
    """Converts text to token ids and back. Every kind is a frozen dataclass that can be pickled to worker processes."""

    kind: ClassVar[TokenizerKind]
    """Name of the kind, as in `txl prepare --tokenizer KIND`."""
    is_lossless: ClassVar[bool] = True
    """Whether `decode_bytes(encode(text))` restores every text; otherwise whitespace and unknown words are lost."""
    is_text: ClassVar[bool] = True
    """Whether tokens are text; false for integer sequences, for which word and character counts are meaningless."""
    is_cheap_to_encode: ClassVar[bool] = False
    """Whether encoding is faster than sending text to another process."""

    @property
    def counts(self) -> npt.NDArray[np.int64] | None:
        """(V,) how often each token occurred in the training text, or None if unknown.

        If counts are known, ids are in descending order of counts, except for special tokens at the front.
        """
        return None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """V, the number of tokens; ids are 0 .. V - 1."""

    @property
    @abstractmethod
    def bos_token_id(self) -> int:
        """The token that is put before a text as the input that predicts its first token."""

    @property
    def unk_token_id(self) -> int | None:
        """The token for unknown words, or None if the tokenizer has none."""
        return None

    @property
    @abstractmethod
    def is_newline_V(self) -> npt.NDArray[np.bool_]:
        """(V,) whether each token ends a line."""

    @property
    def adds_final_newline(self) -> bool:
        """Whether a newline is added to a document that does not end in one."""
        return False

    @abstractmethod
    def last_boundary(self, text: bytes) -> int:
        """Return the last position at which splitting `text` changes no token, whatever follows, or 0 if none."""

    @abstractmethod
    def encode_chunk(self, chunk: bytes) -> EncodedChunk:
        """Encode a chunk of text that was split at a `last_boundary`, without adding special tokens.

        Raises:
            EncodingError: the chunk is not UTF-8 (all kinds but bytes), or contains text that the vocabulary lacks.
        """

    def encode(self, text: str | bytes) -> TokenArray:
        """Return the token ids of a text, as `encode_chunk` does.

        Raises:
            UserError: the text cannot be encoded.
        """
        return self.encode_chunk(to_bytes(text)).ids

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            UserError: an id is not in the vocabulary.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """Return the text of token ids as bytes.

        Raises:
            UserError: an id is not in the vocabulary.
        """
        decoder = self.stream_decoder()  # kinds that use Utf8StreamDecoder override decode_bytes
        return "".join([*map(decoder.push, self.check_ids(ids).tolist()), decoder.finish()]).encode("utf-8")

    def stream_decoder(self) -> StreamDecoder:
        """Return a decoder for one token at a time, whose concatenated output equals that of `decode`."""
        return Utf8StreamDecoder(self)

    def count_words(self, ids: TokenArray) -> int | None:
        """Return the number of words in the decoded text, or None if the ids do not determine it."""
        return None

    def unknown_words(self, text: str | bytes) -> list[str]:
        """Return the words of a text that are encoded as the unknown token, in descending order of frequency."""
        return []

    def check_ids(self, ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return ids as a one-dimensional int64 array.

        Raises:
            UserError: an id is not in the vocabulary.
        """
        checked = np.asarray(ids, dtype=np.int64).reshape(-1)
        if checked.size and not (checked.min() >= 0 and checked.max() < self.vocab_size):
            wrong = checked.min() if checked.min() < 0 else checked.max()
            raise UserError(
                f"token id {wrong} is not in this {self.kind} vocabulary; expected 0 to {self.vocab_size - 1}"
            )
        return checked

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the whole tokenizer as JSON values, from which `from_json` creates an equal one."""

    @classmethod
    @abstractmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Create a tokenizer from the output of `to_json`.

        Raises:
            ValueError: the values are invalid; the message is a clause that describes the problem.
        """

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the fields; cached tables are recomputed on demand."""
        return type(self), tuple(getattr(self, field.name) for field in fields(cast(Any, self)))


class Utf8StreamDecoder:
    """Decodes tokens that represent bytes, withholding a UTF-8 character until it is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Return the characters that became complete with this token."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def finish(self) -> str:
        """Return U+FFFD if the last character is incomplete."""
        return self._decoder.decode(b"", final=True)


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest little-endian unsigned dtype for the ids 0 .. vocab_size - 1."""
    assert 0 < vocab_size <= 2**32
    return np.dtype("u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<u4")


def to_bytes(text: str | bytes) -> bytes:
    """Return a text as UTF-8; bytes are returned as they are.

    Raises:
        UserError: the text contains an unpaired surrogate, which UTF-8 cannot represent.
    """
    if isinstance(text, bytes):
        return text
    try:
        # Python decodes command-line bytes that are not UTF-8 to surrogate escapes; this restores those bytes.
        return text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError as error:
        character = text[error.start]
        raise UserError(
            f"the text has {character!r} at index {error.start}, which UTF-8 cannot represent; remove it"
        ) from None


def decode_utf8(chunk: bytes) -> str:
    """Decode a chunk of UTF-8.

    Raises:
        EncodingError: it is not UTF-8.
    """
    try:
        return chunk.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 (byte 0x{chunk[error.start]:02x}); save the text as UTF-8, or use --tokenizer byte"
        raise EncodingError(error.start, reason) from None


def check_counts(counts: object, vocab_size: int) -> npt.NDArray[np.int64] | None:
    """Validate token counts read from JSON: a list with one count per token, or None.

    Raises:
        ValueError: the counts are invalid.
    """
    if counts is None:
        return None
    if not isinstance(counts, list) or not all(type(count) is int and 0 <= count < 2**63 for count in counts):
        raise ValueError("its counts are not a list of non-negative integers")
    if len(counts) != vocab_size:
        raise ValueError(f"it has {len(counts):,} counts for {vocab_size:,} tokens")
    return np.array(counts, dtype=np.int64)


def quoted(text: str) -> str:
    """Return a text in quotation marks for a message, shortened to 40 characters."""
    return repr(text if len(text) <= 40 else text[:40] + "...")
