"""`word_indices`: which word of the text, as whitespace separates it, each token belongs to."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from bpe_tokenizers import bpe_across_spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer, moses
from transformer_xl.text.tokenizers.bpe import train_bpe
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.integer import IntegerTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

GOLDEN = [text for text, _, _ in json.loads((Path(__file__).parent / "moses.json").read_text())]
PARTS = sorted({part for text in GOLDEN for part in text.split()})
BPE = train_bpe([["the cat sat on the mat\n", "  the dog sat\n", "caf\u00e9 the cat\n"] * 20], 290)
LOSSLESS = [ByteTokenizer(), CharTokenizer("the cat\n"), BPE]


@pytest.mark.parametrize("tokenizer", LOSSLESS, ids=lambda tokenizer: tokenizer.kind)
@settings(deadline=None, max_examples=50)
@given(text=st.text(alphabet="the cat\n\t.\u00e9\u00a0\u2603", max_size=30))
def test_tokens_of_a_word_have_its_bytes(tokenizer: Tokenizer, text: str) -> None:
    """Without whitespace, the tokens with an index are the word; after the last word only whitespace is left."""
    content = text.encode()
    indices, ids = tokenizer.word_indices(content).tolist(), tokenizer.encode(content).tolist()
    assert indices == sorted(indices)
    for number, word in enumerate([*content.split(), b""]):
        own = [token for token, index in zip(ids, indices, strict=True) if index == number]
        assert b"".join(tokenizer.decode_bytes(own).split()) == word


def test_whitespace_belongs_to_the_word_that_follows() -> None:
    assert ByteTokenizer().word_indices(b" ab  c\td \n").tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert BPE.word_indices(b"the cat sat\n").tolist() == [0, 1, 2, 3]
    assert ByteTokenizer().word_indices(b"").tolist() == []


def test_token_of_two_words_is_refused() -> None:
    """A tokenizer that merges across spaces, and one that joins a full stop and the newline after it."""
    tokenizer = bpe_across_spaces(" |b", "a| b", ".|\n")
    assert tokenizer.word_indices(b"b. b.\n").tolist() == [0, 0, 1, 1]  # the newline cannot leave its word
    with pytest.raises(UserError, match=r"byte 2 of the text: the token 'a b' has parts of two words"):
        tokenizer.word_indices(b"b a b")


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("whitespace", "He isn't  here.", [0, 1, 2]),
        ("punctuation", "He isn't (no.) 1,000 No. 5.", [0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 5, 5]),
        ("moses", 'He said "no." (5 % of 1,000 ) <unk>foo X.', [0, 1, 2, 2, 2, 2, 3, 3, 4, 5, 6, 6, 6, 7, 8, 8, 9]),
    ],
)
def test_parts_of_words_that_a_pre_tokenizer_splits(name, line: str, expected: list[int]) -> None:
    assert PreTokenizer(name).word_indices(line.encode()) == expected
    assert PreTokenizer(name, lowercase=True).word_indices(line.upper().encode()) != []
    tokenizer = WordTokenizer(
        ("<eos>", "<unk>"), eos_token="<eos>", unk_token="<unk>", pre_tokenizer=PreTokenizer(name)
    )
    num_words = len(line.split())
    twice = [*expected, num_words, *(num_words + index for index in expected), 2 * num_words]
    assert tokenizer.word_indices(f"{line}\n{line}\n".encode()).tolist() == twice
    without_eos = WordTokenizer(("<unk>",), unk_token="<unk>", pre_tokenizer=PreTokenizer(name))
    once = [*expected, *(num_words + index for index in expected)]
    assert without_eos.word_indices(f"{line}\n{line}\n".encode()).tolist() == once


@pytest.mark.parametrize("name", ["punctuation", "moses"])
@settings(deadline=None, max_examples=100)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=8))
def test_every_word_has_a_part(name, parts: list[str]) -> None:
    """Joining lines of any words changes no count, and a part's letters and digits are those of its words."""
    line, pre_tokenizer = " ".join(parts), PreTokenizer(name)
    try:
        indices = pre_tokenizer.word_indices(line.encode())
    except UserError:  # a character such as a zero byte between two words
        return
    words = [word.decode() for word in pre_tokenizer.split(line.encode())]
    assert len(indices) == len(words)
    assert indices == sorted(indices)
    for index, part in enumerate(line.encode().decode().split(" ")):
        own = "".join(word for word, of in zip(words, indices, strict=True) if of == index)
        assert [one for one in own if one.isalpha()] == [one for one in part if one.isalpha()]


def test_words_of_ascii_letters_are_split_with_their_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To split each of a long text takes seconds; other letters, of which each word is split, have the same indices."""
    split_line, lines = moses.split_line, list[str]()
    monkeypatch.setattr(moses, "split_line", lambda line: lines.append(line) or split_line(line))
    line = "Then <unk> said 'so , ( 5 % of it ) . Mr X. is \"No. 1\" of them : don't ''a'' . " * 9
    pre_tokenizer = PreTokenizer("moses")
    indices = pre_tokenizer.word_indices(line.encode())
    num_others = sum(not part.isalpha() for part in line.split())
    assert len(lines) == 1 + 2 * num_others
    assert pre_tokenizer.word_indices(re.sub(r"(?<!\S)[A-Za-z]+(?!\S)", "\\g<0>\u00e9", line).encode()) == indices


def test_words_that_become_one_are_refused() -> None:
    with pytest.raises(UserError, match="two words become one"):
        PreTokenizer("moses").word_indices(b"a\rb")  # moses deletes carriage returns


def test_integers_are_words() -> None:
    assert IntegerTokenizer(9).word_indices(b"1 2\n3\n").tolist() == [0, 1, 2, 2, 3]
    assert IntegerTokenizer(9, add_eos=False).word_indices(b"1 2\n3\n").tolist() == [0, 1, 2]
