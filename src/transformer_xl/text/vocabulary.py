"""Vocabularies: text to token ids and back.

A vocabulary is a value: it never changes, is written to `vocabulary.json`, and is recognised by its fingerprint, so
that a model is never fed ids of another vocabulary. Text arrives as bytes, because bytes are what files hold; a kind
that needs characters decodes them itself.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from transformer_xl.config import UserError, nearest
from transformer_xl.files import explained, write_text

TokenArray = npt.NDArray[np.unsignedinteger[Any]]


class StreamDecoder(Protocol):
    """Turns tokens into text one at a time; a character cut between tokens is held back until it is whole."""

    def push(self, token: int) -> str:
        """The text that became certain with this token; often nothing, never half a character."""
        ...

    def finish(self) -> str:
        """The rest, once no token follows (a replacement sign for a character that stayed incomplete)."""
        ...


class Vocabulary(Protocol):
    """What every kind of vocabulary offers."""

    @property
    def kind(self) -> str:
        """Name of the kind, as in `txl prepare --vocabulary KIND`."""
        ...

    @property
    def size(self) -> int:
        """V: number of different tokens; ids are 0 .. size - 1."""
        ...

    @property
    def start_id(self) -> int:
        """The token taken as read before a text begins, so that its first token is predicted from something."""
        ...

    def encode(self, text: str | bytes) -> TokenArray:
        """Token ids of a text, one dimension, dtype `token_dtype(size)`; the array is the caller's own.

        Raises:
            UserError: the text cannot be written in this vocabulary.
        """
        ...

    def encode_chunks(self, chunks: Iterable[bytes]) -> Iterator[TokenArray]:
        """The same ids as `encode` gives for the joined chunks, in pieces; the text may be cut anywhere."""
        ...

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of these ids; bytes that are not UTF-8 become replacement signs."""
        ...

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """The text of these ids, as bytes.

        Raises:
            UserError: an id that is not of this vocabulary.
        """
        ...

    def stream_decoder(self) -> StreamDecoder:
        """A decoder for tokens that arrive one at a time."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The whole vocabulary as plain values; `vocabulary_from_json` gives it back."""
        ...


@dataclass(frozen=True)
class ByteVocabulary:
    """The 256 byte values, for any text in any encoding. A text begins as if after a line end (byte 10)."""

    @property
    def kind(self) -> str:
        """The word `bytes`."""
        return "bytes"

    @property
    def size(self) -> int:
        """256 tokens."""
        return 256

    @property
    def start_id(self) -> int:
        """The line end, byte 10."""
        return 10

    def encode(self, text: str | bytes) -> TokenArray:
        """The bytes of the text (of its UTF-8 form), as uint8.

        Raises:
            UserError: a character that UTF-8 does not have (half of a surrogate pair).
        """
        if isinstance(text, str):
            try:
                # Python hands over command-line bytes that are not UTF-8 as escapes; this gives those bytes back.
                text = text.encode("utf-8", errors="surrogateescape")
            except UnicodeEncodeError as error:
                character = text[error.start]
                raise UserError(
                    f"the text holds {character!r} at place {error.start}, which UTF-8 cannot write; take it out"
                ) from None
        return np.frombuffer(text, dtype=np.uint8).copy()  # a view would be read-only, and torch warns at those

    def encode_chunks(self, chunks: Iterable[bytes]) -> Iterator[TokenArray]:
        """The bytes of each chunk, as uint8."""
        return map(self.encode, chunks)

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of these ids, read as UTF-8; what is not UTF-8 becomes replacement signs."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """The bytes of these ids.

        Raises:
            UserError: an id outside 0 .. 255.
        """
        wide = np.asarray(ids, dtype=np.int64)
        if wide.size and not (wide.min() >= 0 and wide.max() < self.size):
            wrong = wide.min() if wide.min() < 0 else wide.max()
            raise UserError(f"token id {wrong} is not one of the byte vocabulary; wanted 0 to {self.size - 1}")
        return wide.astype(np.uint8).tobytes()

    def stream_decoder(self) -> StreamDecoder:
        """A decoder that holds back a UTF-8 character until all its bytes are there."""
        return _Utf8StreamDecoder(self)

    def to_json(self) -> dict[str, Any]:
        """Kind, size and start id."""
        return {"kind": self.kind, "size": self.size, "start_id": self.start_id}


class _Utf8StreamDecoder:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._vocabulary.decode_bytes([token]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


_BUILDERS: dict[str, Callable[[], Vocabulary]] = {"bytes": ByteVocabulary}
_READERS: dict[str, Callable[[Mapping[str, Any]], Vocabulary]] = {"bytes": lambda values: ByteVocabulary()}


def build_vocabulary(kind: str) -> Vocabulary:
    """A new vocabulary of this kind.

    Raises:
        UserError: no such kind; the nearest is offered.
    """
    _check_kind(kind, "--vocabulary")
    return _BUILDERS[kind]()


def vocabulary_from_json(values: Mapping[str, Any], source: str = "vocabulary") -> Vocabulary:
    """The vocabulary that `to_json` wrote.

    Args:
        values: what `to_json` gave.
        source: where the values come from, for the message.

    Raises:
        UserError: an unknown kind (the nearest is offered), or values that are not what this kind writes.
    """
    if "kind" not in values:
        raise UserError(f"{source}: no kind of vocabulary in it, wanted one of {', '.join(_READERS)}; {_AGAIN}")
    _check_kind(str(values["kind"]), source)
    vocabulary = _READERS[str(values["kind"])](values)
    if vocabulary.to_json() != values:
        raise UserError(f"{source}: damaged, its values do not describe a vocabulary of {vocabulary.kind}; {_AGAIN}")
    return vocabulary


_AGAIN = "copy it again from where it came, or make the corpus again with 'txl prepare'"


def _check_kind(kind: str, source: str) -> None:
    if kind not in _READERS:
        raise UserError(f"{source}: no vocabulary '{kind}'{nearest(kind, _READERS)}; known: {', '.join(_READERS)}")


def fingerprint(vocabulary: Vocabulary) -> str:
    """What identifies a vocabulary: the sha256 of its JSON with sorted names and no spaces, as 64 hex digits."""
    canonical = json.dumps(vocabulary.to_json(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def token_dtype(size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest little-endian unsigned type that holds the ids 0 .. size - 1."""
    assert 0 < size <= 2**32
    return np.dtype("u1" if size <= 2**8 else "<u2" if size <= 2**16 else "<u4")


def save_vocabulary(vocabulary: Vocabulary, path: Path) -> None:
    """Writes `vocabulary.json`, whole or not at all."""
    write_text(path, json.dumps(vocabulary.to_json(), indent=1) + "\n")


def load_vocabulary(path: Path) -> Vocabulary:
    """Reads `vocabulary.json`.

    Raises:
        UserError: it is missing, damaged, or of an unknown kind.
    """
    return vocabulary_from_json(read_json_object(path), str(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds one object.

    Raises:
        UserError: it is missing, unreadable or damaged.
    """
    with explained(f"reading {path}"):
        if not path.exists():
            raise UserError(f"{path}: missing, wanted a JSON file; {_AGAIN}")
        content = path.read_bytes()
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged, not readable as JSON ({error}); {_AGAIN}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: wanted a JSON object, found {type(values).__name__}; {_AGAIN}")
    return values
