"""Parts of words as tokens: byte-level byte-pair encoding, by the `tokenizers` library.

Each line is encoded by itself, together with its line end, so that a text cut at line ends has the tokens of the whole.
Every byte is a token, so that every Unicode text comes back exactly. Tokenizers from elsewhere are taken where the same
holds of them; special tokens in their list are never found in a text, whatever it holds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from transformer_xl.text.tokenizer import (
    EncodedChunk,
    StreamDecoder,
    TokenArray,
    Utf8StreamDecoder,
    check_ids,
    decode_utf8,
    to_bytes,
    token_dtype,
)
from transformer_xl.text.tokenizers.splitting import last_word_space

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BATCH_CHARACTERS = 2**17  # encoded at once; a token takes some 150 bytes while it is
_KEEP_TEXT = frozenset({"ByteLevel", "Split", "Digits", "Punctuation"})  # pre-tokenizers
# Letters, numbers and signs of several scripts, white space, contractions, characters of one to four bytes.
_PROBE = (
    "".join(map(chr, range(0x180)))
    + " a  b\r\n\r\n\t don't 1,234.5\u00a0\u3000\u65e5\u672c \ufb01 e\u0301 \U0001f600\n "
)


def _byte_characters() -> dict[str, int]:
    """The character that stands for each byte in a token: itself where it can be seen, else one from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + place): byte for place, byte in enumerate(unseen)}


@dataclass(frozen=True)
class BPETokenizer:
    """A tokenizer that changes no text."""

    tokenizer_json: str
    """The tokenizer as JSON, as `tokenizers` writes it."""

    kind = "bpe"
    adds_final_newline = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the tokenizer, which is made again where it is needed."""
        return BPETokenizer, (self.tokenizer_json,)

    @property
    def counts(self) -> None:
        """Tokens stand in the order in which they were made, not in that of their counts."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self._contents)

    @property
    def bos_token_id(self) -> int:
        """The line end as a token by itself."""
        return self._contents.index(b"\n")

    @cached_property
    def is_newline_V(self) -> npt.NDArray[np.bool_]:
        """(V,) the tokens whose last byte is a line end."""
        return np.array([content.endswith(b"\n") for content in self._contents])

    @cached_property
    def _values(self) -> dict[str, Any]:
        return json.loads(self.tokenizer_json)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if multiprocessing.parent_process() is not None:  # a worker beside others has no use for threads of its own
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        tokenizer.encode_special_tokens = True  # as the characters they are made of
        return tokenizer

    @cached_property
    def _contents(self) -> tuple[bytes, ...]:
        """The bytes of each token."""
        byte_of = _byte_characters()
        contents = {token["id"]: token["content"].encode("utf-8") for token in self._values.get("added_tokens", ())}
        for token, number in self._values["model"]["vocab"].items():
            if number not in contents:
                known = all(character in byte_of for character in token)
                contents[number] = bytes(map(byte_of.__getitem__, token)) if known else token.encode("utf-8")
        return tuple(contents[number] for number in range(len(contents)))

    @cached_property
    def _cut_inside_lines(self) -> bool:
        """Whether no token reaches over the start of a space before a word: so with the pattern of GPT-2."""
        before = self._values["pre_tokenizer"]
        return before["type"] == "ByteLevel" and before.get("use_regex", True)

    def last_boundary(self, text: bytes) -> int:
        """The place after the last line end, or before a space that no token reaches over."""
        return last_word_space(text) if self._cut_inside_lines else text.rfind(b"\n") + 1

    def encode_chunk(self, piece: bytes) -> EncodedChunk:
        """The tokens of each line of the piece.

        Raises:
            BadText: it is not UTF-8.
        """
        ids = np.fromiter(
            chain.from_iterable(
                line.ids
                for batch in _batches(lines_of(decode_utf8(piece)))
                for line in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            ),
            dtype=np.int64,
        )
        return EncodedChunk(ids.astype(token_dtype(self.vocab_size)))

    def encode(self, text: str | bytes) -> TokenArray:
        """The tokens of a text; raises what `encode_piece` and `as_bytes` do."""
        return self.encode_chunk(to_bytes(text)).ids

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of these ids, with replacement signs for bytes that make no character; raises as `decode_bytes`."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """The text of these ids in UTF-8.

        Raises:
            UserError: an id that is not of this vocabulary.
        """
        return b"".join(map(self._contents.__getitem__, check_ids(ids, self).tolist()))

    def stream_decoder(self) -> StreamDecoder:
        """A decoder that holds back a character until all its bytes are there."""
        return Utf8StreamDecoder(self)

    def to_json(self) -> dict[str, Any]:
        """The tokenizer as plain values."""
        return {"kind": self.kind, "tokenizer": self._values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BPETokenizer:
        """What `to_json` wrote, or any tokenizer that changes no text.

        Raises:
            ValueError: what is wrong with the tokenizer.
        """
        content = values.get("tokenizer")
        if not isinstance(content, dict):
            raise ValueError("it holds no tokenizer")
        model = content.get("model")
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):  # the library may panic while it reads them
            if isinstance(model, dict) and model.get(name):
                raise ValueError(f"the tokenizer marks the parts of words by more than their bytes (it has {name})")
        from tokenizers import Tokenizer

        tokenizer = cls(json.dumps(content))
        try:
            _check_structure(json.loads(Tokenizer.from_str(tokenizer.tokenizer_json).to_str()), content)
            back = tokenizer.decode_bytes(tokenizer.encode(_PROBE))
        except ValueError:
            raise
        except Exception as error:  # tokenizers raises nothing narrower
            raise ValueError(f"the tokenizer cannot be used ({' '.join(str(error).split())})") from None
        if back != _PROBE.encode("utf-8"):
            raise ValueError("the tokenizer changes the text")
        return tokenizer


def train_bpe(lines: Iterable[list[str]], size: int) -> BPETokenizer:
    """Learns which neighbours to join, the most frequent first; the same lines give the same tokens.

    Args:
        lines: the text in lines, some at a time, each with its line end.
        size: tokens wanted, at least 256; a short text may give fewer.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    return BPETokenizer.from_json({"tokenizer": json.loads(tokenizer.to_str())})


def lines_of(text: str) -> list[str]:
    """The lines of a text, each with its line end; the last may have none."""
    *whole, rest = text.split("\n")
    return [line + "\n" for line in whole] + ([rest] if rest else [])


def _batches(lines: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    length = 0
    for line in lines:
        batch.append(line)
        length += len(line)
        if length >= _BATCH_CHARACTERS:
            yield batch
            batch = []
            length = 0
    if batch:
        yield batch


def _check_structure(values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Whether the parts of a tokenizer can be trusted with any text.

    Args:
        values: the tokenizer as `tokenizers` writes it, so that every part is there.
        given: the tokenizer as it was given; `tokenizers` numbers added tokens anew where ids are missing.

    Raises:
        ValueError: one that cannot.
    """
    model, added = values["model"], values["added_tokens"]
    if model["type"] != "BPE":
        raise ValueError("the tokenizer is not of type BPE")
    tokens = given["model"]["vocab"] | {token["content"]: token["id"] for token in given.get("added_tokens", ())}
    if sorted(tokens.values()) != list(range(len(tokens))):
        raise ValueError("the tokenizer leaves out some token ids, or gives one twice")
    if values["normalizer"]:
        raise ValueError("the tokenizer changes the text before it reads it (it has a normalizer)")
    if values["truncation"] or values["padding"]:
        raise ValueError("the tokenizer shortens or fills up texts (it has truncation or padding)")
    if model["dropout"]:
        raise ValueError("the tokenizer reads the same text differently each time (it has dropout)")
    first = values["pre_tokenizer"] or {"type": None}
    parts = first.get("pretokenizers", [first])
    levels = [part for part in parts if part["type"] == "ByteLevel"]
    if not levels or _byte_characters().keys() - model["vocab"].keys():
        raise ValueError("the tokenizer is not byte-level, so that it cannot write every text")
    if any(part["add_prefix_space"] for part in levels):
        raise ValueError("the tokenizer puts a space before the text (add_prefix_space)")
    for part in parts:
        if part["type"] not in _KEEP_TEXT or part.get("behavior") == "Removed":
            raise ValueError(f"the tokenizer may drop text (its pre-tokenizer {part['type']})")
    for token in added:
        if not token["special"]:
            raise ValueError(f"the tokenizer finds its added token {token['content']!r} inside the text")
