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

    def __post_init__(self) -> None:
        assert self.tokens > 0
        assert self.bytes > 0

    @property
    def nats_per_token(self) -> float:
        """Mean loss in nats."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the text; comparable across vocabularies. With bytes as tokens, the paper's bpc."""
        return self.nats / math.log(2) / self.bytes

    @property
    def perplexity(self) -> float:
        """exp of the mean loss, per token (infinite where that overflows)."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf
