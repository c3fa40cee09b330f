"""Writes a corpus in one pass: documents -> pieces -> ids, in several processes -> files in the order of the text.

Only a few pieces are held at a time, so a corpus may be larger than the machine's memory. What comes out is the same
for any number of processes and however the documents come in chunks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from transformer_xl.config import UserError
from transformer_xl.files import atomic_folder, write_text
from transformer_xl.text.documents import SPLITS, Document, SplitName
from transformer_xl.text.parallel import ordered_map
from transformer_xl.text.token_store import (
    START_DTYPE,
    Corpus,
    CorpusRecord,
    documents_file,
    token_file,
)
from transformer_xl.text.tokenizers import (
    EncodingError,
    TokenArray,
    Tokenizer,
    fingerprint,
    save_tokenizer,
    split_chunks,
    token_dtype,
)

_BATCH_BYTES = 2**20  # small documents are sent to a worker together until they are this long


@dataclass(frozen=True)
class CorpusLayout:
    """How a corpus is laid out, and with how much help."""

    documents: Literal["files", "lines"] = "files"
    """Whether each document, or each line of it, is a document of the corpus."""
    shard_tokens: int = 2**30
    """Most tokens in one file."""
    workers: int = 1
    """Processes that encode."""


@dataclass(frozen=True)
class _TextChunk:
    """A piece of a document on its way to be encoded."""

    split: SplitName
    document: int
    """The document's number in its split."""
    name: str
    """The document's name."""
    place: int
    """Where the piece starts in its document, in bytes."""
    text: bytes


@dataclass(frozen=True)
class _Encoded:
    """A piece that was encoded, and what is known of its text."""

    split: SplitName
    document: int
    ids: TokenArray
    unknown: int
    line_ends: npt.NDArray[np.int64]
    """Places behind tokens that end a line; empty where lines do not matter."""
    num_words: int
    in_word: tuple[bool, bool]
    """Whether the text begins and ends inside a word."""


def write_corpus(
    folder: str | Path,
    splits: Mapping[SplitName, Iterable[Document]],
    *,
    name: str,
    source: str,
    tokenizer: Tokenizer,
    layout: CorpusLayout = CorpusLayout(),
) -> Corpus:
    """Writes a corpus, and opens it.

    Args:
        folder: where it goes; must not exist. It appears whole, or not at all.
        splits: documents of each split, each with text; train must be there. Empty documents leave no trace.
        name: what the corpus is called.
        source: where its text comes from, in words.
        vocabulary: turns the text into ids.
        layout: what its documents are, the size of its files, and how many processes encode.

    Raises:
        UserError: the folder exists, the file system refuses, a document cannot be read or holds what the vocabulary
            cannot write, the vocabulary knows no lines where each is to be a document, or a split holds no text.
    """
    if layout.documents == "lines" and not tokenizer.is_newline_V.any():
        raise UserError(
            f"this vocabulary of {tokenizer.kind} has no token that ends a line, so lines cannot be documents; give "
            "it an end-of-line mark, or prepare with --documents files"
        )
    wanted = [split for split in SPLITS if split in splits]
    with atomic_folder(Path(folder)) as aside:
        save_tokenizer(tokenizer, aside / "txl_tokenizer.json")
        with ExitStack() as stack:
            writers = {split: stack.enter_context(_SplitWriter(aside, split, tokenizer, layout)) for split in wanted}
            batches = _batches(_text_chunks({split: splits[split] for split in wanted}, writers, tokenizer))
            # A byte is encoded sooner than sent to another process.
            workers = 1 if tokenizer.is_cheap_to_encode else layout.workers
            encoder = _Encoder(tokenizer, layout.documents == "lines")
            for results in stack.enter_context(closing(ordered_map(encoder, batches, workers=workers))):
                for encoded in results:
                    writers[encoded.split].add(encoded)
            records = {split: writer.record() for split, writer in writers.items()}
        for split in ("train", *wanted):
            if split not in records or not records[split]["tokens"]:
                raise UserError(
                    f"the {split} split of {name} holds no text; give 'txl prepare' text for it"
                    f"{'' if split == 'train' else ', or leave it out'}"
                )
        record = CorpusRecord.model_validate(
            {"name": name, "source": source, "tokenizer_sha256": fingerprint(tokenizer), "splits": records}
        )
        write_text(aside / "corpus.json", json.dumps(record.model_dump(), indent=1) + "\n")
    return Corpus.open(folder)


def _text_chunks(
    splits: Mapping[SplitName, Iterable[Document]], writers: Mapping[SplitName, _SplitWriter], tokenizer: Tokenizer
) -> Iterator[_TextChunk]:
    """All documents in pieces that can be encoded by themselves; the writers hear how many bytes were read."""
    for split, documents in splits.items():
        for number, document in enumerate(documents):
            place = 0
            try:
                for text in split_chunks(tokenizer, writers[split].counted(document.chunks)):
                    yield _TextChunk(split, number, document.name, place, text)
                    place += len(text)
            except EncodingError as error:
                raise _refused(document.name, error.position, error) from None


def _refused(name: str, place: int, error: EncodingError) -> UserError:
    return UserError(f"{name}: byte {place:,}: {error.reason}")


def _batches(pieces: Iterable[_TextChunk]) -> Iterator[list[_TextChunk]]:
    batch: list[_TextChunk] = []
    length = 0
    for piece in pieces:
        batch.append(piece)
        length += len(piece.text)
        if length >= _BATCH_BYTES:
            yield batch
            batch, length = list[_TextChunk](), 0
    if batch:
        yield batch


class _Encoder:
    """Encodes pieces; pickled to where that happens."""

    def __init__(self, tokenizer: Tokenizer, lines: bool) -> None:
        self._vocabulary, self._lines = tokenizer, lines

    def __call__(self, pieces: list[_TextChunk]) -> list[_Encoded]:
        return [self._encoded(piece) for piece in pieces]

    def _encoded(self, piece: _TextChunk) -> _Encoded:
        try:
            found = self._vocabulary.encode_chunk(piece.text)
        except EncodingError as error:
            raise _refused(piece.name, piece.place + error.position, error) from None
        lines = self._vocabulary.is_newline_V[found.ids].nonzero()[0] + 1 if self._lines else np.empty(0, np.int64)
        return _Encoded(piece.split, piece.document, found.ids, found.num_unknown, lines, *count_words(piece.text))


_IN_WORD = bytes(not bytes([value]).isspace() for value in range(256))


def count_words(text: bytes) -> tuple[int, tuple[bool, bool]]:
    """How many words there are between ASCII white space, and whether the text begins and ends inside one."""
    inside = np.frombuffer(text.translate(_IN_WORD), dtype=np.bool_)  # two and a half times as fast as split
    edges = (bool(inside[0]), bool(inside[-1]))
    return int(np.count_nonzero(inside[1:] > inside[:-1])) + edges[0], edges


class _SplitWriter:
    """Files of one split, growing piece by piece."""

    def __init__(self, folder: Path, split: SplitName, tokenizer: Tokenizer, layout: CorpusLayout) -> None:
        assert layout.shard_tokens > 0
        self._folder, self._split, self._shard_tokens = folder, split, layout.shard_tokens
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._shards: list[int] = []
        self._tokens: BinaryIO | None = None
        self._starts = documents_file(folder, split).open("wb")
        self._token_hash, self._start_hash = hashlib.sha256(), hashlib.sha256()
        self._num_bytes = self._num_words = self._num_tokens = self._num_documents = self._num_unknown = 0
        self._document = -1  # of the last token written
        self._line_ended = False  # with that token
        self._word_open = (-1, False)  # the document of the last piece, and whether that ended inside a word

    def __enter__(self) -> _SplitWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        self._starts.close()
        if self._tokens:
            self._tokens.close()

    def counted(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """The chunks, their bytes counted as they pass."""
        for chunk in chunks:
            self._num_bytes += len(chunk)
            yield chunk

    def add(self, encoded: _Encoded) -> None:
        """Writes what comes next."""
        goes_on = encoded.in_word[0] and self._word_open == (encoded.document, True)
        self._num_words += encoded.num_words - goes_on
        self._word_open = (encoded.document, encoded.in_word[1])
        self._num_unknown += encoded.unknown
        if not len(encoded.ids):
            return
        starts = encoded.line_ends[encoded.line_ends < len(encoded.ids)]
        if self._line_ended or encoded.document != self._document:
            starts = np.concatenate([[0], starts])
        self._add_starts(starts)
        self._document = encoded.document
        self._line_ended = bool(encoded.line_ends.size) and encoded.line_ends[-1] == len(encoded.ids)
        self._add_tokens(np.ascontiguousarray(encoded.ids, dtype=self._dtype))

    def _add_starts(self, starts: npt.NDArray[np.int64]) -> None:
        content = (starts + self._num_tokens).astype(START_DTYPE)
        self._starts.write(content.data)
        self._start_hash.update(content.data)
        self._num_documents += len(content)

    def _add_tokens(self, ids: TokenArray) -> None:
        self._token_hash.update(ids.data)
        self._num_tokens += len(ids)
        while len(ids):
            if self._tokens is None or self._shards[-1] == self._shard_tokens:
                if self._tokens:
                    self._tokens.close()
                self._tokens = token_file(self._folder, self._split, len(self._shards)).open("wb")
                self._shards.append(0)
            fitting = ids[: self._shard_tokens - self._shards[-1]]
            self._tokens.write(fitting.data)
            self._shards[-1] += len(fitting)
            ids = ids[len(fitting) :]

    def record(self) -> dict[str, object]:
        """What was written, as the values of a `SplitRecord`; closes the files."""
        self._close()
        return {
            "dtype": self._dtype.name,
            "tokens": self._num_tokens,
            "bytes": self._num_bytes,
            "words": self._num_words,
            "num_unknown": self._num_unknown,
            "documents": self._num_documents,
            "shards": tuple(self._shards),
            "sha256": self._token_hash.hexdigest(),
            "documents_sha256": self._start_hash.hexdigest(),
        }
