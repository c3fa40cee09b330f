"""Writes a corpus in one pass: documents -> chunks of text -> token ids (in several processes) -> files.

`transformer_xl.text.prepare` calls it. Only a few chunks are in RAM at a time, so a corpus may be larger than RAM.
Tokens are in the order of the text: the files do not depend on the number of processes or on how the documents are
split into chunks. `split_writers` joins corpora to the files that their documents, written at once, would have given.

Shape suffix: V vocabulary.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from transformer_xl.config import UserError
from transformer_xl.files import atomic_folder, json_digest, remove_leftovers, write_json
from transformer_xl.text.documents import SPLITS, Document, DocumentUnit, SplitName, TextChunk, batched, text_chunks
from transformer_xl.text.parallel import ordered_map
from transformer_xl.text.sources.archives import CHUNK_BYTES, Progress, no_progress
from transformer_xl.text.sources.rows import DocumentRows, SplitChoice, TextBatch
from transformer_xl.text.token_store import (
    DOCUMENT_START_DTYPE,
    Corpus,
    CorpusRecord,
    SplitRecord,
    TokenSplit,
    documents_file,
    token_file,
)
from transformer_xl.text.tokenizers.base import TokenArray, Tokenizer, document_errors, token_dtype
from transformer_xl.text.tokenizers.storage import fingerprint, read_json_object, save_tokenizer

SECONDS_BETWEEN_SAVES = 10.0
"""How often it is saved how far a corpus is."""
_COPIED_TOKENS = 2**22  # of a corpus that is joined, in RAM at a time
UNFINISHED = "unfinished.json"
"""File in the folder of an unfinished corpus that says how far it is."""


@dataclass(frozen=True)
class _TokenChunk:
    """The tokens of consecutive chunks of text of one split, and statistics of the text."""

    split: SplitName
    documents: tuple[int, int]
    """The first and the last document, by their indices."""
    ids: TokenArray
    starts: npt.NDArray[np.int64]
    """Positions of the tokens that begin a document; whether the first does depends on the chunk before."""
    at_line_end: bool
    """Whether the last token ends a line, if lines are documents."""
    num_bytes: int
    num_words: int
    """Number of words that begin in the text."""
    num_unknown: int


def write_corpus(
    folder: str | Path,
    splits: Mapping[SplitName, Iterable[Document]] | Iterable[tuple[SplitName, Document]],
    **settings: Any,
) -> Corpus:
    """Write a corpus and return it opened.

    Args:
        folder: folder to create, atomically; it must not exist.
        splits: documents by split, including train, each of which must contain text; or documents with their splits
            in any order, of which any split may be missing. Empty documents are ignored.
        settings: those of `fill_corpus`: name, source and tokenizer, and the others if need be.

    Raises:
        UserError: the folder exists or cannot be written, or what `fill_corpus` refuses.
    """
    if isinstance(splits, Mapping):
        by_split = cast(Mapping[SplitName, Iterable[Document]], splits)
        splits = {split: by_split[split] for split in SPLITS if split in by_split}
    with atomic_folder(Path(folder)) as temporary:
        fill_corpus(Unfinished(temporary), splits, **settings)
    return Corpus.open(folder)


class Unfinished:
    """The folder of an unfinished corpus, with what its writing needs in order to go on after it was killed."""

    def __init__(self, folder: Path, key: str | None = None) -> None:
        """Open the folder.

        Args:
            folder: the folder, which may be new.
            key: identifies text and settings, or None to keep nothing.
        """
        self.folder, self._key = folder, key
        self.found = key is not None and is_unfinished(folder, key)
        """Whether an earlier process has begun this corpus."""
        self.values: dict[str, Any] = read_json_object(folder / UNFINISHED) if self.found else {"key": key}
        self._last_save = time.monotonic()
        remove_leftovers(folder)

    def save(self, values: Callable[[], Mapping[str, Any]]) -> None:
        """Save values, unless there is nothing to keep or some were saved in the last seconds."""
        if self._key is not None and time.monotonic() - self._last_save >= SECONDS_BETWEEN_SAVES:
            self.values.update(values())
            write_json(self.folder / UNFINISHED, self.values)
            self._last_save = time.monotonic()


def is_unfinished(folder: Path, key: str) -> bool:
    """Return whether a folder is that of an unfinished corpus with this key, whose writing can go on."""
    with suppress(UserError):
        return (folder / UNFINISHED).is_file() and read_json_object(folder / UNFINISHED).get("key") == key
    return False


def fill_corpus(
    unfinished: Unfinished,
    text: Mapping[SplitName, Iterable[Document]] | Iterable[tuple[SplitName, Document]] | DocumentRows,
    *,
    name: str,
    source: str,
    tokenizer: Tokenizer,
    document_unit: DocumentUnit = "file",
    num_workers: int = 1,
    max_shard_tokens: int = 2**30,
    progress: Progress = no_progress,
) -> None:
    """Write the files of a corpus, or those that are not written yet.

    Args:
        unfinished: the folder.
        text: documents as for `write_corpus`, or measured rows, which report progress.
        name: name of the corpus.
        source: description of where the text comes from.
        tokenizer: encodes the text.
        document_unit: what becomes a document of the corpus: each of the documents (file), or each of their lines
            (line).
        num_workers: number of processes that encode.
        max_shard_tokens: maximum number of tokens in one token file (shard) of a split.
        progress: called with the stage `write`, for rows.

    Raises:
        UserError: a document cannot be read or encoded, a split has no text, or `document_unit` is line but the
            tokenizer has no token that ends a line.
    """
    if document_unit == "line" and not tokenizer.is_newline_V.any():
        raise UserError(
            f"this {tokenizer.kind} tokenizer has no token that ends a line, so lines cannot be documents; set "
            "add_eos=true, or document_unit=file"
        )
    assert max_shard_tokens > 0
    folder = unfinished.folder
    save_tokenizer(tokenizer, folder / "txl_tokenizer.json")
    batches: Iterator[Any]
    required: tuple[SplitName, ...] = ()
    if isinstance(text, DocumentRows):
        splits, required, workers = text.splits, ("train", *text.splits), num_workers
        batches, encode = text.batches(), partial(_encode_rows, tokenizer, document_unit, text.choice)
    else:
        splits, documents, workers = SPLITS, text, 1 if tokenizer.is_cheap_to_encode else num_workers
        if isinstance(text, Mapping):
            by_split = cast(Mapping[SplitName, Iterable[Document]], text)
            splits, required = tuple(by_split), ("train", *by_split)
            documents = ((split, document) for split in splits for document in by_split[split])
        chunks_of_text = _text_chunks(cast(Iterable[tuple[SplitName, Document]], documents), tokenizer)
        batches = batched(chunks_of_text, lambda chunk: len(chunk[1].text))
        encode = partial(_encode, tokenizer, document_unit)
    with ExitStack() as stack:
        saved: dict[str, Any] = unfinished.values.get("splits", {})
        writers = {
            split: stack.enter_context(closing(SplitWriter(folder, split, tokenizer, max_shard_tokens)))
            for split in splits
        }
        done = 0
        if saved and all(writers[split].restore(saved[split]) for split in splits):
            done = unfinished.values["batches"]
        else:
            for writer in writers.values():
                writer.restore(None)
        for _ in islice(batches, done):
            pass
        for chunks in stack.enter_context(closing(ordered_map(encode, batches, workers=workers))):
            for chunk in chunks:
                writers[chunk.split].add(chunk)
            done += 1
            if isinstance(text, DocumentRows):
                progress("write", sum(writer.num_bytes for writer in writers.values()), text.num_bytes)
            unfinished.save(partial(_states, done, writers))
        for split in required:
            if split not in writers or not writers[split].shard_lengths:
                raise UserError(
                    f"the {split} split of {name} has no text; pass text for it to 'txl prepare'"
                    f"{'' if split == 'train' else ', or leave it out'}"
                )
        for writer in writers.values():
            writer.end_document()
    _complete(folder, writers, tokenizer, name, source)
    (folder / UNFINISHED).unlink(missing_ok=True)


@contextmanager
def split_writers(
    folder: Path, tokenizer: Tokenizer, name: str, source: str, max_shard_tokens: int
) -> Iterator[dict[SplitName, SplitWriter]]:
    """Yield a writer for each split, and then complete the corpus; arguments and errors are those of `write_corpus`."""
    assert max_shard_tokens > 0
    with atomic_folder(folder) as temporary:
        save_tokenizer(tokenizer, temporary / "txl_tokenizer.json")
        with ExitStack() as stack:
            writers = {split: SplitWriter(temporary, split, tokenizer, max_shard_tokens) for split in SPLITS}
            for writer in writers.values():
                stack.enter_context(closing(writer)).restore(None)
            yield writers
        _complete(temporary, writers, tokenizer, name, source)


def _complete(
    folder: Path, writers: Mapping[SplitName, SplitWriter], tokenizer: Tokenizer, name: str, source: str
) -> None:
    """Write corpus.json, and delete the files of splits without text."""
    records = {split: writer.record() for split, writer in writers.items() if writer.shard_lengths}
    for split in writers.keys() - records.keys():
        documents_file(folder, split).unlink()
    record = CorpusRecord(name=name, source=source, tokenizer_sha256=fingerprint(tokenizer), splits=records)
    contents = record.model_dump(mode="json")
    write_json(folder / "corpus.json", {**contents, "sha256": json_digest(contents)})


def _states(done: int, writers: Mapping[SplitName, SplitWriter]) -> dict[str, Any]:
    return {"batches": done, "splits": {split: writer.state() for split, writer in writers.items()}}


def _text_chunks(
    documents: Iterable[tuple[SplitName, Document]], tokenizer: Tokenizer
) -> Iterator[tuple[SplitName, TextChunk]]:
    """Yield the chunks of all documents, each with its split."""
    for index, (split, document) in enumerate(documents):
        for chunk in text_chunks(tokenizer, [document], index):
            yield split, chunk


def _encode_rows(
    tokenizer: Tokenizer, document_unit: DocumentUnit, choice: SplitChoice, batch: tuple[TextBatch, int]
) -> list[_TokenChunk]:
    """Read and encode a batch of rows; runs in the worker processes."""
    chunks = [
        (split, chunk) for split, number, row in choice.read(batch) for chunk in text_chunks(tokenizer, [row], number)
    ]
    return _encode(tokenizer, document_unit, chunks)


def _encode(
    tokenizer: Tokenizer, document_unit: DocumentUnit, chunks: list[tuple[SplitName, TextChunk]]
) -> list[_TokenChunk]:
    """Encode a batch of chunks, and join those of each split; runs in the worker processes."""
    by_split: dict[SplitName, list[TextChunk]] = {}
    for split, chunk in chunks:
        by_split.setdefault(split, []).append(chunk)
    return [_encode_split(tokenizer, document_unit, split, of_split) for split, of_split in by_split.items()]


def _encode_split(
    tokenizer: Tokenizer, document_unit: DocumentUnit, split: SplitName, chunks: list[TextChunk]
) -> _TokenChunk:
    ids, starts = [np.empty(0, token_dtype(tokenizer.vocab_size))], [np.empty(0, np.int64)]
    first, last, at_line_end, length, num_words, num_unknown = -1, -1, False, 0, 0, 0
    for chunk in chunks:
        with document_errors(chunk.document_name, chunk.position):
            encoded = tokenizer.encode_chunk(chunk.text)
        num_words += count_words(chunk.text, chunk.previous_byte)
        num_unknown += encoded.num_unknown
        num_tokens = len(encoded.ids)
        if not num_tokens:
            continue
        if length and (at_line_end or chunk.document != last):
            starts.append(np.array([length]))
        at_line_end = False
        if document_unit == "line":
            line_ends = tokenizer.is_newline_V[encoded.ids].nonzero()[0] + 1
            at_line_end = num_tokens in line_ends[-1:]
            # a line that ends with the chunk is followed by a document that starts in the next chunk
            starts.append(line_ends[line_ends < num_tokens] + length)
        first, last = chunk.document if first < 0 else first, chunk.document
        ids.append(encoded.ids)
        length += num_tokens
    num_bytes = sum(chunk.num_bytes for chunk in chunks)
    joined = np.concatenate(ids), np.concatenate(starts)
    return _TokenChunk(split, (first, last), *joined, at_line_end, num_bytes, num_words, num_unknown)


_IN_WORD = bytes(not bytes([value]).isspace() for value in range(256))  # by byte value: 1 unless whitespace


def count_words(text: bytes, previous_byte: bytes = b" ") -> int:
    """Return the number of words that begin in a text; words are separated by ASCII whitespace.

    Args:
        text: the text, at least one byte.
        previous_byte: the byte before the text; if it is not whitespace, the text may begin inside a word.
    """
    # A word begins where a byte of a word follows whitespace. This is 2.5 times as fast as len(text.split()).
    inside = np.frombuffer((previous_byte + text).translate(_IN_WORD), dtype=np.bool_)
    return int(np.count_nonzero(inside[1:] > inside[:-1]))


class SplitWriter:
    """Writes the files of one split, chunk by chunk, once `restore` was called."""

    def __init__(self, folder: Path, split: SplitName, tokenizer: Tokenizer, max_shard_tokens: int) -> None:
        self._folder, self._split, self._max_shard_tokens = folder, split, max_shard_tokens
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._end = tokenizer.document_end
        self.shard_lengths: list[int] = []  # number of tokens in each token file
        self._shard: BinaryIO | None = None  # the last token file
        self._documents: BinaryIO | None = None

    @property
    def num_bytes(self) -> int:
        """Length of the text that was written."""
        return self._counts["num_bytes"]

    def close(self) -> None:
        """Close the files."""
        for file in (self._documents, self._shard):
            if file:
                file.close()

    def state(self) -> dict[str, Any]:
        """Return as JSON values what `restore` needs, after writing what is buffered."""
        for file in (self._documents, self._shard):
            if file:
                file.flush()
        hashes = self._token_hash.hexdigest(), self._start_hash.hexdigest()
        values = {"counts": dict(self._counts), "shard_lengths": list(self.shard_lengths), "hashes": hashes}
        return {**values, "document": self._document, "at_line_end": self._at_line_end}

    def restore(self, state: Mapping[str, Any] | None) -> bool:
        """Begin where a state was taken, or at the beginning, and return whether the files are those of the state."""
        self.close()
        state = state or {"counts": {}, "shard_lengths": [], "hashes": None, "document": -1, "at_line_end": False}
        self._counts = (
            dict.fromkeys(("num_tokens", "num_bytes", "num_words", "num_unknown", "num_documents"), 0) | state["counts"]
        )  # of SplitRecord
        self._document = state["document"]  # index of the document of the last token written
        self._at_line_end = state["at_line_end"]  # whether the last token written ended a line
        self._token_hash, self._start_hash = hashlib.sha256(), hashlib.sha256()
        self.shard_lengths = list(state["shard_lengths"])
        num_bytes = self._counts["num_documents"] * DOCUMENT_START_DTYPE.itemsize
        self._documents = self._reopened(documents_file(self._folder, self._split), num_bytes, self._start_hash)
        self._shard = None
        for shard, length in enumerate(self.shard_lengths):
            if self._shard:
                self._shard.close()
            file = token_file(self._folder, self._split, shard)
            self._shard = self._reopened(file, length * self._dtype.itemsize, self._token_hash)
        for file in self._folder.glob(f"{self._split}-*.tokens"):
            if file not in (token_file(self._folder, self._split, shard) for shard in range(len(self.shard_lengths))):
                file.unlink()
        hashes = [self._token_hash.hexdigest(), self._start_hash.hexdigest()]
        return state["hashes"] is None or hashes == list(state["hashes"])

    @staticmethod
    def _reopened(path: Path, num_bytes: int, digest: hashlib._Hash) -> BinaryIO:
        """Open a file behind the first bytes, which are hashed, and delete the others."""
        file = path.open("r+b" if path.exists() else "w+b")
        while num_bytes and (chunk := file.read(min(num_bytes, CHUNK_BYTES))):
            digest.update(chunk)
            num_bytes -= len(chunk)
        file.truncate()
        return file

    def add(self, chunk: _TokenChunk) -> None:
        """Write the next chunk."""
        for name in ("num_bytes", "num_words", "num_unknown"):
            self._counts[name] += getattr(chunk, name)
        if not len(chunk.ids):
            return
        starts = chunk.starts
        if self._at_line_end or chunk.documents[0] != self._document:
            starts = np.concatenate([[0], starts])
        self._document, self._at_line_end = chunk.documents[1], chunk.at_line_end
        ids = np.ascontiguousarray(chunk.ids, dtype=self._dtype)
        if self._end is not None:  # after each document but the split's last one, which `end_document` ends
            follows = starts[not self._counts["num_tokens"] :]
            ids = np.insert(ids, follows, self._end.id)
            starts = np.concatenate([starts[: len(starts) - len(follows)], follows + 1 + np.arange(len(follows))])
        self._add_starts(starts + self._counts["num_tokens"])
        self._add_tokens(ids)

    def copy(self, split: TokenSplit) -> Iterator[int]:
        """Write the documents of a corpus with the same tokenizer; yield the bytes of each part that was written."""
        self._add_starts(split.document_starts + np.uint64(self._counts["num_tokens"]))
        for name in ("num_bytes", "num_words", "num_unknown"):
            self._counts[name] += getattr(split, name)
        for start in range(0, split.num_tokens, _COPIED_TOKENS):
            ids = np.ascontiguousarray(split.tokens[start : start + _COPIED_TOKENS])
            self._add_tokens(ids)
            yield ids.nbytes

    def _add_starts(self, starts: npt.NDArray[np.integer[Any]]) -> None:
        start_bytes = starts.astype(DOCUMENT_START_DTYPE).data
        assert self._documents is not None
        self._documents.write(start_bytes)
        self._start_hash.update(start_bytes)
        self._counts["num_documents"] += len(starts)

    def _add_tokens(self, ids: TokenArray) -> None:
        self._token_hash.update(ids.data)
        self._counts["num_tokens"] += len(ids)
        while len(ids):
            if self._shard is None or self.shard_lengths[-1] == self._max_shard_tokens:
                if self._shard:
                    self._shard.close()
                self._shard = token_file(self._folder, self._split, len(self.shard_lengths)).open("wb")
                self.shard_lengths.append(0)
            shard_part = ids[: self._max_shard_tokens - self.shard_lengths[-1]]
            self._shard.write(shard_part.data)
            self.shard_lengths[-1] += len(shard_part)
            ids = ids[len(shard_part) :]

    def end_document(self) -> None:
        """Write the token that ends the last document, if there is a document and the tokenizer has such a token."""
        if self._end is not None and self.shard_lengths:
            self._add_tokens(np.array([self._end.id], dtype=self._dtype))

    def record(self) -> SplitRecord:
        """Return the entry of the split in `corpus.json`."""
        return SplitRecord.model_validate(
            {
                "dtype": self._dtype.name,
                **self._counts,
                "shard_lengths": tuple(self.shard_lengths),
                "sha256": self._token_hash.hexdigest(),
                "documents_sha256": self._start_hash.hexdigest(),
            }
        )
