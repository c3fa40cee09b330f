"""A corpus on disk: flat arrays of token ids that are read where they lie, and a JSON file that says what they are.

    corpus.json        what the corpus is, and the counts and checksums of each split
    vocabulary.json    the vocabulary of its ids
    train.tokens       ids of all documents one after another, little-endian, no header (so too valid., test.)
    train.documents    uint64, little-endian: where each document starts, in tokens; the first 0

Writing is one pass in pieces, so a corpus may be larger than the machine's memory; so may one that is read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from transformer_xl.config import Settings, UserError, check_settings, nearest
from transformer_xl.files import explained, whole_folder, write_text
from transformer_xl.text.vocabulary import (
    TokenArray,
    Vocabulary,
    fingerprint,
    load_vocabulary,
    read_json_object,
    save_vocabulary,
    token_dtype,
)

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")

_FORMAT = "txl-corpus"
_VERSION = 1
_START_DTYPE = np.dtype("<u8")
_HASH_CHUNK_BYTES = 2**20
_AGAIN = "copy the corpus again, or make it again with 'txl prepare'"


@dataclass(frozen=True)
class Document:
    """One text of a corpus."""

    name: str
    """Where it comes from, for messages."""
    chunks: Iterable[bytes]
    """Its bytes in pieces cut anywhere; they can be gone through more than once, and are read only then."""
    num_bytes: int = 0
    """How many there will be, to show how far reading is; 0: not known."""


class SplitRecord(Settings):
    """What `corpus.json` says about one split."""

    dtype: Literal["uint8", "uint16", "uint32"]
    """Type of a token id."""
    tokens: int = Field(ge=0)
    """Number of tokens."""
    bytes: int = Field(ge=0)
    """Number of bytes of the text they were made from."""
    words: int = Field(ge=0)
    """Number of words of that text: stretches between ASCII whitespace."""
    documents: int = Field(ge=0)
    """Number of documents."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Checksum of the token file."""
    documents_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Checksum of the file of document starts."""


class CorpusRecord(Settings):
    """What `corpus.json` holds."""

    format: Literal["txl-corpus"] = _FORMAT
    version: Literal[1] = _VERSION
    name: str
    """What the corpus is called."""
    source: str
    """Where its text comes from, in words."""
    vocabulary: str = Field(pattern="^[0-9a-f]{64}$")
    """Fingerprint of its vocabulary."""
    splits: dict[SplitName, SplitRecord]
    """Its splits; train is always there."""

    @model_validator(mode="after")
    def _has_train(self) -> Self:
        if "train" not in self.splits:
            raise ValueError("wanted a split 'train', found none")
        return self


@dataclass(frozen=True, eq=False)
class TokenSplit:
    """The tokens of one split, left on disk until read."""

    name: str
    tokens: TokenArray
    """(num_tokens,) ids, read only."""
    document_starts: npt.NDArray[np.uint64]
    """(num_documents,) rising places in `tokens`, read only."""
    num_bytes: int
    """Bytes of the text the tokens were made from."""
    num_words: int
    """Words of that text: stretches between ASCII whitespace."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_starts)

    @property
    def bytes_per_token(self) -> float:
        """Mean length of a token in bytes; not a number where there are no tokens."""
        return self.num_bytes / self.num_tokens if self.num_tokens else math.nan


@dataclass(frozen=True, eq=False)
class Corpus:
    """A corpus folder that was checked when opened."""

    path: Path
    vocabulary: Vocabulary
    record: CorpusRecord

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Opens a corpus: its format, the sizes of its files and its vocabulary are checked, no token is read.

        Raises:
            UserError: it is not a corpus, or one that is damaged or cut short.
        """
        path = Path(folder)
        record = _read_record(path)
        for split, of in record.splits.items():
            _check_size(path / f"{split}.tokens", of.tokens * np.dtype(of.dtype).itemsize)
            _check_size(path / f"{split}.documents", of.documents * _START_DTYPE.itemsize)
        vocabulary = load_vocabulary(path / "vocabulary.json")
        if fingerprint(vocabulary) != record.vocabulary:
            raise UserError(
                f"{path / 'vocabulary.json'}: not the vocabulary this corpus was made with (fingerprint "
                f"{fingerprint(vocabulary)[:12]}, wanted {record.vocabulary[:12]}); {_AGAIN}"
            )
        for split, of in record.splits.items():
            wanted = token_dtype(vocabulary.size).name
            if of.dtype != wanted:
                raise UserError(
                    f"{path / 'corpus.json'}: splits.{split}.dtype is {of.dtype}, wanted {wanted}; {_AGAIN}"
                )
        return cls(path, vocabulary, record)

    @property
    def name(self) -> str:
        """What the corpus is called."""
        return self.record.name

    @property
    def source(self) -> str:
        """Where its text comes from, in words."""
        return self.record.source

    @property
    def splits(self) -> tuple[SplitName, ...]:
        """The splits it has, in the order train, valid, test."""
        return tuple(split for split in SPLITS if split in self.record.splits)

    def split(self, name: str) -> TokenSplit:
        """One split by its name.

        Raises:
            UserError: the corpus does not have it; the nearest is offered.
        """
        for split in self.splits:
            if split == name:
                of = self.record.splits[split]
                return TokenSplit(
                    name=split,
                    tokens=_map(self.path / f"{split}.tokens", np.dtype(of.dtype).newbyteorder("<"), of.tokens),
                    document_starts=_map(self.path / f"{split}.documents", _START_DTYPE, of.documents),
                    num_bytes=of.bytes,
                    num_words=of.words,
                )
        raise UserError(
            f"the corpus {self.path} has no split '{name}'{nearest(name, self.splits)}; it has "
            f"{', '.join(self.splits)}, and 'txl prepare' with --train, --valid and --test makes all three"
        )

    def verify(self) -> None:
        """Reads every token and document file once and compares the checksums.

        Raises:
            UserError: a file was changed or damaged since it was made.
        """
        for split, of in self.record.splits.items():
            for path, wanted in (
                (self.path / f"{split}.tokens", of.sha256),
                (self.path / f"{split}.documents", of.documents_sha256),
            ):
                found = _hash_file(path)
                if found != wanted:
                    raise UserError(f"{path}: damaged (sha256 {found[:12]}, wanted {wanted[:12]}); {_AGAIN}")


def write_corpus(
    folder: str | Path,
    splits: Mapping[SplitName, Iterable[Document]],
    *,
    name: str,
    source: str,
    vocabulary: Vocabulary,
) -> Corpus:
    """Writes a corpus in one pass over its documents, never holding more than a piece of one, and opens it.

    Args:
        folder: where it goes; must not exist. It appears whole, or not at all.
        splits: documents of each split; train must be there and hold text. Empty documents leave no trace.
        name: what the corpus is called.
        source: where its text comes from, in words.
        vocabulary: turns the text into ids.

    Raises:
        UserError: the folder exists, the file system refuses, a document cannot be read, or train holds no text.
    """
    with whole_folder(Path(folder)) as aside:
        save_vocabulary(vocabulary, aside / "vocabulary.json")
        records = {split: _write_split(aside, split, splits[split], vocabulary) for split in SPLITS if split in splits}
        if "train" not in records or not records["train"].tokens:
            raise UserError(
                f"the train split of {name} holds no text, and a model needs some; give 'txl prepare' files with text"
            )
        record = CorpusRecord(name=name, source=source, vocabulary=fingerprint(vocabulary), splits=records)
        write_text(aside / "corpus.json", json.dumps(record.model_dump(), indent=1) + "\n")
    return Corpus.open(folder)


def _write_split(folder: Path, split: SplitName, documents: Iterable[Document], vocabulary: Vocabulary) -> SplitRecord:
    dtype = token_dtype(vocabulary.size)
    counts = _TextCounts()
    num_tokens = num_documents = 0
    token_hash, start_hash = hashlib.sha256(), hashlib.sha256()
    with (folder / f"{split}.tokens").open("wb") as tokens, (folder / f"{split}.documents").open("wb") as starts:
        for document in documents:
            start = num_tokens
            for ids in vocabulary.encode_chunks(counts.counted(document.chunks)):
                content = ids.astype(dtype, copy=False).tobytes()
                tokens.write(content)
                token_hash.update(content)
                num_tokens += len(ids)
            if num_tokens > start:
                content = start.to_bytes(_START_DTYPE.itemsize, "little")
                starts.write(content)
                start_hash.update(content)
                num_documents += 1
    return SplitRecord.model_validate(
        {
            "dtype": dtype.name,
            "tokens": num_tokens,
            "bytes": counts.num_bytes,
            "words": counts.num_words,
            "documents": num_documents,
            "sha256": token_hash.hexdigest(),
            "documents_sha256": start_hash.hexdigest(),
        }
    )


class _TextCounts:
    """Counts the bytes and words of texts that pass through."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_words = 0

    def counted(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        in_word = False
        for chunk in chunks:
            if chunk:
                self.num_bytes += len(chunk)
                # A word that began in the chunk before is already counted.
                self.num_words += len(chunk.split()) - (in_word and not chunk[:1].isspace())
                in_word = not chunk[-1:].isspace()
                yield chunk


def _read_record(path: Path) -> CorpusRecord:
    makes_one = "'txl prepare FILES --out DIR' makes one"
    if not path.exists():
        raise UserError(f"no corpus at {path}; 'txl prepare FILES --out {path}' makes one there")
    if not path.is_dir():
        raise UserError(f"{path} is a file, wanted the folder of a corpus; 'txl prepare {path} --out DIR' makes one")
    file = path / "corpus.json"
    if not file.exists():
        if (path / "config.yaml").exists():
            raise UserError(f"{path} is a run, wanted a corpus; its config.yaml names the one it learned, {makes_one}")
        raise UserError(f"{path} is not a corpus (it has no corpus.json); {makes_one}")
    values = read_json_object(file)
    if values.get("format") != _FORMAT:
        raise UserError(f"{file}: format {values.get('format')!r}, wanted '{_FORMAT}'; {makes_one}")
    if values.get("version") != _VERSION:
        raise UserError(
            f"{file}: version {values.get('version')!r}, this txl reads {_VERSION}; upgrade transformer-xl, or make "
            "the corpus again with 'txl prepare'"
        )
    try:
        return check_settings(CorpusRecord, values, str(file))
    except UserError as error:
        raise UserError(f"{error}; {_AGAIN}") from None


def _check_size(path: Path, wanted: int) -> None:
    with explained(f"reading {path}"):
        if not path.exists():
            raise UserError(f"{path}: missing, wanted {wanted:,} bytes; {_AGAIN}")
        found = path.stat().st_size
    if found != wanted:
        raise UserError(f"{path}: {found:,} bytes long, wanted {wanted:,}; {_AGAIN}")


def _map(path: Path, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    if not length:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    with explained(f"reading {path}"):
        return np.memmap(path, dtype=dtype, mode="r", shape=(length,))


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with explained(f"reading {path}"), path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
