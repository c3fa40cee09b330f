"""Subword tokens: byte-level byte-pair encoding with the Hugging Face library `tokenizers`.

Each line is encoded separately, including its newline, so that splitting a text at newlines does not change its tokens.
Every byte is a token, so that decoding restores every Unicode text. A `tokenizer.json` from another source, such as
GPT-2's, is accepted if it is lossless too; its special tokens are encoded like any other text. One of them may end
documents.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.text.tokenizers.base import ByteLevelTokenizer, EncodedChunk, NamedToken, decode_utf8, token_dtype
from transformer_xl.text.tokenizers.chunking import last_match_in_line

if TYPE_CHECKING:
    import tokenizers

_MAX_TRAINED_BYTES = 256  # of a word; longer ones are cut where tokens are chosen
BATCH_LINES = 512
"""Number of lines that are encoded at once; each token takes about 150 bytes of memory during encoding."""
_LOSSLESS_PRE_TOKENIZERS = frozenset({"ByteLevel", "Split", "Digits", "Punctuation"})
"""Types of pre-tokenizers of the library that can keep every character."""
_UNSUPPORTED = ("normalizer", "truncation", "padding", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
"""Settings of a tokenizer and of its BPE model that can change the text or its tokens."""
PROBE = (  # letters, numbers and punctuation of several scripts, whitespace, characters of one to four bytes
    "".join(map(chr, range(0x180)))
    + " a  b\r\n\r\n\t don't 1,234.5\u00a0\u3000\u65e5\u672c \ufb01 e\u0301 \U0001f600\n "
)
"""A text that shows whether a tokenizer is lossless."""
DOCUMENT_ENDS = "<|endoftext|>", "<|end_of_text|>", "<eod>", "</s>", "<eos>", "[EOS]"
"""Names of special tokens that end documents, the first that a tokenizer has."""
# A space that precedes a word: the next character is neither ASCII whitespace (excluded by the first line) nor Unicode
# whitespace (the second line, in UTF-8). `.{2}` requires all its bytes, at most three.
_SPACE = re.compile(
    rb" (?=[\x00-\x08\x0e-\x1b!-\x7f]|[\x80-\xff].{2})"
    rb"(?!\xc2[\x85\xa0]|\xe1(?:\x9a\x80|\xa0\x8e)|\xe2(?:\x80[\x80-\x8a\xa8\xa9\xaf]|\x81\x9f)|\xe3\x80\x80)",
    flags=re.DOTALL,
)


def byte_of_character() -> dict[str, int]:
    """Return the byte that each character represents in the vocabulary of a byte-level tokenizer, as in GPT-2's.

    Printable bytes are written as themselves (in Latin-1), and the others as characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


@dataclass(frozen=True, repr=False)
class BPETokenizer(ByteLevelTokenizer):
    """A byte-level BPE tokenizer of the library `tokenizers` that restores every text exactly."""

    tokenizer_json: str
    """The content of `tokenizer.json`."""
    document_end_token: str | None = None
    """The special token that ends documents; None in files of before, where none did."""

    kind = "bpe"

    @property
    @override
    def bos_token_id(self) -> int:
        """The token that ends documents, or if there is none the one that is a single newline."""
        return self.token_bytes.index(b"\n") if self.document_end is None else self.document_end.id

    @cached_property
    @override
    def document_end(self) -> NamedToken | None:
        return next((token for token in special_tokens(self._values) if token.name == self.document_end_token), None)

    @cached_property
    def _values(self) -> dict[str, Any]:
        """`tokenizer_json`, parsed."""
        return json.loads(self.tokenizer_json)

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        return load_json(self.tokenizer_json)

    @cached_property
    @override
    def token_bytes(self) -> list[bytes]:
        byte_of = byte_of_character()
        contents = {token["id"]: token["content"].encode("utf-8") for token in self._values.get("added_tokens", ())}
        for token, token_id in self._values["model"]["vocab"].items():
            if token_id not in contents:
                is_bytes = all(character in byte_of for character in token)
                contents[token_id] = bytes(map(byte_of.__getitem__, token)) if is_bytes else token.encode("utf-8")
        if self.document_end is not None:
            contents[self.document_end.id] = b""
        return [contents[token_id] for token_id in range(len(contents))]

    @override
    def last_boundary(self, text: bytes) -> int:
        """Return the position after the last newline, or before a later space that precedes a word.

        No match of GPT-2's pre-tokenization pattern crosses the start of such a space, and the pattern has no
        lookbehind. With other patterns, only newlines are boundaries.
        """
        pre_tokenizer = self._values["pre_tokenizer"]
        if pre_tokenizer["type"] == "ByteLevel" and pre_tokenizer.get("use_regex", True):
            return last_match_in_line(_SPACE, text)
        return text.rfind(b"\n") + 1

    @override
    def encode_chunk(self, chunk: bytes) -> EncodedChunk:
        lines = lines_of(decode_utf8(chunk))
        batches = (lines[start : start + BATCH_LINES] for start in range(0, len(lines), BATCH_LINES))
        encodings = (self._tokenizer.encode_batch_fast(batch, add_special_tokens=False) for batch in batches)
        ids = chain.from_iterable(line.ids for encoding in encodings for line in encoding)
        return EncodedChunk(np.fromiter(ids, dtype=np.int64).astype(token_dtype(self.vocab_size)))

    @override
    def to_json(self) -> dict[str, Any]:
        end = {} if self.document_end_token is None else {"document_end_token": self.document_end_token}
        return {"kind": self.kind, "tokenizer": self._values, **end}

    @classmethod
    def of_library(cls, content: Mapping[str, Any]) -> BPETokenizer:
        """Create the tokenizer from a tokenizer.json; one of its special tokens ends documents if it has such a name.

        Raises:
            ValueError: as for `from_json`.
        """
        with library_errors("tokenizers"):
            names = [token.name for token in special_tokens(content)]
        end = next((name for name in DOCUMENT_ENDS if name in names), None)
        return cls.from_json({"tokenizer": content, "document_end_token": end})

    @classmethod
    @override
    def from_json(cls, values: Mapping[str, Any]) -> BPETokenizer:
        """Create the tokenizer from {"tokenizer": the content of tokenizer.json, "document_end_token": its name}.

        Raises:
            ValueError: the tokenizer is damaged, or does not restore every text exactly.
        """
        content, end = values.get("tokenizer"), values.get("document_end_token")
        if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
            raise ValueError("it has no BPE model")
        for name in _UNSUPPORTED:  # checked first, since loading some of these can crash the library
            if content.get(name) or content["model"].get(name):
                raise ValueError(f"it has {name}, which can change the text or its tokens")
        tokenizer = cls(json.dumps(content), end)
        with library_errors("tokenizers"):
            check_ids(content)
            if end is not None and end not in (token.name for token in special_tokens(content)):
                raise ValueError(f"{end!r} is none of its special tokens")
            _check_structure(json.loads(tokenizer._tokenizer.to_str()))
            decoded = tokenizer.decode_bytes(tokenizer.encode(PROBE))
        if decoded != PROBE.encode("utf-8"):
            raise ValueError("it changes the text")
        return tokenizer


def load_json(content: str) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tokenizer.json, which encodes special tokens like any other text."""
    if multiprocessing.parent_process() is not None:  # worker processes already use all cores, so disable threads
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(content)
    tokenizer.encode_special_tokens = True
    return tokenizer


@contextmanager
def library_errors(name: str) -> Iterator[None]:
    """Convert what another library raises in the block, with its name in the message.

    Raises:
        ValueError: it raised anything; a ValueError of ours passes as it is.
    """
    try:
        yield
    except ValueError:
        raise
    except BaseException as error:  # the library raises plain Exception, and in Rust panics, which are none
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the library {name} cannot use it ({' '.join(str(error).split())})") from None


def special_tokens(values: Mapping[str, Any]) -> list[NamedToken]:
    """Return the special tokens of a tokenizer.json."""
    return [NamedToken(token["id"], token["content"]) for token in values.get("added_tokens", ()) if token["special"]]


def train_bpe(lines: Iterable[list[str]], vocab_size: int) -> BPETokenizer:
    """Train byte-pair encoding, which merges the most frequent pair of tokens first. Training is deterministic.

    Args:
        lines: the text in batches of lines, each line with its newline.
        vocab_size: target vocabulary size, at least 256; a short text may yield fewer tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    # the time of a merge grows with the longest word, so that of training with its square
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([byte_level, pre_tokenizers.FixedLength(_MAX_TRAINED_BYTES)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.pre_tokenizer = byte_level
    return BPETokenizer.from_json({"tokenizer": json.loads(tokenizer.to_str())})


def train_bpe_apart(
    lines: Iterable[list[str]], vocab_size: int, waiting: Callable[[], object] = lambda: None
) -> BPETokenizer:
    """Do the same as `train_bpe` in another process: the library notices no signal until it has finished.

    Args:
        lines: as there.
        vocab_size: as there.
        waiting: called a few times in a second once the text is read.

    Raises:
        UserError: the process was killed.
    """
    code = f"from {__name__} import answer_parent; answer_parent({vocab_size})"
    command = [sys.executable, "-P", "-c", code]
    own_group = {"start_new_session": True}  # Ctrl-C is for this process, which ends the other one
    with (
        tempfile.TemporaryFile() as answer,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=answer, **own_group) as process,
    ):
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError), process.stdin:
                for batch in lines:
                    process.stdin.write(json.dumps(batch).encode() + b"\n")
            while process.poll() is None:
                waiting()
                time.sleep(0.1)
        finally:
            process.kill()
        if process.returncode:
            raise UserError("the process that trains the tokenizer was killed, perhaps because memory ran out")
        answer.seek(0)
        return BPETokenizer.from_json(json.load(answer))


def answer_parent(vocab_size: int) -> None:
    """Train from the lines on standard input, and write the tokenizer to standard output."""
    json.dump(train_bpe(map(json.loads, sys.stdin.buffer), vocab_size).to_json(), sys.stdout)


def lines_of(text: str) -> list[str]:
    """Return the lines of a text, each with its newline; the last may have none."""
    return io.StringIO(text).readlines()


def check_ids(values: Mapping[str, Any]) -> None:
    """Check the ids of a tokenizer before the library has it, which makes room up to the largest, and renumbers some.

    Raises:
        ValueError: they are not 0, 1, 2, ...
    """
    vocab = values["model"]["vocab"]
    if isinstance(vocab, list):  # of a Unigram model, with scores
        vocab = {token: token_id for token_id, (token, _) in enumerate(vocab)}
    tokens = vocab | {token["content"]: token["id"] for token in values.get("added_tokens", ())}
    if sorted(tokens.values()) != list(range(len(tokens))):
        raise ValueError("its token ids are not 0, 1, 2, ... without gaps and duplicates")


def _check_structure(values: Mapping[str, Any]) -> None:
    """Check that the components of a tokenizer preserve the text.

    Args:
        values: the tokenizer as the library saves it, with every component.

    Raises:
        ValueError: a component changes the text.
    """
    model = values["model"]
    pre_tokenizer = values["pre_tokenizer"] or {"type": None}
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    byte_level = any(part["type"] == "ByteLevel" for part in parts)
    if model["type"] != "BPE" or not byte_level or byte_of_character().keys() - model["vocab"].keys():
        raise ValueError("it is not byte-level BPE, so it cannot encode every text")
    for part in parts:
        if part["type"] not in _LOSSLESS_PRE_TOKENIZERS or part.get("behavior") == "Removed":
            raise ValueError(f"its pre-tokenizer {part['type']} may drop text")
    for token in values["added_tokens"]:
        if not token["special"]:  # the library splits the text at such tokens before it merges bytes
            raise ValueError(f"its added token {token['content']!r} is matched inside the text")
