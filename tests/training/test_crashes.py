"""Runs that were killed at an unfavourable moment keep a complete checkpoint, their best weights and their metrics."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from training_runs import StopInValidation, letters_corpus, lines_of, reopened, start, train_until
from typing_extensions import override

from transformer_xl.checkpoint_record import CheckpointRecord
from transformer_xl.run_folder import read_last_start
from transformer_xl.training.callbacks import Callback
from transformer_xl.training.trackers import TrackerCallback
from transformer_xl.training.trainer import Trainer

INTERVALS = {"eval_interval": 3, "checkpoint_interval": 4, "max_steps": 13}


class Killed(Exception):
    """Simulates the end of the process."""


def start_run(path: Path, **changed: Any) -> Trainer:
    corpus = letters_corpus(path.parent / f"{path.name} corpus")
    return start(path, corpus, **{**INTERVALS, **changed})


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_replacing_a_checkpoint_of_the_same_step_can_be_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Killed before, between or after the two renames; the next save deletes what the interrupted one left.

    The old checkpoint is renamed to a name with `.partial-old`, the new one to the final name; then the old is deleted.
    """
    trainer = start_run(tmp_path / "run")
    train_until(trainer, 8)
    checkpoints, rename, rmtree = tmp_path / "run" / "checkpoints", Path.rename, shutil.rmtree

    def rename_or_die(path: Path, target: Path) -> Path:
        if moment == "before" and target.name == ".step-00000008.partial-old":
            raise Killed
        if moment == "between" and target.name == "step-00000008":
            raise Killed
        return rename(path, target)

    def rmtree_or_die(path: Path, **options: Any) -> None:
        if moment == "after" and Path(path).name == ".step-00000008.partial-old":
            assert (checkpoints / "step-00000008").is_dir()
            raise Killed
        rmtree(path, **options)

    monkeypatch.setattr(Path, "rename", rename_or_die)
    monkeypatch.setattr(shutil, "rmtree", rmtree_or_die)
    with pytest.raises(Killed):
        trainer.save_checkpoint()
    monkeypatch.undo()
    newest = trainer.folder.checkpoints()[-1]
    assert newest.name == ("step-00000004" if moment == "between" else "step-00000008")
    CheckpointRecord.read(newest).verify(newest)
    assert len(list(checkpoints.glob(".*.partial-*"))) == (2 if moment == "between" else 1)
    trainer = reopened(trainer)
    train_until(trainer, 9)
    assert not list(checkpoints.glob(".*"))
    assert trainer.folder.checkpoints()[-1].name == "step-00000009"


class KillAt(Callback):
    """Ends the process in a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    @override
    def on_step(self, trainer: Trainer, num_tokens: int) -> None:
        if trainer.state.step == self.step:
            raise Killed


def crash_after_best_validation(trainer: Trainer) -> float:
    """Kill the run in step 11, so that the newest checkpoint is that of step 8; the best weights are of step 9.

    Returns:
        The validation loss of the best weights.
    """
    trainer.callbacks.append(KillAt(11))
    with pytest.raises(Killed):
        trainer.run()
    assert trainer.folder.checkpoints()[-1].name == "step-00000008"
    assert trainer.state.best_nats is not None
    assert trainer.folder.best_known() == (9, trainer.state.best_nats)
    return trainer.state.best_nats


def test_what_is_left_of_writing_does_not_stay(tmp_path: Path) -> None:
    """A line of starts.jsonl that was cut off spoils no other, and the temporary file of safetensors is deleted."""
    trainer = start_run(tmp_path / "run")
    train_until(trainer, 4)
    (tmp_path / "run" / "starts.jsonl").write_text('{"date": "2026')
    (tmp_path / "run" / ".tmpA1b2C3").touch()
    trainer = reopened(trainer)
    trainer.folder.record_start(4, trainer.device, 1)
    last = read_last_start(trainer.folder.path)
    assert last is not None
    assert last["step"] == 4
    assert not list((tmp_path / "run").glob(".*"))


def test_best_weights_newer_than_the_checkpoint_are_kept(tmp_path: Path) -> None:
    """Resumed with another learning rate, step 9 has a loss between those of the checkpoint and of the best weights."""
    trainer = start_run(tmp_path / "run")
    best_nats = crash_after_best_validation(trainer)
    best = tmp_path / "run" / "model.safetensors"
    before = best.read_bytes()
    record = CheckpointRecord.read(tmp_path / "run" / "checkpoints" / "step-00000008")
    trainer = reopened(trainer, learning_rate=0.001)
    assert trainer.state.best_nats == best_nats < record.state["best_nats"]
    train_until(trainer, 10)
    assert best_nats < lines_of(trainer, "valid")[-1]["nats_per_token"] < record.state["best_nats"]
    assert best.read_bytes() == before
    assert trainer.state.best_nats == best_nats


def test_missing_best_weights_are_replaced(tmp_path: Path) -> None:
    """The next weights are saved even if their losses are higher, else the run would end without best weights."""
    trainer = start_run(tmp_path / "run", eval_interval=6)
    train_until(trainer, 8)
    trainer.state = trainer.state.model_copy(update={"best_nats": 0.001})  # lower than any loss of this run
    trainer.save_checkpoint()
    (tmp_path / "run" / "model.safetensors").unlink()
    trainer = reopened(trainer)
    trainer.run()
    lowest, step = min(
        (line["nats_per_token"], line["step"]) for line in lines_of(trainer, "valid") if line["step"] > 8
    )
    assert trainer.state.best_nats == lowest
    assert trainer.folder.best_known() == (step, lowest)


def test_repeated_validation_is_in_tensorboard_once(tmp_path: Path) -> None:
    """Stopped during the validation of step 9, resumed, and killed right after that validation."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = start_run(tmp_path / "run", trackers=("tensorboard",))
    trainer.callbacks += [TrackerCallback("tensorboard"), StopInValidation(9)]
    assert not trainer.run()
    assert trainer.state.step == 9
    assert trainer.folder.metrics()[-1]["split"] == "train"
    trainer = reopened(trainer)
    trainer.callbacks = [TrackerCallback("tensorboard")]
    trainer.callbacks[0].on_train_begin(trainer)
    trainer._validate()  # writes metrics, but no checkpoint, as if killed afterwards
    assert [line["split"] for line in trainer.folder.metrics()[-2:]] == ["train", "valid"]
    trainer = reopened(trainer)
    trainer.callbacks = [TrackerCallback("tensorboard")]
    trainer.run()
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for split in ("train", "valid"):
        steps = [line["step"] for line in lines_of(trainer, split)]
        assert [event.step for event in events.Scalars(f"{split}/nats_per_token")] == steps
        assert 9 in steps
