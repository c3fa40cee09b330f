"""Integer tokens: music, proteins, or the output of another tokenizer.

The text has one sequence of integers per line, separated by whitespace. Ids are the integers themselves,
0 .. num_values - 1, and id `num_values` is the end-of-sequence token of every line. An empty line is an empty sequence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transformer_xl.config import INT32_MAX
from transformer_xl.text.tokenizers.base import EncodedChunk, EncodingError, Tokenizer, quoted, token_dtype
from transformer_xl.text.tokenizers.chunking import last_whitespace
from transformer_xl.text.tokenizers.pre_tokenizer import WhitespaceDetokenizer, WordStreamDecoder

MAX_VALUES = INT32_MAX - 1  # so that the size of the vocabulary is at most INT32_MAX
_MAX_DIGITS = 10  # of a number below MAX_VALUES
_NEWLINE = -1
_IS_WHITESPACE = np.isin(np.arange(256), list(b" \n\t\r\v\f"))


def read_numbers(chunk: bytes, below: int = MAX_VALUES) -> npt.NDArray[np.int64]:
    """Return the integers of a chunk in order, with -1 for each newline.

    Args:
        chunk: integers in the digits 0 to 9, separated by ASCII whitespace.
        below: exclusive upper bound of the integers.

    Raises:
        EncodingError: the chunk contains anything else.
    """
    text = np.frombuffer(chunk, dtype=np.uint8)
    is_digit = (text >= ord("0")) & (text <= ord("9"))
    if not (is_digit | _IS_WHITESPACE[text]).all():
        raise _not_a_number(chunk, int(np.argmin(is_digit | _IS_WHITESPACE[text])), below)
    is_newline = text == ord("\n")
    is_last = is_digit.copy()
    is_last[:-1] &= ~is_digit[1:]  # the last digit of each number
    ends = np.flatnonzero(is_last | is_newline)
    positions = ends.copy()
    inside = is_digit[ends]
    values = np.zeros(len(ends), dtype=np.int64)
    for power in range(_MAX_DIGITS):
        values[inside] += (text[positions[inside]] - ord("0")) * np.int64(10**power)
        positions -= 1
        inside &= (positions >= 0) & is_digit[positions]
        if not inside.any():
            break
    values[is_newline[ends]] = _NEWLINE
    if inside.any():
        inside[inside] = _has_nonzero_digit(text, is_digit, positions[inside])
    wrong = inside | (values >= below)
    if wrong.any():
        raise _not_a_number(chunk, int(ends[wrong.argmax()]), below)
    return values


def _has_nonzero_digit(
    text: npt.NDArray[np.uint8], is_digit: npt.NDArray[np.bool_], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return whether a nonzero digit is at or before each position in the same number."""
    nonzero = np.maximum.accumulate(np.where(text == ord("0"), -1, np.arange(len(text))))[positions]
    return (nonzero >= 0) & is_digit[nonzero]


def _not_a_number(chunk: bytes, position: int, below: int) -> EncodingError:
    """Return the error for the word that contains this byte."""
    start = last_whitespace(chunk[:position])
    match = re.match(rb"[^ \n\t\r\v\f]+", chunk[start:])
    word = (match[0] if match else b"").decode("utf-8", errors="backslashreplace")
    digits = word.lstrip("0") if re.fullmatch("[0-9]+", word) else ""
    if digits and len(digits) <= _MAX_DIGITS and int(digits) < MAX_VALUES:
        advice = f"remove it, or prepare the corpus with --vocab-size {int(digits) + 2} or more"
    elif digits or re.fullmatch("-[0-9]+", word):
        advice = "remove it, or renumber the values from 0"
    else:
        advice = "write it in the digits 0 to 9 alone, or remove it"
    return EncodingError(start, f"{quoted(word)} is not an integer from 0 to {below - 1}; {advice}")


@dataclass(frozen=True)
class IntegerTokenizer(Tokenizer):
    """A tokenizer for the integers 0 .. num_values - 1, with an end-of-sequence token."""

    num_values: int
    """Number of different integers."""

    kind = "integer"
    is_lossless = False
    is_text = False

    @property
    @override
    def vocab_size(self) -> int:
        """Number of integers plus the end-of-sequence token."""
        return self.num_values + 1

    @property
    @override
    def bos_token_id(self) -> int:
        """The end-of-sequence token, as if a sequence had just ended."""
        return self.num_values

    @cached_property
    @override
    def is_newline_V(self) -> npt.NDArray[np.bool_]:
        """(V,) true only for the end-of-sequence token."""
        return np.arange(self.vocab_size) == self.num_values

    @property
    @override
    def adds_final_newline(self) -> bool:
        return True

    @override
    def last_boundary(self, text: bytes) -> int:
        return last_whitespace(text)

    @override
    def encode_chunk(self, chunk: bytes) -> EncodedChunk:
        numbers = read_numbers(chunk, self.num_values)
        return EncodedChunk(
            np.where(numbers == _NEWLINE, self.num_values, numbers).astype(token_dtype(self.vocab_size))
        )

    @override
    def stream_decoder(self) -> WordStreamDecoder:
        return WordStreamDecoder(self, str, WhitespaceDetokenizer(), eos_token_id=self.num_values)

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "num_values": self.num_values}

    @classmethod
    @override
    def from_json(cls, values: Mapping[str, Any]) -> IntegerTokenizer:
        num_values = values.get("num_values")
        if type(num_values) is not int or not 0 < num_values <= MAX_VALUES:
            raise ValueError(f"num_values is {num_values!r}, expected an integer from 1 to {MAX_VALUES}")
        return cls(num_values)
