"""Text ready to be turned into a corpus, wherever it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from transformer_xl.text.documents import Document, SplitName
from transformer_xl.text.tokenizers import TokenizerConfig

AS_BYTES = TokenizerConfig()


@dataclass(frozen=True)
class TextSource:
    """Documents of each split, named at once but read only when gone through, and how they are normally read."""

    name: str
    """What to call the corpus."""
    description: str
    """Where the text comes from and how it was split, in words."""
    splits: Mapping[SplitName, Sequence[Document]]
    """Documents of each split; what is not given is not there."""
    tokenizer: TokenizerConfig = AS_BYTES
    """The vocabulary it is normally read with."""
    counted: tuple[SplitName, ...] = ("train",)
    """Splits that this vocabulary is learned from."""
    documents: Literal["files", "lines"] = "files"
    """Whether each of the documents, or each line of them, is a document of the corpus."""
    known_tokens: Mapping[SplitName, int] = field(default_factory=dict)
    """How many tokens others count in each split, where that is known; with this vocabulary."""
    notes: tuple[str, ...] = ()
    """What a user may not have meant, in words."""
