"""Learning a vocabulary from text: which tokens there are, and in which order.

One reading in pieces, spread over processes; what is held is a table of the different words or characters. The order
does not depend on the number of processes: falling counts, ties in the order in which they first stand in the text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Generic, Literal, Self, TypeVar

import numpy as np
from pydantic import Field, model_validator

from transformer_xl.config import INT32_MAX, Settings, UserError
from transformer_xl.files import as_user_error
from transformer_xl.text.documents import Document
from transformer_xl.text.parallel import ordered_map
from transformer_xl.text.tokenizer import (
    ENCODE_CHUNK_BYTES,
    ByteTokenizer,
    EncodingError,
    Tokenizer,
    decode_utf8,
    read_json_object,
    split_chunks,
)
from transformer_xl.text.tokenizers.bpe import BPETokenizer, lines_of, train_bpe
from transformer_xl.text.tokenizers.characters import CharTokenizer, code_points, whole_characters
from transformer_xl.text.tokenizers.integers import MAX_VALUES, IntegerTokenizer, read_numbers
from transformer_xl.text.tokenizers.splitting import last_whitespace, last_word_space
from transformer_xl.text.tokenizers.words import Case, PreTokenizerName, WordSplitting, WordTokenizer, check_words

TokenizerKind = Literal["bytes", "characters", "words", "bpe", "integers"]
Count = TypeVar("Count")

DEFAULT_BPE_VOCAB_SIZE = 8192
"""Tokens of byte-pair encoding, unless told otherwise."""


class TokenizerConfig(Settings):
    """Which vocabulary to make; what is set must apply to its kind."""

    kind: TokenizerKind = "bytes"
    """What a token is: a byte, a character, a word, a part of a word (byte-pair encoding), or a whole number."""
    case: Case = "kept"
    """Of words: as the text has it, or folded to small letters."""
    pre_tokenizer: PreTokenizerName = "spaces"
    """Of words: at white space, or punctuation and numbers apart as well, in the forms of WikiText."""
    min_frequency: int = Field(default=1, gt=0, le=INT32_MAX)
    """Of words and characters: how often one must stand in the text; rarer ones are left out."""
    vocab_size: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Most words or characters, marks in front not counted; none: all. Of bpe: tokens wanted; none: 8192."""
    eos_token: str | None = "<eos>"
    """Of words: the mark that each line end becomes, id 0; none: line ends are white space."""
    unk_token: str | None = "<unk>"
    """Of words: the one that stands for all that were left out; none: they are refused. Of characters: none means that
    other characters are refused, and anything else that they are written as bytes."""
    vocab_file: str | None = None
    """Of words: a file with a word to a line, in the order of their ids, marks included; nothing is learned."""
    tokenizer_file: str | None = None
    """Of bpe: a tokenizer as a JSON file of the `tokenizers` library; nothing is learned."""
    num_values: int | None = Field(default=None, gt=0, le=MAX_VALUES)
    """Of integers: numbers are 0 .. values - 1; none: the largest of the text + 1."""

    @model_validator(mode="after")
    def _applies(self) -> Self:
        for name, kinds in _APPLIES_TO.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for {' and '.join(kinds)}, not for {self.kind}; leave it out")
        for mark in filter(None, (self.eos_token, self.unk_token)):
            if mark.encode("utf-8", errors="replace").split() != [mark.encode("utf-8", errors="replace")]:
                raise ValueError(f"the mark {mark!r} holds white space; give one word")
        if self.eos_token == self.unk_token is not None and self.kind == "words":
            raise ValueError(f"{self.unk_token!r} cannot mark both line ends and unknown words; give two words")
        if "" in (self.eos_token, self.unk_token):
            raise ValueError("a mark is empty; give a word, or none")
        if (self.vocab_file or self.tokenizer_file) and (self.vocab_size or self.min_frequency > 1):
            raise ValueError("the tokens come from a file, so they cannot be limited; leave min_count and max_size out")
        if self.kind == "bpe" and self.vocab_size is not None and self.vocab_size < 256:
            raise ValueError(f"max_size is {self.vocab_size}, but bpe has at least the 256 bytes; give a larger one")
        return self


_APPLIES_TO = {
    "case": ("words",),
    "splitting": ("words",),
    "min_count": ("words", "characters"),
    "max_size": ("words", "characters", "bpe"),
    "end_of_line": ("words",),
    "unknown": ("words", "characters"),
    "words_file": ("words",),
    "tokenizer_file": ("bpe",),
    "values": ("integers",),
}


def train_tokenizer(options: TokenizerConfig, documents: Iterable[Document], *, workers: int = 1) -> Tokenizer:
    """The vocabulary that these options describe, for this text.

    Args:
        options: which one.
        documents: the text to learn from; not read where nothing is learned (bytes, a file of words, given values).
        workers: processes that read it; the vocabulary does not depend on them.

    Raises:
        UserError: the text cannot be read as this kind (its document and byte are said), or holds nothing to learn;
            a file of words or a tokenizer is not what is wanted.
    """
    reading = _Reading(documents, workers)
    if options.kind == "bytes":
        return ByteTokenizer()
    if options.kind == "characters":
        return _learn_characters(options, reading)
    if options.kind == "words":
        return _read_words(options, options.vocab_file) if options.vocab_file else _learn_words(options, reading)
    if options.kind == "bpe":
        return _read_bpe(options.tokenizer_file) if options.tokenizer_file else _learn_bpe(options, reading)
    return IntegerTokenizer(options.num_values or _largest(reading) + 1)


@dataclass(frozen=True)
class _Cuts:
    """Where text may be cut before there is a vocabulary."""

    find: Callable[[bytes], int]
    adds_final_newline: bool = False

    def last_boundary(self, text: bytes) -> int:
        """The last place to cut this text; 0: none."""
        return self.find(text)


@dataclass(frozen=True)
class _Located:
    """A piece of a document."""

    name: str
    place: int
    piece: bytes


@dataclass(frozen=True)
class _Reader(Generic[Count]):
    """Does something with a piece; says of which document it is where that fails."""

    count: Callable[[bytes], Count]

    def __call__(self, item: _Located) -> Count:
        try:
            return self.count(item.piece)
        except EncodingError as error:
            raise UserError(f"{item.name}: byte {item.place + error.place:,}: {error.what}") from None


@dataclass(frozen=True)
class _Reading:
    """The text to learn from, and how many processes read it."""

    documents: Iterable[Document]
    workers: int

    def map(self, count: Callable[[bytes], Count], cuts: _Cuts) -> Iterator[Count]:
        """What `count` gives for each piece, in the order of the text."""
        return ordered_map(_Reader(count), self._pieces(cuts), workers=self.workers)

    def _pieces(self, cuts: _Cuts) -> Iterator[_Located]:
        for document in self.documents:
            place = 0
            try:
                for piece in split_chunks(cuts, document.chunks, ENCODE_CHUNK_BYTES):
                    yield _Located(document.name, place, piece)
                    place += len(piece)
            except EncodingError as error:
                raise UserError(f"{document.name}: byte {error.place:,}: {error.what}") from None


def _count_words(rules: WordSplitting, piece: bytes) -> tuple[Counter[bytes], int]:
    return Counter(rules.words(piece)), piece.count(b"\n")


def _learn_words(options: TokenizerConfig, reading: _Reading) -> WordTokenizer:
    rules = WordSplitting(options.case, options.pre_tokenizer)
    counts: Counter[bytes] = Counter()
    num_lines = 0
    cuts = _Cuts(rules.last_boundary, adds_final_newline=options.eos_token is not None)
    for found, ends in reading.map(partial(_count_words, rules), cuts):
        counts.update(found)
        num_lines += ends
    specials: list[tuple[bytes, int]] = []
    if options.eos_token is not None:
        mark = options.eos_token.encode("utf-8")
        specials.append((mark, num_lines + counts.pop(mark, 0)))
    kept = {word: count for word, count in counts.most_common(options.vocab_size) if count >= options.min_frequency}
    if not kept.keys() - {(options.unk_token or "").encode("utf-8")}:
        raise UserError("no words to learn: the text holds none that stands in it often enough; give more text")
    if options.unk_token is not None:
        unknown = options.unk_token.encode("utf-8")
        num_unknown = counts.total() - sum(kept.values()) + kept.get(unknown, 0)
        if unknown in counts:  # its place is that of all it stands for
            kept = {word: kept.get(word, 0) for word in counts if word in kept or word == unknown} | {
                unknown: num_unknown
            }
        else:
            specials.append((unknown, num_unknown))
    words = [*specials, *sorted(kept.items(), key=lambda item: -item[1])]
    return WordTokenizer(
        tuple(word.decode("utf-8") for word, _ in words),
        np.array([count for _, count in words], dtype=np.int64),
        options.eos_token,
        options.unk_token,
        rules,
    )


_COUNT = re.compile(rb"[0-9]{1,19}")
_MOST_COUNTED = 2**63 - 1  # all together; a larger number is no count


def _read_words(options: TokenizerConfig, file: str) -> WordTokenizer:
    """The words of a file, with their counts where each line gives one and they fall."""
    with as_user_error(f"reading {file}"):
        content = Path(file).read_bytes()
    try:
        lines = [line.split() for line in decode_utf8(content).encode("utf-8").splitlines() if line.strip()]
        if not lines:
            raise UserError(f"{file}: empty, wanted a word to a line, marks included; give another file of words")
        words = check_words([line[0].decode("utf-8") for line in lines])
    except EncodingError as error:
        raise UserError(f"{file}: byte {error.place:,}: {error.what}") from None
    except ValueError as error:
        raise UserError(f"{file}: {error}; wanted a word to a line") from None
    mark, unknown = options.eos_token, options.unk_token
    if mark is not None and mark not in words:
        raise UserError(f"{file}: no word '{mark}', the mark of line ends; add it, or give --no-end-of-line")
    if unknown is not None:
        known = [word for word in (unknown, "<UNK>", "<unk>") if word in words]
        if not known:
            raise UserError(f"{file}: no word '{unknown}' for unknown words; add it on a line by itself")
        unknown = known[0]
    if not set(words) - {mark, unknown}:
        raise UserError(f"{file}: no words but its marks, so there is nothing to learn; give a word to a line")
    counts = [int(line[1]) for line in lines if len(line) == 2 and _COUNT.fullmatch(line[1])]
    of_others = [count for word, count in zip(words, counts, strict=False) if word not in (mark, unknown)]
    falling = len(counts) == len(words) and of_others == sorted(of_others, reverse=True)
    known_counts = np.array(counts, dtype=np.int64) if falling and sum(counts) <= _MOST_COUNTED else None
    return WordTokenizer(words, known_counts, mark, unknown, WordSplitting(options.case, options.pre_tokenizer))


def _count_characters(piece: bytes) -> tuple[str, list[int]]:
    """The different characters in the order in which they first stand in the piece, and their counts."""
    text = decode_utf8(piece)
    counts = np.bincount(code_points(text))
    characters = "".join(dict.fromkeys(text))
    return characters, counts[code_points(characters)].tolist()


def _learn_characters(options: TokenizerConfig, reading: _Reading) -> CharTokenizer:
    counts: Counter[str] = Counter()
    for characters, numbers in reading.map(_count_characters, _Cuts(whole_characters)):
        counts.update(dict(zip(characters, numbers, strict=True)))
    kept = [item for item in counts.most_common(options.vocab_size) if item[1] >= options.min_frequency]
    closed = options.unk_token is None
    if not kept:
        raise UserError("no characters to learn: the text holds none that stands in it often enough; give more text")
    known = [count for _, count in kept] + [0] * (0 if closed else 256)
    return CharTokenizer(
        "".join(character for character, _ in kept),
        # rare characters make some bytes more frequent than kept characters: counts would not fall
        np.array(known, dtype=np.int64) if len(kept) == len(counts) else None,
        closed,
    )


def _learn_bpe(options: TokenizerConfig, reading: _Reading) -> BPETokenizer:
    # the library counts in threads of its own, so one process reads
    pieces = _Reading(reading.documents, workers=1).map(decode_utf8, _Cuts(last_word_space))
    return train_bpe(map(lines_of, pieces), options.vocab_size or DEFAULT_BPE_VOCAB_SIZE)


_OTHER_TOKENIZER = "give another tokenizer, or let txl learn one"


def _read_bpe(file: str) -> BPETokenizer:
    try:
        return BPETokenizer.from_json({"tokenizer": read_json_object(Path(file), _OTHER_TOKENIZER)})
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{file}: {error}; {_OTHER_TOKENIZER}") from None


def _largest(reading: _Reading) -> int:
    largest = max(
        chain([-1], (int(found.max(initial=-1)) for found in reading.map(read_numbers, _Cuts(last_whitespace))))
    )
    if largest < 0:
        raise UserError("the text holds no numbers to learn from; give one sequence of whole numbers to a line")
    return largest
