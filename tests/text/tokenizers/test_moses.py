"""The pre-tokenizer `moses`, compared with the output of TransfoXLTokenizer of transformers (`golden_moses.py`)."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.text.tokenizers.moses import MosesDetokenizer, split_line
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

PROPERTY = settings(deadline=None, max_examples=50)
# Each entry: a text, its words, and the words joined again.
GOLDEN: list[tuple[str, list[str], str]] = json.loads((Path(__file__).parent / "moses.json").read_text())
MOSES = PreTokenizer("moses")
WORDS = ["<eos>", "<unk>", "Hello", ",", "my", "dog", "23", "@,@", "000", "1", "@.@", "80", "isn", "'t"]


def join(words: list[str]) -> str:
    detokenizer = MosesDetokenizer()
    return "".join([*map(detokenizer.push, words), detokenizer.finish()])


def test_words_equal_those_of_transformers() -> None:
    assert len(GOLDEN) > 400
    assert {text: split_line(text) for text, _, _ in GOLDEN} == {text: words for text, words, _ in GOLDEN}


def test_joined_words_equal_those_of_transformers() -> None:
    joined = {" ".join(words): join(words) for _, words, _ in GOLDEN}
    assert joined == {" ".join(words): text for _, words, text in GOLDEN}


def test_number_punctuation_is_joined_at_the_ends_of_a_line() -> None:
    """This differs from TransfoXLTokenizer, which leaves @,@ and @.@ there."""
    assert join(["@,@", "5", "@.@"]) == ",5."


def test_encoding_and_decoding() -> None:
    tokenizer = WordTokenizer(tuple(WORDS), eos_token="<eos>", unk_token="<unk>", pre_tokenizer=MOSES)
    text = "Hello, my dog isn't 23,000\n1.80"
    words = "Hello , my dog isn 't 23 @,@ 000 <eos> 1 @.@ 80"
    assert [WORDS[token] for token in tokenizer.encode(text)] == words.split()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<unk> <eos>Hello<unk>").tolist() == [1, 0, 2, 1]
    assert MOSES.last_boundary(b"Hello 1. my") == 0  # the rest of the line affects all of its words
    assert MOSES.last_boundary(b"Hello\n1. my") == 6


@PROPERTY
@given(st.text() | st.lists(st.sampled_from([part for text, _, _ in GOLDEN for part in text.split()])).map(" ".join))
def test_words_contain_no_whitespace(text: str) -> None:
    line = text.replace("\n", " ")
    words = split_line(line)
    assert words == " ".join(words).split()
    assert [word.decode() for word in MOSES.split(line.encode())] == words
