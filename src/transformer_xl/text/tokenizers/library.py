"""Tokenizers of other libraries as they are: any `tokenizer.json` of Hugging Face's `tokenizers`, such as WordPiece and
Unigram, and the `.model` files of sentencepiece, also with the text changed first as XLNet's code does.

The library encodes each line by itself, with its newline, so that splitting a text at newlines does not change its
tokens. It may change the text (case, accents, whitespace, unknown words), so decoding does not always restore it, and
bytes and words are counted in the text and not in its tokens. The file is a part of the tokenizer. Special tokens are
encoded like any other text.
"""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transformer_xl.config.extras import missing_extra
from transformer_xl.text.tokenizers import bpe
from transformer_xl.text.tokenizers.base import (
    EncodedChunk,
    NamedToken,
    StreamDecoder,
    Tokenizer,
    decode_utf8,
    token_dtype,
    words_at,
)

LibraryName = Literal["tokenizers", "sentencepiece", "xlnet"]
"""xlnet: sentencepiece, between the rules of XLNet's code (`_xlnet`)."""
Tokens = tuple[list[int], list[tuple[int, int]]]
"""Ids, and the start and end of each token in the text, in characters."""
_BEGINNINGS = "<s>", "[BOS]", "[CLS]"  # names of special tokens that begin texts, where none ends documents

_PADDINGS = "[PAD]", "<pad>", "<|pad|>"
_SPACE = "\u2581"  # how sentencepiece writes a space in a token
# what XLNet's rules leave as it is, white space, two quotation marks, and any other character
_XLNET_UNITS = re.compile(r"[!-&(-_a-~]+|\s+|``|''|.", flags=re.DOTALL)


class _Library(NamedTuple):
    """What is needed of a library."""

    names: list[str]
    unk_id: int | None
    special: list[NamedToken]
    encode: Callable[[list[str]], list[Tokens]]
    """Returns the tokens of each line."""
    decode: Callable[[list[int]], str]
    """Returns the text of the tokens of a line."""


def _tokenizers(content: str) -> _Library:
    values, loaded = json.loads(content), bpe.load_json(content)
    loaded.no_truncation()
    loaded.no_padding()

    def encode(lines: list[str]) -> list[Tokens]:
        return [(line.ids, line.offsets) for line in loaded.encode_batch(lines, add_special_tokens=False)]

    names = [loaded.id_to_token(index) or "" for index in range(loaded.get_vocab_size())]
    unk = values["model"].get("unk_token")
    unk_id = values["model"].get("unk_id") if unk is None else loaded.token_to_id(unk)
    return _Library(
        names, unk_id, bpe.special_tokens(values), encode, partial(loaded.decode, skip_special_tokens=False)
    )


def _sentencepiece(content: str) -> _Library:
    try:
        sentencepiece = import_module("sentencepiece")
    except ImportError:
        raise missing_extra("sentencepiece", "sentencepiece") from None
    loaded = sentencepiece.SentencePieceProcessor(model_proto=base64.b64decode(content))

    def encode(lines: list[str]) -> list[Tokens]:
        return [(line["ids"], line["offsets"]) for line in loaded.encode(lines, return_type="offset_mapping")]

    names = [loaded.id_to_piece(index) for index in range(loaded.vocab_size())]
    special = [NamedToken(index, name) for index, name in enumerate(names) if loaded.is_control(index)]
    return _Library(names, loaded.unk_id(), special, encode, loaded.decode)


def _xlnet(content: str) -> _Library:
    """Return sentencepiece with the rules of XLNet's code (its prepro_utils.py) before and after it.

    White space becomes one space, and two back quotes or apostrophes one quotation mark; NFKD, without combining
    characters. A token that ends in a digit and a comma is split again: the digits by themselves, and the comma.
    """
    library = _sentencepiece(content)
    ids = {name: index for index, name in enumerate(library.names)}
    parts: dict[int, list[tuple[int, int]]] = {}  # of such a token: ids, and how many characters follow each
    for name, index in ids.items():
        if len(name) > 1 and name[-1] == "," and name[-2].isdigit():
            ((in_number, _),) = library.encode([name[:-1].replace(_SPACE, "")])
            names = [library.names[part] for part in in_number]
            if names and name[0] != _SPACE:  # sentencepiece puts a space before what it encodes
                names[0] = names[0].removeprefix(_SPACE)
            names = [*filter(None, names), ","]
            lengths = [len(part.removeprefix(_SPACE)) for part in names]
            after = [sum(lengths[number + 1 :]) for number in range(len(names))]
            parts[index] = [(ids.get(part, library.unk_id or 0), rest) for part, rest in zip(names, after, strict=True)]

    def encode(lines: list[str]) -> list[Tokens]:
        changed = [_xlnet_text(line) for line in lines]
        result = list[Tokens]()
        for tokens, (_, origins) in zip(library.encode([text for text, _ in changed]), changed, strict=True):
            split, places = list[int](), list[tuple[int, int]]()
            for index, (start, end) in zip(*tokens, strict=True):
                for part, after in parts.get(index, [(index, 0)]):
                    stop = max(end - after, start)
                    split.append(part)
                    places.append((origins[start], origins[stop]))
                    start = stop
            result.append((split, places))
        return result

    return library._replace(encode=encode)


def _xlnet_text(line: str) -> tuple[str, list[int]]:
    """Return a line as XLNet's code changes it, and for each character and the end its place in the line."""
    text, origins, first = list[str](), list[int](), len(line) - len(line.lstrip())
    for match in _XLNET_UNITS.finditer(line.strip()):
        unit, start = match[0], first + match.start()
        if unit.isspace() or unit in ("``", "''"):
            unit = " " if unit.isspace() else '"'
        elif len(unit) == 1:
            unit = "".join(one for one in unicodedata.normalize("NFKD", unit) if not unicodedata.combining(one))
        text.append(unit)
        origins += range(start, start + len(unit)) if len(unit) == len(match[0]) else [start] * len(unit)
    return "".join(text), [*origins, first + len(line.strip())]


_LIBRARIES = {"tokenizers": _tokenizers, "sentencepiece": _sentencepiece, "xlnet": _xlnet}


@dataclass(frozen=True, repr=False)
class LibraryTokenizer(Tokenizer):
    """A tokenizer of another library."""

    library: LibraryName
    content: str
    """The content of `tokenizer.json`, or of a sentencepiece model in base64."""

    kind = "library"
    is_lossless = False
    counts_words = False

    @cached_property
    def _library(self) -> _Library:
        return _LIBRARIES[self.library](self.content)

    @property
    def names(self) -> list[str]:
        """(V,) each token as the library writes it."""
        return self._library.names

    @property
    @override
    def vocab_size(self) -> int:
        return len(self.names)

    @property
    @override
    def bos_token_id(self) -> int:
        """The token that ends documents, or one that begins texts, or token 0."""
        return (self.document_end or self._special(_BEGINNINGS) or NamedToken(0, "")).id

    @property
    def begins_texts(self) -> bool:
        """Whether `bos_token_id` is a special token, and not token 0, which texts have too."""
        return (self.document_end or self._special(_BEGINNINGS)) is not None

    @property
    @override
    def unk_token_id(self) -> int | None:
        return self._library.unk_id

    @cached_property
    @override
    def document_end(self) -> NamedToken | None:
        return self._special(bpe.DOCUMENT_ENDS)

    @cached_property
    def padding(self) -> NamedToken | None:
        """The special token that the library pads with, if its name says so."""
        return self._special(_PADDINGS)

    @cached_property
    @override
    def separators(self) -> tuple[int, ...]:
        found = [self._special(names) for names in (("<sep>", "[SEP]"), ("<cls>", "[CLS]"))]
        return tuple(token.id for token in found if token is not None) if None not in found else ()

    def _special(self, names: tuple[str, ...]) -> NamedToken | None:
        found = {token.name: token for token in self._library.special}
        return next((found[name] for name in names if name in found), None)

    @cached_property
    @override
    def is_newline_V(self) -> npt.NDArray[np.bool_]:
        return np.array([self._library.decode([index]).endswith("\n") for index in range(self.vocab_size)])

    @override
    def last_boundary(self, text: bytes) -> int:
        return text.rfind(b"\n") + 1

    def _lines(self, text: str) -> Iterator[tuple[str, Tokens]]:
        lines = bpe.lines_of(text)
        for first in range(0, len(lines), bpe.BATCH_LINES):
            batch = lines[first : first + bpe.BATCH_LINES]
            yield from zip(batch, self._library.encode(batch), strict=True)

    def places(self, text: str) -> list[tuple[int, int]]:
        """Return the start and end of each token in a text, in characters."""
        places, position = list[tuple[int, int]](), 0
        for line, (_, in_line) in self._lines(text):
            places += [(position + start, position + end) for start, end in in_line]
            position += len(line)
        return places

    @override
    def encode_chunk(self, chunk: bytes) -> EncodedChunk:
        ids = chain.from_iterable(ids for _, (ids, _) in self._lines(decode_utf8(chunk)))
        array = np.fromiter(ids, dtype=np.int64).astype(token_dtype(self.vocab_size))
        return EncodedChunk(array, int(np.count_nonzero(array == self.unk_token_id)))

    @override
    def word_indices(self, chunk: bytes) -> npt.NDArray[np.int64]:
        text = decode_utf8(chunk)
        byte_of_character = np.array([*accumulate((len(one.encode()) for one in text), initial=0)])
        places_T2 = byte_of_character[np.array(self.places(text), dtype=np.int64).reshape(-1, 2)]
        return words_at(chunk, places_T2[:, 0], places_T2[:, 1])

    @override
    def stream_decoder(self) -> _LineDecoder:
        return _LineDecoder(self, self._library)

    @override
    def to_json(self) -> dict[str, Any]:
        content = json.loads(self.content) if self.library == "tokenizers" else self.content
        return {"kind": self.kind, "library": self.library, "content": content}

    @classmethod
    @override
    def from_json(cls, values: Mapping[str, Any]) -> LibraryTokenizer:
        """Create the tokenizer from {"library": its name, "content": tokenizer.json, or a model in base64}.

        Raises:
            ValueError: the content is damaged, draws tokens at random, or has ids that are not 0, 1, 2, ...
        """
        library, content = values.get("library"), values.get("content")
        if library == "tokenizers" and isinstance(content, dict) and isinstance(content.get("model"), dict):
            if content["model"].get("dropout"):
                raise ValueError("it has dropout, so the tokens of a text are drawn at random")
            with bpe.library_errors(library):
                bpe.check_ids(content)
            tokenizer = cls(library, json.dumps(content))
        elif library in ("sentencepiece", "xlnet") and isinstance(content, str):
            tokenizer = cls(library, content)
        else:
            raise ValueError("it has no model")
        with bpe.library_errors(library):
            tokenizer.decode(tokenizer.encode(bpe.PROBE))
        return tokenizer


class _LineDecoder(StreamDecoder):
    """Decodes tokens one at a time, each line as the library does, and withholds incomplete characters."""

    def __init__(self, tokenizer: LibraryTokenizer, library: _Library) -> None:
        self._tokenizer, self._decode, self._end = tokenizer, library.decode, tokenizer.document_end
        self._ids: list[int] = []  # those before `_num_final` are context: they decide about spaces
        self._num_final = 0

    def push(self, token: int) -> str:
        """Return the text that is final with this token.

        Raises:
            UserError: it is not in the vocabulary.
        """
        if not 0 <= token < self._tokenizer.vocab_size:
            self._tokenizer.check_ids([token])
        if self._end is not None and token == self._end.id:
            return self.finish()
        self._ids.append(token)
        text = self._new_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._ids, self._num_final = self._ids[self._num_final :], len(self._ids) - self._num_final
        if text.endswith("\n"):  # the next line was encoded by itself
            self.finish()
        return text

    def finish(self) -> str:
        """Return the withheld text after the last token."""
        text, self._num_final = self._new_text(), 0
        self._ids = self._ids[:0]
        return text

    def _new_text(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._num_final])) :]
