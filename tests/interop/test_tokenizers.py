"""Vocabularies of other programs keep the order in which they are stored, whatever the form."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.old_modules import old_corpus, old_modules, old_vocabulary

from transformer_xl.config import UserError
from transformer_xl.interop.imported import ImportedModel
from transformer_xl.interop.tokenizers import bytes_from_byte_ids, read_tokenizer, tokenizer_from_words, words_of
from transformer_xl.text.tokenizers import ByteTokenizer
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

WORDS = ["<eos>", "zebra", "caf\u00e9", "<unk>", "apple", "the"]
NUMBERED = {word: WORDS.index(word) for word in sorted(WORDS)}


def save(path: Path, form: str) -> Path:
    contents: dict[str, Any] = {
        "json of numbers": NUMBERED, "json of words": WORDS, "json of both": {"sym2idx": NUMBERED},
    }  # fmt: skip
    if form.startswith("json"):
        path = path / "vocab.json"
        path.write_text(json.dumps(contents[form]))
        return path
    if form == "text":
        path = path / "vocab.txt"
        path.write_text("".join(f"{word} 7\n" for word in WORDS))
        return path
    with old_modules():
        value = {
            "tokenizer": {"sym2idx": OrderedDict(NUMBERED), "counter": None},
            "vocabulary": old_vocabulary(WORDS), "corpus": old_corpus(WORDS),
        }[form.split()[0]]  # fmt: skip
        path = path / "vocab.bin"
        if form.endswith("pickled"):
            path.write_bytes(pickle.dumps(value, 2))
        else:
            torch.save(value, path, _use_new_zipfile_serialization=form.endswith("archive"))
    return path


FORMS = [
    "json of numbers", "json of words", "json of both", "text",
    *(f"{kind} {how}" for kind in ("tokenizer", "vocabulary", "corpus") for how in ("archive", "stream")),
    "tokenizer pickled", "vocabulary pickled",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_order_stays(form: str, tmp_path: Path) -> None:
    tokenizer = read_tokenizer(save(tmp_path, form))
    assert isinstance(tokenizer, WordTokenizer)
    assert list(tokenizer.words) == WORDS
    assert (tokenizer.eos_token, tokenizer.unk_token) == ("<eos>", "<unk>")
    assert tokenizer.encode("the zebra pear\n").tolist() == [5, 1, 3, 0]


def test_marks_of_one_billion_words() -> None:
    tokenizer = tokenizer_from_words(["<S>", "a", "<UNK>"], "x")
    assert isinstance(tokenizer, WordTokenizer)
    assert (tokenizer.eos_token, tokenizer.unk_token) == ("<S>", "<UNK>")


def test_words_go_back_as_they_came() -> None:
    assert words_of(tokenizer_from_words(WORDS, "x")) == tuple(WORDS)
    letters = tokenizer_from_words(["_", "e", "t"], "x")
    assert isinstance(letters, CharTokenizer)
    assert letters.characters == " et"
    assert words_of(letters) == ("_", "e", "t")
    assert words_of(ByteTokenizer()) is None
    assert isinstance(tokenizer_from_words(["a", "e", "t"], "x"), WordTokenizer)


@pytest.mark.parametrize("symbols", [[], [1, 2], ["a", "a"], ["a b"], [""], ["_", "a", "a"], ["_", " "]])
def test_what_is_no_list_of_words_is_refused(symbols: list[Any]) -> None:
    with pytest.raises(UserError, match=r"^some.json: "):
        tokenizer_from_words(symbols, "some.json")


def test_only_byte_numbers_without_clusters_become_bytes() -> None:
    weights = {"embedding.tables.0": torch.randn(3, 2), "softmax.bias": torch.randn(3)}
    for words, cutoffs, changed in ((["97", "10", "0"], (), True), (["97", "10", "x"], (), False),
                                    (["97", "10", "256"], (), False), (["97", "10", "0"], (1,), False)):  # fmt: skip
        tokenizer = tokenizer_from_words(words, "x")
        imported = ImportedModel({"vocab_size": 3, "cutoffs": cutoffs}, {}, {}, weights, tokenizer)
        found = bytes_from_byte_ids(imported)
        assert (found is not imported) == changed
        if changed:
            assert found.model["vocab_size"] == 256
            assert torch.equal(found.weights["embedding.tables.0"][[97, 10, 0]], weights["embedding.tables.0"])
            assert not found.weights["embedding.tables.0"][1:10].any()
