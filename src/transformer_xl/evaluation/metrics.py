"""Sums over a scored text, and the metrics computed from them: losses are summed in nats and divided here, once.

Shape suffixes: K tokens of the text.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer_xl.text.token_store import Tokens, TokenSplit
from transformer_xl.text.tokenizers import Tokenizer

_TOKENS_PER_CHUNK = 2**20


@dataclass(frozen=True)
class Sums:
    """Loss and counts of a text."""

    nats: float
    tokens: int
    bytes: float
    """Not a whole number where only the bytes of the whole text are known, and this is part of it."""
    characters: int | None = None
    """Unicode characters; None: not known, or the text is not UTF-8."""
    words: int | None = None
    """Number of words, separated by white space; None: not known."""
    num_unknown: int = 0
    """Tokens that stand for a word the tokenizer does not know."""

    def __post_init__(self) -> None:
        assert self.tokens > 0
        assert self.bytes > 0

    @staticmethod
    def of_split(nats: float, tokenizer: Tokenizer, split: TokenSplit, tokens_K: Tokens) -> Sums:
        """Count bytes, characters and words of the first K tokens of a split, as far as they are known."""
        whole = len(tokens_K) == split.num_tokens
        words = split.num_words if whole and tokenizer.is_text else _count_words(tokenizer, tokens_K)
        num_unknown = count_unknown(tokenizer, tokens_K)
        if not tokenizer.is_lossless:  # decoding does not give the text back: unknown words, white space
            num_bytes = split.num_bytes if whole else max(1, round(split.bytes_per_token * len(tokens_K)))
            return Sums(nats, len(tokens_K), num_bytes, None, words, num_unknown)
        num_bytes, characters = count_text(tokenizer, tokens_K)
        return Sums(nats, len(tokens_K), split.num_bytes if whole else num_bytes, characters, words, num_unknown)

    @property
    def nats_per_token(self) -> float:
        """Mean loss in nats."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the text; comparable across tokenizers. The paper's bpc of enwik8 is this."""
        return self.nats / math.log(2) / self.bytes

    @property
    def bits_per_character(self) -> float | None:
        """Bits per Unicode character; None where their number is not known."""
        return self.nats / math.log(2) / self.characters if self.characters else None

    @property
    def perplexity(self) -> float:
        """exp of the mean loss per token (infinite where that overflows)."""
        return _exp(self.nats_per_token)

    @property
    def word_perplexity(self) -> float | None:
        """exp of the loss per word, which includes the loss of line ends and spaces; None: words not known."""
        return _exp(self.nats / self.words) if self.words else None

    def as_dict(self) -> dict[str, Any]:
        """Return counts and metrics by name, for JSON."""
        return {
            "tokens": self.tokens,
            "num_unknown": self.num_unknown,
            "bytes": round(self.bytes),
            "characters": self.characters,
            "words": self.words,
            "nats_per_token": self.nats_per_token,
            "bits_per_byte": self.bits_per_byte,
            "bits_per_character": self.bits_per_character,
            "perplexity": self.perplexity,
            "word_perplexity": self.word_perplexity,
        }


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def chunks(tokens_K: Tokens) -> Iterator[npt.NDArray[Any]]:
    """Yield a text in chunks, so that a large one is never in memory as a whole."""
    for start in range(0, len(tokens_K), _TOKENS_PER_CHUNK):
        yield tokens_K[start : start + _TOKENS_PER_CHUNK]


def count_text(tokenizer: Tokenizer, tokens_K: Tokens) -> tuple[int, int | None]:
    """Return bytes and Unicode characters of a text whose tokens decode exactly; characters None: it is not UTF-8.

    A character that the end of the text cuts does not count.
    """
    decoder, num_bytes = codecs.getincrementaldecoder("utf-8")(), 0
    characters: int | None = 0
    for chunk_K in chunks(tokens_K):
        content = tokenizer.decode_bytes(chunk_K)
        num_bytes += len(content)
        if characters is not None:
            try:
                characters += len(decoder.decode(content))
            except UnicodeDecodeError:
                characters = None
    return num_bytes, characters


def _count_words(tokenizer: Tokenizer, tokens_K: Tokens) -> int | None:
    counts = [tokenizer.count_words(chunk_K) for chunk_K in chunks(tokens_K)]
    return None if None in counts else sum(count for count in counts if count is not None)


def count_unknown(tokenizer: Tokenizer, tokens_K: Tokens) -> int:
    """Return how many tokens stand for a word the tokenizer does not know."""
    if tokenizer.unk_token_id is None:
        return 0
    return sum(int(np.count_nonzero(chunk_K == tokenizer.unk_token_id)) for chunk_K in chunks(tokens_K))
