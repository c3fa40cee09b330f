"""Total loss and counts of a scored text, and the metrics computed from them.

Shape suffixes: K tokens of the text, N documents, S series of values, U units of a text, B bootstrap samples.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer_xl.text.corpus_writer import count_words
from transformer_xl.text.token_store import Tokens, TokenSplit
from transformer_xl.text.tokenizers import Tokenizer

_TOKENS_PER_CHUNK = 2**20  # a chunk takes a few megabytes of memory
_SAMPLES = 2000  # of a bootstrap


@dataclass(frozen=True)
class Sums:
    """Total loss and counts of a text."""

    nats: float
    """Sum of the losses of all tokens."""
    tokens: int
    """Number of scored tokens."""
    bytes: float
    """Number of bytes of the text; for part of a text whose tokens do not decode exactly, estimated from the
    mean number of bytes per token of the whole text."""
    characters: int | None = None
    """Number of Unicode characters, or None if the text is not UTF-8 or its tokens do not decode exactly."""
    words: int | None = None
    """Number of words: the tokens of a word tokenizer that are not line ends; for others, words separated by
    whitespace; None for integers, and for part of a text with a tokenizer of another library."""
    line_ends: int | None = None
    """Number of line ends, or None for integers."""
    num_unknown: int = 0
    """Number of tokens that are the tokenizer's unknown-word token; 0 if it has no such token."""

    @staticmethod
    def of_split(nats: float, tokenizer: Tokenizer, split: TokenSplit, tokens_K: Tokens) -> Sums:
        """Count bytes, characters and words of the first K tokens of a split, as far as they can be known."""
        is_whole, starts_N = len(tokens_K) == split.num_tokens, split.document_starts
        num_documents = 1 if is_whole else np.searchsorted(starts_N, len(tokens_K))  # of the whole, words are known
        counts = count(tokenizer, tokens_K, starts_N[:num_documents])
        if is_whole:
            counts["bytes"] = split.num_bytes
            if tokenizer.is_lossless or not tokenizer.counts_words:
                counts["words"] = split.num_words  # documents need not end with whitespace
        elif not tokenizer.is_lossless:  # decoding does not restore unknown words and whitespace
            counts["bytes"] = max(1, round(split.bytes_per_token * len(tokens_K)))
        return Sums(nats, **counts)

    @property
    def nats_per_token(self) -> float:
        """Mean loss in nats."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the text, comparable across tokenizers; what the paper reports as bpc on enwik8."""
        return self.nats / math.log(2) / self.bytes

    @property
    def bits_per_character(self) -> float | None:
        """Bits per Unicode character, or None if the number of characters is not known."""
        return self.nats / math.log(2) / self.characters if self.characters else None

    @property
    def perplexity(self) -> float | None:
        """Word-level perplexity, which papers report for Penn Treebank, WikiText-103 and One Billion Word.

        exp of the total loss divided by the number of words and line ends, or infinity if that overflows. It compares
        tokenizers. With a word tokenizer it equals `token_perplexity`; None for integers, which are not words.
        """
        num_words = 0 if self.words is None else self.words + (self.line_ends or 0)
        return exp_nats(self.nats / num_words) if num_words else None

    @property
    def token_perplexity(self) -> float:
        """exp of the mean loss per token, or infinity if that overflows; not comparable between tokenizers."""
        return exp_nats(self.nats_per_token)

    def as_dict(self) -> dict[str, Any]:
        """Return counts and metrics by name, for JSON."""
        counts = ("tokens", "num_unknown", "bytes", "characters", "words", "line_ends")
        metrics = ("nats_per_token", "bits_per_byte", "bits_per_character", "perplexity", "token_perplexity")
        values = {name: getattr(self, name) for name in (*counts, *metrics)}
        return {**values, "bytes": round(self.bytes)}


def bootstrap_means(sum_SU: npt.NDArray[Any], size_U: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the mean of bootstrap samples, shape (S, 2000): units are drawn with replacement, the same for all rows.

    Args:
        sum_SU: in each row, the sum of something in each unit of a text, such as the difference of two losses.
        size_U: number of values in each unit, by whose sum a sample is divided.
    """
    drawn_BU = np.random.default_rng(0).multinomial(len(size_U), np.full(len(size_U), 1 / len(size_U)), _SAMPLES)
    return sum_SU @ drawn_BU.T / (drawn_BU @ size_U)


def exp_nats(nats: float) -> float:
    """Return exp of a mean loss in nats, or infinity if that overflows."""
    return math.exp(nats) if nats < 700 else math.inf  # math.exp overflows above 709


def chunks(tokens_K: Tokens, starts_N: Iterable[int] = (0,)) -> Iterator[tuple[npt.NDArray[Any], bool]]:
    """Yield a text in chunks, each of one document, and whether that starts there.

    So a large text is never loaded into memory as a whole, and no word goes on in the next document.
    """
    for first, end in pairwise(chain(map(int, starts_N), [len(tokens_K)])):
        for start in range(first, end, _TOKENS_PER_CHUNK):
            yield tokens_K[start : min(start + _TOKENS_PER_CHUNK, end)], start == first


def count(tokenizer: Tokenizer, tokens_K: Tokens, starts_N: Iterable[int] = (0,)) -> dict[str, Any]:
    """Return what can be counted in a text, under the names of the fields of `Sums`; a word that the end cuts counts.

    Words end where documents do, which start at `starts_N`.

    `bytes` and `characters` are there if the tokens decode exactly. The number of characters is None if the text is not
    UTF-8; an incomplete character at the end is not counted.
    """
    decoder, previous_byte = codecs.getincrementaldecoder("utf-8")(), b" "
    num_bytes = words = line_ends = num_unknown = 0
    characters: int | None = 0
    for chunk_K, is_start in chunks(tokens_K, starts_N):
        if tokenizer.unk_token_id is not None:
            num_unknown += int(np.count_nonzero(chunk_K == tokenizer.unk_token_id))
        if tokenizer.is_lossless:
            content = tokenizer.decode_bytes(chunk_K)
            num_bytes += len(content)
            words += count_words(content, b" " if is_start else previous_byte)
            line_ends += content.count(b"\n")
            previous_byte = content[-1:] or previous_byte
            try:
                characters = None if characters is None else characters + len(decoder.decode(content))
            except UnicodeDecodeError:
                characters = None
        elif tokenizer.is_text:
            num_newlines = int(np.count_nonzero(tokenizer.is_newline_V[chunk_K]))
            words += len(chunk_K) - num_newlines
            line_ends += num_newlines
    counts: dict[str, Any] = {"tokens": len(tokens_K), "num_unknown": num_unknown}
    if tokenizer.is_text:
        counts |= {"words": words if tokenizer.counts_words else None, "line_ends": line_ends}
    return counts | ({"bytes": num_bytes, "characters": characters} if tokenizer.is_lossless else {})
