"""Words as tokens: what stands between white space, and a mark for each line end.

White space is ASCII white space, as for bytes.split; anything else can be part of a word, NUL too. A word that the
vocabulary lacks becomes the unknown word, or is refused where there is none. A word of the text that looks like the
mark or the unknown word is taken for it. So text does not always come back as it was; `lost` says what went missing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from transformer_xl.text.tokenizer import (
    EncodedChunk,
    EncodingError,
    StreamDecoder,
    TokenArray,
    check_ids,
    decode_utf8,
    to_bytes,
    token_dtype,
)
from transformer_xl.text.tokenizers import moses
from transformer_xl.text.tokenizers.splitting import (
    Detokenizer,
    PunctuationDetokenizer,
    WhitespaceDetokenizer,
    last_chunk_end,
    last_whitespace,
    split_line,
)

Case = Literal["kept", "folded"]
PreTokenizerName = Literal["spaces", "punctuation", "moses"]

_MOST_LISTED = 20


@dataclass(frozen=True)
class WordSplitting:
    """What the words of a text are."""

    case: Case = "kept"
    """As the text has it, or all in small letters."""
    pre_tokenizer: PreTokenizerName = "spaces"
    """Only at white space; or punctuation and numbers apart as well, in the forms of WikiText (`splitting.py`), or in
    those of Hugging Face's tokenizer (`moses.py`)."""

    def last_boundary(self, text: bytes) -> int:
        """The last place at which `text` may be cut without changing a word; 0: there is none."""
        if self.pre_tokenizer == "moses":  # the end of a line has a say in all of it
            return text.rfind(b"\n") + 1
        return last_whitespace(text) if self.pre_tokenizer == "spaces" else last_chunk_end(text)

    def words(self, piece: bytes, line_end: bytes = b"") -> list[bytes]:
        """The words of a piece, in UTF-8, with `line_end` for each line end.

        Raises:
            BadText: the piece is not UTF-8.
        """
        text = decode_utf8(piece)
        if self.case == "folded":
            piece = text.lower().encode("utf-8")
        if self.pre_tokenizer == "punctuation":
            piece = b"\n".join([b" ".join(split_line(line)) for line in piece.split(b"\n")])
        elif self.pre_tokenizer == "moses":
            lines = (moses.split_line(line) for line in piece.decode("utf-8").split("\n"))
            piece = "\n".join(map(" ".join, lines)).encode("utf-8")
        return (piece.replace(b"\n", b" " + line_end + b" ") if line_end else piece).split()

    def joiner(self) -> Detokenizer:
        """What turns words back into text."""
        if self.pre_tokenizer == "moses":
            return moses.MosesDetokenizer()
        return WhitespaceDetokenizer() if self.pre_tokenizer == "spaces" else PunctuationDetokenizer()


@dataclass(frozen=True)
class RoundTripLoss:
    """What a text loses on the way to tokens and back."""

    exact: bool
    """Nothing: the very same text comes back."""
    num_unknown: int
    """Words that the vocabulary lacks."""
    unknown: tuple[tuple[str, int], ...]
    """The most frequent of them with their numbers; at most 20."""
    whitespace: bool
    """White space comes back changed (or, where punctuation is split, other signs that are put together anew)."""
    case: bool
    """Capital letters come back small."""
    invalid: bool
    """It is not UTF-8, so it is refused; the rest is said of it with replacement signs in place of what is wrong."""


class _Ids(dict[bytes, int]):
    def __missing__(self, word: bytes) -> int:
        return -1


@dataclass(frozen=True, eq=False)
class WordTokenizer:
    """Words in the order of their ids, and how text is taken apart into them."""

    words: tuple[str, ...]
    """(V,) every word, marks included."""
    counts: npt.NDArray[np.int64] | None
    """(V,) how often each stood in the text they were learned from; none: not known."""
    eos_token: str | None = None
    """The word of `words` that stands for a line end; none: line ends are white space."""
    unk_token: str | None = None
    """The word of `words` that stands for all others; none: others are refused."""
    splitting: WordSplitting = WordSplitting()
    """What the words of a text are."""

    kind = "words"

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the table of ids, which is made again where it is needed."""
        return WordTokenizer, (self.words, self.counts, self.eos_token, self.unk_token, self.splitting)

    @property
    def vocab_size(self) -> int:
        """Number of words, marks included."""
        return len(self.words)

    @cached_property
    def _ids(self) -> _Ids:
        return _Ids((word.encode("utf-8"), place) for place, word in enumerate(self.words))

    @cached_property
    def _mark(self) -> int:
        return -1 if self.eos_token is None else self.words.index(self.eos_token)

    @property
    def bos_token_id(self) -> int:
        """The mark of a line end; without one, the first word."""
        return max(self._mark, 0)

    @property
    def adds_final_newline(self) -> bool:
        """Where line ends have a mark."""
        return self.eos_token is not None

    @property
    def is_newline_V(self) -> npt.NDArray[np.bool_]:
        """(V,) the mark of line ends."""
        return np.arange(self.vocab_size) == self._mark

    def last_boundary(self, text: bytes) -> int:
        """The place after the last white space (where punctuation is split: not after every full stop)."""
        return self.splitting.last_boundary(text)

    def encode_chunk(self, piece: bytes) -> EncodedChunk:
        """The words of the piece, a mark for each line end.

        Raises:
            BadText: it is not UTF-8, or holds a word the vocabulary lacks and there is no unknown word.
        """
        words = self.splitting.words(piece, (self.eos_token or "").encode("utf-8"))
        ids = np.fromiter(map(self._ids.__getitem__, words), dtype=np.int32, count=len(words))
        missing = ids < 0
        num_unknown = int(np.count_nonzero(missing))
        if num_unknown:
            if self.unk_token is None:
                word = words[int(missing.argmax())]
                raise EncodingError(
                    self._place(word, piece),
                    f"the word {_shown(word)} is not one of the {self.vocab_size:,} of this vocabulary, which has none for "
                    "unknown words; leave it out, or take a vocabulary that has one",
                )
            ids[missing] = self._ids[self.unk_token.encode("utf-8")]
        return EncodedChunk(ids.astype(token_dtype(self.vocab_size)), num_unknown)

    def _place(self, word: bytes, piece: bytes) -> int:
        """Where the word stands first; the start of its line where that hangs on the words around it."""
        start = 0
        for line in piece.split(b"\n"):
            if word in self.splitting.words(line):
                inside = (chunk.start() for chunk in _CHUNK.finditer(line) if word in self.splitting.words(chunk[0]))
                return start + next(inside, 0)
            start += len(line) + 1
        raise AssertionError(f"{word!r} does not stand in the piece it was found in")

    def encode(self, text: str | bytes) -> TokenArray:
        """The words of a text; raises what `encode_piece` and `as_bytes` do."""
        return self.encode_chunk(to_bytes(text)).ids

    def decode(self, ids: npt.ArrayLike) -> str:
        """The words with one space between them, or put together again where punctuation was split.

        Raises:
            UserError: an id that is not of this vocabulary.
        """
        decoder = _WordStreamDecoder(self)
        return "".join([*map(decoder.push_checked, check_ids(ids, self).tolist()), decoder.finish()])

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """The text of these ids in UTF-8; raises what `decode` does."""
        return self.decode(ids).encode("utf-8")

    def stream_decoder(self) -> StreamDecoder:
        """A decoder whose pieces join to what `decode` gives."""
        return _WordStreamDecoder(self)

    def round_trip_loss(self, text: str | bytes) -> RoundTripLoss:
        """What does not come back when this text is encoded and decoded."""
        given = to_bytes(text)
        whole = given.decode("utf-8", errors="replace")
        content = whole.encode("utf-8")
        invalid = content != given
        kept = whole.lower() if self.splitting.case == "folded" else whole
        missing = Counter(word for word in self.splitting.words(content) if self._ids[word] < 0)
        joiner = self.splitting.joiner()
        lines: list[str] = []
        for line in content.split(b"\n") if self.adds_final_newline else [content]:
            joined = [joiner.push(word.decode("utf-8")) for word in self.splitting.words(line)]
            lines.append("".join([*joined, joiner.finish()]))
        unknown = sum(missing.values())
        exact = not invalid and not (unknown and self.unk_token is None) and self.decode(self.encode(given)) == whole
        return RoundTripLoss(
            exact=exact,
            num_unknown=unknown,
            unknown=tuple((word.decode("utf-8"), number) for word, number in missing.most_common(_MOST_LISTED)),
            whitespace="\n".join(lines) != kept,
            case=kept != whole,
            invalid=invalid,
        )

    def to_json(self) -> dict[str, Any]:
        """The words, their counts and how text becomes words."""
        return {
            "kind": self.kind,
            "case": self.splitting.case,
            "splitting": self.splitting.pre_tokenizer,
            "end_of_line": self.eos_token,
            "unknown": self.unk_token,
            "words": list(self.words),
            "counts": None if self.counts is None else self.counts.tolist(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> WordTokenizer:
        """What `to_json` wrote.

        Raises:
            ValueError: what is wrong with the values.
        """
        case: Any = values.get("case")
        splitting: Any = values.get("splitting")
        if case not in get_args(Case) or splitting not in get_args(PreTokenizerName):
            raise ValueError(f"case {case!r} or splitting {splitting!r} is not known")
        words = check_words(values.get("words"))
        marks = values.get("end_of_line"), values.get("unknown")
        for mark in marks:
            if mark is not None and mark not in words:
                raise ValueError(f"{mark!r} is not one of its words")
        return cls(words, check_counts(values.get("counts"), len(words)), *marks, WordSplitting(case, splitting))


_CHUNK = re.compile(rb"[^ \n\t\r\v\f]+")


class _WordStreamDecoder:
    def __init__(self, tokenizer: WordTokenizer) -> None:
        self._vocabulary = tokenizer
        self._joiner = tokenizer.splitting.joiner()
        self._mark = tokenizer.bos_token_id if tokenizer.adds_final_newline else -1

    def push(self, token: int) -> str:
        return self.push_checked(int(check_ids(token, self._vocabulary)[0]))

    def push_checked(self, token: int) -> str:
        if token == self._mark:
            return self._joiner.finish() + "\n"
        return self._joiner.push(self._vocabulary.words[token])

    def finish(self) -> str:
        return self._joiner.finish()


def check_words(words: object) -> tuple[str, ...]:
    """A list of words as it should be: at least one, none twice, none with white space in it.

    Raises:
        ValueError: what is wrong with it.
    """
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise ValueError("its words are not a list of texts")
    if "\n".join(words).encode("utf-8").split() != [word.encode("utf-8") for word in words]:
        raise ValueError("one of its words is empty or holds white space")
    if len(set(words)) < len(words):
        twice = next(word for word, number in Counter(words).items() if number > 1)
        raise ValueError(f"the word {_shown(twice.encode())} stands in it twice")
    return tuple(words)


def check_counts(counts: object, size: int) -> npt.NDArray[np.int64] | None:
    """A list of numbers as it should be, one for each token; or none.

    Raises:
        ValueError: what is wrong with it.
    """
    if counts is None:
        return None
    if not isinstance(counts, list) or not all(type(count) is int and 0 <= count < 2**63 for count in counts):
        raise ValueError("its counts are not a list of whole numbers")
    if len(counts) != size:
        raise ValueError(f"it has {len(counts):,} counts for {size:,} tokens")
    return np.array(counts, dtype=np.int64)


def _shown(word: bytes) -> str:
    """A word as a message can hold it."""
    text = word.decode("utf-8", errors="replace")
    return repr(text if len(text) <= 40 else text[:40] + "...")
