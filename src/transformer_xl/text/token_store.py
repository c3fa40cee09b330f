"""A corpus on disk: arrays of token ids that are memory-mapped, and a JSON file that describes them.

    corpus.json           what the corpus is, with the counts and checksums of each split
    txl_tokenizer.json    its tokenizer
    train-00000.tokens    ids of all documents one after another, little-endian, no header; a large split continues in
                          train-00001.tokens and so on (valid and test likewise)
    train.documents       uint64, little-endian: where each document starts, in tokens; the first is 0

No token is read when a corpus is opened, so it may be larger than memory. `corpus_writer` writes one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, overload

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from transformer_xl.config import Settings, UserError, check_settings, nearest
from transformer_xl.files import as_user_error
from transformer_xl.text.documents import SPLITS, SplitName
from transformer_xl.text.tokenizers import (
    TokenArray,
    Tokenizer,
    fingerprint,
    load_tokenizer,
    token_dtype,
)
from transformer_xl.text.tokenizers.storage import read_json_object

DOCUMENT_START_DTYPE = np.dtype("<u8")
"""Type of the positions where documents start, in a file."""

_FORMAT = "txl-corpus"
_VERSION = 3
_HASH_CHUNK_BYTES = 2**20
_AGAIN = "copy the corpus again, or prepare it again with 'txl prepare'"


class SplitRecord(Settings):
    """What `corpus.json` says about one split."""

    dtype: Literal["uint8", "uint16", "uint32"]
    """Type of a token id."""
    num_tokens: int = Field(gt=0)
    num_bytes: int = Field(gt=0)
    """Bytes of the text the tokens were made from."""
    num_words: int = Field(ge=0)
    """Words of that text, between ASCII white space."""
    num_unknown: int = Field(ge=0)
    """Tokens that stand for a word that is not in the vocabulary."""
    num_documents: int = Field(gt=0)
    shard_lengths: tuple[Annotated[int, Field(gt=0)], ...]
    """Number of tokens in each token file."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Checksum of all tokens, as they are in the token files one after another."""
    documents_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Checksum of the file of document starts."""

    @model_validator(mode="after")
    def _check_sum(self) -> Self:
        if sum(self.shard_lengths) != self.num_tokens:
            raise ValueError(f"shards of {sum(self.shard_lengths):,} tokens in all, wanted {self.num_tokens:,}")
        return self


class CorpusRecord(Settings):
    """What `corpus.json` holds."""

    format: Literal["txl-corpus"] = _FORMAT
    version: Literal[3] = _VERSION
    name: str
    """Name of the corpus."""
    source: str
    """Where its text comes from, in words."""
    tokenizer_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Fingerprint of its tokenizer."""
    splits: dict[SplitName, SplitRecord]
    """Its splits; there is always train."""

    @model_validator(mode="after")
    def _has_train(self) -> Self:
        if "train" not in self.splits:
            raise ValueError("wanted a split 'train', found none")
        return self


@dataclass(frozen=True, eq=False)
class TokenShards:
    """One-dimensional arrays of one type that are indexed as one array, without being joined."""

    shards: tuple[TokenArray, ...]
    """None of them empty."""
    ndim = 1

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Type of an id."""
        return self.shards[0].dtype

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum([len(shard) for shard in self.shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, index: slice | npt.NDArray[np.integer[Any]]) -> TokenArray: ...
    @overload
    def __getitem__(self, index: int) -> np.unsignedinteger[Any]: ...
    def __getitem__(self, index: int | slice | npt.NDArray[np.integer[Any]]) -> TokenArray | np.unsignedinteger[Any]:
        """Return the tokens at an index.

        Args:
            index: an int; a slice without step, which copies only if it reaches over several shards; or an array of
                non-negative ints, of any shape.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1
            parts = [
                shard[max(start - begin, 0) : stop - begin]
                for shard, begin in zip(self.shards, self._ends - [len(shard) for shard in self.shards], strict=True)
                if start < begin + len(shard) and begin < stop
            ]
            return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else self.shards[0][:0]
        if isinstance(index, int):
            return self[np.array(range(len(self))[index])][()]
        shard_of = np.searchsorted(self._ends, index, side="right")
        found = np.empty(index.shape, self.dtype)
        for shard in np.unique(shard_of):
            inside = shard_of == shard
            begin = self._ends[shard] - len(self.shards[shard])
            found[inside] = self.shards[shard][index[inside] - begin]
        return found


Tokens = TokenArray | TokenShards
"""(N,) token ids that may be on disk; they have `len`, `dtype`, slices, and indexing by arrays."""


@dataclass(frozen=True, eq=False)
class TokenSplit:
    """The tokens of one split, memory-mapped."""

    name: str
    tokens: Tokens
    """(num_tokens,) ids, read-only."""
    document_starts: npt.NDArray[np.uint64]
    """(num_documents,) rising positions in `tokens`, read-only."""
    num_bytes: int
    """Bytes of the text the tokens were made from."""
    num_words: int
    """Words of that text, between ASCII white space."""
    num_unknown: int = 0
    """Tokens that stand for a word that is not in the vocabulary."""

    def first(self, limit: int | None) -> Tokens:
        """Return the first `limit` tokens (None: all), memory-mapped unless they are in several files."""
        return self.tokens if limit is None or limit >= len(self.tokens) else self.tokens[:limit]

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
        """Mean length of a token in bytes."""
        return self.num_bytes / self.num_tokens


@dataclass(frozen=True, eq=False)
class Corpus:
    """A corpus folder, checked when it was opened."""

    path: Path
    tokenizer: Tokenizer
    record: CorpusRecord
    notes: tuple[str, ...] = ()
    """What `prepare` noticed about the text, such as files given twice; empty for a corpus that was opened."""

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Open a corpus. Its format, the sizes of its files and its tokenizer are checked; no token is read.

        Raises:
            UserError: it is not a corpus, was made by an earlier version, or is damaged or cut short.
        """
        path = Path(folder)
        corpus_record = _read_record(path)
        for split, record in corpus_record.splits.items():
            for file, length in _token_files(path, split, record).items():
                _check_size(file, length * np.dtype(record.dtype).itemsize)
            _check_size(documents_file(path, split), record.num_documents * DOCUMENT_START_DTYPE.itemsize)
        tokenizer = load_tokenizer(path / "txl_tokenizer.json")
        if fingerprint(tokenizer) != corpus_record.tokenizer_sha256:
            raise UserError(
                f"{path / 'txl_tokenizer.json'}: not the tokenizer this corpus was made with (fingerprint "
                f"{fingerprint(tokenizer)[:12]}, wanted {corpus_record.tokenizer_sha256[:12]}); {_AGAIN}"
            )
        for split, record in corpus_record.splits.items():
            wanted = token_dtype(tokenizer.vocab_size).name
            if record.dtype != wanted:
                raise UserError(
                    f"{path / 'corpus.json'}: splits.{split}.dtype is {record.dtype}, wanted {wanted}; {_AGAIN}"
                )
        return cls(path, tokenizer, corpus_record)

    @property
    def name(self) -> str:
        """Its name."""
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
        """Return one split.

        Raises:
            UserError: the corpus does not have it; the message offers the nearest name.
        """
        for split in self.splits:
            if split == name:
                record = self.record.splits[split]
                dtype = np.dtype(record.dtype).newbyteorder("<")
                shards = tuple(_map(*file, dtype) for file in _token_files(self.path, split, record).items())
                return TokenSplit(
                    name=split,
                    tokens=shards[0] if len(shards) == 1 else TokenShards(shards),
                    document_starts=_map(documents_file(self.path, split), record.num_documents, DOCUMENT_START_DTYPE),
                    num_bytes=record.num_bytes,
                    num_words=record.num_words,
                    num_unknown=record.num_unknown,
                )
        raise UserError(
            f"the corpus {self.path} has no split '{name}'{nearest(name, self.splits)}; it has "
            f"{', '.join(self.splits)}, and 'txl prepare' with --train, --valid and --test makes all three"
        )

    def verify(self, *splits: str) -> None:
        """Compare the checksums of the token and document files, which are read once.

        Args:
            splits: the splits to check; all if none is given.

        Raises:
            UserError: a file was changed or damaged since it was written.
        """
        for split, record in self.record.splits.items():
            if splits and split not in splits:
                continue
            for files, wanted in (
                (list(_token_files(self.path, split, record)), record.sha256),
                ([documents_file(self.path, split)], record.documents_sha256),
            ):
                found = _hash_files(files)
                if found != wanted:
                    which = f"{files[0]}{f' to {files[-1].name}' if len(files) > 1 else ''}"
                    raise UserError(f"{which}: damaged (sha256 {found[:12]}, wanted {wanted[:12]}); {_AGAIN}")


def token_file(folder: Path, split: SplitName, shard: int) -> Path:
    """Return the path of a shard of a split's tokens."""
    return folder / f"{split}-{shard:05d}.tokens"


def documents_file(folder: Path, split: SplitName) -> Path:
    """Return the path of the file that has the positions where a split's documents start."""
    return folder / f"{split}.documents"


def _token_files(folder: Path, split: SplitName, record: SplitRecord) -> dict[Path, int]:
    """Each token file of a split, and its number of tokens."""
    return {token_file(folder, split, shard): length for shard, length in enumerate(record.shard_lengths)}


def _read_record(path: Path) -> CorpusRecord:
    makes_one = "'txl prepare FILES --out DIR' makes one"
    if not path.exists():
        raise UserError(f"no corpus at {path}; 'txl prepare FILES --out {path}' makes one there")
    if not path.is_dir():
        raise UserError(f"{path} is a file, wanted the folder of a corpus; 'txl prepare {path} --out DIR' makes one")
    file = path / "corpus.json"
    if not file.exists():
        if (path / "config.yaml").exists():
            raise UserError(
                f"{path} is a run, wanted a corpus; its config.yaml names the one it was trained on, {makes_one}"
            )
        raise UserError(f"{path} is not a corpus (it has no corpus.json); {makes_one}")
    values = read_json_object(file)
    if values.get("format") != _FORMAT:
        raise UserError(f"{file}: format {values.get('format')!r}, wanted '{_FORMAT}'; {makes_one}")
    version = values.get("version")
    if version != _VERSION:
        newer = isinstance(version, int) and version > _VERSION
        raise UserError(
            f"{file}: made by {'a later' if newer else 'an earlier'} version of txl (format {version!r}, wanted "
            f"{_VERSION}); {'upgrade transformer-xl, or ' if newer else ''}prepare the corpus again with 'txl prepare'"
        )
    try:
        return check_settings(CorpusRecord, values, str(file))
    except UserError as error:
        raise UserError(f"{error}; {_AGAIN}") from None


def _check_size(path: Path, wanted: int) -> None:
    with as_user_error(f"reading {path}"):
        if not path.exists():
            raise UserError(f"{path}: missing, wanted {wanted:,} bytes; {_AGAIN}")
        found = path.stat().st_size
    if found != wanted:
        raise UserError(f"{path}: {found:,} bytes long, wanted {wanted:,}; {_AGAIN}")


def _map(path: Path, length: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    with as_user_error(f"reading {path}"):
        # A plain array, because slicing it takes half the time of slicing a numpy.memmap.
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(length,)))


def _hash_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with as_user_error(f"reading {path}"), path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
