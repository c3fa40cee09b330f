"""Tokenizer files: load_tokenizer restores what was saved, and refuses other files with a cause and advice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transformer_xl.config import UserError
from transformer_xl.text.tokenizers import (
    ByteTokenizer,
    Tokenizer,
    describe_difference,
    fingerprint,
    load_tokenizer,
    save_tokenizer,
)
from transformer_xl.text.tokenizers.bpe import lines_of, train_bpe
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.integer import IntegerTokenizer
from transformer_xl.text.tokenizers.storage import tokenizer_from_json
from transformer_xl.text.tokenizers.word import WordTokenizer

WORDS = ["<eos>", "<unk>", "the", "a"]
TOKENIZERS: dict[str, Tokenizer] = {
    "byte": ByteTokenizer(),
    "char": CharTokenizer("e \u00e9\n"),
    "char without byte fallback": CharTokenizer("ab", byte_fallback=False),
    "word": WordTokenizer(tuple(WORDS), np.array([7, 5, 11, 3]), eos_token="<eos>", unk_token="<unk>"),
    "integer": IntegerTokenizer(num_values=31),
    "integer without eos": IntegerTokenizer(num_values=31, add_eos=False),
    "bpe": train_bpe([lines_of("the caf\u00e9 the\n" * 3)], vocab_size=259),
}


def test_content_determines_the_format(tmp_path: Path) -> None:
    save_tokenizer(TOKENIZERS["word"], tmp_path / "txl_tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("of another program")
    (tmp_path / "copy.json").write_bytes((tmp_path / "txl_tokenizer.json").read_bytes())
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "tokenizer.json").write_text(json.dumps(TOKENIZERS["bpe"].to_json()["tokenizer"]))
    # a path, and the kind of tokenizer that it contains; "" is the folder itself
    for name, kind in (
        ("", "word"), ("txl_tokenizer.json", "word"), ("copy.json", "word"),
        ("gpt2", "bpe"), ("gpt2/tokenizer.json", "bpe"),
    ):  # fmt: skip
        assert fingerprint(load_tokenizer(str(tmp_path / name))) == fingerprint(TOKENIZERS[kind])


def test_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"txl_tokenizer.json: missing.*; copy it again"):
        load_tokenizer(tmp_path / "txl_tokenizer.json")
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match=r"no tokenizer at .*kinds byte, char.*folder of a run or corpus"):
            load_tokenizer(path)


@pytest.mark.parametrize(
    ("kind", "sha256"),
    [
        ("byte", "7da8b59d384076438bab9ae10dee36e1ed40155053c42c319918fb1eb47b641e"),
        ("char", "39c3d8a79d4e96a9da316c42068b1a5653ef2e90130b844a0f57909978003781"),
        ("word", "38849115679ef412c4d30cdde3510580cbffe70e993e843efccbc3a2f272b0f2"),
        ("integer", "043801a1c379b40b2620c2e533c3f17e63629e69952d796589e7bbfc1783b60c"),
    ],
)
def test_fingerprint_is_stable(kind: str, sha256: str) -> None:
    """Every corpus and run stores the fingerprint, and could not be used any more if it changed.

    The expected values therefore must not be updated.
    """
    assert fingerprint(TOKENIZERS[kind]) == sha256


def changed(name: str, **changes: object) -> Tokenizer:
    """One of TOKENIZERS with other values in its JSON."""
    return tokenizer_from_json(TOKENIZERS[name].to_json() | changes)


def with_other_merges(values: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a BPE tokenizer that merges the same pairs in another order."""
    h_e, t_he, a_f = values["model"]["merges"]
    return values | {"model": values["model"] | {"merges": [a_f, h_e, t_he]}}


def test_tokenizers_that_differ_only_in_counts_are_the_same() -> None:
    for counts in ([9, 5, 11, 3], None):
        assert describe_difference(changed("word", counts=counts), TOKENIZERS["word"]) is None
    for tokenizer in TOKENIZERS.values():
        assert describe_difference(tokenizer_from_json(tokenizer.to_json()), tokenizer) is None


@pytest.mark.parametrize(
    ("actual", "expected", "difference"),
    [
        ("byte", TOKENIZERS["word"], "byte, 256 tokens, not word, 4 tokens"),
        ("integer", changed("integer", num_values=30), "integer, 32 tokens, not 31"),
        ("integer", changed("integer", add_eos=False), "integer, 32 tokens, not 31"),
        ("word", changed("word", words=["<eos>", "<unk>", "a", "the"]), "word, token 2 is 'the', not 'a'"),
        ("word", changed("word", lowercase=True), "word, lowercase is false, not true"),
        ("word", changed("word", eos_token=None), 'word, eos_token is "<eos>", not null'),
        ("word", changed("word", words=[*WORDS, "b"], counts=None, lowercase=True), "word, 4 tokens, not 5"),
        ("char", changed("char", characters=list("e \u00e8\n")), "char, token 2 is '\u00e9', not '\u00e8'"),
        ("bpe", train_bpe([lines_of("caf" * 9)], vocab_size=259), "bpe, token 256 is 'he', not 'af'"),
        (
            "bpe",
            changed("bpe", tokenizer=with_other_merges(TOKENIZERS["bpe"].to_json()["tokenizer"])),
            "bpe, model is {",
        ),
    ],
)
def test_difference_of_tokenizers(actual: str, expected: Tokenizer, difference: str) -> None:
    described = describe_difference(TOKENIZERS[actual], expected)
    assert described is not None
    assert described.startswith(difference)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"kind": "bite"}', r"no tokenizer of kind 'bite' \(did you mean 'byte'\?\); expected one of byte, char"),
        ('{"vocab_size": 256}', r"no tokenizer of kind None"),
        ('{"kind": "byte", "vocab_size": 255}', r"not a valid byte tokenizer.*copy it again, or use another"),
        ('{"kind": "byte", "si', r"damaged, not readable as JSON .*copy it again.*'txl prepare'"),
        ("\ufeff\xff", r"damaged, not readable as JSON"),
        ("[" * 100_000, r"damaged, not readable as JSON"),
        ("[]", r"expected a JSON object, found list; copy it again"),
        ('{"model": {"type": "BPE"}, "normalizer": {}}', r"not a valid library tokenizer.*use another such as"),
    ],
)
def test_invalid_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "txl_tokenizer.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    # `name`: a key of TOKENIZERS. `change`: values that replace those of its JSON.
    ("name", "change", "message"),
    [
        ("word", {"words": ["a", "a", "<eos>", "<unk>"]}, r"the word 'a' twice"),
        ("word", {"words": [*WORDS[:-1], "a b"]}, r"empty or contains whitespace"),
        ("word", {"words": [*WORDS[:-1], ""]}, r"empty or contains whitespace"),
        ("word", {"words": [*WORDS[:-1], 7]}, r"not a list of strings"),
        ("word", {"words": []}, r"not a list of strings"),
        ("word", {"words": [*WORDS[:-1], "\ud800"]}, r"surrogates not allowed"),
        ("word", {"counts": [7, 5, 11]}, r"its counts are not 4 non-negative integers"),
        ("word", {"counts": [7, 5, 11, -1]}, r"its counts are not 4 non-negative integers"),
        ("word", {"counts": 7}, r"its counts are not 4 non-negative integers"),
        ("word", {"unk_token": "<UNK>"}, r"'<UNK>' is not one of its words"),
        ("word", {"pre_tokenizer": "spaces"}, r"pre_tokenizer 'spaces'"),
        ("word", {"unexpected": 1}, r"settings or values that such a tokenizer does not have"),
        ("char", {"characters": ["a", "a"]}, r"not a list of different single characters"),
        ("char", {"characters": ["ab"]}, r"not a list of different single"),
        ("char", {"characters": ["\ud800"]}, r"surrogates not allowed"),
        # the four characters and 256 bytes
        ("char", {"counts": [1, 1, 1, 1]}, r"its counts are not 260 non-negative"),
        ("char", {"byte_fallback": 1}, r"byte_fallback is 1, expected true or false"),
        ("char without byte fallback", {"characters": []}, r"not a list of different single"),
        ("integer", {"num_values": 0}, r"num_values is 0, expected an integer from 1 to"),
        ("integer", {"num_values": True}, r"num_values is True"),
        ("integer", {"add_eos": 0}, r"add_eos is 0, expected true or false"),
        ("integer", {"num_values": 2**31}, r"num_values is 2147483648"),
        ("bpe", {"tokenizer": None}, r"it has no BPE model"),
    ],
)
def test_invalid_values_are_refused(name: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        tokenizer_from_json({**TOKENIZERS[name].to_json(), **change}, "v.json")
    assert str(caught.value).startswith("v.json: not a valid ")
    assert "\n" not in str(caught.value)
