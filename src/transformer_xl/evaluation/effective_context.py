"""Relative effective context length: how far back a text still helps each of several models (paper section 4.4).

l_i(c, t) is model i's loss of token t when it sees the c tokens before it and nothing else. With c' = c + step:

    b(c, t)    = min over the models of l_i(c, t)
    T(r, c)    = the fraction r of the places with the largest b(c, t), chosen anew for each c
    f_i(c, c') = mean over T(r, c) of min(b(c, t), l_i(c', t))
    g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)

From a short c on, c and c' go up by a step while g_i is at or above a threshold; where it falls below, c is the length.
It is relative because a model gains only where it betters the best of the group: one that makes little of a short
context gains nothing by catching up. Where the paper leaves it open: the number of places chosen is r times all,
rounded, one at least; of equal losses the one earlier in the text counts as larger.

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

from transformer_xl.config import INT32_MAX, UserError
from transformer_xl.evaluation.plan import EvaluationPlan, Progress
from transformer_xl.evaluation.scoring import check_weights, computing
from transformer_xl.evaluation.stretches import slots_needed
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits
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
        for name in ("step", "start", "longest", "positions"):
            if not 1 <= getattr(self, name) <= INT32_MAX:
                raise UserError(f"{name} {getattr(self, name):,}: wanted 1 or more, {INT32_MAX:,} at most")
        if not 0 <= self.seed <= INT32_MAX:
            raise UserError(f"seed {self.seed}: wanted 0 or more, {INT32_MAX:,} at most")
        names = [f"{fraction:g}" for fraction in self.fractions]
        given = ",".join(names) or "nothing"
        if not names or not all(0 < fraction <= 1 for fraction in self.fractions):
            raise UserError(f"fractions {given}: wanted shares of the places, above 0 and up to 1, such as 0.1,0.5,1.0")
        if len(set(names)) < len(names):
            raise UserError(f"fractions {given}: wanted each share once")
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
    plan: EvaluationPlan
    """Segment, reach and number format; what else a plan has is not looked at but for `rows`, tokens side by side."""

    @property
    def sees_at_most(self) -> int | None:
        """Tokens before the predicted one that this model can see, however many there are; none: no such limit.

        Without memory they are those of its segment.
        """
        return None if self.plan.context_limits.memory_length else self.plan.segment

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
        context_limits, rows = self._reach(read), self._rows(read)
        first = (read - 1) % segment + 1
        parts: list[torch.Tensor] = []
        for at_B in np.array_split(places_P, -(-len(places_P) // rows)):
            window_BS = torch.from_numpy(tokens_K[at_B[:, None] + np.arange(-read, 1)].astype(np.int64))
            with computing(device, self.plan.precision):
                segments = window_BS[:, :-1].to(device).split([first] + [segment] * ((read - 1) // segment), dim=1)
                hidden_BTD, memory = model(segments[0], model.inference_memory(len(at_B), context_limits))
                for tokens_BT in segments[1:]:
                    hidden_BTD, memory = model(tokens_BT, memory)
                parts.append(model.nats(hidden_BTD[:, -1:], window_BS[:, -1:]).flatten())
            if progress:
                progress(len(at_B) * read)
        return torch.cat(parts).cpu().double().numpy()

    def seconds_for(self, sweep: ContextSweep, tokens_K: Tokens, places_P: npt.NDArray[np.int64]) -> float:
        """About how long all that it reads will take: a step of rows at a context of middle length is timed."""
        context = sweep.contexts[len(sweep.contexts) // 2]
        some_P = places_P[: self._rows(self.tokens_of(context))]
        self.nats(tokens_K, some_P[:1], context)  # the first is slow for other reasons
        start = time.perf_counter()
        self.nats(tokens_K, some_P, context)
        seconds = time.perf_counter() - start
        return seconds * self.cost(sweep) / (len(some_P) * self.tokens_of(context))

    def _reach(self, read: int) -> ContextLimits:
        """The plan's, with no more slots than so many tokens can fill."""
        if self.model.config.attend_empty_memory:
            return self.plan.context_limits
        return replace(self.plan.context_limits, memory_length=slots_needed(read, self.plan))

    def _rows(self, read: int) -> int:
        """B: places that are side by side when each reads so many tokens."""
        if self.plan.rows is not None:
            return self.plan.rows
        held = sum(tensor.nbytes for tensor in self.model.inference_memory(1, self._reach(read)).tensors().values())
        return max(1, min(_TOKENS_AT_ONCE // min(self.plan.segment, read), _MEMORY_AT_ONCE // held))


@dataclass(frozen=True, eq=False)
class Gains:
    """The comparison of each context with the next longer one, at one fraction r; the last context has none."""

    fraction: float
    places: int
    """How many places that is."""
    nats_C: Losses
    """f(c, c), which is the same for all models: the mean of b over the places chosen."""
    further_nats_IC: Losses
    """f_i(c, c')."""
    gains_IC: Losses
    """g_i(c, c'), never below 0."""

    @staticmethod
    def of(nats_ICP: Losses, fraction: float) -> Gains:
        """From the losses of all models, contexts and places."""
        baseline_CP = nats_ICP.min(axis=0)
        num_contexts, num_places = baseline_CP.shape
        count = max(1, int(fraction * num_places + 0.5))
        hardest_CP = np.argsort(-baseline_CP, axis=1, kind="stable")
        own: list[float] = []
        further: list[Losses] = []
        for index in range(num_contexts - 1):
            chosen_P = hardest_CP[index, :count]
            baseline_P = baseline_CP[index, chosen_P]
            own.append(baseline_P.mean())
            further.append(np.minimum(baseline_P, nats_ICP[:, index + 1].take(chosen_P, axis=1)).mean(axis=-1))
        nats_C, further_nats_IC = np.array(own), np.stack(further, axis=-1)
        # (exp f - exp f') / exp f, without exponentials that could be too large
        return Gains(fraction, count, nats_C, further_nats_IC, 0.0 - np.expm1(further_nats_IC - nats_C))


@dataclass(frozen=True)
class Length:
    """A relative effective context length."""

    tokens: int
    found: bool
    """Whether a gain fell below the threshold; false: the contexts ended before, and the length is this or more."""


@dataclass(frozen=True, eq=False)
class EffectiveContext:
    """What was measured of a group of models."""

    sweep: ContextSweep
    readers: tuple[Reader, ...]
    places_P: npt.NDArray[np.int64]
    nats_ICP: Losses
    """l_i(c, t) of all models, contexts and places."""
    seconds_I: tuple[float, ...]
    """How long each model took to read."""

    def gains(self, fraction: float) -> Gains:
        """The gains at one fraction."""
        return Gains.of(self.nats_ICP, fraction)

    def lengths(self, gains: Gains) -> list[Length]:
        """The relative effective context length of each model.

        A model without memory is given no more than it can see, where that is less than the context found.
        """
        return [
            _length(gains_C, self.sweep, reader.sees_at_most)
            for reader, gains_C in zip(self.readers, gains.gains_IC, strict=True)
        ]

    def as_dict(self) -> dict[str, Any]:
        """By name, for JSON."""
        sweep, measured = self.sweep, [self.gains(fraction) for fraction in self.sweep.fractions]
        fractions = {f"{gains.fraction:g}": gains for gains in measured}
        return {
            "contexts": list(sweep.contexts),
            "step": sweep.step,
            "threshold": sweep.threshold,
            "seed": sweep.seed,
            "positions": self.places_P.tolist(),
            "baseline": {
                name: {"places": gains.places, "nats_per_token": gains.nats_C.tolist()}
                for name, gains in fractions.items()
            },
            "models": [self._model(index, fractions) for index in range(len(self.readers))],
        }

    def _model(self, index: int, fractions: dict[str, Gains]) -> dict[str, Any]:
        reader, found = self.readers[index], dict[str, Any]()
        for name, gains in fractions.items():
            length = self.lengths(gains)[index]
            found[name] = {
                "effective_context_tokens": length.tokens,
                "fell_below_threshold": length.found,
                "further_nats_per_token": gains.further_nats_IC[index].tolist(),
                "gains": gains.gains_IC[index].tolist(),
            }
        plan = reader.plan
        return {
            "name": reader.name,
            "parameters": reader.model.num_parameters(),
            "segment": plan.segment,
            "memory": plan.context_limits.memory_length,
            "window": plan.context_limits.attention_window,
            "clamp": plan.context_limits.clamp_length,
            "sees_at_most": reader.sees_at_most,
            "tokens_read": reader.cost(self.sweep),
            "seconds": self.seconds_I[index],
            "nats_per_token": self.nats_ICP[index].mean(axis=-1).tolist(),
            "fractions": found,
        }


def _length(gains_C: Losses, sweep: ContextSweep, sees_at_most: int | None) -> Length:
    for context, gain in zip(sweep.contexts, gains_C.tolist(), strict=False):
        if gain < sweep.threshold:
            return Length(min(context, sees_at_most or context), found=True)
    return Length(sweep.contexts[-1], found=False)


def measure_context(
    readers: Sequence[Reader], tokens_K: Tokens, sweep: ContextSweep, progress: Progress | None = None
) -> EffectiveContext:
    """Measures the relative effective context length of each model of a group, all at the same places of one text.

    All contexts are read, also those beyond a length that is found: the curve of gains needs them.

    Args:
        readers: the models, of one vocabulary; they are in evaluation mode.
        tokens_K: the text.
        sweep: which contexts, places, fractions and threshold.
        progress: told how many tokens were read, of all models together.

    Raises:
        UserError: a text too short, weights that are not numbers, or a reach that a model does not have.
    """
    places_P = sweep.places(len(tokens_K))
    for reader in readers:
        check_weights(reader.model)
    shape = (len(readers), len(sweep.contexts), len(places_P))
    nats_ICP, seconds = np.empty(shape), list[float]()
    for nats_CP, reader in zip(nats_ICP, readers, strict=True):
        start = time.perf_counter()
        for nats_P, context in zip(nats_CP, sweep.contexts, strict=True):
            nats_P[:] = reader.nats(tokens_K, places_P, context, progress)
        seconds.append(time.perf_counter() - start)
    return EffectiveContext(sweep, tuple(readers), places_P, nats_ICP, tuple(seconds))
