"""Text before it has tokens: documents, read in chunks, and a source of text with its splits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from transformer_xl.text.tokenizers.config import TokenizerConfig

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")

DocumentUnit = Literal["file", "line"]
"""What one document of a corpus is: a file (or text) as a whole, or each of its lines."""

DEFAULT_TOKENIZER = TokenizerConfig()


@dataclass(frozen=True)
class Document:
    """One text."""

    name: str
    """Where it comes from, for messages."""
    chunks: Iterable[bytes]
    """Its bytes in chunks cut anywhere, read only when iterated; training a tokenizer and writing iterate once each."""
    num_bytes: int = 0
    """Length in bytes, for progress; 0 if unknown."""


@dataclass(frozen=True)
class TextSource:
    """The documents of each split, and how they are tokenized by default."""

    name: str
    """Default name of the corpus."""
    description: str
    """Where the text comes from and how it was split."""
    splits: Mapping[SplitName, Sequence[Document]]
    """Documents of each split; splits without text are absent."""
    tokenizer: TokenizerConfig = DEFAULT_TOKENIZER
    """Its default tokenizer."""
    tokenizer_splits: tuple[SplitName, ...] = ("train",)
    """Splits that this tokenizer is trained on."""
    document_unit: DocumentUnit = "file"
    """Whether each of `splits`' documents, or each line of them, becomes a document of the corpus."""
    expected_num_tokens: Mapping[SplitName, int] = field(default_factory=dict)
    """Published number of tokens of each split with the default tokenizer, where known."""
    notes: tuple[str, ...] = ()
    """Warnings about what the user may not have intended."""
