"""Integer tokens, for data that consists of integers: encoded music or proteins, or the ids of another tokenizer.

The text has one sequence of integers per line, separated by whitespace. Ids are the integers themselves,
0 .. num_values - 1, and id `num_values` is the end-of-sequence token, which ends every line. An empty line is an empty
sequence. Without that token a newline is whitespace, and every id is an integer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transformer_xl.config import INT32_MAX
from transformer_xl.text.tokenizers.base import EncodedChunk, EncodingError, Tokenizer, quoted, token_dtype
from transformer_xl.text.tokenizers.chunking import last_whitespace
from transformer_xl.text.tokenizers.pre_tokenizer import WhitespaceDetokenizer, WordStreamDecoder

MAX_VALUES = INT32_MAX - 1  # so that the vocabulary, with its end-of-sequence token, has at most INT32_MAX tokens
_NEWLINE = -1  # what `parse_integers` returns for a newline


def parse_integers(chunk: bytes, limit: int = MAX_VALUES) -> npt.NDArray[np.int64]:
    """Return the integers of a chunk in order, with -1 for each newline.

    Args:
        chunk: integers in the digits 0 to 9, separated by ASCII whitespace.
        limit: exclusive upper bound of the integers.

    Raises:
        EncodingError: the chunk contains anything else.
    """
    if invalid := re.search(rb"[^0-9\s]", chunk):
        raise _not_an_integer(chunk, last_whitespace(chunk[: invalid.start()]), limit)
    # fromstring parses an integer that exceeds int64 as the largest int64, and text of only spaces as one 0
    values = np.fromstring(chunk.replace(b"\n", b" %d " % _NEWLINE).strip(), dtype=np.int64, sep=" ")
    if (values >= limit).any():
        word = next(islice(re.finditer(rb"\S+|\n", chunk), int((values >= limit).argmax()), None))
        raise _not_an_integer(chunk, word.start(), limit)
    return values


def _not_an_integer(chunk: bytes, start: int, limit: int) -> EncodingError:
    """Return the error for the word that starts at this position."""
    word = chunk[start:].split(maxsplit=1)[0].decode("utf-8", errors="backslashreplace")
    return EncodingError(
        start,
        f"{quoted(word)} is not an integer from 0 to {limit - 1} in the digits 0 to 9; remove it, renumber the values "
        "from 0, or prepare the corpus with a larger vocab_size",
    )


@dataclass(frozen=True, repr=False)
class IntegerTokenizer(Tokenizer):
    """A tokenizer for the integers 0 .. num_values - 1, with or without an end-of-sequence token."""

    num_values: int
    """Number of different integers."""
    add_eos: bool = True
    """Whether there is an end-of-sequence token, with id `num_values`; without it the ids are the integers alone."""
    midi: str = ""
    """What the integers mean in music, as JSON: the settings of MidiTok, and the name of each token (see `midi.py`)."""

    kind = "integer"
    is_lossless = False
    is_text = False

    @property
    @override
    def vocab_size(self) -> int:
        """Number of different integers, plus 1 for the end-of-sequence token if there is one."""
        return self.num_values + self.add_eos

    @property
    @override
    def eos_token_id(self) -> int | None:
        return self.num_values if self.add_eos else None

    @override
    def last_boundary(self, text: bytes) -> int:
        return last_whitespace(text)

    @override
    def encode_chunk(self, chunk: bytes) -> EncodedChunk:
        values = parse_integers(chunk, self.num_values)
        is_newline = values == _NEWLINE
        ids = np.where(is_newline, self.num_values, values) if self.add_eos else values[~is_newline]
        return EncodedChunk(ids.astype(token_dtype(self.vocab_size)))

    @override
    def word_indices(self, chunk: bytes) -> npt.NDArray[np.int64]:
        is_newline = parse_integers(chunk, self.num_values) == _NEWLINE
        index = np.cumsum(~is_newline) - ~is_newline  # integers before each token
        return index if self.add_eos else index[~is_newline]

    @override
    def stream_decoder(self) -> WordStreamDecoder:
        return WordStreamDecoder(self, word_of=str, detokenizer=WhitespaceDetokenizer)

    @override
    def to_json(self) -> dict[str, Any]:
        values = {"kind": self.kind, "num_values": self.num_values}
        values |= {} if self.add_eos else {"add_eos": False}
        return values | ({"midi": json.loads(self.midi)} if self.midi else {})

    @classmethod
    @override
    def from_json(cls, values: Mapping[str, Any]) -> IntegerTokenizer:
        num_values, add_eos = values.get("num_values"), values.get("add_eos", True)
        if type(num_values) is not int or not 0 < num_values <= MAX_VALUES:
            raise ValueError(f"num_values is {num_values!r}, expected an integer from 1 to {MAX_VALUES}")
        if type(add_eos) is not bool:
            raise ValueError(f"add_eos is {add_eos!r}, expected true or false")
        midi = values.get("midi")
        if midi is None:
            return cls(num_values, add_eos)
        if not (
            isinstance(midi, dict)
            and midi.keys() == {"settings", "tokens"}
            and isinstance(midi["settings"], dict)
            and isinstance(midi["tokens"], list)
            and len(midi["tokens"]) == num_values
            and all(isinstance(token, str) for token in midi["tokens"])
        ):
            raise ValueError(f"its description of MIDI tokens is not one of settings and {num_values} names")
        return cls(num_values, add_eos, json.dumps(midi, sort_keys=True))
