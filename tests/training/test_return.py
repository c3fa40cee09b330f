"""Going back to an earlier checkpoint (`--resume RUN --from STEP`): the same training from there; no file is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import txl
from torch import Tensor
from training_runs import OPTIONS, StopAt, letters_corpus, lines_of, names_in, nats_of, start, train_until
from typing_extensions import override

from transformer_xl import Callback, UserError, resume
from transformer_xl.run_folder import RunFolder
from transformer_xl.training.train import TrainResult
from transformer_xl.training.trainer import Trainer

SETTINGS: dict[str, Any] = {"max_steps": 130, "checkpoint_interval": 25, "eval_interval": 20}


def begin(path: Path, **changed: Any) -> Trainer:
    """Begin a run on 500 letters, whose validation loss falls until step 60 at least."""
    return start(path, letters_corpus(corpus_of(path), 500), **SETTINGS | changed)


def corpus_of(path: Path) -> Path:
    return path.parent / f"{path.name} corpus"


def go_on(path: Path, stop: int | None = None, **options: Any) -> TrainResult:
    """Resume a run, and stop after a step."""
    return resume(path, corpus_of(path), callbacks=[StopAt(stop)] if stop else [], **options, **OPTIONS)


class StopAtOnce(Callback):
    """Stops training before its first step."""

    @override
    def on_train_begin(self, trainer: Trainer) -> None:
        trainer.stop()


def lose(trainer: Trainer) -> None:
    """Train until the run is lost, from step 60 on, after the checkpoints of the steps 50, 75 and 100."""
    nats = trainer.model.nats

    def changed_nats(hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        return nats(hidden_BTD, targets_BT) + (20.0 if trainer.state.step + 1 >= 60 else 0.0)

    trainer.model.nats = changed_nats
    with pytest.raises(UserError, match="--from 50 "):
        trainer.run()


def test_lost_run_is_resumed_from_the_good_checkpoint(tmp_path: Path) -> None:
    """With the settings that it had, it is what it would have been without the divergence."""
    expected, trainer = begin(tmp_path / "expected"), begin(tmp_path / "run")
    assert expected.run()
    lose(trainer)
    path = tmp_path / "run"
    result = txl(
        "train", "--resume", path, "--from", "50", "--corpus", corpus_of(path), "--device", "cpu", "--threads", "1"
    )
    assert result.status == 0
    assert f"resuming {path} at step 50 of 130" in result.err
    assert "note: kept aside until training has passed them: " in result.err
    assert nats_of(trainer) == nats_of(expected)
    losses = [[line["nats_per_token"] for line in lines_of(run, "valid")] for run in (trainer, expected)]
    assert losses[0] == losses[1]
    for checkpoint in ("best", "last"):
        files = [run.folder.choose_weights(checkpoint).used.file.read_bytes() for run in (trainer, expected)]
        assert files[0] == files[1]
    assert RunFolder.open(path).verify() == []


def test_later_checkpoints_are_kept_aside_until_they_are_overtaken(tmp_path: Path) -> None:
    path = tmp_path / "run"
    lose(begin(path))
    for stop, aside in ((60, {75, 100}), (80, {100}), (101, set[int]())):
        from_step = 50 if stop == 60 else None
        go_on(path, stop, from_step=from_step, train={"learning_rate": 0.001})
        assert {name for name in names_in(path) if "aside" in name} == {f"step-{step:08}.aside" for step in aside}
        assert RunFolder.open(path).checkpoints()[-1].name == f"step-{stop:08}"
    (change,) = RunFolder.open(path).config.history
    assert (change.step, change.after) == (50, {"learning_rate": 0.001})


@pytest.mark.parametrize("is_better", [False, True])
def test_best_weights_are_kept_until_there_are_better_ones(tmp_path: Path, *, is_better: bool) -> None:
    """The best weights are of step 60, and training goes back to step 50; their loss is the one to beat."""
    path = tmp_path / "run"
    trainer = begin(path)
    train_until(trainer, 62)
    file = path / "model.safetensors"
    before, best = file.read_bytes(), trainer.folder.best_known()
    assert best is not None
    assert best[0] in (60, 62)
    # without learning, each validation gives the loss of step 50
    result = go_on(path, from_step=50, train={"learning_rate": 0.01 if is_better else 1e-30})
    assert result.finished
    after = trainer.folder.best_known()
    assert after is not None
    assert result.best_nats_per_token == after[1]
    assert (after == best and file.read_bytes() == before) != is_better
    assert (after[1] < best[1]) == is_better


def test_best_weights_of_another_validation_text_are_not_compared(tmp_path: Path) -> None:
    """After step 50 another part of the text was validated; back there, the first text is validated again."""
    path = tmp_path / "run"
    train_until(trainer := begin(path, eval_tokens=20), 50)
    go_on(path, 76, train={"eval_tokens": None})
    go_on(path, 60, from_step=50)
    assert trainer.folder.best_known() == (60, lines_of(trainer, "valid")[-1]["nats_per_token"])


def test_settings_of_training_go_back_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train_until(begin(path), 50)
    go_on(path, 60, train={"learning_rate": 0.002})
    resume(path, corpus_of(path), evaluation={"memory_length": 5}, callbacks=[StopAtOnce()], **OPTIONS)
    assert len(RunFolder.open(path).config.history) == 1
    go_on(path, 51, from_step=50)
    config = RunFolder.open(path).config
    assert (config.train.learning_rate, config.history) == (0.01, ())
    assert config.evaluation.memory_length == 5
    assert RunFolder.open(path).verify() == []


def test_program_that_torchrun_restarts_does_not_go_back_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_until(begin(tmp_path / "run"), 76)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert go_on(tmp_path / "run", 77, from_step=50).step == 77
    assert names_in(tmp_path / "run")[-2:] == ["step-00000076", "step-00000077"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--from 60", "run has no checkpoint of step 60; it has those of the steps 50 and 75"),
        ("--from 50.5", 'Invalid value for --from: unable to convert "50.5" into int'),
        ("--from 50 --train.max-steps 40", "is at step 50 already, beyond --train.max-steps 40"),
        (
            "--from 50 --train.memory-length 5",
            "--train.memory-length cannot change within a run; to train its weights further with another value: txl "
            "finetune",
        ),
    ],
)
def test_refused_return_changes_nothing(tmp_path: Path, flags: str, message: str) -> None:
    path = tmp_path / "run"
    train_until(begin(path), 75)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    result = txl("train", "--resume", path, *flags.split(), "--corpus", corpus_of(path), "--device", "cpu")
    assert (result.status, result.out) == (2, "")
    assert message in result.err
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("step", [True, 50.0, "50"])
def test_step_that_is_no_integer_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(UserError, match=r"from_step is of type .*; give the step of a checkpoint, an integer"):
        resume(tmp_path, from_step=step)


def test_training_goes_back_from_a_damaged_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train_until(begin(path), 75)
    (path / "checkpoints" / "step-00000075" / "training.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        go_on(path)
    assert go_on(path, 51, from_step=50).step == 51
    assert names_in(path) == ["step-00000050", "step-00000051", "step-00000075.aside"]


def test_settings_that_a_killed_return_lost_are_named_and_equal_steps_are_not_equal_weights(tmp_path: Path) -> None:
    """Training that goes back and comes to the step of the best weights has other weights there."""
    path = tmp_path / "run"
    train_until(begin(path), 60)
    go_on(path, from_step=50, train={"max_steps": 60, "learning_rate": 1e-6, "eval_interval": 10})
    chosen = RunFolder.open(path).choose_weights("last")
    assert (chosen.used.step, chosen.others[0].step) == (60, 60)
    assert chosen.used.valid_nats_per_token != chosen.others[0].valid_nats_per_token
    (path / "checkpoints" / "step-00000060").rename(path / "checkpoints" / "step-00000060.aside")
    trainer = Trainer(RunFolder.open(path), RunFolder.open(path).open_corpus(corpus_of(path)), torch.device("cpu"))
    messages = trainer.resume()
    assert ["settings that were given then are lost" in message for message in messages] == [True]
