"""Words: their ids, what stands for line ends and for others, and what gets lost on the way."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.text.tokenizers import EncodingError, split_chunks
from transformer_xl.text.tokenizers.word import RoundTripLoss, WordTokenizer

UNHURRIED = settings(deadline=None)
WORDS = ("<eos>", "<unk>", "the", "dog", "isn", "'t", ",", "na\u00efve", "\x00\u2028x")
PLAIN = WordTokenizer(WORDS, None, "<eos>", "<unk>")
FOLDED = WordTokenizer(WORDS, None, "<eos>", "<unk>", PreTokenizer(lowercase=True))
ENGLISH = WordTokenizer(WORDS, None, "<eos>", "<unk>", PreTokenizer("punctuation"))
UNMARKED = WordTokenizer(WORDS[2:], None, None, None)
NOTHING = RoundTripLoss(exact=True, num_unknown=0, unknown=(), white_space=False, case=False, invalid=False)


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
    piece = PLAIN.encode_chunk(text.encode())
    assert piece.ids.tolist() == oracle(text) == PLAIN.encode(text).tolist()
    known = {*WORDS}
    assert piece.num_unknown == sum(word.decode() not in known for word in text.encode().split())


@UNHURRIED
@given(st.lists(st.integers(0, len(WORDS) - 1)))
def test_tokens_come_back(ids: list[int]) -> None:
    assert PLAIN.encode(PLAIN.decode(ids)).tolist() == ids
    assert UNMARKED.encode(UNMARKED.decode([i for i in ids if i < 7])).tolist() == [i for i in ids if i < 7]


def test_text_reads_naturally() -> None:
    text = "the dog , na\u00efve\n\nthe \x00\u2028x\n"
    assert PLAIN.encode(text).tolist() == [2, 3, 6, 7, 0, 0, 2, 8, 0]
    assert PLAIN.decode([2, 3, 6, 7, 0, 0, 2, 8, 0]) == text
    assert ENGLISH.encode("the dog, isn't\n").tolist() == [2, 3, 6, 4, 5, 0]
    assert ENGLISH.decode([2, 3, 6, 4, 5, 0, 3]) == "the dog, isn't\ndog"
    assert FOLDED.encode("The DOG NA\u00cfVE <EOS>").tolist() == [2, 3, 7, 0]
    assert UNMARKED.encode("the\n\n dog").tolist() == [0, 1]


def test_line_ends_and_starts() -> None:
    assert (PLAIN.bos_token_id, PLAIN.adds_final_newline, PLAIN.is_newline_V.nonzero()[0].tolist()) == (0, True, [0])
    assert (UNMARKED.bos_token_id, UNMARKED.adds_final_newline, UNMARKED.is_newline_V.any()) == (0, False, False)
    late = WordTokenizer(("the", "<S>", "<UNK>"), None, "<S>", "<UNK>")
    assert late.encode("the cat\n<S>").tolist() == [0, 2, 1, 1]
    assert (late.bos_token_id, late.decode([0, 1, 0])) == (1, "the\nthe")
    assert list(split_chunks(PLAIN, [b"the "])) == [b"the \n"]
    assert list(split_chunks(PLAIN, [b"the ", b"dog "], 8)) == [b"the dog ", b"\n"]
    assert list(split_chunks(PLAIN, [b"", b""])) == []
    assert list(split_chunks(UNMARKED, [b"the"])) == [b"the"]


def test_english_is_cut_where_no_word_changes() -> None:
    text = b"the dog. isn't vs. the dog\nMr. the dog. The 'dog' a.\tv. isn't"
    whole = ENGLISH.encode(text).tolist()
    assert len(set(whole)) == 6
    for size in range(1, len(text)):
        for pieces in (split_chunks(ENGLISH, [text], size), split_chunks(ENGLISH, [text[:size], text[size:]], 11)):
            assert [token for piece in pieces for token in ENGLISH.encode(piece).tolist()] == [*whole, 0]


@pytest.mark.parametrize(
    ("rules", "text", "place", "shown"),
    [
        (PreTokenizer(), "the  dog\n na\u00efve cat the cow", 17, "'cat'"),
        (PreTokenizer(), "the " + "x" * 99, 4, "'" + "x" * 40 + r"\.\.\.'"),
        (PreTokenizer(lowercase=True), "The DOG\nCAT", 8, "'cat'"),
        (PreTokenizer("punctuation"), "the dog,\nthe dog's", 13, "''s'|\"'s\""),
    ],
)
def test_unknown_word_without_a_token_is_named(rules: PreTokenizer, text: str, place: int, shown: str) -> None:
    tokenizer = WordTokenizer(WORDS[2:], None, None, None, rules)
    with pytest.raises(
        EncodingError, match=rf"the word ({shown}) is not one of the 7 of this vocabulary, which has"
    ) as caught:
        tokenizer.encode_chunk(text.encode())
    assert caught.value.place == place


def test_workers_get_no_table_of_ids() -> None:
    large = WordTokenizer(tuple(f"word{place}" for place in range(10_007)), None, None, None)
    before = len(pickle.dumps(large))
    large.encode("word7")
    assert len(pickle.dumps(large)) == before < 200_000
    assert pickle.loads(pickle.dumps(large)).encode("word7 word10006").tolist() == [7, 10_006]


@pytest.mark.parametrize(
    ("tokenizer", "text", "lost"),
    [
        (PLAIN, "the dog\nthe", {}),
        (PLAIN, "the dog\n", {}),
        (PLAIN, "", {}),
        (PLAIN, "a cat a\n", {"num_unknown": 3, "unknown": (("a", 2), ("cat", 1))}),
        (PLAIN, "the  dog\n", {"white_space": True}),
        (PLAIN, "the\r\n", {"white_space": True}),
        (PLAIN, "the\n ", {"white_space": True}),
        (PLAIN, "the <eos> dog", {}),
        (PLAIN, b"the \xff", {"invalid": True, "num_unknown": 1, "unknown": (("\ufffd", 1),)}),
        (FOLDED, "The dog\n", {"case": True}),
        (FOLDED, "The  Cat\n", {"case": True, "white_space": True, "num_unknown": 1, "unknown": (("cat", 1),)}),
        (ENGLISH, "the dog, isn't\n", {}),
        (ENGLISH, "the dog , isn 't\n", {"white_space": True}),
        (UNMARKED, "the dog", {}),
        (UNMARKED, "the\ndog", {"white_space": True}),
        (UNMARKED, "the cat", {"num_unknown": 1, "unknown": (("cat", 1),)}),
    ],
)
def test_what_is_lost(tokenizer: WordTokenizer, text: str | bytes, lost: dict[str, object]) -> None:
    found = tokenizer.round_trip_loss(text)
    exact = not lost and "<eos>" not in str(text)
    assert found == RoundTripLoss(**{**NOTHING.__dict__, **lost, "exact": exact})


@UNHURRIED
@given(st.lists(st.sampled_from([*WORDS, " ", " ", "\n", ".", "The", "  "])).map("".join))
@pytest.mark.parametrize("tokenizer", [PLAIN, FOLDED, ENGLISH], ids=["plain", "folded", "english"])
def test_exact_is_exact(tokenizer: WordTokenizer, text: str) -> None:
    lost = tokenizer.round_trip_loss(text)
    assert lost.exact == (tokenizer.decode(tokenizer.encode(text)) == text)
    if lost.exact:
        assert not any((lost.num_unknown, lost.whitespace, lost.case, lost.invalid))
    assert lost.num_unknown == tokenizer.encode_chunk(text.encode()).num_unknown


def test_no_more_than_twenty_unknown_words_are_listed() -> None:
    lost = PLAIN.round_trip_loss(" ".join(f"{place} " * place for place in range(31)))
    assert [word for word, _ in lost.unknown] == [str(place) for place in range(30, 10, -1)]
    assert lost.num_unknown == sum(range(31))


def test_counts_are_kept() -> None:
    counted = WordTokenizer(("a", "b"), np.array([5, 3]), None, None)
    again = WordTokenizer.from_json(counted.to_json())
    assert again.counts is not None
    assert again.counts.tolist() == [5, 3]
    assert again.counts.dtype == np.int64
