"""Splits text into words, and joins words to text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from transformer_xl.text.tokenizers import moses, punctuation
from transformer_xl.text.tokenizers.base import Tokenizer, decode_utf8
from transformer_xl.text.tokenizers.chunking import last_whitespace

PreTokenizerName = Literal["whitespace", "punctuation", "moses"]


class Detokenizer(Protocol):
    """Turns words back into text, one at a time."""

    def push(self, word: str) -> str:
        """Return the text that is final after this word: usually the word, after any whitespace."""
        ...

    def finish(self) -> str:
        """Return the withheld text; the next word begins a line."""
        ...


class WhitespaceDetokenizer:
    """Puts one space between the words of a line."""

    def __init__(self) -> None:
        self._space = ""

    def push(self, word: str) -> str:
        """Return the word, after a space if it is not the first of its line."""
        space, self._space = self._space, " "
        return space + word

    def finish(self) -> str:
        """Return nothing, since nothing is withheld."""
        self._space = ""
        return ""


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split into words."""

    name: PreTokenizerName = "whitespace"
    """whitespace: words are separated by ASCII whitespace. punctuation: punctuation and numbers are split as well,
    in the forms of WikiText (`punctuation.py`). moses: the same by the rules of Hugging Face's tokenizer (`moses.py`).
    """
    lowercase: bool = False
    """Whether the text is lowercased first."""

    def last_boundary(self, text: bytes) -> int:
        """Return the last position at which splitting `text` changes no word, or 0 if none."""
        if self.name == "moses":  # the end of a line can change all of its words
            return text.rfind(b"\n") + 1
        return last_whitespace(text) if self.name == "whitespace" else punctuation.last_boundary(text)

    def split(self, chunk: bytes, eos_token: bytes = b"") -> list[bytes]:
        """Return the words of a chunk as UTF-8, with `eos_token` (if given) for each newline.

        Raises:
            EncodingError: the chunk is not UTF-8.
        """
        text = decode_utf8(chunk)
        if self.lowercase:
            chunk = text.lower().encode("utf-8")
        if self.name == "punctuation":
            chunk = b"\n".join([b" ".join(punctuation.split_line(line)) for line in chunk.split(b"\n")])
        elif self.name == "moses":
            lines = (moses.split_line(line) for line in chunk.decode("utf-8").split("\n"))
            chunk = "\n".join(map(" ".join, lines)).encode("utf-8")
        return (chunk.replace(b"\n", b" " + eos_token + b" ") if eos_token else chunk).split()

    def detokenizer(self) -> Detokenizer:
        """Return a new detokenizer for this kind."""
        if self.name == "moses":
            return moses.MosesDetokenizer()
        return WhitespaceDetokenizer() if self.name == "whitespace" else punctuation.PunctuationDetokenizer()


class WordStreamDecoder:
    """Decodes tokens that represent words; the end-of-sequence token ends a line.

    Args:
        tokenizer: validates ids.
        word_of: returns the word of an id.
        detokenizer: joins the words.
        eos_token_id: the end-of-sequence token, or None.
    """

    def __init__(
        self, tokenizer: Tokenizer, word_of: Callable[[int], str], detokenizer: Detokenizer, eos_token_id: int | None
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, tokenizer.vocab_size
        self._word_of, self._detokenizer, self._eos_token_id = word_of, detokenizer, eos_token_id

    def push(self, token: int) -> str:
        """Return the text that is final after this token."""
        if not 0 <= token < self._vocab_size:
            self._tokenizer.check_ids(token)
        if token == self._eos_token_id:
            return self._detokenizer.finish() + "\n"
        return self._detokenizer.push(self._word_of(token))

    def finish(self) -> str:
        """Return the text that the detokenizer withheld."""
        return self._detokenizer.finish()
