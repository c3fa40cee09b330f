"""Callbacks, which training calls at each step: the base class, what they see of the trainer, and the progress bar."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from pydantic import Field
from typing_extensions import override

from transformer_xl.config import Settings, TrainConfig
from transformer_xl.files import quoted
from transformer_xl.progress import ProgressBar, note, say
from transformer_xl.text.segments import DatasetPosition

if TYPE_CHECKING:
    from transformer_xl.model.language_model import LanguageModel
    from transformer_xl.run_folder import RunFolder
    from transformer_xl.training.distributed import DistributedContext

Metrics = dict[str, Any]
"""One line of metrics.jsonl: split, step, nats_per_token and other metrics by name."""


class TrainerState(Settings):
    """The progress of training, the same in all processes, as checkpoints have it."""

    RETIRED: ClassVar[Mapping[str, Any]] = {"part": 0}

    step: int = Field(default=0, ge=0)
    """Optimizer steps done."""
    position: DatasetPosition = DatasetPosition()
    """The segment that is trained on next."""
    validation_step: int = Field(default=0, ge=0)
    """Step of the last validation."""
    validation_nats: float | None = None
    """Loss of the last validation, in nats per token."""
    best_nats: float | None = None
    """Lowest validation loss so far, in nats per token."""
    validation_text: str | None = None
    """Identifies the validation text of `best_nats` (see `Validator.text_id`)."""
    interval_nats: float = 0.0
    """Sum of the losses since the last line of training metrics, in nats."""
    interval_tokens: int = 0
    """Number of targets since the last line of training metrics."""
    interval_grad_norm: float = 0.0
    """Largest gradient norm since the last line of training metrics."""
    seconds: float = 0.0
    """Total training time so far, in seconds."""


class StepSums(NamedTuple):
    """The sums of one step over all processes."""

    step: int
    """The step, from 1."""
    nats: float
    """Sum of the losses in nats."""
    num_targets: int
    """Number of targets in the loss."""
    grad_norm: float
    """Gradient norm before clipping."""
    num_tokens: int
    """Number of tokens read."""


class TrainerView(Protocol):
    """What callbacks see of the trainer."""

    state: TrainerState
    model: LanguageModel
    config: TrainConfig
    folder: RunFolder
    world: DistributedContext

    @property
    def epochs(self) -> float:
        """How often training has read its text."""

    def stop(self, *, skip_validation: bool = False) -> None:
        """End training after the current step, with a checkpoint."""

    def warn(self, message: str) -> None:
        """Tell all callbacks what the user should know."""


class Callback:
    """Base class of callbacks. Override the methods you need; each returns None.

    Each method gets the trainer: `trainer.state` contains the progress, `trainer.model` and `trainer.config` the
    model and its settings, and `trainer.stop()` ends training after the current step, with a checkpoint. Under
    torchrun every process runs its own callbacks, which get the same metrics; `trainer.world.is_first` is true in
    one process only. `trainer.stop()` takes effect in all processes, a few steps later. An error that a method raises
    in all processes at the same step ends training at once, without a checkpoint.
    """

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Training begins or resumes, at `trainer.state.step`."""

    def on_step(self, trainer: TrainerView, num_tokens: int) -> None:
        """A step was queued on the device; all processes together trained on `num_tokens` tokens in this step."""

    def on_step_sums(self, trainer: TrainerView, sums: StepSums) -> None:
        """The losses of a step are known, one step later and before anything is saved after it."""

    def on_validation_progress(self, trainer: TrainerView, num_scored: int, num_tokens: int) -> None:
        """`num_scored` of the `num_tokens` tokens of the validation text are scored."""

    def on_metrics(self, trainer: TrainerView, metrics: Metrics) -> None:
        """A line of metrics was measured: `metrics["split"]` is "train" or "valid"."""

    def on_warning(self, trainer: TrainerView, message: str) -> None:
        """Training seems to diverge or overfit: `message` says what was seen and what to do. Called once a time."""

    def on_stop(self, trainer: TrainerView) -> None:
        """Training stops early: its checkpoint is written, and its last weights are validated next."""

    def on_train_end(self, trainer: TrainerView) -> None:
        """Training ended: it is finished, was stopped, or failed with an error."""


class ProgressBarCallback(Callback):
    """Shows training on a progress bar, with the newest metrics."""

    def __init__(self) -> None:
        """Prepare the callback; the bar is created when training begins."""
        self._bar: ProgressBar | None = None
        self._metrics = {"train": "", "valid": "", "step": ""}
        self._num_tokens = 0

    @override
    def on_train_begin(self, trainer: TrainerView) -> None:
        self._bar = ProgressBar("train", trainer.config.max_steps, "steps").__enter__()
        self._bar.begin_at(trainer.state.step)

    @override
    def on_step(self, trainer: TrainerView, num_tokens: int) -> None:
        assert self._bar is not None
        self._num_tokens += num_tokens
        rate = self._num_tokens / max(1e-9, self._bar.seconds)
        self._bar.advance(1, f"{''.join(self._metrics.values())}{rate:,.0f} tokens/s")

    @override
    def on_validation_progress(self, trainer: TrainerView, num_scored: int, num_tokens: int) -> None:
        assert self._bar is not None
        self._bar.advance(0, f"validation, {num_scored:,} of {num_tokens:,} tokens")

    @override
    def on_metrics(self, trainer: TrainerView, metrics: Metrics) -> None:
        nats = metrics["nats_per_token"]
        quality = f"{nats:.3f} nats, {nats / math.log(2):.3f} bits/token, "
        if metrics["split"] == "train":
            self._metrics["train"] = f"loss {quality}"
            self._metrics["step"] = f"grad norm {metrics['grad_norm']:.2g}, lr {metrics['learning_rate']:.2g}, "
        else:
            self._metrics["valid"] = f"valid {quality}"

    @override
    def on_warning(self, trainer: TrainerView, message: str) -> None:
        note(message)

    @override
    def on_stop(self, trainer: TrainerView) -> None:
        say(
            f"saved step {trainer.state.step:,} (txl train --resume {quoted(trainer.folder.path)} continues there); "
            "validating its weights, Ctrl-C again skips that and loses nothing"
        )

    @override
    def on_train_end(self, trainer: TrainerView) -> None:
        if self._bar is not None:
            self._bar.__exit__()
