"""Sums of a scored text, and the figures they give. Losses are summed in nats and divided here, once."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Sums:
    """What was counted over a text."""

    nats: float
    tokens: int
    bytes: float
    """Whole for a whole text; a share of the text's where only part of it was counted in training."""
    characters: int | None = None
    """Unicode characters; none: not known, or the text is not UTF-8."""
    words: int | None = None
    """Stretches between white space; none: not known."""

    def __post_init__(self) -> None:
        assert self.tokens > 0
        assert self.bytes > 0

    @property
    def nats_per_token(self) -> float:
        """Mean loss in nats."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the text; comparable across vocabularies. The paper's bpc of enwik8 is this."""
        return self.nats / math.log(2) / self.bytes

    @property
    def bits_per_character(self) -> float | None:
        """Bits per Unicode character; none where their number is not known."""
        return self.nats / math.log(2) / self.characters if self.characters else None

    @property
    def perplexity(self) -> float:
        """exp of the mean loss, per token (infinite where that overflows)."""
        return _exp(self.nats_per_token)

    @property
    def word_perplexity(self) -> float | None:
        """exp of the loss per word, that of line ends and spaces shared out over the words; none: words not known."""
        return _exp(self.nats / self.words) if self.words else None


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
