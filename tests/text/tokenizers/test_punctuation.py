"""English and its WikiText forms: each rule, and the way there and back."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.text.tokenizers.chunking import last_whitespace
from transformer_xl.text.tokenizers.pre_tokenizer import Detokenizer, PreTokenizer, WhitespaceDetokenizer
from transformer_xl.text.tokenizers.punctuation import PunctuationDetokenizer, last_boundary, split_line

UNHURRIED = settings(deadline=None, max_examples=50)
# Ordinary text and its words, one space between them.
BOTH_WAYS = [
    ("23,000 people", "23 @,@ 000 people"),
    ("1,234,567.89 in all", "1 @,@ 234 @,@ 567 @.@ 89 in all"),
    ("1.80 m, not 2 m", "1 @.@ 80 m , not 2 m"),
    ("a well-known out-of-date M-82", "a well @-@ known out @-@ of @-@ date M @-@ 82"),
    ("the war of 1914–18 ended", "the war of 1914 – 18 ended"),
    ("more money – make more", "more money – make more"),
    ("from 5 – it said – to 6", "from 5 – it said – to 6"),
    ("a score of 5 –", "a score of 5 –"),
    ("the District—roughly bounded", "the District — roughly bounded"),
    ("Hello (bracket) and [this]", "Hello ( bracket ) and [ this ]"),
    ("Hello, my dog; it barks: loud!", "Hello , my dog ; it barks : loud !"),
    ("it's his, isn't it? I've seen they'll", "it 's his , isn 't it ? I 've seen they 'll"),
    ("the 1990s' end and the 1980's", "the 1990s ' end and the 1980 's"),
    ("the players' names and 'so' on", "the players ' names and ' so ' on"),
    ("rock'n'roll by O'Neil", "rock 'n 'roll by O 'Neil"),
    ("it’s ‘so’ “they” said", "it ’ s ‘ so ’ “ they ” said"),
    ('He said "Come in." and "Go."', 'He said " Come in . " and " Go . "'),
    ("a \"quoted 'inner' part\", here", "a \" quoted ' inner ' part \" , here"),
    ("in the U.S. and at 3 a.m. Mr. B. Li left.", "in the U.S. and at 3 a.m. Mr. B. Li left ."),
    ("vol. no. of etc. and so on.", "vol. no. of etc. and so on ."),
    ("No. 5 came. No. It did not.", "No. 5 came . No . It did not ."),
    ("wait... what", "wait ... what"),
    ("wait. . . ... what", "wait . . . ... what"),
    ("$3.50 or £5 (33.2%) at 57° N", "$ 3 @.@ 50 or £ 5 ( 33 @.@ 2 % ) at 57 ° N"),
    ("either/or at 16:00", "either / or at 16 : 00"),
    ("it read: 12 men", "it read : 12 men"),
    ("<unk>-tipped <unk>, 4,<unk> and <unk>'s.", "<unk> @-@ tipped <unk> , 4 @,@ <unk> and <unk> 's ."),
    ("= = Description = =", "= = Description = ="),
    ("18- to 20-year-olds -- or so - went", "18- to 20 @-@ year @-@ olds -- or so - went"),
    ("visit About.com or e.g. this", "visit About.com or e.g. this"),
    ("Caf\u00e9 Cafe\u0301 na\u00efve \u65e5\u672c", "Caf\u00e9 Cafe\u0301 na\u00efve \u65e5\u672c"),
    ("no break and a\x00b", "no break and a \x00 b"),
    ("", ""),
]
# Words put together again mean the same, but look different.
ONE_WAY = [
    ("and / or", "and / or", "and/or"),
    ("a  b \t c", "a b c", "a b c"),
    ("the dogs 'bark' now", "the dogs ' bark ' now", "the dogs' bark 'now"),
    ("5 – 6", "5 – 6", "5–6"),
    ("x @-@ y", "x @-@ y", "x-y"),
    ("it 's", "it 's", "it's"),
]


def split(text: str) -> list[str]:
    return [word.decode() for word in split_line(text.encode())]


def join(words: list[str], detokenizer: Detokenizer | None = None) -> str:
    detokenizer = detokenizer or PunctuationDetokenizer()
    return "".join([*map(detokenizer.push, words), detokenizer.finish()])


@pytest.mark.parametrize(("text", "words"), BOTH_WAYS)
def test_words_and_back(text: str, words: str) -> None:
    assert split(text) == words.split()
    assert join(split(text)) == text
    assert split(join(split(text))) == split(text)


@pytest.mark.parametrize(("text", "words", "back"), ONE_WAY)
def test_what_joining_cannot_know(text: str, words: str, back: str) -> None:
    assert split(text) == words.split()
    assert join(split(text)) == back
    assert split(back) == (words.split() if "bark" not in text else split(back))


@UNHURRIED
@given(st.text())
def test_no_sign_is_lost_or_made(text: str) -> None:
    line = text.replace("\n", "")
    assert re.sub("[ \t\r\v\f]", "", line) == re.sub("@([-.,])@", r"\1", "".join(split(line))) or "@" in line


@UNHURRIED
@given(st.lists(st.sampled_from(BOTH_WAYS), max_size=5))
def test_lines_after_one_another_do_not_disturb_each_other(lines: list[tuple[str, str]]) -> None:
    detokenizer = PunctuationDetokenizer()
    for text, _ in lines:
        assert join(split(text), detokenizer) == text


def test_white_space_of_other_scripts_is_a_word_by_itself() -> None:
    assert split("5\u00a0km\u2003 \ufeffa") == ["5", "\u00a0", "km", "\u2003", "\ufeff", "a"]
    assert join(split("5\u00a0km")) == "5\u00a0km"


def test_split_text_is_split_no_further() -> None:
    for _, words in BOTH_WAYS:
        if not {"'n", "'Neil"} & set(words.split()):
            assert split(words) == words.split()


@pytest.mark.parametrize("part", ["x.", "a-"])
def test_long_words_take_linear_time(part: str) -> None:
    taken = []
    for number in (5_000, 5_000, 40_000, 40_000):
        start = time.process_time()
        assert "".join(split(part * number)).replace("@", "") == part * number
        taken.append(time.process_time() - start)
    assert min(taken[2:]) < 24 * max(taken[:2])  # 8 times the length; squared it would be 64


def test_spaces_stand_between_words_of_a_line() -> None:
    detokenizer = WhitespaceDetokenizer()
    assert join(["a", ",", "b"], detokenizer) == "a , b"
    assert join(["c"], detokenizer) == "c"


@UNHURRIED
@given(st.binary(max_size=40) | st.lists(st.sampled_from([b" ", b"\n", b"a", b"\t", b"\xc2\xa0"])).map(b"".join))
def test_last_whitespace(text: bytes) -> None:
    assert last_whitespace(text) == max((match.end() for match in re.finditer(rb"[ \n\t\r\v\f]", text)), default=0)


LIKELY = [" ", "  ", "\t", "\r", ".", "a.", "U.S.", "No.", "Mr.", "5", "a", "A", "<unk>", "'", '"', ",", "-", ";"]
LIKELY += ["\u00e9", "\u0436", "\u3002", "\u65e5", "\u00a0", "\u3000", "\u2009", "\u201c", "\x1c", "\x85", "\x00", "\n"]
LIKELY += ["\U0001f600", "\u03a3", "\u1680"]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(LIKELY), max_size=17).map("".join) | st.text(max_size=23), st.integers(0, 23))
def test_words_do_not_change_where_text_is_cut(text: str, end: int) -> None:
    """Whatever follows the text in which the boundary was found."""
    for lowercase in (False, True):
        pre_tokenizer = PreTokenizer("punctuation", lowercase)
        content = text.encode()
        cut = last_boundary(content[:end])
        halves = [pre_tokenizer.split(half, b"|") for half in (content[:cut], content[cut:])]
        assert halves[0] + halves[1] == pre_tokenizer.split(content, b"|")


@pytest.mark.parametrize(
    "text", ['"a1", "b2", ', "\u0436 \u0437 ", "\u65e5, \u672c ", "(a) [b] {c}: ", '"A." "B." ', "a\tb\t", "x, "]
)
def test_lines_of_any_kind_can_be_cut(text: str) -> None:
    line = (text * 3001).encode()
    assert len(line) - 2 * len(text.encode()) <= last_boundary(line) < len(line)


def test_the_last_boundary_is_found_from_afar() -> None:
    assert last_boundary(b"a b" + b"x" * 7001) == 1
    assert last_boundary(b"a b\nc" + b"x" * 7001) == 4
    assert last_boundary(b"x" * 7001) == 0
    assert last_boundary(b"a b." + b" " * 7001) == 1
