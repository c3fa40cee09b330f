"""Trains a tokenizer: selects the tokens of the vocabulary and their order.

Several processes read the text once, in chunks; only the counts of distinct words or characters are held in memory. The
order is by descending count, ties by first occurrence, so it does not depend on the number of processes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error
from transformer_xl.text.documents import Document
from transformer_xl.text.parallel import ordered_map
from transformer_xl.text.tokenizers.base import Tokenizer, decode_utf8, document_errors
from transformer_xl.text.tokenizers.bpe import BPETokenizer, last_word_boundary, lines_of, train_bpe
from transformer_xl.text.tokenizers.byte import ByteTokenizer
from transformer_xl.text.tokenizers.char import CharTokenizer, code_points, whole_characters
from transformer_xl.text.tokenizers.chunking import ENCODE_CHUNK_BYTES, last_whitespace, split_chunks
from transformer_xl.text.tokenizers.config import TokenizerConfig
from transformer_xl.text.tokenizers.integer import IntegerTokenizer, read_numbers
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer, check_words

Counted = TypeVar("Counted")

DEFAULT_BPE_VOCAB_SIZE = 8192


def train_tokenizer(config: TokenizerConfig, documents: Iterable[Document], *, num_workers: int = 1) -> Tokenizer:
    """Train the tokenizer that `config` describes.

    Args:
        config: kind and settings of the tokenizer.
        documents: the training text; not read if nothing is trained (byte, word with vocab_file, integer with
            vocab_size).
        num_workers: number of processes, which does not affect the tokenizer.

    Raises:
        UserError: the text is invalid for this kind (the message has the position) or contains nothing to train on, or
            vocab_file is invalid.
    """
    corpus = _TrainingText(documents, num_workers)
    match config.kind:
        case "byte":
            return ByteTokenizer()
        case "char":
            return _train_char(config, corpus)
        case "word":
            return _read_words(config, config.vocab_file) if config.vocab_file else _train_word(config, corpus)
        case "bpe":
            return _train_bpe(config, corpus)
        case "integer":
            return IntegerTokenizer(config.vocab_size - 1 if config.vocab_size else _largest_number(corpus) + 1)


@dataclass(frozen=True)
class _Boundaries:
    """Finds split positions before the tokenizer exists."""

    find: Callable[[bytes], int]
    adds_final_newline: bool = False

    def last_boundary(self, text: bytes) -> int:
        return self.find(text)


@dataclass(frozen=True)
class _DocumentChunk:
    name: str
    """Name of the document."""
    position: int
    """Byte offset of the chunk in its document."""
    text: bytes


@dataclass(frozen=True)
class _ChunkCounter(Generic[Counted]):
    """Applies a function to a chunk, and adds the document name to errors."""

    count: Callable[[bytes], Counted]

    def __call__(self, chunk: _DocumentChunk) -> Counted:
        with document_errors(chunk.name, chunk.position):
            return self.count(chunk.text)


@dataclass(frozen=True)
class _TrainingText:
    """The training text and the number of processes that read it."""

    documents: Iterable[Document]
    num_workers: int

    def map(self, count: Callable[[bytes], Counted], boundaries: _Boundaries) -> Iterator[Counted]:
        """Yield the result of `count` for each chunk, in text order."""
        return ordered_map(_ChunkCounter(count), self._chunks(boundaries), workers=self.num_workers)

    def _chunks(self, boundaries: _Boundaries) -> Iterator[_DocumentChunk]:
        for document in self.documents:
            position = 0
            with document_errors(document.name):
                for text in split_chunks(boundaries, document.chunks, ENCODE_CHUNK_BYTES):
                    yield _DocumentChunk(document.name, position, text)
                    position += len(text)


def _count_words(pre_tokenizer: PreTokenizer, chunk: bytes) -> tuple[Counter[bytes], int]:
    return Counter(pre_tokenizer.split(chunk)), chunk.count(b"\n")


def _pre_tokenizer(config: TokenizerConfig) -> PreTokenizer:
    return PreTokenizer("punctuation" if config.split_punctuation else "whitespace", config.lowercase)


def _train_word(config: TokenizerConfig, corpus: _TrainingText) -> WordTokenizer:
    pre_tokenizer = _pre_tokenizer(config)
    counts: Counter[bytes] = Counter()
    num_lines = 0
    boundaries = _Boundaries(pre_tokenizer.last_boundary, adds_final_newline=config.add_eos)
    for chunk_counts, chunk_lines in corpus.map(partial(_count_words, pre_tokenizer), boundaries):
        counts.update(chunk_counts)
        num_lines += chunk_lines
    total = counts.total()
    eos, unk = config.eos_token.encode("utf-8"), (config.unk_token or "").encode("utf-8")
    first: list[tuple[bytes, int]] = []
    if config.add_eos:
        num_eos = counts.pop(eos, 0)
        total -= num_eos
        first.append((eos, num_lines + num_eos))
    limit = None if config.vocab_size is None else config.vocab_size - len(config.special_tokens)
    words = Counter({word: count for word, count in counts.items() if word != unk})
    kept = {word: count for word, count in words.most_common(limit) if count >= config.min_frequency}
    if not kept:
        raise UserError("no words to train on: none occurs often enough in the text; give more text")
    if config.unk_token is not None:
        num_unknown = total - sum(kept.values())
        if unk in counts:  # the text contains it, so it is sorted by the count of all words that it represents
            kept = {word: num_unknown if word == unk else kept[word] for word in counts if word == unk or word in kept}
        else:
            first.append((unk, num_unknown))
    tokens = [*first, *sorted(kept.items(), key=lambda item: -item[1])]
    return WordTokenizer(
        tuple(word.decode("utf-8") for word, _ in tokens),
        np.array([count for _, count in tokens], dtype=np.int64),
        config.eos_token if config.add_eos else None,
        config.unk_token,
        pre_tokenizer,
    )


_COUNT = re.compile(rb"[0-9]{1,19}")
_MAX_TOTAL = 2**63 - 1  # of all counts, so that sums fit into int64


def _read_words(config: TokenizerConfig, file: str) -> WordTokenizer:
    """Read the words of a file, and their counts if every line has one and they are descending."""
    with as_user_error(f"reading {file}"):
        content = Path(file).read_bytes()
    with document_errors(file):
        decode_utf8(content)
    lines = [line.split() for line in content.splitlines() if line.strip()]
    if not lines:
        raise UserError(f"{file}: empty, expected one word per line, special tokens included; give another file")
    try:
        words = check_words([line[0].decode("utf-8") for line in lines])
    except ValueError as error:
        raise UserError(f"{file}: {error}; expected one word per line") from None
    eos, unk = config.eos_token if config.add_eos else None, config.unk_token
    if eos is not None and eos not in words:
        raise UserError(f"{file}: no word '{eos}', the end-of-sequence token; add it, or give --no-add-eos")
    if unk is not None:
        known = [word for word in (unk, "<UNK>", "<unk>") if word in words]
        if not known:
            raise UserError(f"{file}: no word '{unk}', the unknown token; add it on a line by itself")
        unk = known[0]
    if not set(words) - {eos, unk}:
        raise UserError(f"{file}: no words other than special tokens; give one word a line")
    counts = [int(line[1]) for line in lines if len(line) == 2 and _COUNT.fullmatch(line[1])]
    word_counts = [count for word, count in zip(words, counts, strict=False) if word not in (eos, unk)]
    descending = len(counts) == len(words) and word_counts == sorted(word_counts, reverse=True)
    known_counts = np.array(counts, dtype=np.int64) if descending and sum(counts) <= _MAX_TOTAL else None
    return WordTokenizer(words, known_counts, eos, unk, _pre_tokenizer(config))


def _count_characters(chunk: bytes) -> tuple[str, list[int]]:
    """Return the distinct characters in the order of first occurrence, and their counts."""
    text = decode_utf8(chunk)
    counts = np.bincount(code_points(text))
    characters = "".join(dict.fromkeys(text))
    return characters, counts[code_points(characters)].tolist()


def _train_char(config: TokenizerConfig, corpus: _TrainingText) -> CharTokenizer:
    counts: Counter[str] = Counter()
    for characters, numbers in corpus.map(_count_characters, _Boundaries(whole_characters)):
        counts.update(dict(zip(characters, numbers, strict=True)))
    num_bytes = 256 * config.byte_fallback
    limit = None if config.vocab_size is None else config.vocab_size - num_bytes
    kept = [item for item in counts.most_common(limit) if item[1] >= config.min_frequency]
    if not kept:
        raise UserError("no characters to train on: none occurs often enough in the text; give more text")
    return CharTokenizer(
        "".join(character for character, _ in kept),
        # If characters are left out, bytes occur more often than some characters: counts would not be descending.
        np.array([count for _, count in kept] + [0] * num_bytes, dtype=np.int64) if len(kept) == len(counts) else None,
        config.byte_fallback,
    )


def _train_bpe(config: TokenizerConfig, corpus: _TrainingText) -> BPETokenizer:
    # The library counts in several threads, so one process reads.
    texts = _TrainingText(corpus.documents, num_workers=1).map(decode_utf8, _Boundaries(last_word_boundary))
    return train_bpe(map(lines_of, texts), config.vocab_size or DEFAULT_BPE_VOCAB_SIZE)


def _largest_number(corpus: _TrainingText) -> int:
    found = corpus.map(read_numbers, _Boundaries(last_whitespace))
    largest = max((int(numbers.max(initial=-1)) for numbers in found), default=-1)
    if largest < 0:
        raise UserError("the text has no integers to train on; give one sequence of integers a line")
    return largest
