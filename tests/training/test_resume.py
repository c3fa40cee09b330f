"""Settings that can change in a resumed run, and a validation text that changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import txl
from training_runs import CPU, letters, letters_corpus, make_corpus, reopened, start, train_until

from transformer_xl.run_folder import RunFolder, config_text
from transformer_xl.training.trainer import Trainer


@pytest.mark.parametrize(
    "changed",
    [
        {"micro_batch_size": 1},
        {"activation_checkpointing": True},
        {"min_learning_rate_ratio": 0.5},
        {"weight_decay": 0.3},
    ],
)
def test_settings_changed_at_resume_take_effect(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Micro-batches and activation checkpointing change only the last digits of losses; the others change the
    losses."""
    corpus = letters_corpus(tmp_path / "corpus", num_valid=0)
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
def test_losses_of_different_validation_texts_are_not_compared(tmp_path: Path, *, other_file: bool) -> None:
    """The first validation text is much easier, so its loss must not stay the best."""
    text, hard = b"ab" * 70, letters(29, seed=2)
    easy = make_corpus(tmp_path / "easy", text, b"ab" * 10 + hard)
    trainer = start(tmp_path / "run", easy, max_steps=9, eval_interval=5, eval_tokens=20)
    train_until(trainer, 7)
    before = trainer.state.best_nats
    path, changed = tmp_path / "run", {} if other_file else {"eval_tokens": None}
    corpus = make_corpus(tmp_path / "hard", text, hard) if other_file else easy
    folder = trainer.folder
    config = folder.config.model_copy(update={"train": folder.config.train.model_copy(update=changed)})
    (path / "config.yaml").write_text(config_text(config))
    trainer = Trainer(RunFolder.open(path), corpus, CPU)
    (note,) = trainer.resume()
    assert "validation text has changed" in note
    assert trainer.run()
    assert trainer.resume() == []
    last = [line for line in trainer.folder.metrics() if line["split"] == "valid"][-1]["nats_per_token"]
    assert before is not None
    assert trainer.state.best_nats == last > before
    assert trainer.folder.best_known() == (9, last)
    actual = json.loads(txl("info", path, "--json").out)["run"]["best_valid"]
    assert (actual["step"], actual["nats_per_token"]) == (9, last)
