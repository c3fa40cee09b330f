"""Untokenized text for `txl prepare`: documents, which are read in chunks, and a text source with its splits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from transformer_xl.text.tokenizers import Tokenizer, document_errors
from transformer_xl.text.tokenizers.chunking import ENCODE_CHUNK_BYTES, split_chunks
from transformer_xl.text.tokenizers.tokenizer_config import TokenizerConfig

SplitName = Literal["train", "valid", "test"]
"""The parts of a text for training, validation and the final test."""
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")

DocumentUnit = Literal["file", "line"]
"""Whether a document of a corpus is a whole file (or row, or text in memory), or one line of it."""

Chunk = TypeVar("Chunk")
_BATCH_BYTES = 2**20  # unfinished preparations count batches of rows, so it stays


@dataclass(frozen=True)
class Document:
    """A text that is read in chunks of bytes."""

    name: str
    """Name for messages, such as the path of the file."""
    chunks: Iterable[bytes]
    """The bytes in chunks of any size, read lazily; iterated once to train a tokenizer and once to write the corpus."""
    num_bytes: int = 0
    """Length in bytes for the progress display, or 0 if unknown."""


@dataclass(frozen=True)
class TextChunk:
    """A chunk of a document that can be encoded independently of the rest."""

    document: int
    """The document's index."""
    document_name: str
    position: int
    """Byte offset of the chunk in its document."""
    previous_byte: bytes
    """The byte before the chunk in its document, or a space if the chunk is the first."""
    text: bytes
    num_bytes: int
    """Length of the text in its document, without the newline that a tokenizer may add to it."""


def text_chunks(tokenizer: Tokenizer, documents: Iterable[Document], first_index: int = 0) -> Iterator[TextChunk]:
    """Yield all documents in chunks that can be encoded independently.

    Args:
        tokenizer: decides where they can be split.
        documents: the documents.
        first_index: the index of the first one.

    Raises:
        UserError: a document cannot be split (see `split_chunks`).
    """
    for index, document in enumerate(documents, first_index):
        position, previous_byte, num_read = 0, b" ", 0

        def counted(chunks: Iterable[bytes]) -> Iterator[bytes]:
            nonlocal num_read
            for chunk in chunks:
                num_read += len(chunk)
                yield chunk

        with document_errors(document.name):
            for text in split_chunks(tokenizer, counted(document.chunks), ENCODE_CHUNK_BYTES):
                num_bytes = min(len(text), num_read - position)
                yield TextChunk(index, document.name, position, previous_byte, text, num_bytes)
                position, previous_byte = position + len(text), text[-1:]


def batched(chunks: Iterable[Chunk], size: Callable[[Chunk], int]) -> Iterator[list[Chunk]]:
    """Group consecutive chunks into batches of about 1 MiB or more, so that transfers to processes cost little."""
    batch, num_bytes = list[Chunk](), 0
    for chunk in chunks:
        batch.append(chunk)
        num_bytes += size(chunk)
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = list[Chunk](), 0
    if batch:
        yield batch


@dataclass(frozen=True)
class TextSource:
    """The documents of each split, and the default tokenizer settings."""

    name: str
    """Default name of the corpus."""
    description: str
    """Where the text comes from and how it was split."""
    splits: Mapping[SplitName, Sequence[Document]] = field(default_factory=dict)
    """Documents by split; splits without text are absent."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Settings of the default tokenizer."""
    tokenizer_splits: tuple[SplitName, ...] = ("train",)
    """Splits that the default tokenizer is trained on."""
    document_unit: DocumentUnit = "file"
    """Whether each document in `splits` (file) or each of their lines (line) becomes a document of the corpus."""
    expected_num_tokens: Mapping[SplitName, int] = field(default_factory=dict)
    """Published number of tokens of each split with the default tokenizer, where known."""
    notes: tuple[str, ...] = ()
    """Warnings about what the user may not have intended."""
