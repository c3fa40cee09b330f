"""Word tokens: the words into which a pre-tokenizer splits the text, and an end-of-sequence token for each newline.

Whitespace is ASCII whitespace, as in bytes.split; any other character, even NUL, can be part of a word. A word that is
not in the vocabulary becomes the unknown token, or is an error if the tokenizer has no unknown token. A word that is
spelled like a special token is encoded as that token. So decoding does not always restore the text.

Shape suffix: V vocabulary.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transformer_xl.text.tokenizers.base import (
    EncodedChunk,
    EncodingError,
    Tokenizer,
    check_counts,
    quoted,
    to_bytes,
    token_dtype,
)
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer, PreTokenizerName, WordStreamDecoder

_WHITESPACE = PreTokenizer()


@dataclass(frozen=True, eq=False, repr=False)
class WordTokenizer(Tokenizer):
    """A tokenizer with a list of words in the order of their ids, and a pre-tokenizer."""

    words: tuple[str, ...]
    """(V,) every word, special tokens included."""
    counts: npt.NDArray[np.int64] | None = None
    """(V,) how often each word occurred in the training text, or None if unknown."""
    eos_token: str | None = None
    """The word that represents a newline, or None if newlines are whitespace."""
    unk_token: str | None = None
    """The word that represents all unknown words, or None if encoding them is an error."""
    pre_tokenizer: PreTokenizer = _WHITESPACE
    """How text is split into words."""

    kind = "word"
    is_lossless = False

    @property
    @override
    def vocab_size(self) -> int:
        """Number of words, special tokens included."""
        return len(self.words)

    @cached_property
    def _id_of_word(self) -> dict[bytes, int]:
        return {word.encode("utf-8"): token for token, word in enumerate(self.words)}

    @cached_property
    @override
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.words.index(self.eos_token)

    @cached_property
    @override
    def unk_token_id(self) -> int | None:
        return None if self.unk_token is None else self.words.index(self.unk_token)

    @override
    def last_boundary(self, text: bytes) -> int:
        return self.pre_tokenizer.last_boundary(text)

    @override
    def encode_chunk(self, chunk: bytes) -> EncodedChunk:
        words = self.pre_tokenizer.split(chunk, (self.eos_token or "").encode("utf-8"))
        ids = np.fromiter(map(self._id_of_word.get, words, repeat(-1)), dtype=np.int32, count=len(words))
        is_unknown = ids < 0
        num_unknown = int(np.count_nonzero(is_unknown))
        if num_unknown:
            if self.unk_token_id is None:
                word = words[int(is_unknown.argmax())]
                found = re.search(rb"(?<!\S)" + re.escape(word) + rb"(?!\S)", chunk)
                raise EncodingError(
                    found.start() if found else 0,
                    f"the word {quoted(word.decode('utf-8'))} is not one of the {self.vocab_size:,} of this "
                    "vocabulary, which has no unknown token; remove it, or use a tokenizer that has one",
                )
            ids[is_unknown] = self.unk_token_id
        return EncodedChunk(ids.astype(token_dtype(self.vocab_size)), num_unknown)

    @override
    def word_indices(self, chunk: bytes) -> npt.NDArray[np.int64]:
        indices, num_words = list[int](), 0
        for number, line in enumerate(chunk.split(b"\n")):
            if number and self.eos_token is not None:  # the newline before this line
                indices.append(num_words)
            indices += (num_words + index for index in self.pre_tokenizer.word_indices(line))
            num_words += len(line.split())
        return np.array(indices, dtype=np.int64)

    @override
    def stream_decoder(self) -> WordStreamDecoder:
        return WordStreamDecoder(self, self.words.__getitem__, self.pre_tokenizer.detokenizer)

    @override
    def unknown_words(self, text: str | bytes) -> list[str]:
        words = self.pre_tokenizer.split(to_bytes(text).decode("utf-8", errors="replace").encode("utf-8"))
        unknown = Counter(word for word in words if word not in self._id_of_word)
        return [word.decode("utf-8") for word, _ in unknown.most_common()]

    @override
    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "pre_tokenizer": self.pre_tokenizer.name,
            "lowercase": self.pre_tokenizer.lowercase,
            "eos_token": self.eos_token,
            "unk_token": self.unk_token,
            "words": list(self.words),
            "counts": None if self.counts is None else self.counts.tolist(),
        }

    @classmethod
    @override
    def from_json(cls, values: Mapping[str, Any]) -> WordTokenizer:
        name: Any = values.get("pre_tokenizer")
        lowercase = values.get("lowercase")
        if name not in get_args(PreTokenizerName) or not isinstance(lowercase, bool):
            raise ValueError(f"pre_tokenizer {name!r} with lowercase {lowercase!r} is not known")
        words = check_words(values.get("words"))
        special_tokens = values.get("eos_token"), values.get("unk_token")
        for token in special_tokens:
            if token is not None and token not in words:
                raise ValueError(f"{token!r} is not one of its words")
        counts = check_counts(values.get("counts"), len(words))
        return cls(words, counts, *special_tokens, PreTokenizer(name, lowercase))


def check_words(words: object) -> tuple[str, ...]:
    """Validate the words of a vocabulary: a non-empty list without duplicates or whitespace.

    Raises:
        ValueError: the words are invalid.
    """
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise ValueError("it has no words, or they are not a list of strings")
    if "\n".join(words).encode("utf-8").split() != [word.encode("utf-8") for word in words]:
        raise ValueError("one of its words is empty or contains whitespace")
    word, count = Counter(words).most_common(1)[0]
    if count > 1:
        raise ValueError(f"it has the word {quoted(word)} twice")
    return tuple(words)
