"""Choosing the next token from the model's scores.

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.config import UserError


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen; the limits apply in the order of the fields."""

    temperature: float = 1.0
    """Scores are divided by it: below 1 bolder, above 1 wilder; 0: always the likeliest token (greedy)."""
    top_k: int | None = None
    """Only the k likeliest tokens; none: all. The paper's samples use 40."""
    top_p: float | None = None
    """Only the likeliest tokens that together reach this probability; none: all."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature {self.temperature}: wanted 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k {self.top_k}: wanted 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p}: wanted a number above 0, up to 1")

    @property
    def candidates(self) -> int | None:
        """How many of the likeliest tokens are enough to choose from; none: all of the vocabulary."""
        return 1 if self.temperature == 0 else self.top_k

    def choose(self, logits_BV: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A place in each row, int64 (B,); draws from `generator`, a CPU generator whatever the device.

        Of the whole vocabulary the place is the token; of candidates (`LanguageModel.top`) it is its place there.
        """
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        probabilities_BV = self.probabilities(logits_BV)
        # drawn on the CPU, so that a seed gives the same text on every device with the same scores
        return torch.multinomial(probabilities_BV.cpu(), 1, generator=generator)[:, 0].to(logits_BV.device)

    def probabilities(self, logits_BV: Tensor) -> Tensor:
        """The distribution drawn from, float32 (B, V): each row sums to 1."""
        assert self.temperature > 0
        logits_BV = logits_BV.float()
        # only differences count; without a common part, and with a least divisor, no temperature overflows to nan
        logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / max(self.temperature, 1e-30)
        if self.top_k is not None:
            # by place, not by value: of tokens that are alike no more than k stay
            order_BV = logits_BV.argsort(descending=True, stable=True)
            logits_BV = logits_BV.scatter(-1, order_BV[:, self.top_k :], -torch.inf)
        if self.top_p is not None:
            sorted_BV, order_BV = logits_BV.sort(descending=True, stable=True)
            probability_BV = sorted_BV.softmax(-1)
            # a token stays while those before it have not reached top_p, so the likeliest always stays
            beyond_BV = probability_BV.cumsum(-1) - probability_BV >= self.top_p
            logits_BV = logits_BV.masked_fill(beyond_BV.gather(-1, order_BV.argsort()), -torch.inf)
        return logits_BV.softmax(-1)
