"""From tokens to text: it continues the prompt, in whole characters, up to a stop string wherever that lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transformer_xl.generation.batch import GeneratedToken
from transformer_xl.generation.completion import CompletionBuilder
from transformer_xl.generation.config import GenerationConfig
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

BYTES = ByteTokenizer()


def pieces_of(
    tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int], *stop: str, **settings: Any
) -> tuple[list[str], bool]:
    """The text that each token brings, up to the last one or a stop string; and whether there was a stop string."""
    config = GenerationConfig(stop=stop, max_new_tokens=max(1, len(new)), **settings)
    builder, pieces = CompletionBuilder(tokenizer, prompt, config), []
    for token_id in new:
        pieces.append(builder.add(GeneratedToken(0, token_id, None, is_eos=False)))
        if builder.finish_reason == "stop":
            return pieces, True
    assert builder.finish_reason == ("length" if new else None)
    return pieces, False


def text_of(new: str, *stop: str) -> tuple[str, bool]:
    pieces, stopped = pieces_of(BYTES, [10], new.encode(), *stop)
    return "".join(pieces), stopped


@pytest.mark.parametrize(
    ("new", "stop", "wanted"),
    [
        ("one two", [], ("one two", False)),
        ("one two", ["three"], ("one two", False)),
        ("one two", [" "], ("one", True)),
        ("one two", ["two"], ("one ", True)),  # at the very end
        ("one two", ["one"], ("", True)),  # at the very beginning
        ("aaab", ["aab"], ("a", True)),  # its beginning came once too often
        ("abababc", ["ababc"], ("ab", True)),
        ("one two", ["twos", "ne t"], ("o", True)),
        ("abcd", ["cd", "bcd"], ("a", True)),  # of those complete at once, the one that begins first counts
        ("abcd", ["bcd", "c"], ("ab", True)),  # the one that is complete first, though another began before it
        ("one tw", ["two"], ("one tw", False)),  # a beginning alone is text
        ("caf\u00e9 bar", ["\u00e9"], ("caf", True)),
        ("x\U0001f600\u20acy", ["\U0001f600\u20ac"], ("x", True)),
        ("x\U0001f600\u20acy", ["\U0001f600y"], ("x\U0001f600\u20acy", False)),
    ],
)
def test_stop_strings_across_tokens_and_bytes(new: str, stop: list[str], wanted: tuple[str, bool]) -> None:
    assert text_of(new, *stop) == wanted


def test_what_could_be_a_stop_string_is_held_back() -> None:
    pieces, _ = pieces_of(BYTES, [10], b"a\nUserX\nUser:b", "\nUser:")
    assert pieces == ["a", "", "", "", "", "", "\nUserX", "", "", "", "", "", ""]
    assert pieces_of(BYTES, [10], b"a\nUs", "\nUser:")[0] == ["a", "", "", "\nUs"]


def test_a_stop_string_that_begins_in_the_prompt_is_not_one() -> None:
    assert pieces_of(BYTES, list(b"a\nUser"), b": b", "\nUser:") == ([":", " ", "b"], False)


def test_an_incomplete_character_and_stop_strings() -> None:
    assert pieces_of(BYTES, [10], b"a\xc3", "\ufffd") == (["a", ""], True)
    assert pieces_of(BYTES, [10], b"a\xc3b", "b") == (["a", "", "\ufffd"], True)


def up_to_the_first_stop(text: str, stop: list[str]) -> str:
    """The stop string that is complete first ends the text; of several, the one that begins first."""
    for length in range(1, len(text) + 1):
        if found := [text[:length].find(one) for one in stop if one in text[:length]]:
            return text[: min(found)]
    return text


@given(
    new=st.text("ab\u00e9\u20ac", min_size=1, max_size=30),
    stop=st.lists(st.text("ab\u00e9\u20ac", min_size=1, max_size=4), max_size=3),
    least=st.integers(0, 20),
)
def test_it_is_the_text_up_to_the_first_stop_string(new: str, stop: list[str], least: int) -> None:
    """Byte by byte as at once; none is looked for in the text of tokens before min_new_tokens."""
    least = min(least, len(new.encode()))
    pieces, _ = pieces_of(BYTES, [10], new.encode(), *stop, min_new_tokens=least)
    free = "".join(pieces[: max(0, least - 1)])
    assert new.startswith(free)
    assert "".join(pieces) == free + up_to_the_first_stop(new[len(free) :], stop)


def test_tokens_are_not_kept_without_a_limit() -> None:
    builder = CompletionBuilder(BYTES, [10], GenerationConfig(max_new_tokens=None))
    assert "".join(builder.add(GeneratedToken(0, 97, -1.0, is_eos=False)) for _ in range(700)) == "a" * 700
    assert (builder.num_tokens, builder.token_ids, builder.logprobs, builder.finish_reason) == (700, [], [], None)


def test_an_eos_token_is_not_shown() -> None:
    """Also not as the end of a character that it cuts off; a newline neither."""
    for new, wanted in ((b"ab\xc3z", "ab\ufffd"), (b"ab\n", "ab")):
        builder = CompletionBuilder(BYTES, [10], GenerationConfig(stop="bx"))
        text = "".join(builder.add(GeneratedToken(0, one, None, is_eos=one in b"z\n")) for one in new)
        assert (text, builder.finish_reason, builder.token_ids) == (wanted, "eos", list(new))


WORDS = ("<eos>", "the", "cat", "(", ")", ",", "sat", "don't", "\u2013", "18")


@pytest.mark.parametrize("rules", [PreTokenizer(), PreTokenizer("punctuation")])
@given(ids=st.lists(st.integers(0, 9), min_size=2, max_size=9), cut=st.integers(1, 8))
@example(ids=[9, 8, 9], cut=2)
def test_words_continue_the_prompt(rules: PreTokenizer, ids: list[int], cut: int) -> None:
    """The space between its last word and the first new one is there, and nothing of the prompt is repeated."""
    tokenizer = WordTokenizer(WORDS, None, "<eos>", None, rules)
    prompt, new = ids[:cut], ids[cut:]
    pieces, _ = pieces_of(tokenizer, prompt, new)
    before, whole = tokenizer.decode(prompt), tokenizer.decode(ids)
    if not whole.startswith(before):  # a dash at the end of a prompt, without a space once a number follows
        before = before.removesuffix(" \u2013") + "\u2013"
    assert before + "".join(pieces) == (whole if new else before)


def test_words_and_stop_strings() -> None:
    tokenizer = WordTokenizer(WORDS, None, "<eos>", None, PreTokenizer())
    assert pieces_of(tokenizer, [0, 1], [2, 6, 0, 1], "\n") == ([" cat", " sat", ""], True)
    assert pieces_of(tokenizer, [0, 1], [2, 6, 0, 1], "t s") == ([" ca", ""], True)
    tokenizer = WordTokenizer(("<eos>", "the", "tattoo"), None, "<eos>")  # twice in one token
    assert pieces_of(tokenizer, [0, 1], [2], "t") == ([" "], True)
    assert pieces_of(tokenizer, [0, 1], [2], "o", "tt") == ([" ta"], True)


def test_what_is_held_back_of_a_prompt_is_not_repeated() -> None:
    words = ("<eos>", "1914", "\u2013", "18", "x")
    tokenizer = WordTokenizer(words, None, "<eos>", None, PreTokenizer("punctuation"))
    assert "".join(pieces_of(tokenizer, [1, 2], [4])[0]) == " x"
    assert "".join(pieces_of(tokenizer, [1, 2], [3])[0]) == "18"  # as in 1914\u201318, without a space
    assert "".join(pieces_of(tokenizer, [1, 2], [0, 3])[0]) == "\n18"


def test_characters_appear_once_all_their_bytes_are_known() -> None:
    """One, two, three and four bytes long; never half of one."""
    assert pieces_of(BYTES, [10], "a\u00e9\u20ac\U0001f600z".encode())[0] == [
        "a", "", "\u00e9", "", "", "\u20ac", "", "", "", "\U0001f600", "z",
    ]  # fmt: skip
    assert pieces_of(BYTES, list(b"a\xc3"), b"\xa9A")[0] == ["\u00e9", "A"]
    assert "".join(pieces_of(BYTES, [10], b"\xc3\x41\xe2\x82")[0]) == "\ufffdA\ufffd"
    tokenizer = CharTokenizer("ab\u00e9", None)
    ids = tokenizer.encode("a\u20ac\u00e9b").tolist()
    assert pieces_of(tokenizer, ids[:1], ids[1:]) == (["", "", "\u20ac", "\u00e9", "b"], False)
    assert pieces_of(tokenizer, ids[:1], ids[1:], "\u20ac\u00e9") == (["", "", "", ""], True)
