"""Generated tokens become text in whole characters that continues the prompt, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transformer_xl.generation.batch import GeneratedToken
from transformer_xl.generation.completion import CompletionBuilder
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

BYTES = ByteTokenizer()


def pieces_of(
    tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int], *stop: str, **settings: Any
) -> tuple[list[str], bool]:
    """Return the text that each new token adds after the prompt, up to a stop string, and whether there was one.

    `prompt` and `new` are token ids; with the byte tokenizer, those of bytes. `settings` are those of GenerationConfig.
    """
    config = GenerationConfig(stop=stop, max_new_tokens=max(1, len(new)), **settings)
    builder, pieces = CompletionBuilder(tokenizer, prompt, config), []
    for token_id in new:
        pieces.append(builder.add(GeneratedToken(sequence=0, token_id=token_id, logprob=None, is_eos=False)))
        if builder.finish_reason == "stop":
            return pieces, True
    assert builder.finish_reason == ("length" if new else None)
    return pieces, False


def test_possible_beginning_of_a_stop_string_is_held_back() -> None:
    """It appears once it cannot become the stop string any more, or at the last token."""
    pieces, _ = pieces_of(BYTES, [10], b"a\nUserX\nUser:b", "\nUser:")
    assert pieces == ["a", "", "", "", "", "", "\nUserX", "", "", "", "", "", ""]
    assert pieces_of(BYTES, [10], b"a\nUs", "\nUser:")[0] == ["a", "", "", "\nUs"]


def test_stop_string_that_begins_in_the_prompt_is_ignored() -> None:
    assert pieces_of(BYTES, list(b"a\nUser"), b": b", "\nUser:") == ([":", " ", "b"], False)


def test_stop_strings_after_an_incomplete_character() -> None:
    """The byte 0xc3 begins a character of two bytes, and is decoded as U+FFFD if no second byte follows."""
    assert pieces_of(BYTES, [10], b"a\xc3", "\ufffd") == (["a", ""], True)
    assert pieces_of(BYTES, [10], b"a\xc3b", "b") == (["a", "", "\ufffd"], True)


def truncate_at_stop(text: str, stop: list[str]) -> str:
    """Truncate at the stop string that is complete first; of several, at the one that begins first."""
    for length in range(1, len(text) + 1):
        if positions := [text[:length].find(one) for one in stop if one in text[:length]]:
            return text[: min(positions)]
    return text


@example(new="abababc", stop=["ababc"], min_new_tokens=0)  # the text repeats the beginning of the stop string
@example(new="abcd", stop=["cd", "bcd"], min_new_tokens=0)  # both are complete at once: the first one counts
@example(new="abcd", stop=["bcd", "c"], min_new_tokens=0)  # the one that is complete first counts
@example(new="one tw", stop=["two"], min_new_tokens=0)  # an incomplete stop string is part of the text
@given(
    new=st.text("ab\u00e9\u20ac", min_size=1, max_size=30),
    stop=st.lists(st.text("ab\u00e9\u20ac", min_size=1, max_size=4), max_size=3),
    min_new_tokens=st.integers(0, 20),
)
def test_text_ends_at_the_first_stop_string(new: str, stop: list[str], min_new_tokens: int) -> None:
    """Stop strings in the text of the tokens before min_new_tokens are ignored."""
    min_new_tokens = min(min_new_tokens, len(new.encode()))
    pieces, _ = pieces_of(BYTES, [10], new.encode(), *stop, min_new_tokens=min_new_tokens)
    unchecked = "".join(pieces[: max(0, min_new_tokens - 1)])
    assert new.startswith(unchecked)
    assert "".join(pieces) == unchecked + truncate_at_stop(new[len(unchecked) :], stop)


def test_tokens_are_not_kept_without_max_new_tokens() -> None:
    """Without a limit, 700 tokens with the byte a (id 97) are counted but not stored."""
    builder = CompletionBuilder(BYTES, [10], GenerationConfig(max_new_tokens=None))
    assert "".join(builder.add(GeneratedToken(0, 97, -1.0, is_eos=False)) for _ in range(700)) == "a" * 700
    assert (builder.num_tokens, builder.token_ids, builder.logprobs, builder.finish_reason) == (700, [], [], None)


def test_eos_token_is_not_part_of_the_text() -> None:
    """An incomplete character before it is replaced; a newline is omitted as well."""
    for new, expected in ((b"ab\xc3z", "ab\ufffd"), (b"ab\n", "ab")):
        builder = CompletionBuilder(BYTES, [10], GenerationConfig(stop="bx"))
        text = "".join(builder.add(GeneratedToken(0, byte, None, is_eos=byte in b"z\n")) for byte in new)
        assert (text, builder.finish_reason, builder.token_ids) == (expected, "eos", list(new))


# a vocabulary of words with brackets, an apostrophe, a dash and a number, before or after which there may be no space
WORDS = ("<eos>", "the", "cat", "(", ")", ",", "sat", "don't", "\u2013", "18")


@pytest.mark.parametrize("pre_tokenizer", [PreTokenizer(), PreTokenizer("punctuation")])
@given(ids=st.lists(st.integers(0, 9), min_size=2, max_size=9), prompt_length=st.integers(1, 8))
@example(ids=[9, 8, 9], prompt_length=2)  # 18\u201318: a dash between numbers has no spaces
def test_words_continue_the_prompt(pre_tokenizer: PreTokenizer, ids: list[int], prompt_length: int) -> None:
    """The text contains the space between prompt and first new word, and repeats nothing of the prompt."""
    tokenizer = WordTokenizer(WORDS, eos_token="<eos>", pre_tokenizer=pre_tokenizer)
    prompt, new = ids[:prompt_length], ids[prompt_length:]
    pieces, _ = pieces_of(tokenizer, prompt, new)
    decoded_prompt, whole = tokenizer.decode(prompt), tokenizer.decode(ids)
    if not whole.startswith(decoded_prompt):  # a dash at the end of a prompt loses its space if a number follows
        decoded_prompt = decoded_prompt.removesuffix(" \u2013") + "\u2013"
    assert decoded_prompt + "".join(pieces) == (whole if new else decoded_prompt)


def test_stop_strings_in_text_of_words() -> None:
    tokenizer = WordTokenizer(WORDS, eos_token="<eos>", pre_tokenizer=PreTokenizer())
    assert pieces_of(tokenizer, [0, 1], [2, 6, 0, 1], "\n") == ([" cat", " sat", ""], True)
    assert pieces_of(tokenizer, [0, 1], [2, 6, 0, 1], "t s") == ([" ca", ""], True)
    tokenizer = WordTokenizer(("<eos>", "the", "tattoo"), eos_token="<eos>")  # a token may contain several stop strings
    assert pieces_of(tokenizer, [0, 1], [2], "t") == ([" "], True)
    assert pieces_of(tokenizer, [0, 1], [2], "o", "tt") == ([" ta"], True)


def test_characters_appear_once_they_are_complete() -> None:
    """Characters of one, two, three and four bytes."""
    assert pieces_of(BYTES, [10], "a\u00e9\u20ac\U0001f600z".encode())[0] == [
        "a", "", "\u00e9", "", "", "\u20ac", "", "", "", "\U0001f600", "z",
    ]  # fmt: skip
    assert pieces_of(BYTES, list(b"a\xc3"), b"\xa9A")[0] == ["\u00e9", "A"]
    assert "".join(pieces_of(BYTES, [10], b"\xc3\x41\xe2\x82")[0]) == "\ufffdA\ufffd"
    # characters that it does not have, such as the euro sign, are encoded as their bytes, a token each
    tokenizer = CharTokenizer("ab\u00e9")
    ids = tokenizer.encode("a\u20ac\u00e9b").tolist()
    assert pieces_of(tokenizer, ids[:1], ids[1:]) == (["", "", "\u20ac", "\u00e9", "b"], False)
    assert pieces_of(tokenizer, ids[:1], ids[1:], "\u20ac\u00e9") == (["", "", "", ""], True)
