"""Subword tokens: byte-level byte-pair encoding with the `tokenizers` library.

Each line is encoded separately, including its newline, so that splitting a text at newlines does not change its tokens.
Every byte is a token, so that decoding restores every Unicode text. Tokenizers from other sources are accepted if they
are lossless too; special tokens in their vocabulary are never matched in a text.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transformer_xl.text.tokenizers.base import EncodedChunk, Tokenizer, decode_utf8, token_dtype
from transformer_xl.text.tokenizers.chunking import last_match_in_line

if TYPE_CHECKING:
    import tokenizers

_BATCH_CHARACTERS = 2**17  # encoded at once; each token takes about 150 bytes of memory during encoding
_LOSSLESS_PRE_TOKENIZERS = frozenset({"ByteLevel", "Split", "Digits", "Punctuation"})
# Letters, numbers and punctuation of several scripts, white space, contractions, characters of one to four bytes.
_PROBE = (
    "".join(map(chr, range(0x180)))
    + " a  b\r\n\r\n\t don't 1,234.5\u00a0\u3000\u65e5\u672c \ufb01 e\u0301 \U0001f600\n "
)


_SPACE = re.compile(
    rb" (?=[\x00-\x08\x0e-\x1b!-\x7f]|[\x80-\xff].{2})"  # three bytes identify the whitespace of other scripts
    rb"(?!\xc2[\x85\xa0]|\xe1(?:\x9a\x80|\xa0\x8e)|\xe2(?:\x80[\x80-\x8a\xa8\xa9\xaf]|\x81\x9f)|\xe3\x80\x80)",
    flags=re.DOTALL,
)


def last_word_boundary(text: bytes) -> int:
    """Return the position after the last newline or before the last space that precedes a word, or 0 if neither occurs.

    No match of GPT-2's pattern crosses the start of such a space, and the pattern has no lookbehind.
    """
    return last_match_in_line(_SPACE, text)


def _byte_of_character() -> dict[str, int]:
    """Return the byte of each GPT-2 character: printable bytes represent themselves, others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


@dataclass(frozen=True)
class BPETokenizer(Tokenizer):
    """A byte-level BPE tokenizer of the library `tokenizers` that restores every text exactly."""

    tokenizer_json: str
    """The tokenizer as JSON, as the library writes it."""

    kind = "bpe"

    @property
    @override
    def vocab_size(self) -> int:
        return len(self._token_bytes)

    @property
    @override
    def bos_token_id(self) -> int:
        """The token that is a single newline."""
        return self._token_bytes.index(b"\n")

    @cached_property
    @override
    def is_newline_V(self) -> npt.NDArray[np.bool_]:
        """(V,) the tokens whose last byte is a newline."""
        return np.array([content.endswith(b"\n") for content in self._token_bytes])

    @cached_property
    def _values(self) -> dict[str, Any]:
        return json.loads(self.tokenizer_json)

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        if multiprocessing.parent_process() is not None:  # workers already use all cores, so disable threads
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        tokenizer.encode_special_tokens = True  # as ordinary characters
        return tokenizer

    @cached_property
    def _token_bytes(self) -> tuple[bytes, ...]:
        byte_of = _byte_of_character()
        contents = {token["id"]: token["content"].encode("utf-8") for token in self._values.get("added_tokens", ())}
        for token, number in self._values["model"]["vocab"].items():
            if number not in contents:
                known = all(character in byte_of for character in token)
                contents[number] = bytes(map(byte_of.__getitem__, token)) if known else token.encode("utf-8")
        return tuple(contents[number] for number in range(len(contents)))

    @cached_property
    def _splits_words(self) -> bool:
        """Whether tokens never cross the start of a space before a word, which GPT-2's pattern ensures."""
        pre_tokenizer = self._values["pre_tokenizer"]
        return pre_tokenizer["type"] == "ByteLevel" and pre_tokenizer.get("use_regex", True)

    @override
    def last_boundary(self, text: bytes) -> int:
        return last_word_boundary(text) if self._splits_words else text.rfind(b"\n") + 1

    @override
    def encode_chunk(self, chunk: bytes) -> EncodedChunk:
        ids = np.fromiter(
            chain.from_iterable(
                line.ids
                for batch in _batches(lines_of(decode_utf8(chunk)))
                for line in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            ),
            dtype=np.int64,
        )
        return EncodedChunk(ids.astype(token_dtype(self.vocab_size)))

    @override
    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        return b"".join(map(self._token_bytes.__getitem__, self.check_ids(ids).tolist()))

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "tokenizer": self._values}

    @classmethod
    @override
    def from_json(cls, values: Mapping[str, Any]) -> BPETokenizer:
        """Create the tokenizer from {"tokenizer": JSON of the library}, if it restores every text exactly.

        Raises:
            ValueError: the tokenizer is damaged or not lossless.
        """
        content = values.get("tokenizer")
        if not isinstance(content, dict):
            raise ValueError("it has no tokenizer")
        model = content.get("model")
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):  # the library may panic while it reads them
            if isinstance(model, dict) and model.get(name):
                raise ValueError(f"the tokenizer marks parts of words by more than their bytes (it has {name})")
        from tokenizers import Tokenizer

        tokenizer = cls(json.dumps(content))
        try:
            _check_structure(json.loads(Tokenizer.from_str(tokenizer.tokenizer_json).to_str()), content)
            decoded = tokenizer.decode_bytes(tokenizer.encode(_PROBE))
        except ValueError:
            raise
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"the tokenizer cannot be used ({' '.join(str(error).split())})") from None
        if decoded != _PROBE.encode("utf-8"):
            raise ValueError("the tokenizer changes the text")
        return tokenizer


def train_bpe(lines: Iterable[list[str]], vocab_size: int) -> BPETokenizer:
    """Train byte-pair encoding, which merges the most frequent pair of tokens first; it is deterministic.

    Args:
        lines: the text in batches of lines, each with its newline.
        vocab_size: target vocabulary size, at least 256; a short text may yield fewer tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return BPETokenizer.from_json({"tokenizer": json.loads(tokenizer.to_str())})


def lines_of(text: str) -> list[str]:
    """Return the lines of a text, each with its newline; the last may have none."""
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


def _check_structure(values: Mapping[str, Any], original: Mapping[str, Any]) -> None:
    """Check that the components of a tokenizer preserve the text.

    Args:
        values: the tokenizer as saved by `tokenizers`, which writes every component.
        original: the original JSON; `tokenizers` renumbers added tokens if ids are missing.

    Raises:
        ValueError: a component changes the text.
    """
    model, added = values["model"], values["added_tokens"]
    if model["type"] != "BPE":
        raise ValueError("the tokenizer is not of type BPE")
    tokens = original["model"]["vocab"] | {token["content"]: token["id"] for token in original.get("added_tokens", ())}
    if sorted(tokens.values()) != list(range(len(tokens))):
        raise ValueError("the token ids of the tokenizer are not 0, 1, 2, ... without gaps and duplicates")
    if values["normalizer"]:
        raise ValueError("the tokenizer changes the text before encoding it (it has a normalizer)")
    if values["truncation"] or values["padding"]:
        raise ValueError("the tokenizer truncates or pads texts (it has truncation or padding)")
    if model["dropout"]:
        raise ValueError("the tokenizer encodes the same text differently each time (it has dropout)")
    first = values["pre_tokenizer"] or {"type": None}
    parts = first.get("pretokenizers", [first])
    levels = [part for part in parts if part["type"] == "ByteLevel"]
    if not levels or _byte_of_character().keys() - model["vocab"].keys():
        raise ValueError("the tokenizer is not byte-level, so it cannot encode every text")
    if any(part["add_prefix_space"] for part in levels):
        raise ValueError("the tokenizer puts a space before the text (add_prefix_space)")
    for part in parts:
        if part["type"] not in _LOSSLESS_PRE_TOKENIZERS or part.get("behavior") == "Removed":
            raise ValueError(f"the tokenizer may drop text (its pre-tokenizer {part['type']})")
    for token in added:
        if not token["special"]:
            raise ValueError(f"the tokenizer finds its added token {token['content']!r} inside the text")
