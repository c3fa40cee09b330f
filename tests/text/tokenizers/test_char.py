"""Character tokens: with byte fallback decoding restores every text, without it unknown characters are refused.

Shape suffix: V vocabulary.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.text.tokenizers.base import EncodingError
from transformer_xl.text.tokenizers.char import CharTokenizer

PROPERTY = settings(deadline=None, max_examples=50)
# Ids 0 to 4 are the characters, and ids 5 to 260 the bytes, which did not occur in the training text.
TOKENIZER = CharTokenizer(" e\u00e9\n\U0001f600", counts=np.array([5, 4, 3, 2, 1] + [0] * 256))
WITHOUT_FALLBACK = CharTokenizer(" abc\u00e9", counts=np.array([9, 7, 5, 3, 1]), byte_fallback=False)


@PROPERTY
@given(st.text() | st.text(alphabet=" e\u00e9\n\U0001f600\x00\r\u20acx"))
def test_ids_are_characters_or_bytes_and_restore_every_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    expected: list[int] = []
    for character in text:
        index = TOKENIZER.characters.find(character)
        expected += [index] if index >= 0 else [5 + byte for byte in character.encode()]
    assert ids.tolist() == expected


def test_special_ids() -> None:
    assert (TOKENIZER.vocab_size, TOKENIZER.bos_token_id) == (261, 3)
    assert TOKENIZER.is_newline_V.nonzero()[0].tolist() == [3, 5 + 10]  # the character and the byte
    assert (WITHOUT_FALLBACK.vocab_size, WITHOUT_FALLBACK.bos_token_id, WITHOUT_FALLBACK.is_newline_V.sum()) == (
        5,
        0,
        0,
    )
    assert CharTokenizer("ab").bos_token_id == 2 + 10


@pytest.mark.parametrize(
    # `position`: byte offset of the unknown character. `shown`: how the message shows it.
    ("text", "position", "shown"),
    [("a\u00e9 x", 4, r"'x' \(U\+0078\)"), ("\u20ac", 0, "'\u20ac'"), ("ab\nc", 2, r"'\\n' \(U\+000A\)")],
)
def test_unknown_character_without_byte_fallback_is_refused(text: str, position: int, shown: str) -> None:
    with pytest.raises(EncodingError, match=rf"the character {shown}.* is not one of the 5 of this") as caught:
        WITHOUT_FALLBACK.encode_chunk(text.encode())
    assert caught.value.position == position


@PROPERTY
@given(st.text(min_size=1), st.data())
def test_last_boundary_is_before_an_incomplete_character(text: str, data: st.DataObject) -> None:
    content = text.encode()[: data.draw(st.integers(0, len(text.encode())))]
    boundary = TOKENIZER.last_boundary(content)
    assert content[:boundary].decode() == content.decode(errors="ignore")
    assert len(content) - boundary < 4


@pytest.mark.parametrize("content", [b"\x80" * 5, b"a\xff", b"a\x80\x80", b"\xc3\xa9\xa9"])
def test_last_boundary_is_near_the_end_of_bytes_that_are_not_utf8(content: bytes) -> None:
    assert len(content) - 1 <= TOKENIZER.last_boundary(content) <= len(content)
