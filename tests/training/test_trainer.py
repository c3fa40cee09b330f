"""The loop: what memory carries, what lines of figures say, what is validated and kept, and who hears of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import (
    CPU,
    best_and,
    letters,
    lines_of,
    make_corpus,
    nats_of,
    reopened,
    rows_nats,
    start,
    train_until,
)
from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.run_folder import RunFolder
from transformer_xl.text.segments import DatasetPosition
from transformer_xl.training import checkpoint
from transformer_xl.training.callbacks import Callback
from transformer_xl.training.trainer import Trainer, training_dataset
from transformer_xl.training.validation import Validator


def test_text_before_reaches_the_next_step_through_memory_alone(tmp_path: Path) -> None:
    """Two texts that differ in the first segments of the rows only, but for the last token; weights do not move."""
    one = bytearray(letters(126, seed=1))
    other = bytearray(one)
    for row in range(3):
        other[row * 42 : row * 42 + 6] = letters(6, seed=row + 5)
    corpora = [make_corpus(tmp_path / f"corpus {place}", bytes(text)) for place, text in enumerate((one, other))]
    for memory in (0, 11):
        first, second = (
            start(tmp_path / f"{memory} {place}", corpus, memory_length=memory, learning_rate=1e-30)
            for place, corpus in enumerate(corpora)
        )
        for training in (first, second):
            training.model.double()
            train_until(training, 8)
        differ = [a != b for a, b in zip(nats_of(first), nats_of(second), strict=True)]
        # an epoch is 6 segments. In the fifth (places 28 on) the second layer's memory holds place 17, which was read
        # with a memory of places 3 on; in the sixth it holds place 24, read with one of places 10 on
        assert differ == [True, *[memory > 0] * 4, False, True, memory > 0]


def test_an_epoch_begins_with_an_empty_memory(tmp_path: Path) -> None:
    """With weights that do not move, every epoch has the same losses."""
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1))
    training = start(tmp_path / "run", corpus, learning_rate=1e-30, max_steps=21)
    training.run()
    nats = nats_of(training)
    assert nats[:7] == nats[7:14] == nats[14:]
    assert len(set(nats[:7])) == 7


def test_lines_are_means_over_the_tokens_since_the_last_line(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1))
    each, some = (start(tmp_path / f"{every}", corpus, log_interval=every) for every in (1, 5))
    each.run()
    some.run()
    counts = [
        training_dataset(corpus, each.config).read(DatasetPosition(segment_index=step % 7)).loss_mask_BT.sum()
        for step in range(17)
    ]
    assert counts[:7] == [21] * 6 + [1]
    nats = nats_of(each)
    wanted = [np.average(nats[i : i + 5], weights=counts[i : i + 5]) for i in (0, 5, 10)]
    np.testing.assert_allclose(nats_of(some), wanted, rtol=1e-12)
    assert [line["step"] for line in lines_of(some, "train")] == [5, 10, 15]


# Validation.


def test_validation_is_a_score_of_the_validation_text(tmp_path: Path) -> None:
    """By its own memory and without dropout; training goes on as if there were none."""
    text, valid = letters(127, seed=1), letters(41, seed=2)
    corpus = make_corpus(tmp_path / "corpus", text, valid)
    without = start(tmp_path / "without", make_corpus(tmp_path / "alone", text), model={"dropout": 0.3})
    without.run()
    training = start(tmp_path / "run", corpus, eval_interval=3, model={"dropout": 0.3})
    training.run()
    assert [line["step"] for line in lines_of(training, "valid")] == [3, 6, 9, 12, 15, 17]
    assert nats_of(training) == nats_of(without)
    assert training.model.training
    model = training.folder.load_model(CPU, "last")
    tokens = np.frombuffer(valid, dtype=np.uint8)
    last = lines_of(training, "valid")[-1]
    wanted = rows_nats(model, tokens) / 41
    assert last["nats_per_token"] == pytest.approx(wanted, rel=1e-6)
    assert last["bits_per_byte"] == pytest.approx(wanted / math.log(2), rel=1e-6)


def test_evaluate_tokens_cuts_the_validation_text(tmp_path: Path) -> None:
    """A short one is read in as many rows as it fills, at least one."""
    text, valid = letters(127, seed=1), letters(41, seed=2)
    whole, cut = make_corpus(tmp_path / "whole", text, valid), make_corpus(tmp_path / "cut", text, valid[:5])
    one = start(tmp_path / "one", whole, eval_tokens=5, max_steps=2)
    other = start(tmp_path / "other", cut, max_steps=2)
    for trainer in (one, other):
        trainer.run()
    assert one.state.best_nats == other.state.best_nats


def test_the_best_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation losses 5, 3, 4, 3, 6: the second's weights."""
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1), letters(41, seed=2))
    losses = iter([5.0, 3.0, 4.0, 3.0, 6.0])
    monkeypatch.setattr(Validator, "sum_losses", lambda self, *_: next(losses) * self.num_tokens)
    training = start(tmp_path / "run", corpus, max_steps=15, eval_interval=3)
    train_until(training, 6)
    state = training.folder.latest_checkpoint()
    assert state is not None
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "model.safetensors").write_bytes((state / "model.safetensors").read_bytes())
    training.run()
    assert training.state.best_nats == 3.0
    assert all(best_and(training.folder, tmp_path / "kept" / "model.safetensors"))
    assert not any(best_and(training.folder, training.folder.weights_file("last")))


def test_weights_wrecked_by_a_high_rate_are_not_the_best(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1), letters(41, seed=2))
    training = start(tmp_path / "run", corpus, max_steps=8, eval_interval=4)
    train_until(training, 5)
    good = lines_of(training, "valid")[0]["nats_per_token"]
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    training = reopened(training, learning_rate=30.0)
    training.run()
    first, second = (line["nats_per_token"] for line in lines_of(training, "valid"))
    assert (first, training.state.best_nats) == (good, good)
    assert second > good + 1
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


def test_a_checkpoint_written_anew_replaces_the_old_one_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run stopped in a validation has one of that step; where the next cannot be written, it must still be there."""
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1), letters(41, seed=2))
    training = start(tmp_path / "run", corpus, eval_interval=4, checkpoint_interval=4)
    train_until(training, 4)
    assert not lines_of(training, "valid")

    def refuse(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(checkpoint, "save_tensors", refuse)
    with pytest.raises(UserError, match=r"writing .*step-00000004.*: no room"):
        training.run()
    assert len(lines_of(training, "valid")) == 1
    Trainer(RunFolder.open(tmp_path / "run"), corpus, CPU).resume()
    assert [path.name for path in training.folder.checkpoints()] == ["step-00000000", "step-00000004"]


def test_without_validation_text_the_last_weights_are_the_best(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1))
    training = start(tmp_path / "run", corpus, eval_interval=3)
    train_until(training, 5)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert training.folder.weights_file("best") == training.folder.weights_file("last")
    assert training.run()
    assert training.state.best_nats is None
    assert all(best_and(training.folder, training.folder.weights_file("last")))


def test_too_short_a_text_is_refused(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", letters(20, seed=1))
    with pytest.raises(UserError, match=r"20 tokens.*21.*--train.batch-size"):
        start(tmp_path / "run", corpus)


class Recorder(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    @override
    def on_train_begin(self, trainer: Trainer) -> None:
        self.heard.append("begin")

    @override
    def on_step(self, trainer: Trainer, num_tokens: int) -> None:
        self.heard.append((trainer.state.step, num_tokens))

    @override
    def on_validation_progress(self, trainer: Trainer, num_scored: int, num_tokens: int) -> None:
        self.heard.append((num_scored / num_tokens, "validation"))

    @override
    def on_metrics(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        self.heard.append((metrics["split"], metrics["step"]))

    @override
    def on_train_end(self, trainer: Trainer) -> None:
        self.heard.append("end")


def test_a_callback_sees_every_step_and_line(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1), letters(41, seed=2))
    training = start(tmp_path / "run", corpus, max_steps=8, log_interval=4, eval_interval=4)
    recorder = Recorder()
    training.callbacks.append(recorder)
    assert training.run()
    begin, *heard, end = recorder.heard
    assert (begin, end) == ("begin", "end")
    steps = [(step, 1 if step == 7 else 21) for step in range(1, 9)]
    assert [one for one in heard if isinstance(one[0], int)] == steps
    assert [one[0] for one in heard if one[1] == "validation"][-1] == 1
    lines = [one for one in heard if isinstance(one[0], str)]
    assert lines == [("train", 4), ("valid", 4), ("train", 8), ("valid", 8)]
    assert heard.index(("train", 4)) < heard.index((5, 21))


def test_a_callback_is_told_the_end_when_training_fails(tmp_path: Path) -> None:
    class Failing(Recorder):
        @override
        def on_step(self, trainer: Trainer, num_tokens: int) -> None:
            raise ZeroDivisionError

    training = start(tmp_path / "run", make_corpus(tmp_path / "corpus", letters(127, seed=1)))
    failing = Failing()
    training.callbacks.append(failing)
    with pytest.raises(ZeroDivisionError):
        training.run()
    assert failing.heard[-1] == "end"
