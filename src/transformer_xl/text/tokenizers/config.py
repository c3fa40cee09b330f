"""Settings of a tokenizer: its kind and training. The fields are flags of `txl prepare`."""

from __future__ import annotations

from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from transformer_xl.config import INT32_MAX, Settings

TokenizerKind = Literal["byte", "char", "word", "bpe", "integer"]
TOKENIZER_KINDS: tuple[TokenizerKind, ...] = get_args(TokenizerKind)


class TokenizerConfig(Settings):
    """Which tokenizer to make and how to train it; a setting that does not apply to the kind is refused."""

    kind: TokenizerKind = "byte"
    """What a token is: a byte, a character, a word, a part of a word (byte-pair encoding), or an integer."""
    vocab_size: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Size of the vocabulary, special tokens and bytes included: word and char keep the most frequent (none: all), bpe
    merges up to it (none: 8192), integer takes the numbers below vocab_size - 1 (none: all up to the largest)."""
    min_frequency: int = Field(default=1, gt=0, le=INT32_MAX)
    """word, char: leave out what occurs less often in the training text."""
    lowercase: bool = False
    """word: lowercase the text before it is split."""
    split_punctuation: bool = False
    """word: split punctuation from words, in the forms of WikiText; otherwise words are what is between white space."""
    add_eos: bool = True
    """word: every newline becomes the token eos_token; otherwise newlines are white space."""
    eos_token: str = "<eos>"
    """word: the end-of-sequence token."""
    unk_token: str | None = "<unk>"
    """word: the token for words that are not in the vocabulary; none: such words are refused."""
    vocab_file: str | None = None
    """word: take the words from this file, one a line in the order of their ids, special tokens included; nothing is
    trained."""
    byte_fallback: bool = True
    """char: write characters that are not in the vocabulary as their UTF-8 bytes; otherwise they are refused."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, kinds in _APPLIES_TO.items():
            if name in self.model_fields_set and self.kind not in kinds:
                raise ValueError(f"{name} is for {' and '.join(kinds)} tokenizers, not for {self.kind}; leave it out")
        if self.kind == "word":
            for token in self.special_tokens:
                encoded = token.encode("utf-8", errors="replace")
                if encoded.split() != [encoded]:
                    raise ValueError(f"the special token {token!r} is empty or has white space in it; give one word")
            if len(set(self.special_tokens)) < len(self.special_tokens):
                raise ValueError(f"{self.unk_token!r} cannot be both eos_token and unk_token; give two words")
        if self.vocab_file is not None and (self.vocab_size is not None or self.min_frequency > 1):
            raise ValueError(
                "vocab_file gives the words, so they cannot be limited; leave vocab_size and min_frequency out"
            )
        if self.vocab_size is not None and self.vocab_size < self._min_vocab_size:
            raise ValueError(
                f"vocab_size {self.vocab_size} is too small for {self.kind}; give {self._min_vocab_size} or more"
            )
        return self

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens of a word tokenizer, end of sequence first."""
        return (*([self.eos_token] if self.add_eos else []), *([] if self.unk_token is None else [self.unk_token]))

    @property
    def _min_vocab_size(self) -> int:
        at_least_one_more = {
            "word": len(self.special_tokens),
            "char": 256 * self.byte_fallback,
            "integer": 1,
            "bpe": 255,
        }
        return at_least_one_more.get(self.kind, 0) + 1


_APPLIES_TO: dict[str, tuple[TokenizerKind, ...]] = {
    "vocab_size": ("word", "char", "bpe", "integer"),
    "min_frequency": ("word", "char"),
    "lowercase": ("word",),
    "split_punctuation": ("word",),
    "add_eos": ("word",),
    "eos_token": ("word",),
    "unk_token": ("word",),
    "vocab_file": ("word",),
    "byte_fallback": ("char",),
}
