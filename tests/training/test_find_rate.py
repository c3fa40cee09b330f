"""`find_learning_rate`: its short trainings are trainings, and the search finds the best rate from any first one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import settings_of
from training_runs import MODEL, TRAIN, letters_corpus, start

from transformer_xl import TrainConfig, UserError, find_learning_rate
from transformer_xl.model.memory import Memory
from transformer_xl.training import find_rate
from transformer_xl.training.batches import read_batch
from transformer_xl.training.distributed import SINGLE_PROCESS

# no time, so trainings have the least number of steps: 8 in the first round; in the second 20, or max_steps if fewer
OPTIONS: dict[str, Any] = {"model": settings_of(**MODEL), "device": "cpu", "seconds": 0.0, "progress": False}


@pytest.mark.parametrize(
    ("num_train", "settings"),
    [
        (800, {"micro_batch_size": 2}),
        (800, {"lr_schedule": "wsd", "decay_steps": 6}),
        (379, {}),  # an epoch has 18 segments, so the scored text begins with the last one
    ],
)
def test_short_training_is_a_training(tmp_path: Path, num_train: int, settings: dict[str, Any]) -> None:
    """In the second round it has all 17 steps, so it must be what the trainer does; 4 segments are scored.

    The lowest rate is checked, because at a high one the model ignores its memory.
    """
    corpus = letters_corpus(tmp_path / "corpus", num_train=num_train, num_valid=0)
    result = find_learning_rate(None, corpus, train=TRAIN | settings, **OPTIONS)
    trial = min((trial for trial in result.trials if trial.steps == 17), key=lambda trial: trial.learning_rate)
    trainer = start(tmp_path / "run", corpus, **settings | {"learning_rate": trial.learning_rate})
    assert trainer.run()
    position, losses = trainer.state.position, list[float]()
    memory = Memory.concatenate(trainer.stepper.memories)
    trainer.model.eval()
    for step in range(17, 21):
        batch = read_batch(trainer.stepper.dataset, position, step, trainer.config, SINGLE_PROCESS)
        memory = trainer.model.initial_memory(3) if batch.batch.is_first else memory
        with torch.no_grad():
            nats_BT, _, memory = trainer.stepper.wrapped_model(
                torch.from_numpy(batch.batch.inputs_BX), batch.batch.targets_BT, memory
            )
        position = batch.next
        losses += nats_BT[torch.from_numpy(batch.batch.loss_mask_BT)].tolist()
    assert trial.nats_per_token == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_short_trainings_are_independent(tmp_path: Path) -> None:
    """The loss of a rate does not depend on the rates before it, nor the caller's random numbers on the search."""
    corpus = letters_corpus(tmp_path / "corpus")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model = settings_of(**MODEL | {"dropout": 0.3})
    losses = []
    for rate in (0.01, 0.04):
        result = find_learning_rate(
            None, corpus, train={**TRAIN, "learning_rate": rate, "max_steps": 50}, **OPTIONS | {"model": model}
        )
        losses.append({(trial.learning_rate, trial.steps): trial.nats_per_token for trial in result.trials})
    shared = losses[0].keys() & losses[1].keys()
    assert len(shared) >= 2
    assert all(losses[0][key] == losses[1][key] for key in shared)
    assert torch.equal(torch.get_rng_state(), state)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


@pytest.mark.parametrize(("optimizer", "exponent"), [("adam", 0.125), ("adamw", 0.125), ("muon", 0.5)])
@pytest.mark.parametrize("first", [1e-4, 0.03, 5.0])
def test_search_finds_the_lowest_loss_and_corrects_for_the_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, exponent: float, first: float
) -> None:
    """With a loss that is lowest at rate 0.03, and not finite above 2."""

    def loss(training: find_rate._Training, _: object) -> float:
        rate = training.config.learning_rate
        return 2 + 0.1 * math.log(rate / 0.03) ** 2 if rate < 2 else math.inf

    monkeypatch.setattr(find_rate._Training, "nats_per_token", loss)
    train = {**TRAIN, "learning_rate": first, "optimizer": optimizer, "max_steps": 2000}
    result = find_learning_rate(None, letters_corpus(tmp_path / "corpus"), train=train, **OPTIONS)
    assert [trial.steps for trial in result.trials[-3:]] == [20] * 3
    assert result.learning_rate == pytest.approx(0.03 * (20 / 2000) ** exponent, rel=0.05)  # has two digits


def test_trainings_leave_unread_text_for_scoring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time would allow thousands of steps. The text has 38 segments: 30 to train on, and 8 to score."""
    epochs = []

    def score(training: find_rate._Training, num_segments: int) -> float:
        found = unpatched(training, num_segments)
        epochs.append(training.stepper.position)
        return found

    unpatched = find_rate._Training._score
    monkeypatch.setattr(find_rate._Training, "_score", score)
    corpus = letters_corpus(tmp_path / "corpus", num_train=3 * 7 * 38, num_valid=0)
    result = find_learning_rate(None, corpus, train={**TRAIN, "max_steps": 5000}, **OPTIONS | {"seconds": 600})
    assert {trial.steps for trial in result.trials} == {30}
    assert all(position.epoch == 0 or position.segment_index == 0 for position in epochs)
    (note,) = result.notes
    assert note.startswith("training reads the text 131.6 times, and these trainings less than once; a lower rate")
    short = letters_corpus(tmp_path / "short", num_train=200, num_valid=0)
    notes = find_learning_rate(None, short, train={**TRAIN, "max_steps": 5000}, **OPTIONS).notes
    assert any("learns it by heart" in note for note in notes)


def test_rates_too_small_to_teach_anything_are_refused(tmp_path: Path) -> None:
    corpus = letters_corpus(tmp_path / "corpus")
    with pytest.raises(UserError, match=r"same at all learning rates from .* begin the search with a larger"):
        find_learning_rate(None, corpus, train={**TRAIN, "learning_rate": 1e-30}, **OPTIONS)


def test_notes_say_what_the_proposal_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is lowest at the highest rate that any search tries."""

    def loss(training: find_rate._Training, _: object) -> float:
        return 3 - 0.1 * math.log(training.config.learning_rate)

    monkeypatch.setattr(find_rate._Training, "nats_per_token", loss)
    train = {**TRAIN, "weight_average": "ema"}
    result = find_learning_rate(None, letters_corpus(tmp_path / "corpus"), train=train, **OPTIONS)
    tried = max(trial.learning_rate for trial in result.trials)
    text = "\n".join(result.notes)
    assert "was the highest of those tried" in text
    assert f"search again with train.learning_rate={tried:.2g}" in text
    assert "without train.weight_average ema" in text


def test_errors_say_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = letters_corpus(tmp_path / "corpus")
    with pytest.raises(UserError, match="97 sequences"):
        find_learning_rate(None, corpus, train={**TRAIN, "batch_size": 97}, **OPTIONS)
    with pytest.raises(UserError, match="ema_decay has no effect"):
        find_learning_rate(None, corpus, train=TrainConfig(**TRAIN, ema_decay=0.5), **OPTIONS)
    with pytest.raises(UserError, match="seconds is of type str"):
        find_learning_rate(None, corpus, train=TRAIN, **OPTIONS | {"seconds": "9"})
    monkeypatch.setattr(find_rate._Training, "step", lambda _: math.nan)
    with pytest.raises(UserError, match=r"not finite at any learning rate from .* to 0\.04; begin .* a smaller"):
        find_learning_rate(None, corpus, train=TRAIN, **OPTIONS)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="in one process; start it without torchrun"):
        find_learning_rate(None, corpus, train=TRAIN, **OPTIONS)
