"""Relative effective context length: how far back text still helps each of several models (paper section 4.4).

l_i(c, t) is model i's loss of token t when it sees the c tokens before it and nothing else. With c' = c + step:

    b(c, t)    = min over the models of l_i(c, t)
    T(r, c)    = the fraction r of the positions with the largest b(c, t), chosen anew for each c
    f_i(c, c') = mean over T(r, c) of min(b(c, t), l_i(c', t))
    g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)

Starting at a short c, c grows by one step while g_i is at or above a threshold; the first c with a smaller gain is the
length. It is relative because a model gains only where it improves on the best of the group: a model that uses a short
context badly gains nothing by catching up. Where the paper leaves it open: the number of chosen positions is r times
all of them, rounded, at least one; of equal losses, the one earlier in the text counts as larger.

Shape suffixes: I models, C context lengths, P positions in the text, B batch size, T new tokens, S tokens of a context
and its target, D model width, K tokens of the text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from transformer_xl.config import INT32_MAX, EvaluationConfig, RelativeConfig, UserError, check_settings
from transformer_xl.device import choose_device
from transformer_xl.evaluation.evaluate import check_weights
from transformer_xl.evaluation.memory import memory_slots
from transformer_xl.evaluation.plan import EvaluationPlan, ProgressCallback, compute_context
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits
from transformer_xl.run_folder import RunFolder
from transformer_xl.text.token_store import Tokens
from transformer_xl.text.tokenizers import fingerprint

_TOKENS_PER_STEP = 4096  # over the whole batch: enough to keep a machine busy
_MEMORY_BYTES = 2**29  # most bytes of memory for the sequences of one batch

Losses = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ContextSweep:
    """Which context lengths are compared, at how many positions of a text, and what counts as a gain."""

    min_context: int = 100
    """The shortest context, in tokens."""
    context_step: int = 100
    """How many tokens longer each context is than the one before."""
    max_context: int = 1000
    """The upper limit of the context, in tokens."""
    num_positions: int = 1000
    """Number of positions drawn from the text; each has `max_context` tokens before it."""
    seed: int = 1
    """Seed of that draw."""
    fractions: tuple[float, ...] = (0.1, 0.5, 1.0)
    """r: shares of the positions that count, those that are hardest to predict."""
    threshold: float = 0.01
    """Smallest relative gain in perplexity that counts."""

    def __post_init__(self) -> None:
        for name in ("context_step", "min_context", "max_context", "num_positions"):
            if not 1 <= getattr(self, name) <= INT32_MAX:
                raise UserError(f"{name} {getattr(self, name):,}: wanted 1 or more, {INT32_MAX:,} at most")
        if not 0 <= self.seed <= INT32_MAX:
            raise UserError(f"seed {self.seed}: wanted 0 or more, {INT32_MAX:,} at most")
        names = [f"{fraction:g}" for fraction in self.fractions]
        given = ",".join(names) or "(none)"
        if not names or not all(0 < fraction <= 1 for fraction in self.fractions):
            raise UserError(f"fractions {given}: wanted numbers above 0 and up to 1, such as 0.1,0.5,1.0")
        if len(set(names)) < len(names):
            raise UserError(f"fractions {given}: wanted each number once")
        if not 0 < self.threshold < 1:
            raise UserError(f"threshold {self.threshold:g}: wanted a number above 0 and below 1, such as 0.01")
        if self.max_context < self.min_context + self.context_step:
            raise UserError(
                f"max_context {self.max_context:,} leaves nothing to compare with min_context {self.min_context:,}; "
                f"wanted {self.min_context + self.context_step:,} (min_context + context_step) or more"
            )

    @property
    def contexts(self) -> tuple[int, ...]:
        """The context lengths c, increasing."""
        return tuple(range(self.min_context, self.max_context + 1, self.context_step))

    def draw_positions(self, num_tokens: int) -> npt.NDArray[np.int64]:
        """Draw the positions t whose tokens are predicted, without replacement, in increasing order; (P,).

        Raises:
            UserError: too few positions of a text of `num_tokens` tokens have the longest context before them.
        """
        available = max(0, num_tokens - self.max_context)
        if self.num_positions > available:
            raise UserError(
                f"the text has {num_tokens:,} tokens, of which {available:,} have {self.max_context:,} before them, "
                f"and num_positions is {self.num_positions:,}; give a smaller num_positions or max_context, or a "
                "longer text"
            )
        drawn_P = np.random.default_rng(self.seed).choice(available, self.num_positions, replace=False)
        return np.sort(drawn_P).astype(np.int64) + self.max_context


@dataclass(frozen=True, eq=False)
class GroupModel:
    """A model of the group, and how its context is read."""

    name: str
    model: LanguageModel
    plan: EvaluationPlan
    """Segment length, context limits, dtype and batch size are used, the other fields are not."""

    @property
    def max_visible_tokens(self) -> int | None:
        """Most tokens before the predicted one that this model can see; None: no limit.

        A model without memory sees those of its segment.
        """
        return None if self.plan.context_limits.memory_length else self.plan.segment_length

    def tokens_read(self, context: int) -> int:
        """Return how many tokens the model reads when it may see `context` of them."""
        return min(context, self.max_visible_tokens or context)

    def cost(self, sweep: ContextSweep) -> int:
        """Return how many tokens the model reads for the whole sweep."""
        return sweep.num_positions * sum(self.tokens_read(context) for context in sweep.contexts)

    def nats(
        self,
        tokens_K: Tokens,
        positions_P: npt.NDArray[np.int64],
        context: int,
        progress: ProgressCallback | None = None,
    ) -> Losses:
        """Return l_i(c, t): the loss of each target token given the `context` tokens before it alone; (P,).

        Every position starts from an empty memory. The tokens read end with a whole segment, so that the target follows
        the segment's last position, which sees most; the first segment takes the remainder.

        Args:
            tokens_K: the text.
            positions_P: positions of the targets; each has at least `context` tokens before it.
            context: c, in tokens.
            progress: called with the number of tokens read since the last call.
        """
        model, segment = self.model, self.plan.segment_length
        device, num_read = next(model.parameters()).device, self.tokens_read(context)
        context_limits, batch_size = self._context_limits(num_read), self._batch_size(num_read)
        first = (num_read - 1) % segment + 1
        losses: list[torch.Tensor] = []
        for positions_B in np.array_split(positions_P, -(-len(positions_P) // batch_size)):
            tokens_BS = torch.from_numpy(tokens_K[positions_B[:, None] + np.arange(-num_read, 1)].astype(np.int64))
            with compute_context(device, self.plan.dtype):
                segments = tokens_BS[:, :-1].to(device).split([first] + [segment] * ((num_read - 1) // segment), dim=1)
                hidden_BTD, memory = model(segments[0], model.inference_memory(len(positions_B), context_limits))
                for tokens_BT in segments[1:]:
                    hidden_BTD, memory = model(tokens_BT, memory)
                losses.append(model.nats(hidden_BTD[:, -1:], tokens_BS[:, -1:]).flatten())
            if progress:
                progress(len(positions_B) * num_read)
        return torch.cat(losses).cpu().double().numpy()

    def estimate_seconds(self, sweep: ContextSweep, tokens_K: Tokens, positions_P: npt.NDArray[np.int64]) -> float:
        """Estimate how long the sweep will take, by timing one batch at a context of middle length."""
        context = sweep.contexts[len(sweep.contexts) // 2]
        timed_P = positions_P[: self._batch_size(self.tokens_read(context))]
        self.nats(tokens_K, timed_P[:1], context)  # the first call also pays for one-time work
        start = time.perf_counter()
        self.nats(tokens_K, timed_P, context)
        seconds = time.perf_counter() - start
        return seconds * self.cost(sweep) / (len(timed_P) * self.tokens_read(context))

    def _context_limits(self, num_read: int) -> ContextLimits:
        """Return the plan's limits, with no more memory slots than `num_read` tokens can fill."""
        return replace(self.plan.context_limits, memory_length=memory_slots(self.model, num_read, self.plan))

    def _batch_size(self, num_read: int) -> int:
        """Return B: positions computed at once when each reads `num_read` tokens."""
        if self.plan.batch_size is not None:
            return self.plan.batch_size
        memory = self.model.inference_memory(1, self._context_limits(num_read))
        memory_bytes = sum(tensor.nbytes for tensor in memory.tensors().values())
        return max(1, min(_TOKENS_PER_STEP // min(self.plan.segment_length, num_read), _MEMORY_BYTES // memory_bytes))


@dataclass(frozen=True, eq=False)
class Gains:
    """The gain of each context over the next longer one, at one fraction r; the last context has none."""

    fraction: float
    num_positions: int
    """How many positions that is."""
    nats_C: Losses
    """f(c, c), which is the same for all models: the mean of b over the chosen positions."""
    further_nats_IC: Losses
    """f_i(c, c')."""
    gains_IC: Losses
    """g_i(c, c'), never below 0."""

    @staticmethod
    def of(nats_ICP: Losses, fraction: float) -> Gains:
        """Compute the gains from the losses of all models, contexts and positions."""
        baseline_CP = nats_ICP.min(axis=0)
        num_contexts, num_positions = baseline_CP.shape
        count = max(1, int(fraction * num_positions + 0.5))
        hardest_CP = np.argsort(-baseline_CP, axis=1, kind="stable")
        own: list[float] = []
        further: list[Losses] = []
        for index in range(num_contexts - 1):
            chosen_P = hardest_CP[index, :count]
            baseline_P = baseline_CP[index, chosen_P]
            own.append(baseline_P.mean())
            further.append(np.minimum(baseline_P, nats_ICP[:, index + 1].take(chosen_P, axis=1)).mean(axis=-1))
        nats_C, further_nats_IC = np.array(own), np.stack(further, axis=-1)
        # (exp f - exp f') / exp f, without exponentials that could overflow
        return Gains(fraction, count, nats_C, further_nats_IC, 0.0 - np.expm1(further_nats_IC - nats_C))


@dataclass(frozen=True)
class EffectiveLength:
    """A relative effective context length."""

    tokens: int
    found: bool
    """Whether a gain fell below the threshold; False: the sweep ended first, and the length is at least `tokens`."""


@dataclass(frozen=True, eq=False)
class EffectiveContext:
    """Losses of a group of models, and the gains and lengths computed from them."""

    sweep: ContextSweep
    models: tuple[GroupModel, ...]
    positions_P: npt.NDArray[np.int64]
    nats_ICP: Losses
    """l_i(c, t) of all models, contexts and positions."""
    seconds_I: tuple[float, ...]
    """Seconds that each model took."""

    def gains(self, fraction: float) -> Gains:
        """Return the gains at one fraction."""
        return Gains.of(self.nats_ICP, fraction)

    def lengths(self, gains: Gains) -> list[EffectiveLength]:
        """Return the relative effective context length of each model.

        The length of a model without memory is at most the number of tokens it can see.
        """
        return [
            _length(gains_C, self.sweep, model.max_visible_tokens)
            for model, gains_C in zip(self.models, gains.gains_IC, strict=True)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain values, for JSON."""
        sweep, measured = self.sweep, [self.gains(fraction) for fraction in self.sweep.fractions]
        fractions = {f"{gains.fraction:g}": gains for gains in measured}
        return {
            "contexts": list(sweep.contexts),
            "context_step": sweep.context_step,
            "threshold": sweep.threshold,
            "seed": sweep.seed,
            "positions": self.positions_P.tolist(),
            "baseline": {
                name: {"num_positions": gains.num_positions, "nats_per_token": gains.nats_C.tolist()}
                for name, gains in fractions.items()
            },
            "models": [self._model(index, fractions) for index in range(len(self.models))],
        }

    def _model(self, index: int, fractions: dict[str, Gains]) -> dict[str, Any]:
        model, found = self.models[index], dict[str, Any]()
        for name, gains in fractions.items():
            length = self.lengths(gains)[index]
            found[name] = {
                "effective_context_tokens": length.tokens,
                "fell_below_threshold": length.found,
                "further_nats_per_token": gains.further_nats_IC[index].tolist(),
                "gains": gains.gains_IC[index].tolist(),
            }
        plan = model.plan
        return {
            "name": model.name,
            "parameters": model.model.num_parameters(),
            "segment_length": plan.segment_length,
            "memory_length": plan.context_limits.memory_length,
            "attention_window": plan.context_limits.attention_window,
            "clamp_length": plan.context_limits.clamp_length,
            "max_visible_tokens": model.max_visible_tokens,
            "tokens_read": model.cost(self.sweep),
            "seconds": self.seconds_I[index],
            "nats_per_token": self.nats_ICP[index].mean(axis=-1).tolist(),
            "fractions": found,
        }


def _length(gains_C: Losses, sweep: ContextSweep, max_visible_tokens: int | None) -> EffectiveLength:
    for context, gain in zip(sweep.contexts, gains_C.tolist(), strict=False):
        if gain < sweep.threshold:
            return EffectiveLength(min(context, max_visible_tokens or context), found=True)
    return EffectiveLength(sweep.contexts[-1], found=False)


def load_group(
    runs: Mapping[str, Path],
    *,
    memory_length: int | None = None,
    attention_window: int | Literal["none"] | None = None,
    clamp_length: int | Literal["none"] | None = None,
    device: str = "auto",
) -> list[GroupModel]:
    """Load the models of a group. Each reads with its run's evaluation settings, except for those given here.

    Settings that a model does not have are ignored for that model.

    Args:
        runs: run folders by the name of the model.
        memory_length: memory slots, in tokens.
        attention_window: keys that a query sees, itself included; none: all.
        clamp_length: distances above this count as this one; none: all differ.
        device: auto, cuda, mps or cpu.

    Raises:
        UserError: no such run or device, a number out of range, or runs with different tokenizers.
    """
    folders = {name: RunFolder.open(path) for name, path in runs.items()}
    first = next(iter(folders.values()))
    for folder in folders.values():
        if fingerprint(folder.tokenizer) != fingerprint(first.tokenizer):
            (one, two) = (f"{run.tokenizer.kind}, {run.tokenizer.vocab_size:,} tokens" for run in (folder, first))
            raise UserError(
                f"{folder.path} has another tokenizer ({one}) than {first.path} ({two}); give runs with the same "
                "tokenizer"
            )
    models: list[GroupModel] = []
    for name, folder in folders.items():
        given: dict[str, int | str | None] = {"memory_length": memory_length} if folder.config.model.has_memory else {}
        if isinstance(folder.config.model, RelativeConfig):
            given |= {"attention_window": attention_window, "clamp_length": clamp_length}
        limits = {key: None if value == "none" else value for key, value in given.items() if value is not None}
        config = check_settings(EvaluationConfig, limits, "context limits")
        model = folder.load_model(choose_device(device))
        models.append(GroupModel(name, model, EvaluationPlan.resolve(folder.config, config)))
    return models


def measure_context(
    models: Sequence[GroupModel], tokens_K: Tokens, sweep: ContextSweep, progress: ProgressCallback | None = None
) -> EffectiveContext:
    """Measure the relative effective context length of each model of a group, at the same positions of one text.

    All contexts are read, also those beyond a length that was found: the curve of gains needs them.

    Args:
        models: the models of the group, in evaluation mode; they share one vocabulary.
        tokens_K: the text.
        sweep: contexts, number of positions, fractions and threshold.
        progress: called with the number of tokens read since the last call, by all models together.

    Raises:
        UserError: a text that is too short, weights that are not finite, or context limits that a model does not have.
    """
    positions_P = sweep.draw_positions(len(tokens_K))
    for model in models:
        check_weights(model.model)
    shape = (len(models), len(sweep.contexts), len(positions_P))
    nats_ICP, seconds = np.empty(shape), list[float]()
    for nats_CP, model in zip(nats_ICP, models, strict=True):
        start = time.perf_counter()
        for nats_P, context in zip(nats_CP, sweep.contexts, strict=True):
            nats_P[:] = model.nats(tokens_K, positions_P, context, progress)
        seconds.append(time.perf_counter() - start)
    return EffectiveContext(sweep, tuple(models), positions_P, nats_ICP, tuple(seconds))
