"""Opens a corpus folder, the prepared form of a text that models are trained and evaluated on.

    corpus.json           description of the corpus, with the counts and checksums of each split
    txl_tokenizer.json    the tokenizer
    train-00000.tokens    token ids of all documents, concatenated, little-endian, no header; a large split continues in
                          train-00001.tokens and so on (valid and test likewise); each of these files is a shard
    train.documents       uint64, little-endian: start of each document as a token index; the first is 0

Tokens are memory-mapped, and opening a corpus reads none of them, so a corpus may be larger than RAM. `corpus_writer`
writes these files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import numpy.typing as npt
from pydantic import Field
from typing_extensions import override

from transformer_xl.config import Settings, UserError, check_settings, check_type, nearest
from transformer_xl.display import Displayed
from transformer_xl.files import as_path, as_user_error, json_digest
from transformer_xl.text.documents import SPLITS, SplitName
from transformer_xl.text.sources.archives import raw_chunks
from transformer_xl.text.tokenizers import TokenArray, Tokenizer, fingerprint, load_tokenizer, token_dtype
from transformer_xl.text.tokenizers.storage import read_json_object

DOCUMENT_START_DTYPE = np.dtype("<u8")
"""Data type of the document starts in a file."""

_FORMAT = "txl-corpus"
_VERSION = 3
_RECOVERY = "copy the corpus again, or prepare it again with 'txl prepare'"


class SplitRecord(Settings):
    """The entry of one split in `corpus.json`."""

    dtype: Literal["uint8", "uint16", "uint32"]
    """Data type of the token ids."""
    num_tokens: int = Field(gt=0)
    num_bytes: int = Field(gt=0)
    """Length of the original text in bytes."""
    num_words: int = Field(ge=0)
    """Number of words in the original text, separated by ASCII whitespace."""
    num_unknown: int = Field(ge=0)
    """Number of unknown tokens, each for a word that is not in the vocabulary."""
    num_documents: int = Field(gt=0)
    """Number of documents: files (or texts in memory), or lines with `txl prepare --document-unit line`."""
    shard_lengths: Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(min_length=1)]
    """Number of tokens in each token file."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Checksum of the concatenated token files."""
    documents_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Checksum of the file with the document starts."""


class CorpusRecord(Settings):
    """The contents of `corpus.json`."""

    format: Literal["txl-corpus"] = _FORMAT
    version: Literal[3] = _VERSION
    name: str
    """Name of the corpus."""
    source: str
    """Description of where the text comes from."""
    tokenizer_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Fingerprint of the tokenizer: the sha256 of its JSON (`tokenizers.storage.fingerprint`)."""
    splits: dict[SplitName, SplitRecord]
    """Records by split; train is always present."""


@dataclass(frozen=True, eq=False)
class TokenShards:
    """One-dimensional arrays of the same dtype, indexed as one array without concatenating them."""

    shards: tuple[TokenArray, ...]
    """The arrays; each must be non-empty."""
    ndim = 1

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Data type of the ids."""
        return self.shards[0].dtype

    @cached_property
    def _edges(self) -> npt.NDArray[np.int64]:
        """Index at which each shard starts, and the total length."""
        return np.cumsum([0, *map(len, self.shards)])

    def __len__(self) -> int:
        return int(self._edges[-1])

    def __getitem__(self, index: slice | npt.NDArray[np.integer[Any]]) -> TokenArray:
        """Return the tokens at an index.

        Args:
            index: a slice without step, which copies only if it spans several shards; or an array of non-negative ints.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1
            parts = [
                shard[max(start - shard_start, 0) : max(stop - shard_start, 0)]
                for shard, shard_start in zip(self.shards, self._edges[:-1], strict=True)
            ]
            parts = [part for part in parts if len(part)] or [self.shards[0][:0]]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)
        shard_of = np.searchsorted(self._edges, index, side="right") - 1
        tokens = np.empty(index.shape, self.dtype)
        for shard in np.unique(shard_of):
            in_shard = shard_of == shard
            tokens[in_shard] = self.shards[shard][index[in_shard] - self._edges[shard]]
        return tokens


Tokens = TokenArray | TokenShards
"""One-dimensional token ids, in memory or memory-mapped; they support `len`, `dtype`, slices and indexing by arrays."""


@dataclass(frozen=True, eq=False, repr=False)
class TokenSplit(Displayed):
    """The tokens of one split, memory-mapped."""

    name: str
    tokens: Tokens
    """(num_tokens,) ids, read-only."""
    document_starts: npt.NDArray[np.uint64]
    """(num_documents,) ascending positions in `tokens`, read-only."""
    num_bytes: int
    """Length of the original text in bytes."""
    num_words: int
    """Number of words in the original text, separated by ASCII whitespace."""
    num_unknown: int = 0
    """Number of unknown tokens, each for a word that is not in the vocabulary."""

    def first(self, limit: int | None) -> Tokens:
        """Return the first `limit` tokens, or all if `limit` is None, memory-mapped unless they span several files."""
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


@dataclass(frozen=True, eq=False, repr=False)
class Corpus(Displayed):
    """An opened and validated corpus folder."""

    path: Path
    tokenizer: Tokenizer
    record: CorpusRecord
    notes: tuple[str, ...] = ()
    """Warnings of `prepare` about the text, such as duplicate files; empty for a corpus loaded with `open`."""

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Open a corpus and check its format, file sizes and tokenizer, without reading any tokens.

        Raises:
            UserError: the folder is not a corpus, was made by an earlier version, or is damaged or truncated.
        """
        path = as_path(folder, "corpus", "give the folder of a corpus")
        corpus_record = _read_record(path)
        tokenizer = load_tokenizer(path / "txl_tokenizer.json")
        if fingerprint(tokenizer) != corpus_record.tokenizer_sha256:
            raise UserError(
                f"{path / 'txl_tokenizer.json'}: not the tokenizer this corpus was made with (fingerprint "
                f"{fingerprint(tokenizer)[:12]}, expected {corpus_record.tokenizer_sha256[:12]}); {_RECOVERY}"
            )
        dtype = token_dtype(tokenizer.vocab_size)
        for split, record in corpus_record.splits.items():
            for file, length in _token_files(path, split, record).items():
                _check_size(file, length * dtype.itemsize)
            _check_size(documents_file(path, split), record.num_documents * DOCUMENT_START_DTYPE.itemsize)
        return cls(path, tokenizer, corpus_record)

    @override
    def summary(self) -> dict[str, Any]:
        splits = {
            split: f"{record.num_tokens:,} tokens of {record.num_bytes:,} bytes, documents: {record.num_documents:,}"
            for split, record in self.record.splits.items()
        }
        return {"name": self.name, "path": self.path, "tokenizer": self.tokenizer, **splits}

    @property
    def name(self) -> str:
        """Name of the corpus."""
        return self.record.name

    @property
    def source(self) -> str:
        """Description of where the text comes from."""
        return self.record.source

    @property
    def splits(self) -> tuple[SplitName, ...]:
        """The splits of the corpus, in the order train, valid, test."""
        return tuple(split for split in SPLITS if split in self.record.splits)

    def split(self, name: str, *, verify: bool = False) -> TokenSplit:
        """Return one split.

        Args:
            name: name of the split.
            verify: whether to verify the checksums of its files first.

        Raises:
            UserError: the corpus does not have this split (the message suggests the nearest name), or a file is
                damaged.
        """
        check_type(name, str, "split", f"give one of {', '.join(self.splits)}")
        if name not in self.splits:
            raise UserError(
                f"the corpus {self.path} has no split '{name}'{nearest(name, self.splits)}; it has "
                f"{', '.join(self.splits)}, and 'txl prepare' with --train, --valid and --test creates all three"
            )
        if verify:
            self.verify(name)
        split = cast(SplitName, name)
        record = self.record.splits[split]
        dtype = token_dtype(self.tokenizer.vocab_size)
        shards = tuple(_memory_map(file, size, dtype) for file, size in _token_files(self.path, split, record).items())
        return TokenSplit(
            name=split,
            tokens=shards[0] if len(shards) == 1 else TokenShards(shards),
            document_starts=_memory_map(documents_file(self.path, split), record.num_documents, DOCUMENT_START_DTYPE),
            num_bytes=record.num_bytes,
            num_words=record.num_words,
            num_unknown=record.num_unknown,
        )

    def verify(self, *splits: str) -> None:
        """Verify the checksums of the token and document files.

        Args:
            splits: the splits to check, or none for all of them.

        Raises:
            UserError: a file was changed or damaged since it was written.
        """
        for split, record in self.record.splits.items():
            if not splits or split in splits:
                _check_sha256(list(_token_files(self.path, split, record)), record.sha256)
                _check_sha256([documents_file(self.path, split)], record.documents_sha256)


def token_file(folder: Path, split: SplitName, shard: int) -> Path:
    """Return the path of a shard of a split's tokens."""
    return folder / f"{split}-{shard:05d}.tokens"


def documents_file(folder: Path, split: SplitName) -> Path:
    """Return the path of the file with the start positions of a split's documents."""
    return folder / f"{split}.documents"


def _token_files(folder: Path, split: SplitName, record: SplitRecord) -> dict[Path, int]:
    """Return the number of tokens of each token file of a split."""
    return {token_file(folder, split, shard): length for shard, length in enumerate(record.shard_lengths)}


def _read_record(path: Path) -> CorpusRecord:
    file = path / "corpus.json"
    if not file.exists():
        advice = "; its config.yaml names the corpus it was trained on" if (path / "config.yaml").exists() else ""
        raise UserError(
            f"no corpus at {path}, which has no corpus.json{advice}; 'txl prepare FILES --out DIR' creates a corpus"
        )
    values = read_json_object(file)
    if (values.get("format"), values.get("version")) != (_FORMAT, _VERSION):
        raise UserError(
            f"{file}: format {values.get('format')!r}, version {values.get('version')!r}, expected '{_FORMAT}', "
            f"version {_VERSION}; prepare the corpus again with this version of txl"
        )
    expected = values.pop("sha256", None)  # of the other values; corpora made before it existed have none
    try:
        record = check_settings(CorpusRecord, values, str(file))
    except UserError as error:
        raise UserError(f"{error}; {_RECOVERY}") from None
    if expected not in (None, json_digest(values)):
        raise UserError(f"{file}: damaged, its checksum does not match its contents; {_RECOVERY}")
    return record


def _check_size(path: Path, num_bytes: int) -> None:
    with as_user_error(f"reading {path}"):
        if not path.exists():
            raise UserError(f"{path}: missing, expected {num_bytes:,} bytes; {_RECOVERY}")
        size = path.stat().st_size
    if size != num_bytes:
        raise UserError(f"{path}: {size:,} bytes long, expected {num_bytes:,}; {_RECOVERY}")


def _memory_map(path: Path, length: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    with as_user_error(f"reading {path}"):
        # Convert to a plain array, since slicing it takes half the time of slicing a numpy.memmap.
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(length,)))


def _check_sha256(paths: Sequence[Path], expected: str) -> None:
    """Check the checksum of the concatenated files."""
    digest = hashlib.sha256()
    for path in paths:
        for chunk in raw_chunks(path):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        names = f"{paths[0]}{f' to {paths[-1].name}' if len(paths) > 1 else ''}"
        raise UserError(f"{names}: damaged (sha256 {digest.hexdigest()[:12]}, expected {expected[:12]}); {_RECOVERY}")
