"""The tokenizer interface, and code shared by all kinds of tokenizers.

A tokenizer is immutable. It is saved as `txl_tokenizer.json`, whose hash (its fingerprint) is recorded beside it. A
model is never used with the ids of a tokenizer that has other tokens or settings. The input is bytes, as read from
files; kinds that work on characters decode UTF-8 themselves.

Shape suffixes: T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, cast

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transformer_xl.config import UserError, check_type
from transformer_xl.display import Displayed
from transformer_xl.text.tokenizers.tokenizer_config import TokenizerKind

TokenArray = npt.NDArray[np.unsignedinteger[Any]]
"""Token ids."""


class EncodingError(UserError):
    """Text that a tokenizer cannot encode.

    Args:
        position: index of the first invalid byte in the text.
        reason: what is wrong, and how to fix it.
    """

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(position, reason)  # unpickling calls the constructor with these arguments
        self.position = position
        self.reason = reason

    @override
    def __str__(self) -> str:
        return f"byte {self.position:,} of the text: {self.reason}"


@contextmanager
def document_errors(name: str, position: int = 0) -> Iterator[None]:
    """Convert an EncodingError that the block raises to a UserError that names the document.

    Args:
        name: name of the document.
        position: byte offset in the document of the chunk that the block encodes.

    Raises:
        UserError: the block raised an EncodingError.
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


class NamedToken(NamedTuple):
    """A token, and how it is called."""

    id: int
    name: str


class StreamDecoder(Protocol):
    """Decodes tokens one at a time, and withholds text that later tokens can still change."""

    def push(self, token: int) -> str:
        """Return the text that this token completes; often empty, never an incomplete character."""

    def finish(self) -> str:
        """Return the withheld text after the last token; an incomplete character becomes U+FFFD."""

    def num_ended_by(self, token: int) -> int:
        """Return how many withheld characters would end before this token, which does not continue them."""
        return 0


class Tokenizer(Displayed, ABC):
    """Converts text to token ids and back. Every kind is a frozen dataclass that can be pickled to worker processes."""

    kind: ClassVar[TokenizerKind | Literal["library"]]
    """Name of the kind, the value of `txl prepare --tokenizer`; library: of another library, loaded from its file."""
    is_lossless: ClassVar[bool] = True
    """Whether `decode_bytes(encode(text))` restores every text; otherwise whitespace and unknown words are lost."""
    is_text: ClassVar[bool] = True
    """Whether tokens are text; false for integer sequences, for which word and character counts are meaningless."""
    counts_words: ClassVar[bool] = True
    """Whether words can be counted in tokens; false where they are parts of words, some of which may be dropped."""
    is_cheap_to_encode: ClassVar[bool] = False
    """Whether encoding takes less time than sending the text to a worker process."""

    @override
    def summary(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size}

    @property
    def separators(self) -> tuple[int, ...]:
        """Ids of the tokens that end a part of a text, and a text (SEP and CLS), or none if it does not have both."""
        return ()

    @property
    def counts(self) -> npt.NDArray[np.int64] | None:
        """(V,) how often each token occurred in the text that the tokenizer was trained on, or None if unknown.

        Counts are in descending order, except for special tokens at the front.
        """
        return None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """V, the number of tokens; ids are 0 .. V - 1."""

    @property
    def bos_token_id(self) -> int:
        """The token that precedes every text as the input from which a model predicts the first token.

        Unless a kind overrides this, it is the end-of-sequence token, or token 0 if the tokenizer has none.
        """
        return self.eos_token_id or 0

    @property
    def document_end(self) -> NamedToken | None:
        """The token that ends each document of a corpus, such as `<|endoftext|>`, or None if the tokenizer has none.

        Its own text is empty, and no text is encoded as it, unless another library takes its name for it.
        """
        return None

    @property
    def unk_token_id(self) -> int | None:
        """The token for unknown words, or None if the tokenizer has none."""
        return None

    @property
    def eos_token_id(self) -> int | None:
        """The token that replaces each newline, or None if the tokenizer has none."""
        return None

    @property
    def adds_final_newline(self) -> bool:
        """Whether a newline is added to a document that does not end in one, so that its last line ends in a token."""
        return self.eos_token_id is not None

    @cached_property
    def is_newline_V(self) -> npt.NDArray[np.bool_]:
        """(V,) whether each token ends a line."""
        # Without an end-of-sequence token, no id equals -1, so that all entries are False.
        return np.arange(self.vocab_size) == (-1 if self.eos_token_id is None else self.eos_token_id)

    @abstractmethod
    def last_boundary(self, text: bytes) -> int:
        """Return the last position where splitting `text` changes no token, whatever text follows; 0 if none exists."""

    @abstractmethod
    def encode_chunk(self, chunk: bytes) -> EncodedChunk:
        """Encode a chunk of text that starts and ends at positions of `last_boundary`, without adding special tokens.

        Raises:
            EncodingError: the chunk is not UTF-8 (only byte tokenizers accept that), or contains text that the
                vocabulary lacks.
        """

    @abstractmethod
    def word_indices(self, chunk: bytes) -> npt.NDArray[np.int64]:
        """Return for each token of `encode_chunk(chunk)` which word of `chunk.split()` it belongs to, shape (T,).

        A token of whitespace alone belongs to the word that follows; after the last word its index is the number of
        words.

        Raises:
            EncodingError: the chunk cannot be encoded, or a token has parts of two words.
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
        decoder = self.stream_decoder()
        return "".join([*map(decoder.push, self.check_ids(ids).tolist()), decoder.finish()]).encode("utf-8")

    @abstractmethod
    def stream_decoder(self) -> StreamDecoder:
        """Return a decoder that takes one token at a time; its concatenated output equals that of `decode`."""

    def unknown_words(self, text: str | bytes) -> list[str]:
        """Return the words of a text that the vocabulary lacks, in descending order of frequency."""
        return []

    def check_ids(self, ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return ids as a one-dimensional int64 array.

        Raises:
            UserError: these are not integers, or an id is not in the vocabulary.
        """
        array = np.asarray(ids)
        if array.size and array.dtype.kind not in "iu":
            raise UserError(f"token ids are of type {array.dtype}; give integers")
        checked = array.astype(np.int64).reshape(-1)
        outside = checked[(checked < 0) | (checked >= self.vocab_size)]
        if outside.size:
            raise UserError(
                f"token id {outside[0]} is not in this {self.kind} vocabulary; expected 0 to {self.vocab_size - 1}"
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
            ValueError: the values are invalid; the message says what is wrong with them.
        """

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the fields; cached tables are recomputed on demand."""
        return type(self), tuple(getattr(self, field.name) for field in fields(cast(Any, self)))


_WHITESPACE = b" \t\n\r\v\f"


class ByteLevelTokenizer(Tokenizer):
    """A tokenizer each of whose tokens is a fixed sequence of bytes; decoding concatenates them."""

    @property
    @abstractmethod
    def token_bytes(self) -> list[bytes]:
        """(V,) the bytes of each token."""

    @property
    @override
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    @cached_property
    @override
    def is_newline_V(self) -> npt.NDArray[np.bool_]:
        return np.array([content.endswith(b"\n") for content in self.token_bytes])

    @cached_property
    def starts_with_whitespace_V(self) -> npt.NDArray[np.bool_]:
        """(V,) whether the first byte of each token is ASCII whitespace, so that a word before the token has ended.

        A token without text, the end of a document, ends a word as well.
        """
        return np.array([content[:1].isspace() or not content for content in self.token_bytes])

    @override
    def word_indices(self, chunk: bytes) -> npt.NDArray[np.int64]:
        ids = self.encode_chunk(chunk).ids
        ends_T = np.cumsum([len(self.token_bytes[token]) for token in ids.tolist()], dtype=np.int64)
        return words_at(chunk, np.concatenate([[0], ends_T])[:-1].astype(np.int64), ends_T)

    @override
    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        return b"".join(map(self.token_bytes.__getitem__, self.check_ids(ids).tolist()))

    @override
    def stream_decoder(self) -> StreamDecoder:
        return _Utf8StreamDecoder(self)


class _Utf8StreamDecoder(StreamDecoder):
    """Decodes tokens that represent bytes, and withholds a UTF-8 character until it is complete."""

    def __init__(self, tokenizer: ByteLevelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Return the characters that became complete with this token.

        Raises:
            UserError: it is not in the vocabulary.
        """
        if not 0 <= token < self._tokenizer.vocab_size:
            self._tokenizer.check_ids([token])
        return self._decoder.decode(self._tokenizer.token_bytes[token])

    def finish(self) -> str:
        """Return U+FFFD if the last character is incomplete."""
        return self._decoder.decode(b"", final=True)

    @override
    def num_ended_by(self, token: int) -> int:
        withheld, _ = self._decoder.getstate()
        try:
            codecs.utf_8_decode(withheld + self._tokenizer.token_bytes[token][:1])
        except UnicodeDecodeError:
            return len(withheld.decode("utf-8", errors="replace"))
        return 0


def words_at(chunk: bytes, starts_T: npt.NDArray[np.int64], ends_T: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for tokens at places of a text, in bytes, which word of `chunk.split()` each belongs to, shape (T,).

    Raises:
        EncodingError: a token has parts of two words.
    """
    if not chunk:
        return np.zeros(len(starts_T), dtype=np.int64)
    is_in_word = ~np.isin(np.frombuffer(chunk, dtype=np.uint8), np.frombuffer(_WHITESPACE, dtype=np.uint8))
    is_word_start = is_in_word & ~np.concatenate([[False], is_in_word[:-1]])
    num_words = np.cumsum(is_word_start)  # words that start at or before each byte
    first_T = np.minimum(starts_T, len(chunk) - 1)  # of another library, a token may have no place of its own
    index_T = num_words[first_T] - is_in_word[first_T]
    spanning_T = np.flatnonzero(num_words[np.maximum(ends_T - 1, first_T)] > index_T + 1)
    if spanning_T.size:
        first, end = int(starts_T[spanning_T[0]]), int(ends_T[spanning_T[0]])
        raise EncodingError(
            first,
            f"the token {quoted(chunk[first:end].decode('utf-8', errors='replace'))} has parts of two words, whose "
            "shares of its probability are unknown; use a run whose tokenizer splits text at spaces",
        )
    return index_T


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest little-endian unsigned dtype for the ids 0 .. vocab_size - 1."""
    assert 0 < vocab_size <= 2**32
    return np.dtype("u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<u4")


def to_bytes(text: str | bytes) -> bytes:
    """Return a text as UTF-8; bytes are returned unchanged.

    Raises:
        UserError: it is not str or bytes, or contains an unpaired surrogate, which UTF-8 cannot represent.
    """
    if isinstance(text, bytes):
        return text
    check_type(text, str, "the text", "give str or bytes")
    try:
        # Python decodes command-line bytes that are not UTF-8 to surrogate escapes; this restores those bytes.
        return text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text has {text[error.start]!r} at index {error.start}, which UTF-8 cannot represent; remove it"
        ) from None


def decode_utf8(chunk: bytes) -> str:
    """Decode a chunk of UTF-8.

    Raises:
        EncodingError: the chunk is not UTF-8.
    """
    try:
        return chunk.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 (byte 0x{chunk[error.start]:02x}); save it as UTF-8, or prepare it with tokenizer=byte"
        raise EncodingError(error.start, reason) from None


def check_counts(counts: object, vocab_size: int) -> npt.NDArray[np.int64] | None:
    """Validate token counts read from JSON: a list with one count per token, or None.

    Raises:
        ValueError: the counts are invalid.
    """
    if counts is None:
        return None
    if not (
        isinstance(counts, list)
        and len(counts) == vocab_size
        and all(type(count) is int and 0 <= count < 2**63 for count in counts)
    ):
        raise ValueError(f"its counts are not {vocab_size:,} non-negative integers, one for each token")
    return np.array(counts, dtype=np.int64)


def quoted(text: str) -> str:
    """Return a text in quotation marks for a message, shortened to 40 characters."""
    return repr(text if len(text) <= 40 else text[:40] + "...")
