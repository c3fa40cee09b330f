"""Vocabularies: text to token ids and back.

A vocabulary is a value: it never changes, is written to `txl_tokenizer.json`, and is recognised by its fingerprint, so
that a model is never fed ids of another vocabulary. Text arrives as bytes, because bytes are what files hold; a kind
that needs characters decodes them itself. The kinds beside bytes stand in files of their own, imported when used.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transformer_xl.config import UserError, nearest
from transformer_xl.files import as_user_error, write_text

TokenArray = npt.NDArray[np.unsignedinteger[Any]]

ENCODE_CHUNK_BYTES = 4 * 2**20
"""About how many bytes are encoded at once, unless told otherwise."""
MAX_UNSPLIT_BYTES = 16 * 2**20
"""Most bytes in a row without a place where the text may be cut; they have to be held in memory."""


class EncodingError(UserError):
    """Text that a vocabulary cannot read."""

    def __init__(self, place: int, what: str) -> None:
        """Says what is wrong, as one clause, and at which byte of the piece that was to be encoded."""
        super().__init__(place, what)  # what pickle makes it from again
        self.place = place
        self.what = what

    @override
    def __str__(self) -> str:
        return f"byte {self.place:,} of the text: {self.what}"


@dataclass(frozen=True)
class EncodedChunk:
    """The tokens of one piece of text."""

    ids: TokenArray
    """(number of tokens,) of dtype `token_dtype(size)`; the array is the caller's own."""
    num_unknown: int = 0
    """How many of them stand for a word that the vocabulary lacks."""


class StreamDecoder(Protocol):
    """Turns tokens into text one at a time; a character cut between tokens is held back until it is whole."""

    def push(self, token: int) -> str:
        """The text that became certain with this token; often nothing, never half a character."""
        ...

    def finish(self) -> str:
        """The rest, once no token follows (a replacement sign for a character that stayed incomplete)."""
        ...


class BoundaryFinder(Protocol):
    """Where a text may be cut without changing a token."""

    @property
    def adds_final_newline(self) -> bool:
        """Whether the last line of a document is ended even where its text does not end it."""
        ...

    def last_boundary(self, text: bytes) -> int:
        """The last place at which `text` may be cut, whatever follows, without changing a token; 0: there is none."""
        ...


class Tokenizer(BoundaryFinder, Protocol):
    """What every kind of vocabulary offers; each can be pickled to a worker process."""

    @property
    def kind(self) -> str:
        """Name of the kind, as in `txl prepare --vocabulary KIND`."""
        ...

    @property
    def vocab_size(self) -> int:
        """V: number of different tokens; ids are 0 .. size - 1."""
        ...

    @property
    def bos_token_id(self) -> int:
        """The token taken as read before a text begins, so that its first token is predicted from something."""
        ...

    @property
    def counts(self) -> npt.NDArray[np.int64] | None:
        """(V,) how often each token stood in the text it was learned from; none: not known.

        Where given, ids are in the order of falling counts (marks in front aside).
        """
        ...

    @property
    def is_newline_V(self) -> npt.NDArray[np.bool_]:
        """(V,) the tokens that end a line."""
        ...

    def encode_chunk(self, piece: bytes) -> EncodedChunk:
        """The tokens of a piece cut where `last_cut` allows; no mark is added.

        Raises:
            BadText: the piece cannot be written in this vocabulary.
        """
        ...

    def encode(self, text: str | bytes) -> TokenArray:
        """Token ids of a whole text or a prompt, as `encode_piece` gives them.

        Raises:
            UserError: the text cannot be written in this vocabulary.
        """
        ...

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of these ids, with replacement signs for what is not UTF-8; raises what `checked_ids` does."""
        ...

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """The text of these ids, as bytes; raises what `checked_ids` does."""
        ...

    def stream_decoder(self) -> StreamDecoder:
        """A decoder for tokens that arrive one at a time."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The whole vocabulary as plain values; `vocabulary_from_json` gives it back."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """The 256 byte values, for any text in any encoding. A text begins as if after a line end (byte 10)."""

    kind = "bytes"
    vocab_size = 256
    bos_token_id = 10
    adds_final_newline = False

    @property
    def counts(self) -> None:
        """Bytes are not learned from a text."""

    @property
    def is_newline_V(self) -> npt.NDArray[np.bool_]:
        """(256,) byte 10 alone."""
        return np.arange(self.vocab_size) == self.bos_token_id

    def last_boundary(self, text: bytes) -> int:
        """The end: bytes may be cut anywhere."""
        return len(text)

    def encode_chunk(self, piece: bytes) -> EncodedChunk:
        """The bytes of the piece, as uint8."""
        return EncodedChunk(
            np.frombuffer(piece, dtype=np.uint8).copy()
        )  # a view would be read-only, and torch warns at those

    def encode(self, text: str | bytes) -> TokenArray:
        """The bytes of the text (of its UTF-8 form), as uint8; raises what `as_bytes` does."""
        return self.encode_chunk(to_bytes(text)).ids

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of these ids, read as UTF-8; what is not UTF-8 becomes replacement signs."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """The bytes of these ids; raises what `checked_ids` does."""
        return check_ids(ids, self).astype(np.uint8).tobytes()

    def stream_decoder(self) -> StreamDecoder:
        """A decoder that holds back a UTF-8 character until all its bytes are there."""
        return Utf8StreamDecoder(self)

    def to_json(self) -> dict[str, Any]:
        """Kind, size and start id."""
        return {"kind": self.kind, "vocab_size": self.vocab_size, "bos_token_id": self.bos_token_id}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ByteTokenizer:
        """There is only one, whatever the values."""
        return cls()


class Utf8StreamDecoder:
    """Decodes tokens that stand for bytes, holding back a UTF-8 character until all its bytes are there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that became whole with this token."""
        return self._decoder.decode(self._vocabulary.decode_bytes([token]))

    def finish(self) -> str:
        """A replacement sign for a character that stayed incomplete."""
        return self._decoder.decode(b"", final=True)


def split_chunks(tokenizer: BoundaryFinder, chunks: Iterable[bytes], size: int = ENCODE_CHUNK_BYTES) -> Iterator[bytes]:
    """Cuts a document anew, at places where its tokens do not change; holds little more than one piece at a time.

    Args:
        vocabulary: says where the text may be cut, and whether its last line is to be ended.
        chunks: the document, cut anywhere.
        size: about how long the pieces become, in bytes; at most `MAX_STRETCH`.

    Raises:
        BadText: more than `MAX_STRETCH` bytes without a place to cut; its place counts from the start of the document.
    """
    assert 0 < size <= MAX_UNSPLIT_BYTES
    held, place, limit, last_byte = bytearray(), 0, size, b""
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
                held, place, last_byte = bytearray(text[cut:]), place + cut, text[cut - 1 : cut]
            elif len(held) > MAX_UNSPLIT_BYTES:
                raise EncodingError(place, _NO_CUT if text.split(None, 1) == [text.lstrip()] else _NO_LINE_END)
            limit = min(len(held) + size, MAX_UNSPLIT_BYTES + 1)
    last_byte = bytes(held[-1:]) or last_byte
    if tokenizer.adds_final_newline and last_byte not in (b"", b"\n"):
        held += b"\n"
    if held:
        yield bytes(held)


_NO_CUT = "no white space in 16 MiB where it could be cut, is this text?; leave it out, or take --vocabulary bytes"
_NO_LINE_END = "no line end in 16 MiB, nor white space where this vocabulary may cut; break the line, or leave it out"


def to_bytes(text: str | bytes) -> bytes:
    """The UTF-8 form of a text; bytes stay as they are.

    Raises:
        UserError: a character that UTF-8 does not have (half of a surrogate pair).
    """
    if isinstance(text, bytes):
        return text
    try:
        # Python hands over command-line bytes that are not UTF-8 as escapes; this gives those bytes back.
        return text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError as error:
        character = text[error.start]
        raise UserError(
            f"the text holds {character!r} at place {error.start}, which UTF-8 cannot write; take it out"
        ) from None


def decode_utf8(piece: bytes) -> str:
    """The characters of a piece of UTF-8.

    Raises:
        BadText: it is not UTF-8.
    """
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError as error:
        what = (
            f"not UTF-8 (byte 0x{piece[error.start]:02x}); save the text as UTF-8, or read it with --vocabulary bytes"
        )
        raise EncodingError(error.start, what) from None


def check_ids(ids: npt.ArrayLike, tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """The ids as int64, in one dimension.

    Raises:
        UserError: one is not of this vocabulary.
    """
    wide = np.asarray(ids, dtype=np.int64).reshape(-1)
    if wide.size and not (wide.min() >= 0 and wide.max() < tokenizer.vocab_size):
        wrong = wide.min() if wide.min() < 0 else wide.max()
        raise UserError(
            f"token id {wrong} is not one of this vocabulary of {tokenizer.kind}; wanted 0 to {tokenizer.vocab_size - 1}"
        )
    return wide


_KINDS = {
    "bytes": ("tokenizer", "ByteTokenizer"),
    "characters": ("tokenizers.characters", "CharTokenizer"),
    "words": ("tokenizers.words", "WordTokenizer"),
    "bpe": ("tokenizers.bpe", "BPETokenizer"),
    "integers": ("tokenizers.integers", "IntegerTokenizer"),
}  # module of `text`, class


def tokenizer_from_json(values: Mapping[str, Any], source: str = "vocabulary") -> Tokenizer:
    """The vocabulary that `to_json` wrote.

    Args:
        values: what `to_json` gave.
        source: where the values come from, for the message.

    Raises:
        UserError: an unknown kind (the nearest is offered), or values that are not what this kind writes.
    """
    if "kind" not in values:
        raise UserError(f"{source}: no kind of vocabulary in it, wanted one of {', '.join(_KINDS)}; {_AGAIN}")
    kind = str(values["kind"])
    if kind not in _KINDS:
        raise UserError(f"{source}: no vocabulary '{kind}'{nearest(kind, _KINDS)}; known: {', '.join(_KINDS)}")
    file, name = _KINDS[kind]
    try:
        tokenizer: Tokenizer = getattr(import_module(f"transformer_xl.text.{file}"), name).from_json(values)
    except ValueError as error:
        raise UserError(f"{source}: damaged, {error}; {_AGAIN}") from None
    if tokenizer.to_json() != values:
        raise UserError(f"{source}: damaged, its values do not describe a vocabulary of {kind}; {_AGAIN}")
    return tokenizer


_AGAIN = "copy it again from where it came, or make the corpus again with 'txl prepare'"


def fingerprint(tokenizer: Tokenizer) -> str:
    """What identifies a vocabulary: the sha256 of its JSON with sorted names and no spaces, as 64 hex digits."""
    canonical = json.dumps(tokenizer.to_json(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def token_dtype(size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest little-endian unsigned type that holds the ids 0 .. size - 1."""
    assert 0 < size <= 2**32
    return np.dtype("u1" if size <= 2**8 else "<u2" if size <= 2**16 else "<u4")


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Writes `txl_tokenizer.json`, whole or not at all."""
    write_text(path, json.dumps(tokenizer.to_json(), indent=1) + "\n")


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads `txl_tokenizer.json`.

    Raises:
        UserError: it is missing, damaged, or of an unknown kind.
    """
    return tokenizer_from_json(read_json_object(path), str(path))


def find_tokenizer(path: str | Path) -> Tokenizer:
    """The vocabulary of a `txl_tokenizer.json`, of a corpus folder or of a run folder.

    Raises:
        UserError: there is none at this path, or it is damaged.
    """
    place = Path(path)
    with as_user_error(f"reading {place}"):
        file = place / "txl_tokenizer.json" if place.is_dir() else place
        if not file.is_file():
            raise UserError(
                f"no vocabulary at {place}; give a txl_tokenizer.json, the folder of a corpus or of a run, or one of the "
                f"kinds {', '.join(_KINDS)}"
            )
    return load_tokenizer(file)


def read_json_object(path: Path, advice: str = _AGAIN) -> dict[str, Any]:
    """Reads a JSON file that holds one object; `advice` says what to do where that fails.

    Raises:
        UserError: it is missing, unreadable or damaged.
    """
    with as_user_error(f"reading {path}"):
        if not path.exists():
            raise UserError(f"{path}: missing, wanted a JSON file; {advice}")
        content = path.read_bytes()
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged, not readable as JSON ({error}); {advice}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: wanted a JSON object, found {type(values).__name__}; {advice}")
    return values
