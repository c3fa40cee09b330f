"""Killed at a bad moment, a run keeps its newest checkpoint, its best weights, and figures that are shown once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from training_runs import letters, make_corpus, reopened, start, train_until
from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.run_folder import CheckpointRecord
from transformer_xl.tensor_file import load_tensors, save_tensors
from transformer_xl.training.callbacks import Callback
from transformer_xl.training.checkpoint import save_checkpoint
from transformer_xl.training.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "eval_interval": 3,
    "checkpoint_interval": 4,
    "log_interval": 1,
    "max_steps": 13,
    "learning_rate": 0.01,
}


class Killed(Exception):
    """As if the process were gone."""


def begin(place: Path, **changed: Any) -> Trainer:
    corpus = make_corpus(place.parent / f"{place.name} corpus", letters(127, seed=1), letters(41, seed=2))
    return start(place, corpus, **{**SETTINGS, **changed})


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_checkpoint_replaced_by_one_of_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Killed anywhere in it, a whole checkpoint is there, and what is left aside goes with the next save."""
    training = begin(tmp_path / "run")
    train_until(training, 8)
    states, rename, rmtree = tmp_path / "run" / "checkpoints", Path.rename, shutil.rmtree
    seen: list[str] = []

    def renamed(path: Path, target: Path) -> Path:
        seen.append(target.name)
        if moment == "before" and target.name == ".step-00000008.partial-old":
            raise Killed
        if moment == "between" and target.name == "step-00000008":
            raise Killed
        return rename(path, target)

    def removed(path: Path, **given: Any) -> None:
        if moment == "after" and Path(path).name == ".step-00000008.partial-old":
            assert (states / "step-00000008").is_dir()
            raise Killed
        rmtree(path, **given)

    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(shutil, "rmtree", removed)
    with pytest.raises(Killed):
        save_checkpoint(training.folder, training)
    monkeypatch.undo()
    newest = training.folder.latest_checkpoint()
    assert newest is not None
    assert newest.name == ("step-00000004" if moment == "between" else "step-00000008")
    CheckpointRecord.read(newest).verify(newest)
    assert len(list(states.glob(".*.partial-*"))) == (2 if moment == "between" else 1)
    training = reopened(training)
    train_until(training, 9)
    assert not list(states.glob(".*"))
    assert training.folder.checkpoints()[-1].name == "step-00000009"


def crash_after_a_better_validation(training: Trainer) -> None:
    """At step 11 only the checkpoint of step 8 is there, and the best weights are of the validation at step 9."""
    train_until(training, 11)
    shutil.rmtree(training.folder.path / "checkpoints" / "step-00000011")
    assert training.folder.latest_checkpoint() == training.folder.path / "checkpoints" / "step-00000008"
    known = training.folder.best_known()
    assert known is not None
    assert known == (9, training.state.best_nats)


def test_the_best_weights_of_a_crashed_run_are_to_be_beaten(tmp_path: Path) -> None:
    training = begin(tmp_path / "run")
    crash_after_a_better_validation(training)
    best = tmp_path / "run" / "model.safetensors"
    kept = best.read_bytes()
    # it goes on otherwise, and comes to a loss between that of the checkpoint and that of the best weights
    settings = (tmp_path / "run" / "config.yaml").read_text()
    assert "learning_rate: 0.01\n" in settings
    (tmp_path / "run" / "config.yaml").write_text(settings.replace("learning_rate: 0.01\n", "learning_rate: 0.001\n"))
    at_checkpoint = json.loads((tmp_path / "run" / "checkpoints" / "step-00000008" / "training.json").read_text())[
        "state"
    ]
    training = reopened(training)
    known = training.folder.best_known()
    assert known is not None
    assert training.state.best_nats == known[1] < at_checkpoint["best_nats"]
    train_until(training, 10)
    assert known[1] < training.folder.metrics()[-2]["nats_per_token"] < at_checkpoint["best_nats"]
    assert best.read_bytes() == kept
    assert training.state.best_nats == known[1]


def test_a_crashed_run_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    straight, training = begin(tmp_path / "straight"), begin(tmp_path / "run")
    straight.run()
    crash_after_a_better_validation(training)
    training = reopened(training)
    training.run()
    for weights in ("best", "last"):
        files = [one.folder.weights_file(weights).read_bytes() for one in (training, straight)]
        assert files[0] == files[1]
    assert training.state.best_nats == straight.state.best_nats


def test_best_weights_without_a_loss_say_nothing(tmp_path: Path) -> None:
    """As an older version wrote them; and damaged ones are refused."""
    training = begin(tmp_path / "run")
    crash_after_a_better_validation(training)
    best = tmp_path / "run" / "model.safetensors"
    save_tensors(best, load_tensors(best)[0])
    assert training.folder.best_known() is None
    reopened(training)
    best.write_bytes(best.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"model.safetensors is damaged"):
        reopened(training)
    best.unlink()
    assert training.folder.best_known() is None


def test_lost_best_weights_are_found_anew(tmp_path: Path) -> None:
    """Even if no later ones are as good: else the run would end without any."""
    training = begin(tmp_path / "run", eval_interval=6)
    train_until(training, 8)
    training.state = training.state.model_copy(update={"best_nats": 0.001})
    save_checkpoint(training.folder, training)
    best = tmp_path / "run" / "model.safetensors"
    best.unlink()
    training = reopened(training)
    training.run()
    lowest = min(
        line["nats_per_token"] for line in training.folder.metrics() if line["split"] == "valid" and line["step"] > 8
    )
    assert training.state.best_nats == lowest
    known = training.folder.best_known()
    assert known is not None
    assert known[1] == lowest


def test_a_repeated_validation_is_shown_once(tmp_path: Path) -> None:
    """Stopped in the validation of step 9, then killed right after doing it: it is done and shown again."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    training = begin(tmp_path / "run", tensorboard=True)

    class StopInValidation(Callback):
        @override
        def on_validation_progress(self, trainer: Trainer, num_scored: int, num_tokens: int) -> None:
            if trainer.state.step == 9:
                trainer.stop()

    training.callbacks.append(StopInValidation())
    assert not training.run()
    assert training.state.step == 9
    assert training.folder.metrics()[-1]["split"] == "train"
    training = reopened(training)
    training._validate()
    training._log.close()
    assert [line["split"] for line in training.folder.metrics()[-2:]] == ["train", "valid"]
    training = reopened(training)
    training.run()
    shown = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    shown.Reload()
    for split in ("train", "valid"):
        wanted = [line["step"] for line in training.folder.metrics() if line["split"] == split]
        assert [event.step for event in shown.Scalars(f"{split}/nats_per_token")] == wanted
        assert 9 in wanted
