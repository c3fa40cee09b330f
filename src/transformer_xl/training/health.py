"""Watches the losses and gradient norms of a training: warns, and ends it where nothing can be expected any more.

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
from pydantic import ConfigDict, Field
from typing_extensions import override

from transformer_xl.config import Settings, TrainConfig, UserError
from transformer_xl.files import quoted
from transformer_xl.text.token_store import Corpus
from transformer_xl.training.callbacks import Callback, Metrics, StepSums, TrainerView
from transformer_xl.training.checkpoint import checkpoint_before, step_of

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
_MIN_VALIDATION_RISE = 0.02  # relative, above the lowest validation loss, that is called overfitting


class DivergenceState(Settings):
    """Statistics of the losses and gradient norms of a run, part of its checkpoints; each step changes them."""

    model_config = ConfigDict(frozen=False)

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

    has_overfit: bool = False
    """Whether the validation loss has risen above a lower training loss."""

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


class HealthCallback(Callback):
    """Warns when a training diverges, learns nothing or overfits, and ends it when it is lost.

    Nothing is deleted: what was saved after the last good checkpoint may be wanted for a look at it.
    """

    def __init__(self, corpus: Corpus, config: TrainConfig) -> None:
        """Prepare for a run.

        Args:
            corpus: the corpus of the run.
            config: settings of its training.
        """
        self.state = DivergenceState()
        """The statistics, part of checkpoints."""
        self._corpus, self._warmup_steps = corpus, config.warmup_steps
        self.uniform_nats = math.log(corpus.tokenizer.vocab_size)
        """Loss of a uniform guess, in nats per token."""
        self._max_lost_steps = min(max(_LOST_STEPS[0], int(_LOST_SHARE * config.max_steps)), _LOST_STEPS[1])
        # a model may stay at the frequencies for a while after the warm-up, and leave them later
        self._learning_step = config.warmup_steps + max(_MIN_LEARNING_STEPS, config.max_steps // 2)

    @override
    def on_step_sums(self, trainer: TrainerView, sums: StepSums) -> None:
        step = sums.step
        if not (math.isfinite(sums.nats) and math.isfinite(sums.grad_norm)):
            is_norm = math.isfinite(sums.nats)
            cause = f"gradient norm became {sums.grad_norm}" if is_norm else f"loss became {sums.nats}"
            raise UserError(
                f"the {cause} at step {step}; {trainer.folder.latest_checkpoint()} is the last good checkpoint. Resume "
                f"from it with a lower learning rate: {_resume_slower(trainer)}"
            )
        was_diverging = self.state.is_diverging
        self.count(sums)
        if self.is_lost:
            raise self._lost_error(trainer, step)
        if self.state.is_diverging and not was_diverging:
            trainer.warn(
                f"at step {step:,} {self.state.describe()}; the learning rate is probably too large, unless the text "
                f"is so different here. Stop with Ctrl-C and resume with half of it: {_resume_slower(trainer)}"
            )
        elif self.has_learnt_nothing(step):
            trainer.warn(
                f"at step {step:,} the loss is {self.state.mean_nats:.3f} nats per token, and frequencies of tokens "
                f"alone give {self.token_entropy:.3f}; the learning rate is probably too large, or far too small. Stop "
                "with Ctrl-C and start a new run with another; txl train --find-rate proposes one"
            )

    @override
    def on_metrics(self, trainer: TrainerView, metrics: Metrics) -> None:
        """Warn once when the validation loss has risen above a lower training loss, of a text that was read before."""
        state, nats, best, times_read = self.state, metrics["nats_per_token"], trainer.state.best_nats, trainer.epochs
        if metrics["split"] != "valid" or best is None or state.has_overfit or state.is_diverging:
            return
        # the statistics of the training loss may be new, after resuming
        is_below = state.num_steps > 0 and state.mean_nats < best
        if nats > (1 + _MIN_VALIDATION_RISE) * best and times_read >= 1 and is_below:
            state.has_overfit = True
            trainer.warn(
                f"at step {metrics['step']:,} the validation loss is {nats:.3f} nats per token, above its lowest, "
                f"{best:.3f}, and the training loss {state.mean_nats:.3f}: the model overfits its training text, which "
                f"it has read {times_read:.1f} times. The weights with the lowest loss are kept. Start a new run with "
                "train.max_epochs=1, more text or more regularization (model.dropout)"
            )

    def count(self, sums: StepSums) -> None:
        """Add a step, whose numbers are finite, to the statistics."""
        state = self.state
        if sums.num_targets:
            _count_loss(state, sums)
        if sums.step > self._warmup_steps and sums.grad_norm:  # 0 is that of a step without targets
            weight = _weight(_NORM_DECAY, state.num_norms)
            state.mean_log_norm += weight * (math.log(sums.grad_norm) - state.mean_log_norm)
            state.num_norms += 1
        if not state.num_steps:
            return
        deviation = math.sqrt(state.token_variance / state.mean_targets)
        if state.lowest_nats is None or state.mean_nats < state.lowest_nats:
            state.lowest_nats, state.lowest_step, state.lowest_deviation = state.mean_nats, sums.step, deviation
        if state.num_steps < _MIN_STEPS:
            return
        if state.num_steps == _MIN_STEPS:  # what it was in the first steps comes from too few differences
            state.lowest_deviation = deviation
        if state.num_norms >= _MIN_STEPS and (state.lowest_norm is None or state.mean_norm < state.lowest_norm):
            state.lowest_norm = state.mean_norm
        # it is over when half of what began it is left, so that an alarm is not repeated at every crossing
        threshold = 0.5 if state.is_diverging else 1.0
        is_lost = state.mean_nats > max(_LOST_RATIO * self.uniform_nats, _LOST_RISE * state.lowest_nats)
        state.has_risen, state.has_exploded = _rise(state) > threshold, state.norm_ratio > threshold * _MIN_NORM_RATIO
        state.num_lost_steps = state.num_lost_steps + 1 if is_lost else 0

    def has_learnt_nothing(self, step: int) -> bool:
        """Return whether, at the one step where this is judged, the loss is that of frequencies of tokens."""
        is_judged = step == self._learning_step and self.state.num_steps >= _MIN_STEPS and not self.state.is_diverging
        return is_judged and self.state.mean_nats > _LEARNT_RATIO * self.token_entropy

    @property
    def is_lost(self) -> bool:
        """Whether the loss has so long been above that of a uniform guess that it will not come back."""
        return self.state.num_lost_steps >= self._max_lost_steps

    @cached_property
    def token_entropy(self) -> float:
        """Entropy of single tokens of the training text in nats, from blocks of tokens all over it."""
        tokens = self._corpus.split("train").tokens
        starts = np.linspace(0, max(0, len(tokens) - _BLOCK_TOKENS), _SAMPLE_BLOCKS).astype(int)
        sample = np.concatenate([np.asarray(tokens[start : start + _BLOCK_TOKENS]) for start in starts.tolist()])
        counts = np.unique(sample, return_counts=True)[1]
        fractions = counts / counts.sum()
        return float(-(fractions * np.log(fractions)).sum())

    def _lost_error(self, trainer: TrainerView, step: int) -> UserError:
        """Return the error that ends a lost run: it says what is good and how to go on."""
        state, folder = self.state, trainer.folder
        with trainer.world.raise_together():
            good, best = checkpoint_before(folder, state.lowest_step), folder.best_known()
        said = (
            f"the loss is {state.mean_nats:.3f} nats per token at step {step:,}, above that of a uniform guess for "
            f"{state.num_lost_steps} steps, after {state.lowest_nats:.3f} at step {state.lowest_step:,}"
        )
        if best is not None and best[1] <= self.uniform_nats:
            said += f"; the best weights are of step {best[0]:,}, with a validation loss of {best[1]:.3f}"
        if good is None or (step_of(good) == 0 and folder.config.finetune is None):
            return UserError(
                f"{said}. Start a new run with a much lower learning rate; txl train --find-rate, with the same "
                "settings, proposes one"
            )
        return UserError(
            f"{said}; {good} is the last good checkpoint. Go back to it with a much lower learning rate: "
            f"{_resume_slower(trainer, 10, step_of(good))}"
        )


def _resume_slower(trainer: TrainerView, factor: float = 2, from_step: int | None = None) -> str:
    """Return the command that resumes a run, perhaps from an earlier step, with a lower learning rate."""
    rate, step = trainer.config.learning_rate / factor, "" if from_step is None else f" --from {from_step}"
    return f"txl train --resume {quoted(trainer.folder.path)}{step} --train.learning-rate {rate:g}"


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


def _count_loss(state: DivergenceState, sums: StepSums) -> None:
    """Add the loss of a step with targets."""
    nats_per_token = sums.nats / sums.num_targets
    if state.num_steps:
        weight = _weight(_LOSS_DECAY, state.num_steps - 1)  # the first step has no difference from one before
        # the variance of the difference is that of a token, divided by the targets of the one and of the other step
        per_token = sums.num_targets * state.last_targets / (sums.num_targets + state.last_targets)
        state.token_variance += weight * (per_token * (nats_per_token - state.last_nats) ** 2 - state.token_variance)
    state.num_steps += 1
    state.tokens = _LOSS_DECAY * state.tokens + sums.num_targets
    state.nats = _LOSS_DECAY * state.nats + sums.nats
    state.last_targets, state.last_nats = sums.num_targets, nats_per_token


def _weight(decay: float, count: int) -> float:
    """Return the weight of a new number in a decaying mean of `count` numbers, at first in their plain mean."""
    return max(1 - decay, 1 / (count + 1))
