"""Finds out, from each step's loss and gradient norm, that training diverges or learns nothing.

Three signs of a learning rate that is too large, of which the first two may pass again:

- the loss has risen far above its lowest value,
- the gradient norm (before clipping) is many times its lowest value,
- late in training, the loss is no lower than that of a model that knows only how often each token occurs.

Loss and norm are means over about the last 50 and 20 steps, weighted towards the newest, so that neither a single bad
batch nor a single large gradient counts. The thresholds are so high that a text which changes in the middle of a file
should not reach them: a false alarm would do more harm than none.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from pydantic import Field

from transformer_xl.config import Settings, TrainConfig
from transformer_xl.text.token_store import Corpus

_LOSS_DECAY, _NORM_DECAY = 1 - 1 / 50, 1 - 1 / 20
_MIN_STEPS = 20  # before which the means are those of too few steps
_MIN_RISE, _MIN_RISE_DEVIATIONS = 0.1, 4.0  # of the loss, relative and in standard deviations of one step
_MIN_NORM_RATIO = 10.0  # of the gradient norm to its lowest value
_MIN_NORM_RATIO_OF_RISE, _RISE_FACTOR = 2.0, 0.25
_LEARNT_RATIO = 0.98  # a loss below this fraction of the entropy of single tokens shows that context is used
_MIN_LEARNING_STEPS = 100  # after the warm-up, before which no model is told that it has learnt nothing
# A lost run has long had a loss above that of a uniform guess and above its own lowest, by these factors. A new model
# may begin above a uniform guess; a passage that cannot be predicted raises the loss until the model has adapted to it.
_LOST_RATIO, _LOST_RISE = 1.1, 1.2
_LOST_SHARE, _LOST_STEPS = 0.1, (50, 500)  # for how long: this share of all steps, within limits
_SAMPLE_BLOCKS, _BLOCK_TOKENS = 64, 4096  # of the training text, for the entropy of its tokens


class DivergenceState(Settings):
    """Statistics of the losses and gradient norms of a run, part of its checkpoints."""

    num_steps: int = 0
    """Steps counted."""
    tokens: float = 0.0
    """Sum over the steps of the number of targets, with exponentially decaying weights."""
    nats: float = 0.0
    """The same sum of the losses."""
    last_targets: float = 0.0
    """Number of targets of the last step."""
    last_nats: float = 0.0
    """Loss of the last step, in nats per token."""
    token_variance: float = 0.0
    """Variance of the loss of a token, from the differences between successive steps, which the trend changes little:
    mean of the last steps."""
    num_norms: int = 0
    """Gradient norms counted: those after the warm-up, in which they may be small."""
    mean_log_norm: float = 0.0
    """Mean logarithm of the last gradient norms."""
    lowest_nats: float | None = None
    """Lowest mean loss so far, in nats per token."""
    lowest_step: int = 0
    """The step with the lowest mean loss."""
    lowest_deviation: float = 0.0
    """Standard deviation of the loss of one step, at that step."""
    lowest_norm: float | None = None
    """Lowest mean gradient norm after the warm-up."""
    has_risen: bool = False
    """Whether the loss is far above its lowest value."""
    has_exploded: bool = False
    """Whether the gradient norm is many times its lowest value."""
    num_lost_steps: int = Field(default=0, ge=0)
    """Steps in a row with a mean loss far above that of a uniform guess and above its lowest value."""

    @property
    def mean_nats(self) -> float:
        """Mean loss of the last steps, in nats per token."""
        return self.nats / self.tokens

    @property
    def mean_targets(self) -> float:
        """Mean number of targets of the last steps."""
        return self.tokens * (1 - _LOSS_DECAY) / (1 - _LOSS_DECAY ** max(self.num_steps, 1))

    @property
    def mean_norm(self) -> float:
        """Geometric mean of the gradient norms of the last steps."""
        return math.exp(self.mean_log_norm)

    @property
    def norm_ratio(self) -> float:
        """Mean gradient norm, relative to its lowest value."""
        return 1.0 if self.lowest_norm is None else self.mean_norm / self.lowest_norm

    @property
    def is_diverging(self) -> bool:
        """Whether the loss or the gradient norm is far above its lowest value."""
        return self.has_risen or self.has_exploded

    def describe(self) -> str:
        """Return how training diverges."""
        norm = f"the gradient norm has grown to {self.mean_norm:.3g}, from {self.lowest_norm or 0:.3g}"
        if not self.has_risen:
            return norm
        loss = f"the loss has risen to {self.mean_nats:.3f} nats per token, from {self.lowest_nats:.3f} at step "
        return f"{loss}{self.lowest_step:,}" + (f", and {norm}" if self.norm_ratio > _MIN_NORM_RATIO_OF_RISE else "")


class DivergenceDetector:
    """Tells whether one run diverges; all that changes from step to step is in the `DivergenceState`."""

    def __init__(self, corpus: Corpus, config: TrainConfig) -> None:
        """Prepare for a run.

        Args:
            corpus: the corpus of the run.
            config: settings of its training.
        """
        self._corpus, self._warmup_steps = corpus, config.warmup_steps
        self.uniform_nats = math.log(corpus.tokenizer.vocab_size)
        """Loss of a uniform guess, in nats per token."""
        self._max_lost_steps = min(max(_LOST_STEPS[0], int(_LOST_SHARE * config.max_steps)), _LOST_STEPS[1])
        # a model may stay at the frequencies for a while after the warm-up, and leave them later
        self._learning_step = config.warmup_steps + max(_MIN_LEARNING_STEPS, config.max_steps // 2)

    def update(
        self, state: DivergenceState, step: int, nats: float, num_targets: float, grad_norm: float
    ) -> DivergenceState:
        """Return the statistics with one more step.

        Args:
            state: the statistics of the steps before.
            step: the step, from 1.
            nats: sum of its losses in nats, finite.
            num_targets: number of its targets.
            grad_norm: its gradient norm before clipping, finite.
        """
        state = _count_loss(state, nats, num_targets)
        if step > self._warmup_steps:
            state = _count_norm(state, grad_norm)
        if not state.num_steps:
            return state
        deviation = math.sqrt(state.token_variance / state.mean_targets)
        if state.lowest_nats is None or state.mean_nats < state.lowest_nats:
            lowest = {"lowest_nats": state.mean_nats, "lowest_step": step, "lowest_deviation": deviation}
            state = state.model_copy(update=lowest)
        if state.num_steps < _MIN_STEPS:
            return state
        if state.num_steps == _MIN_STEPS:  # what it was in the first steps comes from too few differences
            state = state.model_copy(update={"lowest_deviation": deviation})
        if state.num_norms >= _MIN_STEPS and (state.lowest_norm is None or state.mean_norm < state.lowest_norm):
            state = state.model_copy(update={"lowest_norm": state.mean_norm})
        assert state.lowest_nats is not None
        # it is over when half of what began it is left, so that an alarm is not repeated at every crossing
        threshold = 0.5 if state.is_diverging else 1.0
        is_lost = state.mean_nats > max(_LOST_RATIO * self.uniform_nats, _LOST_RISE * state.lowest_nats)
        changes = {
            "has_risen": _rise(state) > threshold,
            "has_exploded": state.norm_ratio > threshold * _MIN_NORM_RATIO,
            "num_lost_steps": state.num_lost_steps + 1 if is_lost else 0,
        }
        return state.model_copy(update=changes)

    def has_learnt_nothing(self, state: DivergenceState, step: int) -> bool:
        """Return whether, at the one step where this is judged, the loss is that of frequencies of tokens."""
        is_judged = step == self._learning_step and state.num_steps >= _MIN_STEPS and not state.is_diverging
        return is_judged and state.mean_nats > _LEARNT_RATIO * self.token_entropy

    def is_lost(self, state: DivergenceState) -> bool:
        """Return whether the loss has so long been above that of a uniform guess that it will not come back."""
        return state.num_lost_steps >= self._max_lost_steps

    @cached_property
    def token_entropy(self) -> float:
        """Entropy of single tokens of the training text in nats, from blocks of tokens all over it."""
        tokens = self._corpus.split("train").tokens
        starts = np.linspace(0, max(0, len(tokens) - _BLOCK_TOKENS), _SAMPLE_BLOCKS).astype(int)
        sample = np.concatenate([np.asarray(tokens[start : start + _BLOCK_TOKENS]) for start in starts.tolist()])
        counts = np.unique(sample, return_counts=True)[1]
        fractions = counts / counts.sum()
        return float(-(fractions * np.log(fractions)).sum())


def _rise(state: DivergenceState) -> float:
    """Return the rise of the loss above its lowest value, in units of the smallest that counts."""
    assert state.lowest_nats is not None
    relative = _MIN_RISE * state.lowest_nats
    counts = max(relative, _MIN_RISE_DEVIATIONS * state.lowest_deviation, 1e-30)
    # A text may become harder, but if gradients grow too, a smaller rise counts. Not where the batch is so small that a
    # single step deviates by more: there a passage of the text can raise the loss of many steps.
    if state.norm_ratio > _MIN_NORM_RATIO_OF_RISE and state.lowest_deviation < relative:
        counts *= _RISE_FACTOR
    return (state.mean_nats - state.lowest_nats) / counts


def _count_loss(state: DivergenceState, nats: float, num_targets: float) -> DivergenceState:
    """Add the loss of a step; a step without targets has none."""
    if not num_targets:
        return state
    variance = state.token_variance
    if state.num_steps:
        weight = _weight(_LOSS_DECAY, state.num_steps - 1)  # the first step has no difference from one before
        # the variance of the difference is that of a token, divided by the targets of the one and of the other step
        per_token = num_targets * state.last_targets / (num_targets + state.last_targets)
        variance += weight * (per_token * (nats / num_targets - state.last_nats) ** 2 - variance)
    changes = {
        "num_steps": state.num_steps + 1,
        "tokens": _LOSS_DECAY * state.tokens + num_targets,
        "nats": _LOSS_DECAY * state.nats + nats,
        "last_targets": num_targets,
        "last_nats": nats / num_targets,
        "token_variance": variance,
    }
    return state.model_copy(update=changes)


def _count_norm(state: DivergenceState, grad_norm: float) -> DivergenceState:
    """Add the gradient norm of a step to the mean of logarithms; 0 (of a step without targets) is left out."""
    if not grad_norm:
        return state
    mean = state.mean_log_norm
    mean += _weight(_NORM_DECAY, state.num_norms) * (math.log(grad_norm) - mean)
    return state.model_copy(update={"num_norms": state.num_norms + 1, "mean_log_norm": mean})


def _weight(decay: float, count: int) -> float:
    """Return the weight of a new number in a decaying mean of `count` numbers, at first in their plain mean."""
    return max(1 - decay, 1 / (count + 1))
