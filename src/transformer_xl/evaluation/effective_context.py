"""Relative effective context length: how far back a text still helps each of several models (paper section 4.4).

l_i(c, t) is model i's loss of token t when it sees the c tokens before it and nothing else. With c' = c + step:

    b(c, t)    = min over the models of l_i(c, t)
    T(r, c)    = the fraction r of the places with the largest b(c, t), chosen anew for each c
    f_i(c, c') = mean over T(r, c) of min(b(c, t), l_i(c', t))
    g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)

From a short c on, c and c' go up by a step while g_i is at or above a threshold; where it falls below, c is the length.
It is relative because a model gains only where it betters the best of the group: a length can grow by no short context
being used badly. Where the paper leaves it open: the number of places chosen is r times all, rounded, one at least; of
equal losses the one earlier in the text counts as larger.

Shape suffixes: I models, C context lengths, P places in the text, B rows, T new tokens, S tokens of a window with its
target, D model width, K tokens of the text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from transformer_xl.config import MOST, UserError
from transformer_xl.evaluation.plan import Plan, Progress
from transformer_xl.evaluation.scoring import check_weights, computing
from transformer_xl.evaluation.stretches import slots_needed
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.text.token_store import Tokens

_TOKENS_AT_ONCE = 4096  # of a step, all rows together: enough for a machine to be busy
_MEMORY_AT_ONCE = 2**29  # bytes of memory that rows side by side may need

Losses = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ContextSweep:
    """Which contexts are compared, at how many places of a text, and what counts as a gain."""

    start: int = 100
    """The shortest context, in tokens."""
    step: int = 100
    """How many tokens longer each context is than the one before."""
    longest: int = 1000
    """No context is longer, in tokens."""
    positions: int = 1000
    """Number of places drawn from the text; all have `longest` tokens before them."""
    seed: int = 1
    """Of that draw."""
    fractions: tuple[float, ...] = (0.1, 0.5, 1.0)
    """r: shares of the places that count, those that are hardest to predict."""
    threshold: float = 0.01
    """Smallest gain in perplexity that counts, as a share."""

    def __post_init__(self) -> None:
        """Refuses what cannot be."""
        for name in ("start", "step", "longest", "positions"):
            if not 1 <= getattr(self, name) <= MOST:
                raise UserError(f"{name} {getattr(self, name):,}: wanted 1 or more, {MOST:,} at most")
        if not 0 <= self.seed <= MOST:
            raise UserError(f"seed {self.seed}: wanted 0 or more, {MOST:,} at most")
        if not self.fractions or not all(0 < fraction <= 1 for fraction in self.fractions):
            given = ",".join(f"{fraction:g}" for fraction in self.fractions) or "nothing"
            raise UserError(f"fractions {given}: wanted shares of the places, above 0 and up to 1, such as 0.1,0.5,1.0")
        if not 0 < self.threshold < 1:
            raise UserError(f"threshold {self.threshold:g}: wanted a share above 0 and below 1, such as 0.01")
        if self.longest < self.start + self.step:
            raise UserError(
                f"longest {self.longest:,} leaves nothing to compare with start {self.start:,}; wanted "
                f"{self.start + self.step:,} (start and step) or more"
            )

    @property
    def contexts(self) -> tuple[int, ...]:
        """The lengths c, rising."""
        return tuple(range(self.start, self.longest + 1, self.step))

    def places(self, num_tokens: int) -> npt.NDArray[np.int64]:
        """The places t whose tokens are predicted: drawn without replacement, rising; (P,).

        Raises:
            UserError: too few places of a text of so many tokens have the longest context before them.
        """
        most = max(0, num_tokens - self.longest)
        if self.positions > most:
            raise UserError(
                f"the text has {num_tokens:,} tokens, of which {most:,} have {self.longest:,} before them, and "
                f"{self.positions:,} positions were asked for; give fewer positions, a shorter longest, or more text"
            )
        drawn_P = np.random.default_rng(self.seed).choice(most, self.positions, replace=False)
        return np.sort(drawn_P).astype(np.int64) + self.longest


@dataclass(frozen=True, eq=False)
class Reader:
    """A model of the group, and how it reads what it may see."""

    name: str
    model: LanguageModel
    plan: Plan
    """Segment, reach and number format; what else a plan has is not looked at but for `rows`, tokens side by side."""

    @property
    def sees_at_most(self) -> int | None:
        """Tokens before the predicted one that this model can see, however many there are; none: no such limit.

        Without memory they are those of its segment.
        """
        return None if self.plan.reach.memory else self.plan.segment

    def tokens_of(self, context: int) -> int:
        """How many tokens it reads when it may see so many."""
        return min(context, self.sees_at_most or context)

    def cost(self, sweep: ContextSweep) -> int:
        """How many tokens it reads in all."""
        return sweep.positions * sum(self.tokens_of(context) for context in sweep.contexts)

    def nats(
        self, tokens_K: Tokens, places_P: npt.NDArray[np.int64], context: int, progress: Progress | None = None
    ) -> Losses:
        """l_i(c, t): the loss of the tokens at these places, each from the `context` tokens before it alone; (P,).

        Every place begins with an empty memory. What is read ends with a whole segment, so that the target follows the
        segment's last place, which sees most; the first segment takes what is left over.

        Args:
            tokens_K: the text.
            places_P: places of the targets, all with so many tokens before them.
            context: c.
            progress: told how many tokens were read.
        """
        model, segment = self.model, self.plan.segment
        device, read = next(model.parameters()).device, self.tokens_of(context)
        reach = self.plan.reach
        if not model.config.attend_empty_memory:
            reach = replace(reach, memory=slots_needed(read, self.plan))
        first = (read - 1) % segment + 1
        parts: list[torch.Tensor] = []
        for at_B in np.array_split(places_P, -(-len(places_P) // self._rows(reach.memory))):
            window_BS = torch.from_numpy(tokens_K[at_B[:, None] + np.arange(-read, 1)].astype(np.int64))
            with computing(device, self.plan.precision):
                memory = model.inference_memory(len(at_B), reach)
                for part_BT in window_BS[:, :-1].split([first] + [segment] * (read // segment), dim=1):
                    hidden_BTD, memory = model(part_BT.to(device), memory)
                parts.append(model.nats(hidden_BTD[:, -1:], window_BS[:, -1:]).flatten())
            if progress:
                progress(len(at_B) * read)
        return torch.cat(parts).double().cpu().numpy()
