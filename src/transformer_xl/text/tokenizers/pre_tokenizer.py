"""Splits text into words for word tokenizers, and joins their words to text again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from transformer_xl.text.tokenizers import moses, punctuation
from transformer_xl.text.tokenizers.base import EncodingError, StreamDecoder, Tokenizer, decode_utf8
from transformer_xl.text.tokenizers.chunking import last_whitespace

PreTokenizerName = Literal["whitespace", "punctuation", "moses"]


class WhitespaceDetokenizer:
    """Joins the words of a line with single spaces."""

    _space = ""

    def push(self, word: str) -> str:
        """Return the word, after a space if it is not the first of its line."""
        space, self._space = self._space, " "
        return space + word

    def finish(self) -> str:
        """Return an empty string, since no text is withheld."""
        return ""


Detokenizer = WhitespaceDetokenizer | punctuation.PunctuationDetokenizer | moses.MosesDetokenizer
"""Joins the words of a line one at a time: push(word) returns the text that is final, finish() returns the rest."""


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split into words."""

    name: PreTokenizerName = "whitespace"
    """whitespace: words are separated by ASCII whitespace. punctuation: punctuation and numbers are split as well, as
    in the data set WikiText (`punctuation.py`). moses: the same by the rules of TransfoXLTokenizer of transformers
    (`moses.py`).
    """
    lowercase: bool = False
    """Whether the text is lowercased first."""

    def last_boundary(self, text: bytes) -> int:
        """Return the last position where splitting `text` changes no word, or 0 if there is no such position."""
        if self.name == "moses":  # the end of a line can change all of its words
            return text.rfind(b"\n") + 1
        return last_whitespace(text) if self.name == "whitespace" else punctuation.last_boundary(text)

    def split(self, chunk: bytes, eos_token: bytes = b"") -> list[bytes]:
        """Return the words of a chunk as UTF-8, with `eos_token` (unless empty) for each newline.

        Raises:
            EncodingError: the chunk is not UTF-8.
        """
        text = decode_utf8(chunk)
        if self.lowercase:
            chunk = text.lower().encode("utf-8")
        if self.name != "whitespace":
            chunk = b"\n".join([b" ".join(self._split_line(line)) for line in chunk.split(b"\n")])
        return (chunk.replace(b"\n", b" " + eos_token + b" ") if eos_token else chunk).split()

    def _split_line(self, line: bytes) -> list[bytes]:
        """Return the words of a line of UTF-8, which was lowercased if it has to be."""
        match self.name:
            case "punctuation":
                return punctuation.split_line(line)
            case "moses":
                return " ".join(moses.split_line(line.decode("utf-8"))).encode("utf-8").split()
        return line.split()

    def word_indices(self, line: bytes) -> list[int]:
        """Return for each word of `split(line)` which word of `line.split()` it is, or is a part of.

        Args:
            line: text without a newline.

        Raises:
            EncodingError: the line is not UTF-8, or a word has parts of two words of `line.split()`.
        """
        text = decode_utf8(line)
        if self.lowercase:
            line = text.lower().encode("utf-8")
        parts, words, indices = line.split(), list[bytes](), list[int]()
        before = b""
        for index, (part, following) in enumerate(zip_longest(parts, parts[1:], fillvalue=b"")):
            if part.isalpha():  # ASCII letters stay whole, and to what is around them are as any others
                words.append(part)
                indices.append(index)
                before = b"a"
                continue
            # the words of a part depend on the next part, and on whether it begins the line or follows a special token
            end_of_part = b"<unk>" if part.endswith(moses.SPECIAL_TOKENS) else b"a"
            both = self._split_line(b" ".join([before, part, following]))[len(before.split()) :]
            of_part = both[: len(both) - len(self._split_line(end_of_part + b" " + following)) + 1]
            words += of_part
            indices += [index] * len(of_part)
            before = end_of_part
        if words != self._split_line(line):
            raise EncodingError(0, "two words become one, or quotation marks meet; put spaces between them")
        return indices

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for a line."""
        if self.name == "moses":
            return moses.MosesDetokenizer()
        return WhitespaceDetokenizer() if self.name == "whitespace" else punctuation.PunctuationDetokenizer()


class WordStreamDecoder(StreamDecoder):
    """Decodes tokens that represent words; the end-of-sequence token ends a line.

    Args:
        tokenizer: validates ids and has the end-of-sequence token.
        word_of: returns the word of an id.
        detokenizer: returns what joins the words of a line.
    """

    def __init__(
        self, tokenizer: Tokenizer, word_of: Callable[[int], str], detokenizer: Callable[[], Detokenizer]
    ) -> None:
        self._tokenizer, self._word_of, self._new_detokenizer = tokenizer, word_of, detokenizer
        self._detokenizer = detokenizer()
        self._vocab_size, self._eos_token_id = tokenizer.vocab_size, tokenizer.eos_token_id

    def push(self, token: int) -> str:
        """Return the text that is final after this token."""
        if not 0 <= token < self._vocab_size:
            self._tokenizer.check_ids(token)
        if token == self._eos_token_id:
            text, self._detokenizer = self._detokenizer.finish() + "\n", self._new_detokenizer()
            return text
        return self._detokenizer.push(self._word_of(token))

    def finish(self) -> str:
        """Return the text that the detokenizer withheld."""
        return self._detokenizer.finish()
