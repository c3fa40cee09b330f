"""Stopped and resumed at any step, training with each of its settings ends bit for bit as if it had not been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import txl
from tensors import assert_same_tensors
from training_runs import CPU, letters, make_corpus, reopened, start, train_until

from transformer_xl.model.memory import Memory
from transformer_xl.run_folder import RunFolder, config_text
from transformer_xl.training.trainer import Trainer

WARMUP = {"segment_length": 8, "memory_length": 12, "initial_segment_length": 2, "segment_warmup_steps": 12}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw, wsd, ema": {
        "optimizer": "adamw", "weight_decay": 0.1, "lr_schedule": "wsd", "decay_steps": 7, "weight_average": "ema",
        "ema_decay": 0.9,
    },
    "muon, uniform average": {"optimizer": "muon", "weight_average": "uniform", "average_start_step": 4},
    "micro-batches": {"micro_batch_size": 2, "activation_checkpointing": True},
    "segment warm-up": WARMUP,
    "segment warm-up, micro-batches": {**WARMUP, "micro_batch_size": 1, "optimizer": "muon"},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_stops_change_nothing(tmp_path: Path, name: str) -> None:
    """The stops fall inside segments that are read in parts, between stages, and before an average begins."""
    corpus = make_corpus(tmp_path / "corpus", letters(70, seed=1), letters(41, seed=2))
    settings = {**SETTINGS[name], "eval_interval": 5}
    straight = start(tmp_path / "straight", corpus, model={"dropout": 0.2}, **settings)
    straight.run()
    trainer = start(tmp_path / "run", corpus, model={"dropout": 0.2}, **settings)
    for stop in (2, 3, 7, 13):
        train_until(trainer, stop)
        trainer = reopened(trainer)
        assert trainer.state.step == stop
    trainer.run()
    for checkpoint in ("best", "last"):
        files = (run.folder.weights_file(checkpoint) for run in (trainer, straight))
        assert next(files).read_bytes() == next(files).read_bytes()
    assert_same_tensors(*(Memory.concatenate(run.memories) for run in (trainer, straight)))
    same = {"nats_per_token", "grad_norm", "learning_rate", "split", "step"}
    lines = (
        [{key: line[key] for key in same & line.keys()} for line in run.folder.metrics()] for run in (trainer, straight)
    )
    assert next(lines) == next(lines)
    assert (trainer.state.part, trainer.state.position) == (straight.state.part, straight.state.position)


@pytest.mark.parametrize(
    "changed",
    [
        {"micro_batch_size": 1},
        {"activation_checkpointing": True},
        {"min_learning_rate_ratio": 0.5},
        {"weight_decay": 0.3},
    ],
)
def test_what_may_change_in_a_resumed_run(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Micro-batches and recomputing change no number but in its last digits; rates and decay count from there on."""
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1))
    settings = {"optimizer": "adamw", "warmup_steps": 0, "micro_batch_size": 2}
    straight = start(tmp_path / "straight", corpus, **settings)
    straight.run()
    trainer = start(tmp_path / "run", corpus, **settings)
    train_until(trainer, 9)
    trainer = reopened(trainer, **changed)
    assert len(trainer.memories) == (3 if "micro_batch_size" in changed else 2)
    trainer.run()
    nats = [[line["nats_per_token"] for line in run.folder.metrics()] for run in (trainer, straight)]
    assert nats[0][:9] == nats[1][:9]
    same = nats[0] == pytest.approx(nats[1], rel=1e-5)
    assert same == ("micro_batch_size" in changed or "activation_checkpointing" in changed)


@pytest.mark.parametrize("other_file", [False, True])
def test_losses_of_another_validation_text_are_not_compared(tmp_path: Path, *, other_file: bool) -> None:
    """The text before had a lower loss than this one ever will: its weights are not the best for ever."""
    text, hard = b"ab" * 70, letters(29, seed=2)
    easy = make_corpus(tmp_path / "easy", text, b"ab" * 10 + hard)
    training = start(tmp_path / "run", easy, max_steps=9, eval_interval=5, eval_tokens=20)
    train_until(training, 7)
    before = training.state.best_nats
    place, changed = tmp_path / "run", {} if other_file else {"eval_tokens": None}
    corpus = make_corpus(tmp_path / "hard", text, hard) if other_file else easy
    folder = training.folder
    config = folder.config.model_copy(update={"train": folder.config.train.model_copy(update=changed)})
    (place / "config.yaml").write_text(config_text(config))
    training = Trainer(RunFolder.open(place), corpus, CPU)
    (note,) = training.resume()
    assert "validation text has changed" in note
    assert training.run()
    assert training.resume() == []
    last = [line for line in training.folder.metrics() if line["split"] == "valid"][-1]["nats_per_token"]
    assert before is not None
    assert training.state.best_nats == last > before
    assert training.folder.best_known() == (9, last)
    found = json.loads(txl("info", place, "--json").out)["run"]["best_valid"]
    assert (found["step"], found["nats_per_token"]) == (9, last)
