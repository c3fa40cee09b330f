"""Training that diverges is reported once, when that begins, and stopped when it is lost; other training is not.

Shape suffixes: B batch rows, T tokens of a segment, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from training_runs import letters_corpus, lines_of, make_corpus, names_in, reopened, start, train_until
from typing_extensions import override

from transformer_xl import UserError, train
from transformer_xl.config import TrainConfig
from transformer_xl.training.callbacks import Callback, StepSums
from transformer_xl.training.health import DivergenceState, HealthCallback
from transformer_xl.training.trainer import Trainer

STEPS = 600
RANDOM = np.random.default_rng(1)
NOISE = RANDOM.normal(0, 0.1, STEPS)  # about that of 512 bytes of text
LEARNING = 1.5 + 4 * np.exp(-np.arange(STEPS) / 60)
NORMS = 0.6 * np.exp(RANDOM.normal(0, 0.3, STEPS))


def after(step: int, value: float) -> np.ndarray:
    """Return the value from this step on, and 0 before it."""
    return np.where(np.arange(1, STEPS + 1) >= step, value, 0.0)


def changes(
    tmp_path: Path, losses: Sequence[float] | np.ndarray, norms: Sequence[float] | np.ndarray = NORMS
) -> list[tuple[int, str]]:
    """Return the steps at which divergence begins, as it is described, and the step at which the run is lost."""
    config = TrainConfig(max_steps=STEPS, warmup_steps=50)
    health = HealthCallback(letters_corpus(tmp_path / "corpus"), config)
    found: list[tuple[int, str]] = []
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        num_targets = 1 if step % 97 == 0 else 512  # the last segment of an epoch may be short
        was_diverging = health.state.is_diverging
        health.count(StepSums(step, num_targets * loss, num_targets, norm, num_targets))
        if health.state.is_diverging and not was_diverging:
            found.append((step, health.state.describe()))
        if health.has_learnt_nothing(step):
            found.append((step, "nothing"))
        if health.is_lost:
            return [*found, (step, "lost")]
    return found


@pytest.mark.parametrize(
    ("losses", "norms"),
    [
        (LEARNING + NOISE, NORMS),
        (LEARNING + 3 * NOISE, NORMS),  # a small batch
        (LEARNING + NOISE + after(300, 0.1), NORMS),  # a harder text
        (LEARNING + NOISE + after(300, 5.0) - after(303, 5.0), NORMS),  # three bad batches
        (LEARNING + NOISE, NORMS + after(300, 1e4) - after(301, 1e4)),  # one large gradient, which is clipped
        (LEARNING + NOISE, NORMS * np.linspace(1, 4, STEPS)),  # of a loss that falls
        (LEARNING + NOISE, NORMS * np.where(np.arange(STEPS) < 50, 0.01, 1.0)),  # small gradients in the warm-up
        # sequences of 64 tokens, whose losses are alike in one part of the text, with gradients that grow as they do
        (LEARNING + 3 * NOISE + np.where(np.arange(STEPS) // 80 % 2 == 0, 0.0, 0.6), NORMS * np.linspace(1, 4, STEPS)),
    ],
)
def test_ordinary_training_gives_no_warning(tmp_path: Path, losses: np.ndarray, norms: np.ndarray) -> None:
    assert changes(tmp_path, losses, norms) == []


def test_rise_of_the_loss_is_reported_once_for_each_time(tmp_path: Path) -> None:
    rise = after(300, 0.8) - after(360, 0.8) + after(500, 0.8)  # it comes back at step 360
    first, second = changes(tmp_path, LEARNING + NOISE + rise)
    assert 305 < first[0] < 350
    assert 505 < second[0] < 550
    assert first[1].startswith("the loss has risen to ")
    assert "nats per token, from 1." in first[1]


def test_small_rise_counts_where_the_gradient_norm_grows(tmp_path: Path) -> None:
    """As with Muon at 10 times its best rate: the loss rises by a tenth in 200 steps, and the norm to its triple."""
    rise = 0.1 * np.clip((np.arange(STEPS) - 300) / 200, 0, 1) * LEARNING
    assert changes(tmp_path / "loss", LEARNING + NOISE + rise) == []
    ((step, seen),) = changes(tmp_path, LEARNING + NOISE + rise, NORMS * (1 + 20 * rise))
    assert 400 < step < 560
    assert ", and the gradient norm has grown to" in seen


def test_growth_of_the_gradient_norm_is_reported_once(tmp_path: Path) -> None:
    """As with Muon at 8 times its best rate: from 0.6 to 26."""
    norms = NORMS * np.exp(np.linspace(0, math.log(40), STEPS))
    ((step, seen),) = changes(tmp_path, LEARNING + NOISE, norms)
    assert 350 < step < 550
    assert seen.startswith("the gradient norm has grown to ")


def test_loss_of_single_tokens_is_reported_once(tmp_path: Path) -> None:
    """The text has 26 letters at random, whose entropy is a little below ln 26 = 3.26."""
    assert changes(tmp_path, 3.2 + 2 * np.exp(-np.arange(STEPS) / 20) + NOISE) == [(350, "nothing")]


def test_loss_above_that_of_a_uniform_guess_is_lost(tmp_path: Path) -> None:
    """With 256 tokens that is 5.55. A run that begins above it and falls slowly is not lost."""
    (_, first), (step, last) = changes(tmp_path, LEARNING + NOISE + after(300, 6.0))
    assert "risen" in first
    assert (300 + 60 < step < 480, last) == (True, "lost")  # a tenth of the steps after the mean has risen
    assert changes(tmp_path / "slow", 7 - np.arange(STEPS) / 100 + NOISE) == [(350, "nothing")]
    (_, first), (step, last) = changes(tmp_path / "never below", 6 + NOISE + after(100, 10.0))
    assert "risen" in first
    assert (100 + 60 < step < 220, last) == (True, "lost")


def test_loss_that_has_risen_before_there_was_a_mean_is_lost(tmp_path: Path) -> None:
    """Without a warm-up the first steps can already destroy a model; another begins as high and falls slowly."""
    first, (step, last) = changes(tmp_path, np.where(np.arange(STEPS) < 5, 5.6, 19.5) + NOISE)
    assert "risen" in first[1]
    assert (60 < step < 150, last) == (True, "lost")
    assert changes(tmp_path / "high", 19.5 - np.arange(STEPS) / 300 + NOISE) == [(350, "nothing")]


def test_passage_that_cannot_be_predicted_is_not_lost(tmp_path: Path) -> None:
    """Random bytes among ordinary text: the model adapts to them, and its loss becomes that of a uniform guess."""
    passage = 5.6 + 4.4 * np.exp(-np.maximum(np.arange(STEPS) - 300, 0) / 20)
    losses = np.where(np.arange(STEPS) < 300, LEARNING, passage) + NOISE
    ((_, message),) = changes(tmp_path, losses)
    assert "risen" in message


def test_variance_of_a_token_is_at_first_the_mean_over_all_steps(tmp_path: Path) -> None:
    """A step's loss is the mean of n tokens, so the difference of two steps has the variance of a token times 2 / n."""
    losses = np.array([3.0, 3.5, 3.1])
    health = HealthCallback(letters_corpus(tmp_path / "corpus"), TrainConfig())
    for step, loss in enumerate(losses.tolist(), 1):
        health.count(StepSums(step, 512 * loss, 512, 1.0, 512))
    assert health.state.token_variance == pytest.approx(512 / 2 * np.mean(np.diff(losses) ** 2))


class Warnings(Callback):
    """Records the warnings and their steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.messages: list[str] = []

    @override
    def on_warning(self, trainer: Trainer, message: str) -> None:
        self.steps.append(trainer.state.step)
        self.messages.append(message)


def add_to_losses(trainer: Trainer, function: Callable[[int], float]) -> None:
    """Add a number that depends on the step to all losses that the model computes."""
    nats = trainer.model.nats

    def changed_nats(hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        return nats(hidden_BTD, targets_BT) + function(trainer.state.step + 1)

    trainer.model.nats = changed_nats


def diverging(trainer: Trainer, rise: float) -> Warnings:
    """Let the loss rise at step 60; return the callback that records warnings."""
    warnings = Warnings()
    trainer.callbacks.append(warnings)
    add_to_losses(trainer, lambda step: rise if step >= 60 else 0.0)
    return warnings


SETTINGS: dict[str, Any] = {"max_steps": 130, "checkpoint_interval": 25, "log_interval": 1}


def test_warning_depends_neither_on_logging_nor_on_a_stop(tmp_path: Path) -> None:
    corpus = letters_corpus(tmp_path / "corpus", num_valid=0)
    steps = []
    for log_interval in (1, 50):
        trainer = start(tmp_path / f"{log_interval}", corpus, **SETTINGS | {"log_interval": log_interval})
        warnings = diverging(trainer, 2.0)
        assert trainer.run()
        steps += warnings.steps
        (message,) = warnings.messages
    assert "risen" in message
    assert f"txl train --resume {trainer.folder.path} --train.learning-rate 0.005" in message
    stopped = start(tmp_path / "stopped", corpus, **SETTINGS)
    before = diverging(stopped, 2.0)
    train_until(stopped, 63)
    assert before.steps == []
    resumed = reopened(stopped)
    warnings = diverging(resumed, 2.0)
    resumed.run()
    assert warnings.steps == [steps[0]] == [steps[1]]


def test_lost_run_stops_and_keeps_all(tmp_path: Path) -> None:
    """Checkpoints of the steps 75 and 100 were written; at step 100 that of step 50 is the third newest."""
    path, settings = tmp_path / "run", SETTINGS | {"eval_interval": 20}
    trainer = start(path, letters_corpus(tmp_path / "corpus"), **settings)
    diverging(trainer, 20.0)
    message = (
        r"at step 1\d\d, above that of a uniform guess .* at step (59|60); the best weights are of step [24]0, .*"
        rf"step-00000050 is the last good .* --resume {path} --from 50 --train.learning-rate 0\.001$"
    )
    with pytest.raises(UserError, match=message):
        trainer.run()
    assert names_in(path) == ["step-00000050", "step-00000075", "step-00000100"]
    assert trainer.folder.verify() == []
    lowest, step = min((line["nats_per_token"], line["step"]) for line in lines_of(trainer, "valid"))
    assert trainer.folder.best_known() == (step, lowest)


def test_run_lost_from_its_beginning_keeps_all(tmp_path: Path) -> None:
    """The first validation makes lost weights the best ones, of which the message says nothing."""
    settings = SETTINGS | {"checkpoint_interval": 100, "eval_interval": 25}
    trainer = start(tmp_path / "run", letters_corpus(tmp_path / "corpus"), **settings)
    add_to_losses(trainer, lambda step: 20.0 if step > 3 else 0.0)
    with pytest.raises(UserError, match=r"after 5\.\d* at step \d\. Start a new run .*txl train --find-rate"):
        trainer.run()
    assert trainer.folder.best_known() is not None
    assert names_in(tmp_path / "run") == ["step-00000000"]


def test_resumed_run_that_is_lost_returns_to_where_it_was_resumed(tmp_path: Path) -> None:
    """With its new settings it was never good, and later checkpoints do not replace the good one."""
    trainer = start(tmp_path / "run", letters_corpus(tmp_path / "corpus"), **SETTINGS | {"eval_interval": 10})
    train_until(trainer, 30)
    resumed = reopened(trainer, learning_rate=3.0, checkpoint_interval=10)
    add_to_losses(resumed, lambda step: 20.0 if step > 32 else 0.0)
    message = r"the best weights are of step 30, .*step-00000030 is the last good checkpoint.* --from 30 --train"
    with pytest.raises(UserError, match=message):
        resumed.run()
    assert names_in(tmp_path / "run") == ["step-00000030", "step-00000080", "step-00000090"]


def test_changed_settings_begin_new_statistics(tmp_path: Path) -> None:
    """Losses at another learning rate are not compared with those before."""
    trainer = start(tmp_path / "run", letters_corpus(tmp_path / "corpus", num_valid=0), **SETTINGS)
    warnings = diverging(trainer, 2.0)
    train_until(trainer, 80)
    assert len(warnings.steps) == 1
    assert reopened(trainer).health.state == trainer.health.state
    assert reopened(trainer, learning_rate=0.005).health.state == DivergenceState()


@pytest.mark.parametrize(
    ("num_train", "training_loss", "validation_losses", "expected"),
    [
        (127, 1.0, [2.0, 1.9, 1.93, 1.95, 2.0], [80]),  # once, when it is 2% above the lowest
        (127, 1.0, [2.0, 1.9, 1.8, 1.81, 1.83], []),
        (127, 2.5, [2.0, 1.9, 2.1, 2.2, 2.3], []),  # not learnt by heart: the rate may be too large
        (5000, 1.0, [2.0, 1.9, 2.1, 2.2, 2.3], []),  # read once: a text that has changed
    ],
)
def test_overfitting_is_reported_once(
    tmp_path: Path, num_train: int, training_loss: float, validation_losses: list[float], expected: list[int]
) -> None:
    corpus = letters_corpus(tmp_path / "corpus", num_train)
    trainer = start(tmp_path / "run", corpus, max_steps=100, eval_interval=20, checkpoint_interval=50)
    warnings, nats = Warnings(), trainer.model.nats
    trainer.callbacks.append(warnings)

    def given_nats(hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        loss = training_loss if trainer.model.training else validation_losses[trainer.state.step // 20 - 1]
        return 0 * nats(hidden_BTD, targets_BT) + loss

    trainer.model.nats = given_nats
    assert trainer.run()
    found = [
        (step, message)
        for step, message in zip(warnings.steps, warnings.messages, strict=True)
        if "overfits" in message
    ]
    assert [step for step, _ in found] == expected
    assert all("train.max_epochs=1" in message for _, message in found)


def test_warning_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose rate is too large to learn even two letters that alternate."""
    corpus = make_corpus(tmp_path / "corpus", b"ab" * 2000)
    settings = {"segment_length": 7, "memory_length": 7, "batch_size": 3, "warmup_steps": 5, "learning_rate": 1.0}
    settings |= {"max_steps": 150, "max_grad_norm": 1e9, "dtype": "float32"}
    model = {"n_layers": 1, "d_model": 14, "n_heads": 2, "d_ff": 19}
    train(None, corpus, tmp_path / "run", model=model, train=settings, device="cpu")
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: at step ")]
    assert len(notes) >= 1
    assert "learning rate" in notes[0]
