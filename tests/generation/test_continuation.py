"""The text shown: it goes on from the prompt, in whole characters, up to a stop string wherever that lies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transformer_xl.generation.continuation import Continuation
from transformer_xl.text.tokenizer import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.characters import CharTokenizer
from transformer_xl.text.tokenizers.words import WordSplitting, WordTokenizer

BYTES = ByteTokenizer()


def shown(tokenizer: Tokenizer, prompt: Sequence[int], made: Sequence[int], *stops: str) -> tuple[list[str], bool]:
    """The pieces, one for each token and one at the end, as far as a reader would go; and whether a stop was found."""
    continuation = Continuation(tokenizer, prompt, stops)
    pieces: list[str] = []
    for token in made:
        pieces.append(continuation.push(token))
        if continuation.stopped:
            return pieces, True
    pieces.append(continuation.finish())
    return pieces, continuation.stopped


def text_of(made: str, *stops: str) -> tuple[str, bool]:
    pieces, stopped = shown(BYTES, [10], made.encode(), *stops)
    return "".join(pieces), stopped


@pytest.mark.parametrize(
    ("made", "stops", "wanted"),
    [
        ("one two", [], ("one two", False)),
        ("one two", ["three"], ("one two", False)),
        ("one two", [" "], ("one", True)),
        ("one two", ["two"], ("one ", True)),  # at the very end
        ("one two", ["one"], ("", True)),  # at the very beginning
        ("aaab", ["aab"], ("a", True)),  # its beginning came once too often
        ("abababc", ["ababc"], ("ab", True)),
        ("one two", ["twos", "ne t"], ("o", True)),
        ("abcd", ["cd", "bcd"], ("a", True)),  # of those whole at once the first place counts, not the first string
        ("abcd", ["bcd", "c"], ("ab", True)),  # the one that is whole first, though another began before it
        ("one tw", ["two"], ("one tw", False)),  # a beginning alone is text
        ("caf\u00e9 bar", ["\u00e9"], ("caf", True)),
        ("x\U0001f600\u20acy", ["\U0001f600\u20ac"], ("x", True)),
        ("x\U0001f600\u20acy", ["\U0001f600y"], ("x\U0001f600\u20acy", False)),
    ],
)
def test_stop_strings_across_tokens_and_bytes(made: str, stops: list[str], wanted: tuple[str, bool]) -> None:
    assert text_of(made, *stops) == wanted


def test_what_could_be_a_stop_is_held_back_until_it_is_known() -> None:
    pieces, _ = shown(BYTES, [10], b"a\nUserX\nUser:b", "\nUser:")
    assert pieces == ["a", "", "", "", "", "", "\nUserX", "", "", "", "", "", ""]
    assert shown(BYTES, [10], b"a\nUs", "\nUser:")[0] == ["a", "", "", "", "\nUs"]


def test_a_stop_string_that_lies_in_the_prompt_is_not_one() -> None:
    assert shown(BYTES, list(b"a\nUser"), b": b", "\nUser:") == ([":", " ", "b", ""], False)


def test_a_character_that_never_ends_may_hide_no_stop() -> None:
    assert shown(BYTES, [10], b"a\xc3", "\ufffd") == (["a", "", ""], True)
    assert shown(BYTES, [10], b"a\xc3b", "b") == (["a", "", "\ufffd"], True)


def up_to_the_first_stop(made: str, stops: list[str]) -> tuple[str, bool]:
    """The stop string that is whole first ends the text; of several that are, the one that begins first."""
    for length in range(1, len(made) + 1):
        places = [made[:length].find(stop) for stop in stops if stop in made[:length]]
        if places:
            return made[: min(places)], True
    return made, False


@given(
    made=st.text("ab\u00e9\u20ac", max_size=30),
    stops=st.lists(st.text("ab\u00e9\u20ac", min_size=1, max_size=4), max_size=3),
    free=st.integers(0, 20),
)
def test_it_is_the_text_up_to_the_first_stop(made: str, stops: list[str], free: int) -> None:
    """Byte by byte as at once; and where none is looked for during the first bytes, only those after them count."""
    assert text_of(made, *stops) == up_to_the_first_stop(made, stops)
    continuation = Continuation(BYTES, [10], stops)
    text, later = "", ""
    for place, byte in enumerate(made.encode()):
        piece = continuation.push(byte, stopping=place >= free)
        if place < free:
            text += piece
        else:
            later += piece
        if continuation.stopped:
            break
    else:
        later += continuation.finish()
    assert made.startswith(text)
    assert later == up_to_the_first_stop(made[len(text) :], stops)[0]


WORDS = ("<eos>", "the", "cat", "(", ")", ",", "sat", "don't", "\u2013", "18")


@pytest.mark.parametrize("rules", [WordSplitting(), WordSplitting(splitting="punctuation")])
@given(ids=st.lists(st.integers(0, 9), min_size=2, max_size=9), cut=st.integers(1, 8))
@example(ids=[9, 8, 9], cut=2)
def test_words_go_on_from_the_prompt(rules: WordSplitting, ids: list[int], cut: int) -> None:
    """The space between its last word and the first one made is there, and nothing of it is said again."""
    tokenizer = WordTokenizer(WORDS, None, "<eos>", None, rules)
    prompt, made = ids[:cut], ids[cut:]
    pieces, _ = shown(tokenizer, prompt, made)
    before, whole = tokenizer.decode(prompt), tokenizer.decode(ids)
    if not whole.startswith(before):  # a dash at the end of a prompt, without a space once a number follows
        before = before.removesuffix(" \u2013") + "\u2013"
    assert before + "".join(pieces) == whole


def test_words_stop_at_text_too() -> None:
    tokenizer = WordTokenizer(WORDS, None, "<eos>", None, WordSplitting())
    assert shown(tokenizer, [0, 1], [2, 6, 0, 1], "\n") == ([" cat", " sat", ""], True)
    assert shown(tokenizer, [0, 1], [2, 6, 0, 1], "t s") == ([" ca", ""], True)


def test_a_stop_that_stands_twice_in_one_token() -> None:
    tokenizer = WordTokenizer(("<eos>", "the", "tattoo"), None, "<eos>")
    assert shown(tokenizer, [0, 1], [2], "t") == ([" "], True)
    assert shown(tokenizer, [0, 1], [2], "o", "tt") == ([" ta"], True)


def test_what_is_held_back_of_a_prompt_is_not_said_again() -> None:
    words = ("<eos>", "1914", "\u2013", "18", "x")
    tokenizer = WordTokenizer(words, None, "<eos>", None, WordSplitting(splitting="punctuation"))
    assert "".join(shown(tokenizer, [1, 2], [4])[0]) == " x"
    assert "".join(shown(tokenizer, [1, 2], [3])[0]) == "18"  # as in 1914\u201318, where no space stands
    assert "".join(shown(tokenizer, [1, 2], [0, 3])[0]) == "\n18"


def test_characters_and_the_bytes_between_them() -> None:
    """One, two, three and four bytes long; each as soon as its last byte is there, and never half of one."""
    assert shown(BYTES, [10], "a\u00e9\u20ac\U0001f600z".encode())[0] == [
        "a", "", "\u00e9", "", "", "\u20ac", "", "", "", "\U0001f600", "z", "",
    ]  # fmt: skip
    tokenizer = CharTokenizer("ab\u00e9", None)
    ids = tokenizer.encode("a\u20ac\u00e9b").tolist()
    assert shown(tokenizer, ids[:1], ids[1:]) == (["", "", "\u20ac", "\u00e9", "b", ""], False)
    assert shown(tokenizer, ids[:1], ids[1:], "\u20ac\u00e9") == (["", "", "", ""], True)
