"""The public functions train, resume, save and load, called as in a program or a notebook."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import settings_of
from tensors import assert_same_tensors
from training_runs import MODEL, TRAIN, StopAt, StopInValidation, letters_corpus
from typing_extensions import override

from transformer_xl import (
    Callback,
    Corpus,
    LSTMConfig,
    RunConfig,
    TrainConfig,
    TransformerXLConfig,
    UserError,
    VaswaniConfig,
    load,
    resume,
    save,
)
from transformer_xl import train as train_run
from transformer_xl.checkpoint_record import CheckpointRecord
from transformer_xl.config import load_recipe, read_yaml
from transformer_xl.ops.native import NativeStatus
from transformer_xl.progress import ProgressBar
from transformer_xl.run_folder import RunFolder, config_text
from transformer_xl.training import trainer as trainer_module
from transformer_xl.training.trainer import Trainer

OPTIONS: dict[str, Any] = {"device": "cpu", "progress": False}


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return letters_corpus(tmp_path / "corpus")


def test_config_recipe_file_and_overrides_train_the_same_model(tmp_path: Path, corpus: Corpus) -> None:
    config = RunConfig(model=TransformerXLConfig(**MODEL), train=TrainConfig(**TRAIN))
    result = train_run(config, corpus, tmp_path / "config", **OPTIONS)
    assert (result.path, result.step, result.finished) == (tmp_path / "config", 17, True)
    assert result.best_nats_per_token == RunFolder.open(result.path).metrics()[-1]["nats_per_token"]
    recipe = tmp_path / "own.yaml"
    recipe.write_text(f"title: a\nsource: b\ncorpus: c\nmodel: {MODEL | {'d_ff': 23}}\ntrain: {TRAIN}\n")
    from_recipe = train_run(recipe, corpus.path, tmp_path / "file", model={"d_ff": 19}, **OPTIONS)
    from_overrides = train_run(None, str(corpus.path), tmp_path / "none", model=MODEL, train=TRAIN, **OPTIONS)
    for other in (from_recipe, from_overrides):
        assert_same_tensors(other.run.model.state_dict(), result.run.model.state_dict())
    saved = read_yaml((tmp_path / "file" / "config.yaml").read_text(), "")
    assert saved["model"]["vocab_size"] == 256
    assert saved["corpus"]["path"] == str(corpus.path.resolve())
    assert not result.run.model.training


@pytest.mark.parametrize(
    ("recipe", "model", "train"),
    [
        ("tiny", LSTMConfig(n_layers=1, d_model=14), {}),
        (None, VaswaniConfig(**MODEL), {"memory_length": 0}),
        ("fast-small", TransformerXLConfig(**MODEL), {"optimizer": "adam", "weight_decay": 0.05}),
    ],
)
def test_object_of_a_group_is_what_was_set_and_its_architecture(
    tmp_path: Path, corpus: Corpus, recipe: str | None, model: LSTMConfig, train: dict[str, Any]
) -> None:
    train = TRAIN | {"max_steps": 5} | train
    objects = {"model": model, "train": TrainConfig(**train)}
    values = {"model": {"architecture": model.architecture, **model.model_dump(exclude_unset=True)}, "train": train}
    for name, groups in {"objects": objects, "values": values}.items():
        train_run(recipe, corpus, tmp_path / name, **groups, **OPTIONS)
    config = RunFolder.open(tmp_path / "objects").config
    assert config == RunFolder.open(tmp_path / "values").config
    assert type(config.model) is type(model)
    assert resume(tmp_path / "objects", train=TrainConfig(max_steps=6), **OPTIONS).step == 6
    # all settings of another run have some without effect
    again = train_run(None, corpus, tmp_path / "again", model=config.model, train=config.train, **OPTIONS)
    assert RunFolder.open(again.path).config.model == config.model
    with pytest.raises(UserError, match="d_ngram has no effect without max_ngram 2 or more"):
        train_run(None, corpus, tmp_path / "unused", model=type(model)(d_ngram=4), train=TrainConfig(**train))
    with pytest.raises(UserError, match=r"train is of type int \(5\); give a dict of settings"):
        train_run(None, corpus, tmp_path / "unused", train=5)


def test_default_run_folder(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = train_run(None, "corpus", model=MODEL, train={**TRAIN, "max_steps": 1}, **OPTIONS)
    assert result.path == Path("runs/corpus")


class SendSignal(Callback):
    """Sends a signal to this process during step 3."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    @override
    def on_step(self, trainer: Trainer, num_tokens: int) -> None:
        if trainer.state.step == 3:
            signal.raise_signal(self.number)


def test_ctrl_c_is_raised_after_the_step_and_its_checkpoint(tmp_path: Path, corpus: Corpus) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    interrupt = [SendSignal(signal.SIGINT)]
    with pytest.raises(KeyboardInterrupt):
        train_run(None, corpus, tmp_path / "run", model=MODEL, train=TRAIN, callbacks=interrupt, **OPTIONS)
    assert RunFolder.open(tmp_path / "run").checkpoints()[-1].name == "step-00000003"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert resume(tmp_path / "run", **OPTIONS).finished


@pytest.mark.parametrize("handle_signals", [True, False])
def test_second_signal_skips_the_validation_but_not_the_checkpoint(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, handle_signals: bool
) -> None:
    write = trainer_module.save_checkpoint

    def interrupted_write(*arguments: Any, **options: Any) -> None:
        if arguments[3]["step"]:  # of the state
            signal.raise_signal(signal.SIGINT)
        write(*arguments, **options)

    monkeypatch.setattr(trainer_module, "save_checkpoint", interrupted_write)
    with nullcontext() if handle_signals else pytest.raises(KeyboardInterrupt):
        train_run(
            None, corpus, tmp_path / "run", model=MODEL, train=TRAIN, callbacks=[SendSignal(signal.SIGINT)],
            handle_signals=handle_signals, **OPTIONS,
        )  # fmt: skip
    newest = RunFolder.open(tmp_path / "run").checkpoints()[-1]
    assert newest.name == "step-00000003"
    assert CheckpointRecord.read(newest).state["validation_step"] == 0  # and the second skips the validation


def test_handled_signal_ends_training_with_a_result(tmp_path: Path, corpus: Corpus) -> None:
    terminate = [SendSignal(signal.SIGTERM)]
    result = train_run(
        None, corpus, tmp_path / "run", model=MODEL, train=TRAIN, callbacks=terminate, handle_signals=True, **OPTIONS
    )
    assert (result.step, result.finished, result.stop_signal) == (3, False, signal.SIGTERM)


def test_messages_are_printed_on_standard_error(
    tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line names the attention kernel, and how to get a faster one."""
    monkeypatch.setattr("transformer_xl.ops.native._status", NativeStatus(None, "not built; faster with: a command"))
    train_run(None, corpus, tmp_path / "run", model=MODEL, train=TRAIN, device="cpu")
    out, err = capsys.readouterr()
    assert out == ""
    assert "; attention kernel cpu (native operators: not built; faster with: a command)\n" in err
    assert "parameters, on cpu; 17 steps of 21 tokens" in err  # 3 batch rows of 7 tokens


def test_progress_shows_losses_with_units_gradient_norm_and_learning_rate(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str | None] = []
    monkeypatch.setattr(ProgressBar, "advance", lambda _, amount, text=None: notes.append(text))
    train_run(None, corpus, tmp_path / "run", model=MODEL, train={**TRAIN, "eval_interval": 15}, device="cpu")
    lines = [line for line in RunFolder.open(tmp_path / "run").metrics() if line["step"] in (15, 16)]
    valid, loss = [
        f"{line['nats_per_token']:.3f} nats, {line['nats_per_token'] / math.log(2):.3f} bits/token"
        for line in lines[1:]
    ]
    step_17 = next(text for text in reversed(notes) if text and "lr" in text)
    norm, rate = lines[2]["grad_norm"], lines[2]["learning_rate"]
    assert step_17.startswith(f"loss {loss}, valid {valid}, grad norm {norm:.2g}, lr {rate:.2g}, ")
    assert step_17.endswith(" tokens/s")


@pytest.mark.parametrize("architecture", ["transformer-xl", "lstm", "shaw"])
def test_saved_run_loads_bit_for_bit(tmp_path: Path, corpus: Corpus, architecture: str) -> None:
    settings = settings_of(**MODEL, architecture=architecture)
    run = train_run(None, corpus, tmp_path / "run", model=settings, train={**TRAIN, "max_steps": 2}, **OPTIONS).run
    with torch.no_grad():
        next(run.model.parameters()).mul_(3)  # `save` must write the weights in memory, not those of the run folder
    loaded = load(save(run, tmp_path / "saved"), device="cpu")
    assert_same_tensors(loaded.model.state_dict(), run.model.state_dict())
    assert loaded.config == run.config
    tokens_BT = torch.arange(14).view(2, 7)
    with torch.no_grad():
        assert torch.equal(loaded.model(tokens_BT)[0], run.model(tokens_BT)[0])
    with pytest.raises(UserError, match="holds a run already"):
        save(run, tmp_path / "saved")
    with pytest.raises(UserError, match="saved run are trained further by 'txl finetune'"):
        resume(tmp_path / "saved", **OPTIONS)


# The record of settings


class StopAtOnce(Callback):
    @override
    def on_train_begin(self, trainer: Trainer) -> None:
        trainer.stop()


def test_config_records_the_settings_that_steps_were_trained_with(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed settings are recorded with the first checkpoint after them, also if the process is killed right then."""
    path = tmp_path / "run"
    train_run(None, corpus, path, model=MODEL, train=TRAIN, callbacks=[StopAt(3)], **OPTIONS)
    before = (path / "config.yaml").read_bytes()
    resume(path, train={"learning_rate": 0.02}, callbacks=[StopAtOnce()], **OPTIONS)
    assert (path / "config.yaml").read_bytes() == before
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_config", lambda folder: sys.exit() if folder.config.history else None)
        with pytest.raises(SystemExit):
            resume(path, train={"learning_rate": 0.02}, callbacks=[StopAt(5)], **OPTIONS)
    assert (path / "config.yaml").read_bytes() == before
    (note,) = RunFolder.open(path).verify()
    assert "config.yaml lacks the last change" in note
    resume(path, train={"max_steps": 8}, **OPTIONS)
    config = RunFolder.open(path).config
    assert (config.train.learning_rate, config.train.max_steps) == (0.02, 8)
    first, second = config.history
    assert (first.step, first.before, first.after) == (3, {"learning_rate": 0.01}, {"learning_rate": 0.02})
    assert (second.step, second.before, second.after) == (5, {"max_steps": 17}, {"max_steps": 8})
    assert RunFolder.open(path).verify() == []


def as_earlier_version(path: Path) -> None:
    """Make the newest checkpoint, and config.yaml, as versions without a record of settings wrote them."""
    newest = RunFolder.open(path).latest_checkpoint()
    assert newest is not None
    record = CheckpointRecord.read(newest)
    state = {name: value for name, value in record.state.items() if name != "validation_nats"}
    record.model_copy(update={"config": None, "state": state}).write(newest)
    config = path / "config.yaml"
    config.write_text(config.read_text().replace("history: []\n", ""))


def test_changes_of_a_run_of_an_earlier_version_are_recorded(tmp_path: Path, corpus: Corpus) -> None:
    path = tmp_path / "run"
    train_run(None, corpus, path, model=MODEL, train=TRAIN, **OPTIONS)
    as_earlier_version(path)
    resume(path, train={"max_steps": 19, "learning_rate": 0.02}, **OPTIONS)
    (change,) = RunFolder.open(path).config.history
    assert (change.step, change.before) == (17, {"max_steps": 17, "learning_rate": 0.01})
    assert RunFolder.open(path).verify() == []


@pytest.mark.parametrize("weight_average", ["none", "ema"])
def test_validated_weights_are_not_called_unvalidated(tmp_path: Path, corpus: Corpus, weight_average: str) -> None:
    """Their loss is unknown in a run of an earlier version, and where the average of the weights was validated."""
    path, train = tmp_path / "run", {**TRAIN, "learning_rate": 3.0, "eval_interval": 1}
    train |= {"weight_average": weight_average} | ({"ema_decay": 0.5} if weight_average == "ema" else {})
    train_run(None, corpus, path, model=MODEL, train=train, **OPTIONS)
    as_earlier_version(path)
    (line,) = (chosen := RunFolder.open(path).choose_weights()).lines()
    assert chosen.used.step < 17
    assert "others: last, step 17 (validation loss not known)" in line


def test_run_can_end_at_the_step_it_is_at(tmp_path: Path, corpus: Corpus) -> None:
    path = tmp_path / "run"
    train_run(None, corpus, path, model=MODEL, train=TRAIN, callbacks=[StopAt(3)], **OPTIONS)
    for _ in range(2):
        assert resume(path, train={"max_steps": 3}, **OPTIONS).finished
        (change,) = RunFolder.open(path).config.history
        assert (change.step, change.before, change.after) == (3, {"max_steps": 17}, {"max_steps": 3})
    assert RunFolder.open(path).verify() == []


def test_validation_of_a_stop_leaves_the_position_in_the_text(tmp_path: Path, corpus: Corpus) -> None:
    """Stopped before the first step with another batch size, the checkpoint is still that of the old batch size."""
    path, train = tmp_path / "run", {**TRAIN, "eval_interval": 8}
    train_run(None, corpus, path, model=MODEL, train=train, callbacks=[StopAt(8), StopInValidation(8)], **OPTIONS)
    newest = RunFolder.open(path).latest_checkpoint()
    assert newest is not None
    before = CheckpointRecord.read(newest).state
    batch_size = 2 * RunFolder.open(path).config.train.batch_size
    resume(path, train={"batch_size": batch_size}, callbacks=[StopAtOnce()], **OPTIONS)
    after = CheckpointRecord.read(newest).state
    assert (before["validation_step"], after["validation_step"]) == (0, 8)
    assert (after["position"], after["seconds"]) == (before["position"], before["seconds"])


def test_edited_config_is_found_and_not_trained_with(
    tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    train_run(None, corpus, path, model=MODEL, train=TRAIN, callbacks=[StopAt(3)], **OPTIONS)
    text = (path / "config.yaml").read_text()
    for old, new in (("beta2: 0.999", "beta2: 0.9"), ("clamp_length: null", "clamp_length: 3")):
        (path / "config.yaml").write_text(text.replace(old, new))
        with pytest.raises(UserError, match=rf"config.yaml differs .*{new.replace(': ', ' is ')}, not"):
            RunFolder.open(path).verify()
        resume(path, device="cpu", callbacks=[StopAtOnce()])
        problem = f"config.yaml is not what was trained, and is written again: .*{new.replace(': ', ' is ')}, not"
        assert re.search(problem, capsys.readouterr().err)
        assert (path / "config.yaml").read_text() == text
        RunFolder.open(path).verify()
    saved = save(load(path, device="cpu"), tmp_path / "saved") / "config.yaml"
    assert RunFolder.open(saved.parent).verify() == []
    shutil.rmtree(path / "checkpoints")
    (note,) = RunFolder.open(path).verify()
    assert note == "there is none of the train and evaluation settings in config.yaml"
    saved.write_text(saved.read_text().replace("clamp_length: null", "clamp_length: 3", 1))
    with pytest.raises(UserError, match=r"config.yaml is not the one that .* was saved with"):
        RunFolder.open(saved.parent).verify()


def test_longer_training_says_how_the_learning_rate_goes_on(
    tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cosine of the new length decides: 12 steps of decay after 5 of warm-up, then 95."""
    train_run(None, corpus, tmp_path / "run", model=MODEL, train=TRAIN, **OPTIONS)
    capsys.readouterr()
    options = {"callbacks": [StopAtOnce()], "device": "cpu"}
    resume(tmp_path / "run", train={"max_steps": 100}, **options)
    err = capsys.readouterr().err
    assert "changed: train.max_steps 17 -> 100 from step 17 on" in err
    assert "learning rate: 0.00017 in step 17, 0.00961 in the next, 2.73e-06 in step 100" in err
    resume(tmp_path / "run", train={"max_steps": 18}, **options)
    assert "in step 18; that is below 1% of its peak" not in capsys.readouterr().err
    resume(tmp_path / "run", train={"max_steps": 18, "learning_rate": 0.02, "warmup_steps": 17}, **options)
    assert "learning rate: 0.00017 in step 17, 0.02 in the next" in capsys.readouterr().err


def test_warm_up_longer_than_the_training_is_said(
    tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"max_steps": 2, "learning_rate": 0.01}
    train_run(None, corpus, tmp_path / "run", model=MODEL, train=TRAIN | rates | {"warmup_steps": 4}, device="cpu")
    assert (
        "ends after the training of 2, which reaches 0.005 of the learning rate 0.01; lower train.warmup_steps"
        in capsys.readouterr().err
    )
    train_run(None, corpus, tmp_path / "even", model=MODEL, train=TRAIN | rates | {"warmup_steps": 2}, device="cpu")
    assert "warm-up" not in capsys.readouterr().err


@pytest.mark.parametrize(("window", "is_said"), [(17, True), (18, False), (None, False)])
def test_evaluation_that_sees_less_than_training_is_said(
    tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str], window: int | None, is_said: bool
) -> None:
    """Such as that of a recipe whose memory length was raised; the last token of a segment sees 7 + 11 tokens."""
    settings = {"model": MODEL, "train": TRAIN | {"max_steps": 1}, "evaluation": {"attention_window": window}}
    train_run(None, corpus, tmp_path / "run", device="cpu", **settings)
    assert ("evaluation attends to " in capsys.readouterr().err) == is_said


@pytest.mark.parametrize(
    ("recipe", "given", "steps", "warmup_steps"),
    [
        ({"max_epochs": 2}, {}, 13, 4),  # of 127 tokens in steps of 21; the warm-up is 5 of 17 steps
        ({"max_epochs": 3}, {}, 17, 5),  # 19 steps are more than max_steps
        ({"max_epochs": 2}, {"warmup_steps": 3}, 13, 3),
        ({"max_epochs": 2}, {"max_steps": 20}, 20, 5),  # what is given replaces the recipe's max_epochs
        ({"max_epochs": 2}, TrainConfig(max_steps=20), 20, 5),
        ({"max_epochs": 2}, {"max_steps": 9, "max_epochs": 0.5}, 4, 2),
        ({}, {"max_epochs": 1}, 7, 2),
        ({}, {"max_epochs": 3}, 17, 5),
        # 3.5 and 3.5 of 7 steps are rounded to 4 each, and 6.6 to 7, which would leave no step to average
        ({"max_steps": 18, "lr_schedule": "wsd", "warmup_steps": 9, "decay_steps": 9}, {"max_epochs": 1}, 7, 4),
        ({"weight_average": "ema", "average_start_step": 16}, {"max_epochs": 1}, 7, 2),
    ],
)
def test_max_epochs_limits_the_steps_of_a_new_run(
    tmp_path: Path,
    corpus: Corpus,
    capsys: pytest.CaptureFixture[str],
    recipe: dict[str, float],
    given: dict[str, float] | TrainConfig,
    steps: int,
    warmup_steps: int,
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({"model": MODEL, "train": {**TRAIN, **recipe}}), encoding="utf-8")
    result = train_run(file, corpus, tmp_path / "run", train=given, device="cpu")
    config = result.run.config.train
    assert (result.step, config.max_steps, config.warmup_steps, config.max_epochs) == (steps, steps, warmup_steps, None)
    said = capsys.readouterr().err
    assert (f"{steps} steps instead of " in said) == (steps not in (17, 20))
    # what a recipe has is a limit, and what is given would be read
    too_short = "train.max_epochs 3 needs 19 steps, and training ends at train.max_steps 17 (2.7 epochs); give "
    assert (too_short in said) == (given == {"max_epochs": 3})


def test_run_with_cutoffs_above_the_default_vocabulary_size_is_a_recipe(tmp_path: Path) -> None:
    config = RunConfig(model=TransformerXLConfig(vocab_size=500, cutoffs=(300,)))
    (tmp_path / "config.yaml").write_text(config_text(config))
    assert load_recipe(str(tmp_path)).model["cutoffs"] == [300]


@pytest.mark.parametrize("name", ["run", "run/config.yaml"])
def test_run_is_a_recipe(tmp_path: Path, corpus: Corpus, name: str) -> None:
    result = train_run(None, corpus, tmp_path / "run", model=MODEL, train={**TRAIN, "max_steps": 2}, **OPTIONS)
    again = train_run(tmp_path / name, corpus, tmp_path / "again", **OPTIONS)
    assert_same_tensors(again.run.model.state_dict(), result.run.model.state_dict())
