"""Settings that can change in a resumed run, and a validation text that changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from native_operators import needs_native
from refusals import txl
from training_runs import CPU, letters, letters_corpus, lines_of, make_corpus, nats_of, reopened, start, train_until

from transformer_xl.ops import native
from transformer_xl.ops.linear import packs
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
    """Micro-batches and activation checkpointing change only the last digits of the losses.

    A trainer has one memory for each micro-batch: 3 with one batch row each, 2 with two rows at most.
    """
    corpus = letters_corpus(tmp_path / "corpus", num_valid=0)
    settings = {"optimizer": "adamw", "warmup_steps": 0, "micro_batch_size": 2}
    unchanged = start(tmp_path / "unchanged", corpus, **settings)
    unchanged.run()
    trainer = start(tmp_path / "run", corpus, **settings)
    train_until(trainer, 9)
    trainer = reopened(trainer, **changed)
    assert len(trainer.stepper.memories) == (3 if "micro_batch_size" in changed else 2)
    trainer.run()
    nats, expected = nats_of(trainer), nats_of(unchanged)
    assert nats[:9] == expected[:9]
    assert (nats == pytest.approx(expected, rel=1e-5)) == (
        "micro_batch_size" in changed or "activation_checkpointing" in changed
    )


# the validation text changes with another corpus, or with another number of its tokens (eval_tokens; None: all)
@pytest.mark.parametrize("other_file", [False, True])
def test_losses_of_different_validation_texts_are_not_compared(tmp_path: Path, *, other_file: bool) -> None:
    """The first validation text, `abab...` as in training, is much easier, so its loss must not stay the best."""
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
    (warning,) = trainer.resume()
    assert "validation text has changed" in warning
    assert trainer.run()  # true: it was not stopped before its last step
    assert trainer.resume() == []
    last = lines_of(trainer, "valid")[-1]["nats_per_token"]
    assert before is not None
    assert trainer.state.best_nats == last > before
    assert trainer.folder.best_known() == (9, last)
    best = txl("info", path, "--json").object["run"]["checkpoint"]
    assert (best["step"], best["valid_nats_per_token"]) == (9, last)


@pytest.mark.skipif(not packs(torch.float32), reason="oneDNN packs no weights here")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("first", ["onednn", "mixed", "blas"])
def test_run_is_resumed_with_the_matmul_library_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, *, checkpointing: bool
) -> None:
    """Bit for bit, also on a processor where another library is faster."""
    corpus, other = letters_corpus(tmp_path / "corpus", num_valid=0), "mixed" if first == "blas" else "blas"
    model = {"d_model": 74, "n_heads": 2, "d_ff": 450}  # the smallest matrices that oneDNN takes
    settings = {"model": model, "activation_checkpointing": checkpointing}
    with monkeypatch.context() as patch:
        patch.setattr("transformer_xl.training.numerics.fastest_matmul_library", lambda: first)
        whole = start(tmp_path / "whole", corpus, **settings)
        whole.run()
        trainer = start(tmp_path / "run", corpus, **settings)
        train_until(trainer, 9)
        patch.setattr("transformer_xl.training.numerics.fastest_matmul_library", lambda: other)
        different = start(tmp_path / "other", corpus, **settings)
        different.run()
        trainer = reopened(trainer)
    assert trainer.stepper.numerics == whole.stepper.numerics
    assert trainer.stepper.numerics.matmul_library == first
    trainer.run()
    assert nats_of(trainer) == nats_of(whole) != nats_of(different)
    if first == "onednn":
        monkeypatch.setattr("transformer_xl.training.numerics.packs", lambda _: False)
        resumed = Trainer(RunFolder.open(tmp_path / "run"), corpus, CPU)
        (warning,) = resumed.resume()
        assert "trained with matmul library onednn, which is not available here" in warning
        assert resumed.stepper.numerics.matmul_library == "blas"


# models with attention, and without, and what the native operators compute of them; the field of Numerics
ATTENTION: dict[str, Any] = {"attention_dropout": 0.3}
NORM: dict[str, Any] = {"qk_norm": True}
LSTM: dict[str, Any] = {"architecture": "lstm", "n_layers": 2, "d_model": 14, "dropout": 0.3}


@needs_native
@pytest.mark.parametrize(
    ("model", "field", "first"),
    [
        (ATTENTION, "attn_implementation", "native"),
        (ATTENTION, "attn_implementation", "cpu"),
        (LSTM, "dropout_kernel", "native"),
        (LSTM, "dropout_kernel", "torch"),
        (NORM, "norm_kernel", "native"),
        (NORM, "norm_kernel", "torch"),
    ],
)
def test_run_is_resumed_with_the_operators_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], field: str, first: str
) -> None:
    """Bit for bit, also where the native operators are built between stop and resume."""
    corpus = letters_corpus(tmp_path / "corpus")
    with monkeypatch.context() as patch:
        if first != "native":
            patch.setattr("transformer_xl.ops.native.operators", lambda: None)
        whole = start(tmp_path / "whole", corpus, model=model)
        whole.run()
        trainer = start(tmp_path / "run", corpus, model=model)
        train_until(trainer, 9)
    trainer = reopened(trainer)
    assert trainer.stepper.numerics == whole.stepper.numerics
    assert getattr(trainer.stepper.numerics, field) == first
    takes, seen = native.takes, set[tuple[str, bool]]()
    monkeypatch.setattr(
        native, "takes", lambda kind: seen.add((kind, takes(kind))) or takes(kind)
    )  # validation asks too
    trainer.run()
    assert seen == {("norm", first == "native")} or field != "norm_kernel"
    for name, expected in whole.model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], expected), name
    assert nats_of(trainer) == nats_of(whole)


@needs_native
@pytest.mark.parametrize(
    ("model", "field", "what", "instead"),
    [
        (ATTENTION, "attn_implementation", "attn implementation native", "cpu"),
        (LSTM, "dropout_kernel", "dropout kernel native", "torch"),
    ],
)
def test_resume_without_the_operators_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], field: str, what: str, instead: str
) -> None:
    trainer = start(tmp_path / "run", letters_corpus(tmp_path / "corpus", num_valid=0), model=model)
    train_until(trainer, 9)
    monkeypatch.setattr("transformer_xl.ops.native.operators", lambda: None)
    trainer = Trainer(RunFolder.open(tmp_path / "run"), trainer.corpus, CPU)
    (warning,) = trainer.resume()
    assert f"trained with {what}, which is not available here" in warning
    train_until(trainer, 12)  # the next checkpoint records what was used
    assert getattr(trainer.stepper.numerics, field) == instead
    assert Trainer(RunFolder.open(tmp_path / "run"), trainer.corpus, CPU).resume() == []
