"""Integer tokens: decoding restores the sequences, and text other than integers is refused with its position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.text.tokenizers.base import EncodingError
from transformer_xl.text.tokenizers.chunking import split_chunks
from transformer_xl.text.tokenizers.integer import MAX_VALUES, IntegerTokenizer, parse_integers

PROPERTY = settings(deadline=None, max_examples=50)
SPACES = st.text(alphabet=" \t\r\v\f", min_size=1, max_size=3)


@PROPERTY
@given(st.lists(st.lists(st.integers(0, 65_536), max_size=7), max_size=5))
def test_decoding_restores_sequences(sequences: list[list[int]]) -> None:
    tokenizer = IntegerTokenizer(num_values=65_537)
    text = "".join(" ".join(map(str, sequence)) + "\n" for sequence in sequences)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint32
    assert ids.tolist() == [value for sequence in sequences for value in [*sequence, 65_537]]
    assert tokenizer.decode(ids) == text


@PROPERTY
@given(st.lists(st.integers(0, 9_999_999_999) | st.just("\n"), max_size=11), st.data())
def test_integers_are_parsed_as_by_python(items: list[int | str], data: st.DataObject) -> None:
    zeros = ["0" * data.draw(st.integers(0, 13)) * (item != "\n") for item in items]
    text = "".join(
        f"{data.draw(SPACES)}{zero}{item}{data.draw(SPACES)}" for zero, item in zip(zeros, items, strict=True)
    )
    expected = [-1 if item == "\n" else int(item) for item in items]
    assert parse_integers(text.encode(), limit=10**10).tolist() == expected


def test_newlines_and_leading_zeros() -> None:
    tokenizer = IntegerTokenizer(num_values=31)  # so that 31 is the end-of-sequence token
    assert tokenizer.encode("7\t13\r\n\n007 " + "0" * 4099).tolist() == [7, 13, 31, 31, 7, 0]
    # chunks are split only between integers, and a newline missing at the end is added
    assert b"".join(split_chunks(tokenizer, [b"7 1", b"3"])) == b"7 13\n"
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (32, 31)
    assert tokenizer.decode([31, 3, 31, 31, 5, 6]) == "\n3\n\n5 6"


def test_ids_are_the_integers_alone_without_end_of_sequence() -> None:
    tokenizer = IntegerTokenizer(num_values=31, add_eos=False)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (31, 0, None)
    assert tokenizer.encode("7\t13\r\n\n007 30\n").tolist() == [7, 13, 7, 30]
    assert tokenizer.decode([7, 13, 7, 30]) == "7 13 7 30"


@pytest.mark.parametrize(
    # `position`: byte offset of the first invalid word. `shown`: how the message shows this word.
    ("text", "position", "shown"),
    [
        (b"7 30\n31 5", 5, "'31'"),
        (b"00000000000 31", 12, "'31'"),
        # 2147483645 is the largest integer that a vocabulary can have (MAX_VALUES - 1)
        (b"7 2147483645 5", 2, "'2147483645'"),
        (b"7\n2147483646", 2, "'2147483646'"),
        (b"99999999999999999999 5", 0, "'99999999999999999999'"),
        (b"5 " + b"1" * 5000, 2, "'" + "1" * 40 + r"\.\.\.'"),
        (b"7 -3", 2, "'-3'"),
        (b"7 12x4 5", 2, "'12x4'"),
        (b"7\x00", 0, r"'7\\x00'"),
        ("7\n\u0663".encode(), 2, "'\u0663'"),
        (b"7 \xff", 2, r"'\\\\xff'"),
    ],
)
def test_text_other_than_integers_is_refused(text: bytes, position: int, shown: str) -> None:
    message = (
        f"^byte {position} of the text: {shown} is not an integer from 0 to 30 in the digits .* larger vocab_size$"
    )
    with pytest.raises(EncodingError, match=message) as caught:
        IntegerTokenizer(num_values=31).encode_chunk(text)
    assert caught.value.position == position


def test_largest_integer() -> None:
    assert parse_integers(b"7 " + str(MAX_VALUES - 1).zfill(4099).encode()).tolist() == [7, MAX_VALUES - 1]
    with pytest.raises(EncodingError, match=f"'{MAX_VALUES}' is not an integer from 0 to {MAX_VALUES - 1}"):
        parse_integers(str(MAX_VALUES).encode())
