"""Settings of a tokenizer: its kind, and how it is trained. The fields are also the flags of `txl prepare`."""

from __future__ import annotations

from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from transformer_xl.config import INT32_MAX, Settings

TokenizerKind = Literal["byte", "char", "word", "bpe", "integer"]
TOKENIZER_KINDS: tuple[TokenizerKind, ...] = get_args(TokenizerKind)

_MAX_BPE_VOCAB_SIZE = 10_000_000  # training reserves 70 bytes for each token, even if the text is too short for them


class TokenizerConfig(Settings):
    """The kind of tokenizer to create and how to train it.

    The description of a field begins with the kinds that use it; setting it for another kind is an error.
    """

    kind: TokenizerKind = "byte"
    """What a token is: a byte, a character, a word, a part of a word (byte-pair encoding), or an integer."""
    vocab_size: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Size of the vocabulary, special tokens and bytes included. word, char: keep the most frequent (all if not set).
    bpe: merge pairs of tokens until the vocabulary has this size (8192 if not set). integer: the tokens are 0 to
    vocab_size - 2 (to the largest integer in the text if not set) and the end-of-sequence token; without add_eos, 0 to
    vocab_size - 1."""
    min_frequency: int = Field(default=1, gt=0, le=INT32_MAX)
    """word, char: leave out words or characters that occur less often than this in the training text."""
    lowercase: bool = False
    """word: lowercase the text before it is split into words."""
    split_punctuation: bool = False
    """word: split punctuation from words, as in the data set WikiText; otherwise words are separated by whitespace."""
    add_eos: bool = True
    """word, integer: encode every newline as the end-of-sequence token; otherwise newlines are whitespace."""
    eos_token: str = "<eos>"
    """word: the end-of-sequence token."""
    unk_token: str | None = "<unk>"
    """word: the token for words that are not in the vocabulary; if None, such words are an error."""
    vocab_file: str | None = None
    """word: take the words from this file instead of training: one word per line in the order of ids, special tokens
    included."""
    byte_fallback: bool = True
    """char: encode characters that are not in the vocabulary as their UTF-8 bytes; otherwise they are an error."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in sorted(self.model_fields_set - {"kind"}):
            kinds = _APPLIES_TO.get(name, ("word",))
            if self.kind not in kinds:
                raise ValueError(f"{name} is for {' and '.join(kinds)} tokenizers, not for {self.kind}; leave it out")
        for token in self.special_tokens:
            encoded = token.encode("utf-8", errors="replace")
            if encoded.split() != [encoded]:
                raise ValueError(f"the special token {token!r} is empty or contains whitespace; give one word")
        if len(set(self.special_tokens)) < len(self.special_tokens):
            raise ValueError(f"{self.unk_token!r} cannot be both eos_token and unk_token; give two words")
        if self.vocab_file is not None and (self.vocab_size is not None or self.min_frequency > 1):
            raise ValueError("vocab_file contains all words of the vocabulary; leave vocab_size and min_frequency out")
        smallest = {"word": len(self.special_tokens) + 1, "char": 256 * self.byte_fallback + 1, "bpe": 256}
        min_size = smallest.get(self.kind, 1 + self.add_eos)  # integer: the value 0 and the end-of-sequence token
        if self.vocab_size is not None and self.vocab_size < min_size:
            raise ValueError(f"vocab_size {self.vocab_size} is too small for {self.kind}; give {min_size} or more")
        if self.kind == "bpe" and (self.vocab_size or 0) > _MAX_BPE_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size {self.vocab_size:,} is too large for bpe; give {_MAX_BPE_VOCAB_SIZE:,} at most"
            )
        return self

    @property
    def special_tokens(self) -> list[str]:
        """The special tokens of a word tokenizer, end of sequence first."""
        return [self.eos_token] * self.add_eos + ([] if self.unk_token is None else [self.unk_token])


_APPLIES_TO: dict[str, tuple[TokenizerKind, ...]] = {
    "vocab_size": ("word", "char", "bpe", "integer"),
    "min_frequency": ("word", "char"),
    "add_eos": ("word", "integer"),
    "byte_fallback": ("char",),
}
"""The kinds that use each setting; all other settings are for word tokenizers."""
