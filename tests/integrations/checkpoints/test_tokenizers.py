"""Vocabularies of other programs keep their stored order in every file format."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.checkpoints.old_modules import old_corpus, old_modules, old_vocabulary

from transformer_xl.config import UserError
from transformer_xl.integrations.checkpoints import tokenizers
from transformer_xl.integrations.checkpoints.source_config import ImportedModel
from transformer_xl.integrations.checkpoints.tokenizers import (
    bytes_from_decimal_words,
    read_tokenizer,
    tokenizer_from_object,
    words_of,
)
from transformer_xl.text.tokenizers import ByteTokenizer
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

WORDS = ["<eos>", "zebra", "caf\u00e9", "<unk>", "apple", "the"]
ID_OF_WORD = {word: WORDS.index(word) for word in sorted(WORDS)}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vocab.json", json.dumps(ID_OF_WORD)),
        ("vocab.json", json.dumps(WORDS)),
        ("vocab.json", json.dumps({"sym2idx": ID_OF_WORD})),
        ("vocab.txt", "".join(f"{word} 7\n" for word in WORDS)),  # each line has a word and its count
        ("vocab.txt", "".join(["\ufeff", *(f"{word}\n" for word in WORDS)])),  # with a byte order mark
    ],
)
def test_order_of_words_in_json_and_text_is_kept(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    check_words(tmp_path / name)


@pytest.mark.parametrize(
    ("kind", "file_format"),
    [
        ("tokenizer", "zip"), ("tokenizer", "pickle"), ("vocabulary", "legacy"), ("vocabulary", "pickle"),
        ("corpus", "zip"), ("corpus", "legacy"),
    ],
)  # fmt: skip
def test_order_of_words_in_pickles_is_kept(kind: str, file_format: str, tmp_path: Path) -> None:
    """torch.save writes a zip archive; before torch 1.6 it wrote the legacy format, several pickles in sequence."""
    file = tmp_path / "vocab.bin"
    with old_modules():
        value = {
            "tokenizer": {"sym2idx": OrderedDict(ID_OF_WORD), "counter": None},
            "vocabulary": old_vocabulary(WORDS),
            "corpus": old_corpus(WORDS),
        }[kind]
        if file_format == "pickle":
            file.write_bytes(pickle.dumps(value, 2))
        else:
            torch.save(value, file, _use_new_zipfile_serialization=file_format == "zip")
    check_words(file)


def check_words(file: Path) -> None:
    tokenizer = read_tokenizer(file)
    assert isinstance(tokenizer, WordTokenizer)
    assert list(tokenizer.words) == WORDS
    assert (tokenizer.eos_token, tokenizer.unk_token) == ("<eos>", "<unk>")
    assert tokenizer.encode("the zebra pear\n").tolist() == [5, 1, 3, 0]  # pear is unknown; a newline is <eos>


def test_words_of_a_tokenizer_are_those_it_was_created_from() -> None:
    """Single characters with `_` for the space, as in text8, make a char tokenizer; without `_` they are words."""
    assert words_of(tokenizer_from_object({"idx2sym": WORDS}, "x")) == tuple(WORDS)
    characters = tokenizer_from_object({"idx2sym": ["_", "e", "t"]}, "x")
    assert isinstance(characters, CharTokenizer)
    assert characters.characters == " et"
    assert words_of(characters) == ("_", "e", "t")
    assert words_of(ByteTokenizer()) is None  # it has no words
    assert isinstance(tokenizer_from_object({"idx2sym": ["a", "e", "t"]}, "x"), WordTokenizer)


def test_number_of_words_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    monkeypatch.setattr(tokenizers, "_MAX_WORDS", 5)
    with pytest.raises(UserError, match=r"vocab.txt has 6 words; a model with 5 at most can be converted"):
        read_tokenizer(tmp_path / "vocab.txt")


def test_line_of_any_length_has_one_word(tmp_path: Path) -> None:
    """Only the first word is split off, since a list of all words would take far more memory than the file."""
    (tmp_path / "vocab.txt").write_bytes(b"a" + b" bc" * 1_000_000 + b"\nb\n")
    tracemalloc.start()
    try:
        tokenizer = read_tokenizer(tmp_path / "vocab.txt")
        assert tracemalloc.get_traced_memory()[1] < 20_000_000  # peak, in bytes
    finally:
        tracemalloc.stop()
    assert words_of(tokenizer) == ("a", "b")


@pytest.mark.parametrize("words", [[], [1, 2], ["a", "a"], ["a b"], [""], ["_", "a", "a"], ["_", " "]])
def test_invalid_words_are_refused(words: list[Any]) -> None:
    """Words that are not text, occur twice, are empty or contain a space; `_` and a space would both be the space."""
    with pytest.raises(UserError, match=r"^some.json( holds no words|: .*get it again)"):
        tokenizer_from_object({"idx2sym": words}, "some.json")


# the 204 bytes of the authors' enwik8: those of UTF-8 text without newline and control characters, less eight
ENWIK8 = [str(byte) for byte in (9, *range(0x20, 0xC0), *range(0xC2, 0xED))]


@pytest.mark.parametrize(
    ("words", "cutoffs", "is_bytes", "is_converted"),
    [
        (["97", "10", "0"], (), True, True),
        (["97", "10", "x"], (), True, False),
        (["97", "10", "256"], (), True, False),
        (["97", "10", "0"], (1,), True, False),
        (["97", "10", "0"], (), False, False),
        ([str(value) for value in range(204)], (), False, False),
        (ENWIK8, (), False, True),
        ([*ENWIK8, "10"], (), False, True),
        (ENWIK8[:-7], (), False, False),
    ],
    ids=["said", "letter", "256", "cutoffs", "numbers", "204 numbers", "enwik8", "enwik8 with newline", "197 bytes"],
)
def test_decimal_byte_values_without_cutoffs_become_bytes(
    words: list[str], cutoffs: tuple[int, ...], is_bytes: bool, is_converted: bool
) -> None:
    """A vocabulary of byte values (0 to 255) in decimal becomes a byte tokenizer where the user says so or it is the
    authors' for enwik8, and the embedding of each word moves to the row of its byte."""
    table, tokenizer = torch.randn(len(words), 2), tokenizer_from_object({"idx2sym": words}, "x")
    model = {"vocab_size": len(words), "cutoffs": cutoffs}
    imported = ImportedModel(model, train={}, evaluation={}, weights={"embedding.tables.0": table}, tokenizer=tokenizer)
    converted = bytes_from_decimal_words(imported, ByteTokenizer() if is_bytes else None)
    assert (converted.tokenizer is not tokenizer) == is_converted
    if is_converted:
        assert converted.model["vocab_size"] == 256
        values = [int(word) for word in words]
        assert torch.equal(converted.weights["embedding.tables.0"][values], table)
        assert not converted.weights["embedding.tables.0"][[1, 11, 255]].any()
