"""The pre-tokenizer `punctuation`: each rule in both directions, and where lines can be split."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.text.tokenizers.chunking import last_whitespace
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.punctuation import PunctuationDetokenizer, last_boundary, split_line

PROPERTY = settings(deadline=None, max_examples=50)
# Text, and its words separated by spaces; joining the words restores the text.
REVERSIBLE = [
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
# Text, its words, and the text that joining them gives instead.
IRREVERSIBLE = [
    ("and / or", "and / or", "and/or"),
    ("a  b \t c", "a b c", "a b c"),
    ("the dogs 'bark' now", "the dogs ' bark ' now", "the dogs' bark 'now"),
    ("5 – 6", "5 – 6", "5–6"),
    ("x @-@ y", "x @-@ y", "x-y"),
    ("it 's", "it 's", "it's"),
]


def split(text: str) -> list[str]:
    return [word.decode() for word in split_line(text.encode())]


def join(words: list[str]) -> str:
    detokenizer = PunctuationDetokenizer()
    return "".join([*map(detokenizer.push, words), detokenizer.finish()])


def test_splitting_and_joining() -> None:
    for text, words, joined in [*((text, words, text) for text, words in REVERSIBLE), *IRREVERSIBLE]:
        assert split(text) == words.split()
        assert join(words.split()) == joined
        assert split(joined) == words.split() or "bark" in text  # its quotation marks are joined to the wrong words


def test_split_text_is_not_split_further() -> None:
    for _, words in REVERSIBLE:
        if not {"'n", "'Neil"} & set(words.split()):  # only known contractions such as 's stay unsplit
            assert split(words) == words.split()


@PROPERTY
@given(st.text())
def test_no_character_is_lost_or_added(text: str) -> None:
    line = text.replace("\n", "")
    # A line with @ may contain @-@ itself.
    assert re.sub("[ \t\r\v\f]", "", line) == re.sub("@([-.,])@", r"\1", "".join(split(line))) or "@" in line


def test_whitespace_other_than_ascii_is_a_word() -> None:
    assert split("5\u00a0km\u2003 \ufeffa") == ["5", "\u00a0", "km", "\u2003", "\ufeff", "a"]
    assert join(split("5\u00a0km")) == "5\u00a0km"


@PROPERTY
@given(st.binary(max_size=40) | st.lists(st.sampled_from([b" ", b"\n", b"a", b"\t", b"\xc2\xa0"])).map(b"".join))
def test_last_whitespace(text: bytes) -> None:
    assert last_whitespace(text) == max((match.end() for match in re.finditer(rb"[ \n\t\r\v\f]", text)), default=0)


# Parts at which a line may be split, and parts that change the words next to them; then other scripts, Unicode
# whitespace and control characters.
PARTS = [" ", "  ", "\t", "\r", ".", "a.", "U.S.", "No.", "Mr.", "5", "a", "A", "<unk>", "'", '"', ",", "-", ";"]
PARTS += list("\u00e9\u0436\u3002\u65e5\u00a0\u3000\u2009\u201c\x1c\x85\x00\n\U0001f600\u03a3\u1680")


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(PARTS), max_size=17).map("".join) | st.text(max_size=23), st.integers(0, 23))
@pytest.mark.parametrize("lowercase", [False, True])
def test_splitting_text_at_a_boundary_changes_no_word(lowercase: bool, text: str, end: int) -> None:
    """The boundary is found in the first `end` bytes; the text after them does not matter."""
    pre_tokenizer, content = PreTokenizer("punctuation", lowercase=lowercase), text.encode()
    boundary = last_boundary(content[:end])
    halves = [pre_tokenizer.split(half, eos_token=b"|") for half in (content[:boundary], content[boundary:])]
    assert halves[0] + halves[1] == pre_tokenizer.split(content, eos_token=b"|")
