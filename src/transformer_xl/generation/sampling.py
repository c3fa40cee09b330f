"""Choosing the next token from the model's scores.

Shape suffixes: B rows, V vocabulary, K tokens that stood there before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.config import INT32_MAX, UserError


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen: the repetition penalty first, then all else in the order of the fields."""

    temperature: float = 1.0
    """Scores are divided by it: below 1 surer, above 1 wilder; 0: always the likeliest token (greedy)."""
    top_k: int | None = None
    """Only the k likeliest tokens; none: all. The paper's samples use 40."""
    top_p: float | None = None
    """Only the likeliest tokens that together reach this probability; none: all."""
    min_p: float | None = None
    """Only tokens with at least this share of the likeliest one's probability; none: all."""
    repetition_penalty: float = 1.0
    """Scores of tokens that stood there before are divided by it, or multiplied where negative: above 1 there is less
    repetition, 1 changes nothing (CTRL, Keskar et al. 2019, section 4.1; negative scores as other libraries do)."""
    repetition_window: int = 1024
    """Of the prompt and what was made after it, so many last tokens count as having stood there before."""

    def __post_init__(self) -> None:
        for name in ("top_k", "repetition_window"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise UserError(f"{name} {value}: wanted a whole number")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature {self.temperature}: wanted 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k {self.top_k}: wanted 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p}: wanted a number above 0, up to 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UserError(f"min-p {self.min_p}: wanted a number from 0 to 1")
        if not 0 < self.repetition_penalty < float("inf"):
            raise UserError(f"repetition penalty {self.repetition_penalty}: wanted more than 0 (1 changes nothing)")
        if not 1 <= self.repetition_window <= INT32_MAX:
            raise UserError(
                f"repetition window {self.repetition_window}: wanted 1 or more tokens, {INT32_MAX:,} at most"
            )

    @property
    def candidates(self) -> int | None:
        """How many of the likeliest tokens (after the penalty) are enough to choose from; none: all."""
        return 1 if self.temperature == 0 else self.top_k

    def penalised(self, logits_BV: Tensor, earlier_BK: Tensor) -> Tensor:
        """The scores (B, V) with those of earlier tokens lowered; one that stood there twice is lowered once."""
        score_BK = logits_BV.gather(-1, earlier_BK)
        penalty = self.repetition_penalty
        score_BK = torch.where(score_BK > 0, score_BK / penalty, score_BK * penalty)
        return logits_BV.scatter(-1, earlier_BK, score_BK)

    def choose(self, logits_BV: Tensor, *generators: torch.Generator) -> Tensor:
        """A place in each row, int64 (B,); draws from CPU generators whatever the device, one for all rows or one each.

        Of the whole vocabulary the place is the token; of candidates (`LanguageModel.top`) it is its place there. The
        penalty is not applied here.

        Raises:
            UserError: scores that are not numbers, or a row without any token to choose.
        """
        if self.temperature == 0:
            best_B, place_B = logits_BV.max(-1)
            check_scores(best_B)
            return place_B
        # drawn on the CPU, so that a seed gives the same text on every device with the same scores
        probabilities_BV = self.probabilities(logits_BV).cpu()
        if bool(probabilities_BV.isnan().any()):
            check_scores(logits_BV.amax(-1))
        if len(generators) == 1:
            place_B1 = torch.multinomial(probabilities_BV, 1, generator=generators[0])
        else:
            pairs = zip(probabilities_BV.split(1), generators, strict=True)
            place_B1 = torch.cat([torch.multinomial(row_1V, 1, generator=generator) for row_1V, generator in pairs])
        return place_B1[:, 0].to(logits_BV.device)

    def probabilities(self, logits_BV: Tensor) -> Tensor:
        """The distribution drawn from, float32 (B, V): each row sums to 1."""
        assert self.temperature > 0
        logits_BV = logits_BV.float()
        # only differences count; without a common part, and with a least divisor, no temperature overflows to nan
        logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / max(self.temperature, 1e-30)
        if self.top_k is not None and self.top_k < logits_BV.shape[-1]:
            logits_BV = _highest(logits_BV, self.top_k)
        if self.top_p is not None:
            sorted_BV, order_BV = logits_BV.sort(descending=True, stable=True)
            probability_BV = sorted_BV.softmax(-1)
            # a token stays while those before it have not reached top_p, so the likeliest always stays
            beyond_BV = probability_BV.cumsum(-1) - probability_BV >= self.top_p
            logits_BV = logits_BV.masked_fill(beyond_BV.gather(-1, order_BV.argsort()), -torch.inf)
        probability_BV = logits_BV.softmax(-1)
        if self.min_p is None:
            return probability_BV
        least_B1 = self.min_p * probability_BV.amax(-1, keepdim=True)
        probability_BV = probability_BV.masked_fill(probability_BV < least_B1, 0)
        return probability_BV / probability_BV.sum(-1, keepdim=True)


THE_PAPERS = Sampler(top_k=40)
"""How the samples of the paper were drawn (its appendix on generated text): from the 40 likeliest tokens."""


def check_scores(best_B: Tensor) -> None:
    """Refuses rows that nothing can be chosen from, told by their highest scores.

    Raises:
        UserError: one is not a number, or there is no token left.
    """
    if bool((best_B == -torch.inf).any()):
        raise UserError("no token is left to choose from; let `adjust`, or the ids that end a text, leave one")
    if not bool(best_B.isfinite().all()):
        raise UserError(
            "the model's scores are not numbers: its weights are damaged, or its training diverged; "
            "take other weights (--weights best or last)"
        )


def _highest(logits_BV: Tensor, count: int) -> Tensor:
    """All but the `count` highest scores of each row taken out; of scores that are alike, the first stay."""
    last_B1 = logits_BV.topk(count).values[:, -1:]
    above_BV, alike_BV = logits_BV > last_B1, logits_BV == last_B1
    room_B1 = count - above_BV.sum(-1, keepdim=True)
    return logits_BV.masked_fill(~(above_BV | (alike_BV & (alike_BV.cumsum(-1) <= room_B1))), -torch.inf)
