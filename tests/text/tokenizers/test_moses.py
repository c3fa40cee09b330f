"""The splitting of Hugging Face's tokenizer, beside what that tokenizer gave (`golden_moses.py`)."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.text.tokenizers import split_chunks, tokenizer_from_json
from transformer_xl.text.tokenizers.moses import MosesDetokenizer, split_line
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

UNHURRIED = settings(deadline=None, max_examples=50)
GOLDEN: list[tuple[str, list[str], str]] = json.loads((Path(__file__).parent / "moses.json").read_text())
MOSES = PreTokenizer("moses")
WORDS = (
    "<eos>", "<unk>", "Hello", "(", "bracket", ")", ",", "my", "dog", "23", "@,@", "000", "1", "@.@", "80", "isn", "'t",
)  # fmt: skip
HUB = WordTokenizer(WORDS, None, "<eos>", "<unk>", MOSES)


def join(words: list[str], detokenizer: MosesDetokenizer | None = None) -> str:
    detokenizer = detokenizer or MosesDetokenizer()
    return "".join([*map(detokenizer.push, words), detokenizer.finish()])


def test_words_are_those_of_hugging_face() -> None:
    assert len(GOLDEN) > 400
    assert {text: split_line(text) for text, _, _ in GOLDEN} == {text: words for text, words, _ in GOLDEN}


def test_words_are_joined_as_by_hugging_face() -> None:
    found = {" ".join(words): join(words) for _, words, _ in GOLDEN}
    assert found == {" ".join(words): text for _, words, text in GOLDEN}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello (bracket)", "Hello ( bracket )"),
        ("23,000", "23 @,@ 000"),
        ("1.80", "1 @.@ 80"),
        ("Hello, my dog", "Hello , my dog"),
        ("$23,000 for 1.80 m", "$ 23 @,@ 000 for 1 @.@ 80 m"),
        ("a well-known, isn't it?", "a well @-@ known , isn 't it ?"),
        ("Mr. B. Li of the U.S. left.", "Mr. B. Li of the U.S. left ."),
        ('He said "so" (there).', 'He said " so " ( there ) .'),
        ("<unk>'s and <unk>", "<unk> 's and <unk>"),
    ],
)
def test_there_and_back(text: str, words: str) -> None:
    assert split_line(text) == words.split()
    assert join(words.split()) == text


def test_numbers_and_special_tokens() -> None:
    assert HUB.encode("Hello (bracket)").tolist() == [2, 3, 4, 5]
    assert HUB.encode("Hello, my dog isn't 23,000\n1.80 cat\n").tolist() == [
        2,
        6,
        7,
        8,
        15,
        16,
        9,
        10,
        11,
        0,
        12,
        13,
        14,
        1,
        0,
    ]
    assert HUB.decode([2, 6, 7, 8, 15, 16, 9, 10, 11, 0, 12, 13, 14]) == "Hello, my dog isn't 23,000\n1.80"
    assert HUB.encode("<unk> <eos>Hello<unk>").tolist() == [1, 0, 2, 1]
    assert tokenizer_from_json(HUB.to_json()).encode("1.80").tolist() == [12, 13, 14]


def test_text_is_cut_at_newlines_alone() -> None:
    """Whether a full stop belongs to its word depends on what follows it, and on the end of the line."""
    text = b"Hello 1. my dog. 1.80\nHello Mr. (dog).\r\n\nx 23,000.'\n my"
    whole = HUB.encode(text).tolist()
    assert MOSES.last_boundary(b"Hello. my") == 0
    for size in range(1, len(text)):
        chunks = split_chunks(HUB, [text[:size], text[size:]], size)
        assert [token for chunk in chunks for token in HUB.encode(chunk).tolist()] == [*whole, 0]


@UNHURRIED
@given(st.text() | st.lists(st.sampled_from([part for text, _, _ in GOLDEN for part in text.split()])).map(" ".join))
def test_words_hold_no_white_space(text: str) -> None:
    line = text.replace("\n", " ")
    words = split_line(line)
    assert words == " ".join(words).split()
    assert [word.decode() for word in MOSES.split(line.encode())] == words


@UNHURRIED
@given(st.lists(st.sampled_from(GOLDEN), max_size=5))
def test_lines_after_one_another_do_not_disturb_each_other(lines: list[tuple[str, list[str], str]]) -> None:
    detokenizer = MosesDetokenizer()
    assert [join(words, detokenizer) for _, words, _ in lines] == [text for _, _, text in lines]


@pytest.mark.parametrize("part", ["x.", "a-", '".', "1,"])
def test_long_lines_take_linear_time(part: str) -> None:
    taken = []
    for number in (5_000, 5_000, 40_000):
        start = time.process_time()
        split_line(part * number)
        taken.append(time.process_time() - start)
    assert taken[2] < 24 * max(taken[:2])  # 8 times the length; squared it would be 64


def test_joiners_at_the_ends_of_a_line() -> None:
    """Theirs keeps @,@ there, which nobody wants to read."""
    assert join(["@,@", "5", "@.@"]) == ",5."
