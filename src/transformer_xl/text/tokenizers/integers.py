"""Whole numbers as tokens: music, proteins, or tokens that another program made.

The text has one sequence of numbers to a line, with white space between them. Ids are the numbers themselves,
0 .. values - 1, and one further id, `values`, is the mark that ends every sequence. An empty line is an empty sequence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer_xl.text.tokenizer import (
    EncodedChunk,
    EncodingError,
    StreamDecoder,
    TokenArray,
    check_ids,
    to_bytes,
    token_dtype,
)
from transformer_xl.text.tokenizers.splitting import WhitespaceDetokenizer, last_whitespace

MAX_VALUES = 2**31 - 1
_MOST_DIGITS = 10  # of a number below MOST_VALUES
_LINE_END = -1
_WHITE = np.isin(np.arange(256), list(b" \n\t\r\v\f"))


def read_numbers(piece: bytes, below: int = MAX_VALUES) -> npt.NDArray[np.int64]:
    """The numbers of a piece in their order, with -1 for each line end.

    Args:
        piece: numbers written in the digits 0 to 9, with ASCII white space between them.
        below: every number must be smaller.

    Raises:
        BadText: something that is not such a number.
    """
    text = np.frombuffer(piece, dtype=np.uint8)
    digit = (text >= ord("0")) & (text <= ord("9"))
    if not (digit | _WHITE[text]).all():
        raise _not_a_number(piece, int(np.argmin(digit | _WHITE[text])), below)
    line_end = text == ord("\n")
    last = digit.copy()
    last[:-1] &= ~digit[1:]  # the last digit of each number
    ends = np.flatnonzero(last | line_end)
    places = ends.copy()
    inside = digit[ends]
    values = np.zeros(len(ends), dtype=np.int64)
    for power in range(_MOST_DIGITS):
        values[inside] += (text[places[inside]] - ord("0")) * np.int64(10**power)
        places -= 1
        inside &= (places >= 0) & digit[places]
        if not inside.any():
            break
    values[line_end[ends]] = _LINE_END
    if inside.any():
        inside[inside] = _any_but_zeros(text, digit, places[inside])
    wrong = inside | (values >= below)
    if wrong.any():
        raise _not_a_number(piece, int(ends[wrong.argmax()]), below)
    return values


def _any_but_zeros(
    text: npt.NDArray[np.uint8], digit: npt.NDArray[np.bool_], places: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Whether a digit other than 0 stands at each place or, in the same number, before it."""
    other = np.maximum.accumulate(np.where(text == ord("0"), -1, np.arange(len(text))))[places]
    return (other >= 0) & digit[other]


def _not_a_number(piece: bytes, place: int, below: int) -> EncodingError:
    """What is wrong with the word that holds this byte."""
    start = last_whitespace(piece[:place])
    found = re.match(rb"[^ \n\t\r\v\f]+", piece[start:])
    word = (found[0] if found else b"").decode("utf-8", errors="backslashreplace")
    shown = repr(word if len(word) <= 40 else word[:40] + "...")
    digits = word.lstrip("0") if re.fullmatch("[0-9]+", word) else ""
    if digits and len(digits) <= _MOST_DIGITS and int(digits) < MAX_VALUES:
        advice = f"take it out, or prepare the corpus with --values {int(digits) + 1} or more"
    elif digits or re.fullmatch("-[0-9]+", word):
        advice = "take it out, or number the values anew from 0"
    else:
        advice = "write it in the digits 0 to 9 alone, or take it out"
    return EncodingError(start, f"{shown} is not a whole number from 0 to {below - 1}; {advice}")


@dataclass(frozen=True)
class IntegerTokenizer:
    """The numbers 0 .. values - 1, and a mark that ends each sequence."""

    num_values: int
    """How many different numbers there are."""

    kind = "integers"
    adds_final_newline = True

    @property
    def counts(self) -> None:
        """Numbers stand in their own order, not in that of their counts."""

    @property
    def vocab_size(self) -> int:
        """The numbers and the mark."""
        return self.num_values + 1

    @property
    def bos_token_id(self) -> int:
        """The mark, as if a sequence had just ended."""
        return self.num_values

    @property
    def is_newline_V(self) -> npt.NDArray[np.bool_]:
        """(V,) the mark alone."""
        return np.arange(self.vocab_size) == self.num_values

    def last_boundary(self, text: bytes) -> int:
        """The place after the last white space."""
        return last_whitespace(text)

    def encode_chunk(self, piece: bytes) -> EncodedChunk:
        """The numbers of the piece, a mark for each line end.

        Raises:
            BadText: something that is not a number from 0 to values - 1.
        """
        numbers = read_numbers(piece, self.num_values)
        return EncodedChunk(
            np.where(numbers == _LINE_END, self.num_values, numbers).astype(token_dtype(self.vocab_size))
        )

    def encode(self, text: str | bytes) -> TokenArray:
        """The numbers of a text; raises what `encode_piece` and `as_bytes` do."""
        return self.encode_chunk(to_bytes(text)).ids

    def decode(self, ids: npt.ArrayLike) -> str:
        """The numbers with one space between them, a line for each sequence.

        Raises:
            UserError: an id that is not of this vocabulary.
        """
        decoder = _NumberStreamDecoder(self)
        return "".join(map(decoder.push_checked, check_ids(ids, self).tolist()))

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """The same as ASCII; raises what `decode` does."""
        return self.decode(ids).encode("ascii")

    def stream_decoder(self) -> StreamDecoder:
        """A decoder whose pieces join to what `decode` gives."""
        return _NumberStreamDecoder(self)

    def to_json(self) -> dict[str, Any]:
        """Kind and number of values."""
        return {"kind": self.kind, "values": self.num_values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> IntegerTokenizer:
        """What `to_json` wrote.

        Raises:
            ValueError: what is wrong with the values.
        """
        number = values.get("values")
        if type(number) is not int or not 0 < number <= MAX_VALUES:
            raise ValueError(f"values is {number!r}, wanted a whole number from 1 to {MAX_VALUES}")
        return cls(number)


class _NumberStreamDecoder:
    def __init__(self, tokenizer: IntegerTokenizer) -> None:
        self._vocabulary = tokenizer
        self._joiner = WhitespaceDetokenizer()

    def push(self, token: int) -> str:
        return self.push_checked(int(check_ids(token, self._vocabulary)[0]))

    def push_checked(self, token: int) -> str:
        if token == self._vocabulary.num_values:
            return self._joiner.finish() + "\n"
        return self._joiner.push(str(token))

    def finish(self) -> str:
        return self._joiner.finish()
