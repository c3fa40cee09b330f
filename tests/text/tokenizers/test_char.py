"""Characters: any text comes back, or what the vocabulary lacks is named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.text.tokenizers import EncodingError
from transformer_xl.text.tokenizers.char import CharTokenizer, whole_characters

UNHURRIED = settings(deadline=None, max_examples=50)
SMALL = CharTokenizer(" e\u00e9\n\U0001f600", np.array([5, 4, 3, 2, 1] + [0] * 256))
CLOSED = CharTokenizer(" abc\u00e9", np.array([9, 7, 5, 3, 1]), byte_fallback=False)


@UNHURRIED
@given(st.text() | st.text(alphabet=" e\u00e9\n\U0001f600\x00\r\u20acx"))
def test_any_text_comes_back(text: str) -> None:
    ids = SMALL.encode(text)
    assert SMALL.decode(ids) == text
    assert SMALL.decode_bytes(ids) == text.encode()
    wanted: list[int] = []  # one character after the other
    for character in text:
        known = SMALL.characters.find(character)
        wanted += [known] if known >= 0 else [5 + byte for byte in character.encode()]
    assert ids.tolist() == wanted


def test_ids_are_pinned() -> None:
    assert SMALL.encode("\u00e9x \u20ac").tolist() == [2, 5 + 0x78, 0, 5 + 0xE2, 5 + 0x82, 5 + 0xAC]
    assert (SMALL.vocab_size, SMALL.bos_token_id, SMALL.encode("").tolist()) == (261, 3, [])
    assert SMALL.is_newline_V.nonzero()[0].tolist() == [3, 5 + 10]
    assert (CLOSED.vocab_size, CLOSED.bos_token_id, CLOSED.is_newline_V.sum()) == (5, 0, 0)
    assert CharTokenizer("ab").bos_token_id == 2 + 10


@pytest.mark.parametrize(
    ("text", "position", "shown"),
    [("a\u00e9 x", 4, r"'x' \(U\+0078\)"), ("\u20ac", 0, "'\u20ac'"), ("ab\nc", 2, r"'\\n' \(U\+000A\)")],
)
def test_without_byte_fallback_other_characters_are_named(text: str, position: int, shown: str) -> None:
    with pytest.raises(
        EncodingError, match=rf"the character {shown}.* is not one of the 5 of this vocabulary"
    ) as caught:
        CLOSED.encode_chunk(text.encode())
    assert caught.value.position == position


@UNHURRIED
@given(st.text(min_size=1), st.data())
def test_a_cut_character_is_left_for_later(text: str, data: st.DataObject) -> None:
    content = text.encode()
    end = data.draw(st.integers(0, len(content)))
    whole = whole_characters(content[:end])
    assert content[:whole].decode() == content[:end].decode(errors="ignore")
    assert end - whole < 4


@pytest.mark.parametrize("wrong", [b"\x80" * 5, b"a\xff", b"a\x80\x80", b"\xc3\xa9\xa9"])
def test_what_is_not_utf8_does_not_stop_the_cutting(wrong: bytes) -> None:
    assert len(wrong) - 1 <= whole_characters(wrong) <= len(wrong)
