"""Integers: each comes back with its sequence, and what is not an integer is named with its position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.text.tokenizers import EncodingError, split_chunks
from transformer_xl.text.tokenizers.integer import MAX_VALUES, IntegerTokenizer, read_numbers

UNHURRIED = settings(deadline=None, max_examples=50)
WHITE = st.text(alphabet=" \t\r\v\f", min_size=1, max_size=3)


@UNHURRIED
@given(st.lists(st.lists(st.integers(0, 65_536), max_size=7), max_size=5))
def test_sequences_come_back(sequences: list[list[int]]) -> None:
    tokenizer = IntegerTokenizer(65_537)
    text = "".join(" ".join(map(str, sequence)) + "\n" for sequence in sequences)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint32
    assert ids.tolist() == [number for sequence in sequences for number in [*sequence, 65_537]]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()


@UNHURRIED
@given(st.lists(st.integers(0, 9_999_999_999) | st.just("\n"), max_size=11), st.data())
def test_numbers_are_read_as_python_reads_them(items: list[int | str], data: st.DataObject) -> None:
    zeros = ["0" * data.draw(st.integers(0, 13)) * (item != "\n") for item in items]
    text = "".join(f"{data.draw(WHITE)}{some}{item}{data.draw(WHITE)}" for some, item in zip(zeros, items, strict=True))
    wanted = [-1 if item == "\n" else int(item) for item in items]
    assert read_numbers(text.encode(), 10**10).tolist() == wanted


def test_only_newlines_become_the_end_of_sequence_token() -> None:
    tokenizer = IntegerTokenizer(31)
    assert tokenizer.encode("7\t13\r\n\n007 ").tolist() == [7, 13, 31, 31, 7]
    assert b"".join(split_chunks(tokenizer, [b"7 1", b"3"])) == b"7 13\n"
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.adds_final_newline) == (32, 31, True)
    assert tokenizer.decode([3, 5]) == "3 5"
    assert tokenizer.decode([31, 3, 31, 31, 5]) == "\n3\n\n5"


@pytest.mark.parametrize(
    ("text", "position", "shown"),
    [
        (b"7 30\n31 5", 5, "'31'"),
        (b"7 -3", 2, "'-3'"),
        (b"7 12x4 5", 2, "'12x4'"),
        (b"1.5", 0, r"'1\.5'"),
        (b"7\x00", 0, r"'7\\x00'"),
        ("7\n\u0663".encode(), 2, "'\u0663'"),
        (b"7 \xff", 2, r"'\\\\xff'"),
        (b"5 " + b"1" * 99, 2, "'" + "1" * 40 + r"\.\.\.'"),
        (b"5 10000000007", 2, "'10000000007'"),
        (b"00000000000 31", 12, "'31'"),
        (b"99999999999999999999 5", 0, "'99999999999999999999'"),
    ],
)
def test_what_is_no_number_is_named(text: bytes, position: int, shown: str) -> None:
    with pytest.raises(
        EncodingError, match=f"^byte {position} of the text: {shown} is not an integer from 0 to 30; "
    ) as caught:
        IntegerTokenizer(31).encode_chunk(text)
    assert caught.value.position == position


def test_largest_value() -> None:
    assert read_numbers(str(MAX_VALUES - 1).encode()).tolist() == [MAX_VALUES - 1]
    with pytest.raises(EncodingError, match=f"'{MAX_VALUES}' is not an integer from 0 to {MAX_VALUES - 1}"):
        read_numbers(str(MAX_VALUES).encode())


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        ("31", r"remove it, or prepare the corpus with --vocab-size 33 or more"),
        ("0" * 13 + "31", r"remove it, or prepare the corpus with --vocab-size 33 or more"),
        (str(MAX_VALUES - 1), rf"remove it, or prepare the corpus with --vocab-size {MAX_VALUES + 1} or more"),
        (str(MAX_VALUES), r"remove it, or renumber the values from 0"),
        ("9" * 5000, r"remove it, or renumber the values from 0"),
        ("-2", r"remove it, or renumber the values from 0"),
        ("+1", r"write it in the digits 0 to 9 alone, or remove it"),
        ("\u0663", r"write it in the digits 0 to 9 alone, or remove it"),
    ],
)
def test_what_to_do_is_what_helps(number: str, advice: str) -> None:
    with pytest.raises(EncodingError, match=f"from 0 to 30; {advice}$"):
        IntegerTokenizer(31).encode(f"7 {number} 5")


def test_leading_zeros_are_fine() -> None:
    assert read_numbers(b"00000000001 5").tolist() == [1, 5]
    assert read_numbers(b"0" * 4099).tolist() == [0]
    assert read_numbers(b"7 " + b"0" * 4099 + b"2147483645").tolist() == [7, 2147483645]
