"""A corpus on disk: flat arrays of token ids that are read where they lie, and a JSON file that says what they are.

    corpus.json           what the corpus is, and the counts and checksums of each split
    txl_tokenizer.json       the vocabulary of its ids
    train-00000.tokens    ids of all documents one after another, little-endian, no header; a large split goes on in
                          train-00001.tokens and so on (valid and test likewise)
    train.documents       uint64, little-endian: where each document starts, in tokens; the first 0

Opening reads no token, so a corpus may be larger than the machine's memory. `corpus_writer` makes one.
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

START_DTYPE = np.dtype("<u8")
"""How the places where documents start are written."""

_FORMAT = "txl-corpus"
_VERSION = 2
_HASH_CHUNK_BYTES = 2**20
_AGAIN = "copy the corpus again, or make it again with 'txl prepare'"


class SplitRecord(Settings):
    """What `corpus.json` says about one split."""

    dtype: Literal["uint8", "uint16", "uint32"]
    """Type of a token id."""
    tokens: int = Field(gt=0)
    """Number of tokens."""
    bytes: int = Field(gt=0)
    """Number of bytes of the text they were made from."""
    words: int = Field(ge=0)
    """Number of words of that text: stretches between ASCII whitespace."""
    num_unknown: int = Field(ge=0)
    """Number of tokens that stand for a word the vocabulary lacks."""
    documents: int = Field(gt=0)
    """Number of documents."""
    shards: tuple[Annotated[int, Field(gt=0)], ...]
    """Number of tokens in each token file."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Checksum of all its tokens as they lie in the token files, one file after another."""
    documents_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Checksum of the file of document starts."""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if sum(self.shards) != self.tokens:
            raise ValueError(f"shards of {sum(self.shards):,} tokens in all, wanted {self.tokens:,}")
        return self


class CorpusRecord(Settings):
    """What `corpus.json` holds."""

    format: Literal["txl-corpus"] = _FORMAT
    version: Literal[2] = _VERSION
    name: str
    """What the corpus is called."""
    source: str
    """Where its text comes from, in words."""
    tokenizer_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Fingerprint of its vocabulary."""
    splits: dict[SplitName, SplitRecord]
    """Its splits; train is always there."""

    @model_validator(mode="after")
    def _has_train(self) -> Self:
        if "train" not in self.splits:
            raise ValueError("wanted a split 'train', found none")
        return self


@dataclass(frozen=True, eq=False)
class TokenShards:
    """Arrays of one dimension and type that are read as if they were one, without being joined."""

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
    def __getitem__(self, places: slice | npt.NDArray[np.integer[Any]]) -> TokenArray: ...
    @overload
    def __getitem__(self, places: int) -> np.unsignedinteger[Any]: ...
    def __getitem__(self, places: int | slice | npt.NDArray[np.integer[Any]]) -> TokenArray | np.unsignedinteger[Any]:
        """What stands at these places.

        Args:
            places: a number; a slice without step, whose tokens are copied where it lies in more than one shard; or
                an array of numbers from 0 on, of any shape.
        """
        if isinstance(places, slice):
            start, stop, step = places.indices(len(self))
            assert step == 1
            parts = [
                shard[max(start - begin, 0) : stop - begin]
                for shard, begin in zip(self.shards, self._ends - [len(shard) for shard in self.shards], strict=True)
                if start < begin + len(shard) and begin < stop
            ]
            return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else self.shards[0][:0]
        if isinstance(places, int):
            place = range(len(self))[places]
            return self[np.array(place)][()]
        shard_of = np.searchsorted(self._ends, places, side="right")
        found = np.empty(places.shape, self.dtype)
        for index in np.unique(shard_of):
            here = shard_of == index
            begin = self._ends[index] - len(self.shards[index])
            found[here] = self.shards[index][places[here] - begin]
        return found


Tokens = TokenArray | TokenShards
"""(N,) ids that may lie on disk: `len`, `dtype`, slices, and arrays of places."""


@dataclass(frozen=True, eq=False)
class TokenSplit:
    """The tokens of one split, left on disk until read."""

    name: str
    tokens: Tokens
    """(num_tokens,) ids, read only."""
    document_starts: npt.NDArray[np.uint64]
    """(num_documents,) rising places in `tokens`, read only."""
    num_bytes: int
    """Bytes of the text the tokens were made from."""
    num_words: int
    """Words of that text: stretches between ASCII whitespace."""
    num_unknown: int = 0
    """Tokens that stand for a word the vocabulary lacks."""

    def first(self, limit: int | None) -> Tokens:
        """The first `limit` tokens (a copy, where they lie in several files); none: all, left on disk."""
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
    """A corpus folder that was checked when opened."""

    path: Path
    tokenizer: Tokenizer
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
            for file, length in _token_files(path, split, of).items():
                _check_size(file, length * np.dtype(of.dtype).itemsize)
            _check_size(documents_file(path, split), of.documents * START_DTYPE.itemsize)
        tokenizer = load_tokenizer(path / "txl_tokenizer.json")
        if fingerprint(tokenizer) != record.tokenizer_sha256:
            raise UserError(
                f"{path / 'txl_tokenizer.json'}: not the vocabulary this corpus was made with (fingerprint "
                f"{fingerprint(tokenizer)[:12]}, wanted {record.tokenizer_sha256[:12]}); {_AGAIN}"
            )
        for split, of in record.splits.items():
            wanted = token_dtype(tokenizer.vocab_size).name
            if of.dtype != wanted:
                raise UserError(
                    f"{path / 'corpus.json'}: splits.{split}.dtype is {of.dtype}, wanted {wanted}; {_AGAIN}"
                )
        return cls(path, tokenizer, record)

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
                dtype = np.dtype(of.dtype).newbyteorder("<")
                shards = tuple(_map(*file, dtype) for file in _token_files(self.path, split, of).items())
                return TokenSplit(
                    name=split,
                    tokens=shards[0] if len(shards) == 1 else TokenShards(shards),
                    document_starts=_map(documents_file(self.path, split), of.documents, START_DTYPE),
                    num_bytes=of.bytes,
                    num_words=of.words,
                    num_unknown=of.num_unknown,
                )
        raise UserError(
            f"the corpus {self.path} has no split '{name}'{nearest(name, self.splits)}; it has "
            f"{', '.join(self.splits)}, and 'txl prepare' with --train, --valid and --test makes all three"
        )

    def verify(self, *splits: str) -> None:
        """Reads the token and document files of these splits (none: of all) once and compares the checksums.

        Raises:
            UserError: a file was changed or damaged since it was made.
        """
        for split, of in self.record.splits.items():
            if splits and split not in splits:
                continue
            for files, wanted in (
                (list(_token_files(self.path, split, of)), of.sha256),
                ([documents_file(self.path, split)], of.documents_sha256),
            ):
                found = _hash_files(files)
                if found != wanted:
                    which = f"{files[0]}{f' to {files[-1].name}' if len(files) > 1 else ''}"
                    raise UserError(f"{which}: damaged (sha256 {found[:12]}, wanted {wanted[:12]}); {_AGAIN}")


def token_file(folder: Path, split: SplitName, shard: int) -> Path:
    """Where a shard of a split's tokens lies."""
    return folder / f"{split}-{shard:05d}.tokens"


def documents_file(folder: Path, split: SplitName) -> Path:
    """Where the places lie at which a split's documents start."""
    return folder / f"{split}.documents"


def _token_files(folder: Path, split: SplitName, record: SplitRecord) -> dict[Path, int]:
    """Each token file of a split, and how many tokens it holds."""
    return {token_file(folder, split, number): length for number, length in enumerate(record.shards)}


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
        older = values.get("version") == 1
        raise UserError(
            f"{file}: version {values.get('version')!r}, this txl reads {_VERSION}; "
            f"{'' if older else 'upgrade transformer-xl, or '}prepare the corpus again with 'txl prepare'"
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
        # As a plain array, which is sliced in half the time of a numpy.memmap.
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(length,)))


def _hash_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with as_user_error(f"reading {path}"), path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
