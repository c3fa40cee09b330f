"""Words: their ids, special tokens, and words that are not in the vocabulary."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.text.tokenizers import EncodingError, split_chunks
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

UNHURRIED = settings(deadline=None, max_examples=50)
WORDS = ("<eos>", "<unk>", "the", "dog", "isn", "'t", ",", "na\u00efve", "\x00\u2028x")
PLAIN = WordTokenizer(WORDS, None, "<eos>", "<unk>")
LOWERCASE = WordTokenizer(WORDS, None, "<eos>", "<unk>", PreTokenizer(lowercase=True))
ENGLISH = WordTokenizer(WORDS, None, "<eos>", "<unk>", PreTokenizer("punctuation"))
NO_EOS = WordTokenizer(WORDS[2:], None, None, None)


def oracle(text: str) -> list[int]:
    """Line by line and word by word, as the authors' code does it."""
    ids: list[int] = []
    for line in text.split("\n"):
        ids += [WORDS.index(word) if word in WORDS else 1 for word in line.encode().split() for word in [word.decode()]]
        ids.append(0)
    return ids[:-1]


@UNHURRIED
@given(
    st.lists(st.sampled_from([*WORDS, "cat", "The", " ", " ", "\n", "\r\n", "\t", "\u00a0", "\x1c"])).map("".join)
    | st.text()
)
def test_ids_are_those_of_every_line_in_turn(text: str) -> None:
    chunk = PLAIN.encode_chunk(text.encode())
    assert chunk.ids.tolist() == oracle(text) == PLAIN.encode(text).tolist()
    known = {*WORDS}
    assert chunk.num_unknown == sum(word.decode() not in known for word in text.encode().split())


@UNHURRIED
@given(st.lists(st.integers(0, len(WORDS) - 1)))
def test_tokens_come_back(ids: list[int]) -> None:
    assert PLAIN.encode(PLAIN.decode(ids)).tolist() == ids
    assert NO_EOS.encode(NO_EOS.decode([i for i in ids if i < 7])).tolist() == [i for i in ids if i < 7]


def test_text_reads_naturally() -> None:
    text = "the dog , na\u00efve\n\nthe \x00\u2028x\n"
    assert PLAIN.encode(text).tolist() == [2, 3, 6, 7, 0, 0, 2, 8, 0]
    assert PLAIN.decode([2, 3, 6, 7, 0, 0, 2, 8, 0]) == text
    assert ENGLISH.encode("the dog, isn't\n").tolist() == [2, 3, 6, 4, 5, 0]
    assert ENGLISH.decode([2, 3, 6, 4, 5, 0, 3]) == "the dog, isn't\ndog"
    assert LOWERCASE.encode("The DOG NA\u00cfVE <EOS>").tolist() == [2, 3, 7, 0]
    assert NO_EOS.encode("the\n\n dog").tolist() == [0, 1]


def test_newlines_and_starts() -> None:
    assert (PLAIN.bos_token_id, PLAIN.adds_final_newline, PLAIN.is_newline_V.nonzero()[0].tolist()) == (0, True, [0])
    assert (NO_EOS.bos_token_id, NO_EOS.adds_final_newline, NO_EOS.is_newline_V.any()) == (0, False, False)
    late = WordTokenizer(("the", "<S>", "<UNK>"), None, "<S>", "<UNK>")
    assert late.encode("the cat\n<S>").tolist() == [0, 2, 1, 1]
    assert (late.bos_token_id, late.decode([0, 1, 0])) == (1, "the\nthe")
    assert list(split_chunks(PLAIN, [b"the "])) == [b"the \n"]
    assert list(split_chunks(PLAIN, [b"the ", b"dog "], 8)) == [b"the dog ", b"\n"]
    assert list(split_chunks(PLAIN, [b"", b""])) == []
    assert list(split_chunks(NO_EOS, [b"the"])) == [b"the"]


def test_english_is_cut_where_no_word_changes() -> None:
    text = b"the dog. isn't vs. the dog\nMr. the dog. The 'dog' a.\tv. isn't"
    whole = ENGLISH.encode(text).tolist()
    assert len(set(whole)) == 6
    for size in range(1, len(text)):
        for chunks in (split_chunks(ENGLISH, [text], size), split_chunks(ENGLISH, [text[:size], text[size:]], 11)):
            assert [token for chunk in chunks for token in ENGLISH.encode(chunk).tolist()] == [*whole, 0]


@pytest.mark.parametrize(
    ("pre_tokenizer", "text", "position", "shown"),
    [
        (PreTokenizer(), "the  dog\n na\u00efve cat the cow", 17, "'cat'"),
        (PreTokenizer(), "the " + "x" * 99, 4, "'" + "x" * 40 + r"\.\.\.'"),
        (PreTokenizer(lowercase=True), "The DOG\nCAT", 8, "'cat'"),
        (PreTokenizer("punctuation"), "the dog,\nthe dog's", 13, "''s'|\"'s\""),
    ],
)
def test_unknown_word_without_a_token_is_named(
    pre_tokenizer: PreTokenizer, text: str, position: int, shown: str
) -> None:
    tokenizer = WordTokenizer(WORDS[2:], None, None, None, pre_tokenizer)
    with pytest.raises(
        EncodingError, match=rf"the word ({shown}) is not one of the 7 of this vocabulary, which has no unknown token"
    ) as caught:
        tokenizer.encode_chunk(text.encode())
    assert caught.value.position == position


def test_workers_get_no_table_of_ids() -> None:
    large = WordTokenizer(tuple(f"word{number}" for number in range(10_007)), None, None, None)
    before = len(pickle.dumps(large))
    large.encode("word7")
    assert len(pickle.dumps(large)) == before < 200_000
    assert pickle.loads(pickle.dumps(large)).encode("word7 word10006").tolist() == [7, 10_006]


def test_unknown_words_are_listed_by_frequency() -> None:
    assert PLAIN.unknown_words("a cat the a\nDog") == ["a", "cat", "Dog"]
    assert LOWERCASE.unknown_words(b"The Cat \xff") == ["cat", "\ufffd"]
    assert ENGLISH.unknown_words("the dogs, isn't") == ["dogs"]
    assert NO_EOS.unknown_words("a cat") == []  # refused, not replaced
    assert (PLAIN.unk_token_id, NO_EOS.unk_token_id) == (1, None)


def test_words_are_counted_where_white_space_separates_them() -> None:
    ids = PLAIN.encode("the dog , a\n\nthe ")
    assert PLAIN.count_words(ids) == 5
    assert NO_EOS.count_words(NO_EOS.encode("the dog\n")) == 2
    assert ENGLISH.count_words(ids) is None


def test_counts_are_kept() -> None:
    counted = WordTokenizer(("a", "b"), np.array([5, 3]), None, None)
    again = WordTokenizer.from_json(counted.to_json())
    assert again.counts is not None
    assert again.counts.tolist() == [5, 3]
    assert again.counts.dtype == np.int64
