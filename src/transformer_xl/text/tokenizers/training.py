"""Trains a tokenizer: selects the tokens of the vocabulary and their order.

Several processes count the words or characters of the text, chunk by chunk, in one pass; only the counts of distinct
words or characters are held in memory. Tokens are in descending order of counts, and tokens with equal counts in order
of first occurrence, so the tokenizer does not depend on the number of processes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from transformer_xl.config import UserError
from transformer_xl.text.documents import Document, TextChunk, batched, text_chunks
from transformer_xl.text.parallel import ordered_map
from transformer_xl.text.sources.archives import Progress, no_progress, read_text_file
from transformer_xl.text.tokenizers.base import Tokenizer, decode_utf8, document_errors
from transformer_xl.text.tokenizers.bpe import lines_of, train_bpe, train_bpe_apart
from transformer_xl.text.tokenizers.byte import ByteTokenizer
from transformer_xl.text.tokenizers.char import CharTokenizer, code_points
from transformer_xl.text.tokenizers.integer import MAX_VALUES, IntegerTokenizer, parse_integers
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.tokenizer_config import TokenizerConfig
from transformer_xl.text.tokenizers.word import WordTokenizer, check_words

Result = TypeVar("Result")

DEFAULT_BPE_VOCAB_SIZE = 8192


def train_tokenizer(
    config: TokenizerConfig, documents: Iterable[Document], *, num_workers: int = 1, progress: Progress = no_progress
) -> Tokenizer:
    """Train the tokenizer that `config` describes.

    Args:
        config: kind and settings of the tokenizer.
        documents: the training text; not read if nothing is trained (byte, word with vocab_file, integer with
            vocab_size).
        num_workers: number of processes, which does not affect the tokenizer.
        progress: called with a stage, the amount done and the total.

    Raises:
        UserError: the text is invalid for this kind (the message contains the position) or contains nothing to train
            on, or vocab_file is invalid.
    """
    match config.kind:
        case "byte":
            return ByteTokenizer()
        case "char":
            return _train_char(config, documents, num_workers)
        case "word" if config.vocab_file:
            return _read_words(config, config.vocab_file)
        case "word":
            return _train_word(config, documents, num_workers)
        case "bpe":
            # The library `tokenizers` counts in several threads, so one process is enough.
            texts = _map_chunks(decode_utf8, documents, train_bpe([], vocab_size=256), num_workers=1)
            size = config.vocab_size or DEFAULT_BPE_VOCAB_SIZE
            return train_bpe_apart(map(lines_of, texts), size, lambda: progress("merge bytes to tokens", 0, size))
        case "integer" if config.vocab_size:
            return IntegerTokenizer(config.vocab_size - config.add_eos, config.add_eos)
        case "integer":
            return _train_integer(config, documents, num_workers)


def _map_chunks(
    function: Callable[[bytes], Result], documents: Iterable[Document], untrained: Tokenizer, num_workers: int
) -> Iterator[Result]:
    """Yield the results of `function` for the chunks of the documents, in order.

    Args:
        function: called in a worker process with each chunk.
        documents: the training text.
        untrained: a tokenizer of the same kind and settings, whatever its vocabulary, which finds where to split.
        num_workers: number of worker processes.
    """
    batches = batched(text_chunks(untrained, documents), lambda chunk: len(chunk.text))
    for results in ordered_map(partial(_call, function), batches, workers=num_workers):
        yield from results


def _call(function: Callable[[bytes], Result], chunks: list[TextChunk]) -> list[Result]:
    results: list[Result] = []
    for chunk in chunks:
        with document_errors(chunk.document_name, chunk.position):
            results.append(function(chunk.text))
    return results


def _pre_tokenizer(config: TokenizerConfig) -> PreTokenizer:
    return PreTokenizer("punctuation" if config.split_punctuation else "whitespace", lowercase=config.lowercase)


def _count_words(pre_tokenizer: PreTokenizer, eos_token: bytes, chunk: bytes) -> Counter[bytes]:
    """Return the count of each word; newlines count as `eos_token` unless it is empty."""
    return Counter(pre_tokenizer.split(chunk, eos_token))


def _train_word(config: TokenizerConfig, documents: Iterable[Document], num_workers: int) -> WordTokenizer:
    pre_tokenizer = _pre_tokenizer(config)
    eos_and_unk = config.eos_token if config.add_eos else None, config.unk_token
    untrained = WordTokenizer(tuple(config.special_tokens), None, *eos_and_unk, pre_tokenizer)
    eos, unk = ((token or "").encode("utf-8") for token in eos_and_unk)
    counts: Counter[bytes] = Counter()
    for chunk_counts in _map_chunks(partial(_count_words, pre_tokenizer, eos), documents, untrained, num_workers):
        counts.update(chunk_counts)
    special: list[tuple[bytes, int]] = []  # at the front of the vocabulary
    if config.add_eos:
        special.append((eos, counts.pop(eos, 0)))
    limit = None if config.vocab_size is None else config.vocab_size - len(config.special_tokens)
    words = Counter({word: count for word, count in counts.items() if word != unk})
    selected = {word: count for word, count in words.most_common(limit) if count >= config.min_frequency}
    if not selected:
        raise UserError("no words to train on: none occurs often enough in the text; give more text")
    if config.unk_token is not None:
        num_unknown = counts.total() - sum(selected.values())
        if unk in counts:  # the text contains it, so it is sorted by the count of all words that it represents
            selected = {word: selected.get(word, num_unknown) for word in counts if word in selected or word == unk}
        else:
            special.append((unk, num_unknown))
    tokens = [*special, *sorted(selected.items(), key=lambda item: -item[1])]
    return replace(
        untrained,
        words=tuple(word.decode("utf-8") for word, _ in tokens),
        counts=np.array([count for _, count in tokens], dtype=np.int64),
    )


_COUNT = re.compile(rb"[0-9]{1,19}")  # of a word, as it may follow the word in a line of a vocabulary file
_MAX_TOTAL = 2**63 - 1  # of all counts, so that sums fit into int64


def _read_words(config: TokenizerConfig, file: str) -> WordTokenizer:
    """Read the words of a file, one per line, and their counts if all lines have counts in descending order."""
    content = read_text_file(Path(file))
    with document_errors(file):
        decode_utf8(content)
    lines = [line.split() for line in content.splitlines() if line.strip()]
    try:
        words = check_words([line[0].decode("utf-8") for line in lines])
    except ValueError as error:
        raise UserError(f"{file}: {error}; expected one word per line, special tokens included") from None
    eos, unk = config.eos_token if config.add_eos else None, config.unk_token
    if eos is not None and eos not in words:
        raise UserError(f"{file}: no word '{eos}', the end-of-sequence token; add it, or give add_eos=false")
    if unk is not None:  # the file may have it in uppercase or lowercase
        unk = next((word for word in (unk, "<UNK>", "<unk>") if word in words), None)
        if unk is None:
            raise UserError(f"{file}: no word '{config.unk_token}', the unknown token; add it in a line of the file")
    if not set(words) - {eos, unk}:
        raise UserError(f"{file}: no words other than special tokens; expected one word per line")
    counts = [int(line[1]) for line in lines if len(line) == 2 and _COUNT.fullmatch(line[1])]
    word_counts = [count for word, count in zip(words, counts, strict=False) if word not in (eos, unk)]
    descending = len(counts) == len(words) and word_counts == sorted(word_counts, reverse=True)
    known_counts = np.array(counts, dtype=np.int64) if descending and sum(counts) <= _MAX_TOTAL else None
    return WordTokenizer(words, known_counts, eos, unk, _pre_tokenizer(config))


def _count_characters(chunk: bytes) -> dict[str, int]:
    """Return the count of each character, in order of first occurrence."""
    text = decode_utf8(chunk)
    counts = np.bincount(code_points(text))  # much faster than a Counter of the characters
    return {character: int(counts[ord(character)]) for character in dict.fromkeys(text)}


def _train_char(config: TokenizerConfig, documents: Iterable[Document], num_workers: int) -> CharTokenizer:
    untrained = CharTokenizer("", byte_fallback=config.byte_fallback)
    counts: Counter[str] = Counter()
    for chunk_counts in _map_chunks(_count_characters, documents, untrained, num_workers):
        counts.update(chunk_counts)
    num_bytes = untrained.vocab_size  # 256 with byte fallback, else 0
    limit = None if config.vocab_size is None else config.vocab_size - num_bytes
    selected = [(character, count) for character, count in counts.most_common(limit) if count >= config.min_frequency]
    if not selected:
        raise UserError("no characters to train on: none occurs often enough in the text; give more text")
    return replace(
        untrained,
        characters="".join(character for character, _ in selected),
        # If characters are left out, bytes occur more often than some characters: counts would not be descending.
        counts=np.array([count for _, count in selected] + [0] * num_bytes) if len(selected) == len(counts) else None,
    )


def _train_integer(config: TokenizerConfig, documents: Iterable[Document], num_workers: int) -> IntegerTokenizer:
    chunks = _map_chunks(parse_integers, documents, IntegerTokenizer(MAX_VALUES), num_workers)
    largest = max((int(values.max(initial=-1)) for values in chunks), default=-1)
    if largest < 0:
        raise UserError("the text has no integers to train on; give one sequence of integers per line")
    return IntegerTokenizer(largest + 1, config.add_eos)
