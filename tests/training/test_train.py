"""The library: train, resume, save and load as a program or a notebook calls them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tensors import assert_same_tensors
from training_runs import MODEL, TRAIN, StopAt, letters, make_corpus
from typing_extensions import override

from transformer_xl import Callback, Corpus, RunConfig, TrainConfig, TransformerXLConfig, UserError, load, resume, save
from transformer_xl import train as train_run
from transformer_xl.config import read_yaml
from transformer_xl.run_folder import RunFolder
from transformer_xl.training.trainer import Trainer

QUIET: dict[str, Any] = {"device": "cpu", "progress": False}


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return make_corpus(tmp_path / "corpus", letters(127, seed=1), letters(41, seed=2))


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return load(path, device="cpu").model.state_dict()


def test_settings_come_from_a_config_a_file_or_by_name(tmp_path: Path, corpus: Corpus) -> None:
    config = RunConfig(model=TransformerXLConfig(**MODEL), train=TrainConfig(**TRAIN))
    result = train_run(config, corpus, tmp_path / "config", **QUIET)
    assert (result.path, result.step, result.finished) == (tmp_path / "config", 17, True)
    assert result.best_nats_per_token == RunFolder.open(result.path).metrics()[-1]["nats_per_token"]
    recipe = tmp_path / "own.yaml"
    recipe.write_text(f"title: a\nsource: b\ncorpus: c\nmodel: {MODEL | {'d_ff': 23}}\ntrain: {TRAIN}\n")
    again = train_run(recipe, corpus.path, tmp_path / "file", model={"d_ff": 19}, **QUIET)
    plain = train_run(None, str(corpus.path), tmp_path / "none", model=MODEL, train=TRAIN, **QUIET)
    for other in (again, plain):
        assert_same_tensors(other.run.model.state_dict(), result.run.model.state_dict())
    kept = read_yaml((tmp_path / "file" / "config.yaml").read_text(), "")
    assert kept["model"]["vocab_size"] == 256
    assert kept["corpus"]["path"] == str(corpus.path.resolve())
    assert not result.run.model.training


def test_a_run_has_a_default_name(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_run(None, "corpus", model=MODEL, train={**TRAIN, "max_steps": 1}, **QUIET).path == Path("runs/corpus")


def test_resumed_after_a_callback_stopped_it(tmp_path: Path, corpus: Corpus) -> None:
    whole = train_run(None, corpus, tmp_path / "whole", model=MODEL, train=TRAIN, **QUIET)
    stopped = train_run(None, corpus, tmp_path / "run", model=MODEL, train=TRAIN, callbacks=[StopAt(5)], **QUIET)
    assert (stopped.step, stopped.finished, stopped.stop_signal) == (5, False, None)
    torch.manual_seed(104_729)
    resumed = resume(tmp_path / "run", **QUIET)
    assert (resumed.step, resumed.finished) == (17, True)
    assert resumed.best_nats_per_token == whole.best_nats_per_token
    assert_same_tensors(weights_of(tmp_path / "run"), weights_of(tmp_path / "whole"))
    longer = resume(tmp_path / "run", train={"max_steps": 19}, **QUIET)
    assert (longer.step, longer.max_steps) == (19, 19)


def test_wrong_settings_leave_nothing_behind(tmp_path: Path, corpus: Corpus) -> None:
    for wrong, message in (
        ({"batchsize": 3}, "unknown setting 'batchsize'"),
        ({"batch_size": 97}, "127 tokens"),
    ):
        with pytest.raises(UserError, match=message):
            train_run(None, corpus, tmp_path / "run", train=wrong, **QUIET)
        assert not (tmp_path / "run").exists()
    train_run(None, corpus, tmp_path / "run", model=MODEL, train=TRAIN, callbacks=[StopAt(2)], **QUIET)
    with pytest.raises(UserError, match=r"train\.optimizer cannot change"):
        resume(tmp_path / "run", train={"optimizer": "muon"}, **QUIET)
    with pytest.raises(UserError, match="different training text"):
        resume(tmp_path / "run", make_corpus(tmp_path / "other", letters(127, seed=5)), **QUIET)


class SendSignal(Callback):
    """Sends this process a signal in a step, as Ctrl-C does."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    @override
    def on_step(self, trainer: Trainer, num_tokens: int) -> None:
        if trainer.state.step == 3:
            signal.raise_signal(self.number)


def test_ctrl_c_is_raised_after_the_step_with_a_checkpoint(tmp_path: Path, corpus: Corpus) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    interrupt = [SendSignal(signal.SIGINT)]
    with pytest.raises(KeyboardInterrupt):
        train_run(None, corpus, tmp_path / "run", model=MODEL, train=TRAIN, callbacks=interrupt, **QUIET)
    assert RunFolder.open(tmp_path / "run").checkpoints()[-1].name == "step-00000003"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert resume(tmp_path / "run", **QUIET).finished


def test_signals_end_in_a_result_where_they_are_handled(tmp_path: Path, corpus: Corpus) -> None:
    terminate = [SendSignal(signal.SIGTERM)]
    result = train_run(
        None, corpus, tmp_path / "run", model=MODEL, train=TRAIN, callbacks=terminate, handle_signals=True, **QUIET
    )
    assert (result.step, result.finished, result.stop_signal) == (3, False, signal.SIGTERM)


def test_progress_is_shown_as_lines_where_there_is_no_terminal(
    tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    train_run(None, corpus, tmp_path / "run", model=MODEL, train=TRAIN, device="cpu")
    out, err = capsys.readouterr()
    assert out == ""
    assert "parameters, on cpu; 17 steps of 21 tokens" in err


@pytest.mark.parametrize("architecture", ["transformer-xl", "lstm", "shaw"])
def test_load_after_save_is_bit_equal(tmp_path: Path, corpus: Corpus, architecture: str) -> None:
    sizes = MODEL if architecture != "lstm" else {"n_layers": 2, "d_model": 14}
    settings = {**sizes, "architecture": architecture, "dropout": 0.0}
    run = train_run(None, corpus, tmp_path / "run", model=settings, train={**TRAIN, "max_steps": 2}, **QUIET).run
    with torch.no_grad():
        next(run.model.parameters()).mul_(3)
    loaded = load(save(run, tmp_path / "saved"), device="cpu")
    assert_same_tensors(loaded.model.state_dict(), run.model.state_dict())
    assert loaded.config == run.config
    tokens_BT = torch.arange(14).view(2, 7)
    with torch.no_grad():
        assert torch.equal(loaded.model(tokens_BT)[0], run.model(tokens_BT)[0])
    with pytest.raises(UserError, match="holds a run already"):
        save(run, tmp_path / "saved")
    with pytest.raises(UserError, match="saved run can be used, but not trained further"):
        resume(tmp_path / "saved", **QUIET)
