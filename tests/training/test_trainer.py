"""The training loop: what memory passes on, the metrics, validation and best weights, and the calls of callbacks.

The settings TRAIN of training_runs.py have 3 batch rows, segments of 7 tokens, 11 memory slots and 17 steps. The text
of `letters_corpus` has 127 tokens, so an epoch has 7 steps, 6 of 21 tokens and one of a single token.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensors import assert_same_tensors
from training_runs import (
    CPU,
    StopAt,
    StopInValidation,
    equals_best,
    letters,
    letters_corpus,
    lines_of,
    make_corpus,
    nats_of,
    reopened,
    start,
    train_until,
    validation_nats,
)
from typing_extensions import override

from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.model.memory import ContextLimits
from transformer_xl.run import load_run
from transformer_xl.run_folder import RunFolder
from transformer_xl.tensor_file import load_tensors
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import Document
from transformer_xl.text.segments import DatasetPosition
from transformer_xl.text.shuffled import ShuffledDocumentDataset
from transformer_xl.text.tokenizers import ByteTokenizer
from transformer_xl.training.callbacks import Callback
from transformer_xl.training.data import training_dataset
from transformer_xl.training.trainer import Trainer
from transformer_xl.training.validation import Validator


def test_training_reads_pieces_of_the_text_or_of_its_documents(tmp_path: Path) -> None:
    documents = [Document("first", [b"a" * 31]), Document("second", [b"b" * 12])]
    corpus = write_corpus(
        tmp_path / "corpus", {"train": documents}, name="two", source="a test", tokenizer=ByteTokenizer()
    )
    _, second = (int(start) for start in corpus.split("train").document_starts)
    num_tokens = len(corpus.split("train").tokens)
    pieces = (
        (5, False, [*range(0, num_tokens, 5)]),
        (5, True, [*range(0, second, 5), *range(second, num_tokens, 5)]),
        (6, False, [*range(0, num_tokens, 5)]),  # as many for each of the three rows
        (99, False, [*range(0, num_tokens, num_tokens // 3)]),
    )
    for number, (length, shuffle_documents, starts) in enumerate(pieces):
        settings: dict[str, Any] = {"shuffle_length": length, "shuffle_documents": shuffle_documents}
        dataset = start(tmp_path / str(number), corpus, **settings).stepper.dataset
        assert isinstance(dataset, ShuffledDocumentDataset)
        assert dataset.document_starts.tolist() == starts


def test_metrics_are_means_over_the_tokens_of_an_interval(tmp_path: Path) -> None:
    corpus = letters_corpus(tmp_path / "corpus", num_valid=0)
    every_step, every_fifth = (start(tmp_path / f"{steps}", corpus, log_interval=steps) for steps in (1, 5))
    every_step.run()
    every_fifth.run()
    dataset = training_dataset(corpus, every_step.folder.config)
    counts = [dataset.read(DatasetPosition(segment_index=step % 7)).loss_mask_BT.sum() for step in range(17)]
    assert counts[:7] == [21] * 6 + [1]
    nats = nats_of(every_step)
    expected = [np.average(nats[i : i + 5], weights=counts[i : i + 5]) for i in (0, 5, 10)]
    np.testing.assert_allclose(nats_of(every_fifth), expected, rtol=1e-12)
    assert [line["step"] for line in lines_of(every_fifth, "train")] == [5, 10, 15]
    norms = [line["grad_norm"] for line in lines_of(every_step, "train")]
    assert [line["grad_norm"] for line in lines_of(every_fifth, "train")] == norms[4::5]
    assert [line["grad_norm_max"] for line in lines_of(every_fifth, "train")] == [
        max(norms[i : i + 5]) for i in (0, 5, 10)
    ]


def test_validation_is_an_evaluation_of_the_validation_text(tmp_path: Path) -> None:
    """Validation uses a memory of its own and no dropout, and does not change training. The text has 41 tokens."""
    corpus, model = letters_corpus(tmp_path / "corpus"), {"dropout": 0.3}
    without = start(tmp_path / "without", letters_corpus(tmp_path / "no valid", num_valid=0), model=model)
    without.run()
    trainer = start(tmp_path / "run", corpus, eval_interval=3, model=model)
    trainer.run()
    assert [line["step"] for line in lines_of(trainer, "valid")] == [3, 6, 9, 12, 15, 17]
    assert nats_of(trainer) == nats_of(without)
    assert trainer.model.training
    expected = validation_nats(load_run(trainer.folder, CPU, "last").model, corpus.split("valid").tokens) / 41
    line = lines_of(trainer, "valid")[-1]
    assert line["nats_per_token"] == pytest.approx(expected, rel=1e-6)
    assert line["bits_per_byte"] == pytest.approx(expected / math.log(2), rel=1e-6)


def test_validation_reads_the_extended_context(tmp_path: Path) -> None:
    corpus = letters_corpus(tmp_path / "corpus")
    settings = {"memory_length": 0, "extended_context_length": 5, "random_segment_lengths": True, "max_steps": 9}
    trainer = start(tmp_path / "run", corpus, model={"embedding_dropout": 0.3}, **settings)
    trainer.run()
    plan = EvaluationPlan(segment_length=7, context_limits=ContextLimits(0), extended_context_length=5)
    model, tokens = load_run(trainer.folder, CPU, "last").model, corpus.split("valid").tokens
    (line,) = lines_of(trainer, "valid")
    assert line["nats_per_token"] == pytest.approx(validation_nats(model, tokens, plan=plan) / 41, rel=1e-6)


def test_eval_tokens_truncates_the_validation_text(tmp_path: Path) -> None:
    """The truncated text is shorter than one segment for each row of a batch, so it is scored in fewer batch rows.

    Its loss equals that of a text which has only these 5 tokens.
    """
    text, valid = letters(127, seed=1), letters(41, seed=2)
    truncated = start(tmp_path / "1", make_corpus(tmp_path / "long", text, valid), eval_tokens=5, max_steps=2)
    short = start(tmp_path / "2", make_corpus(tmp_path / "short", text, valid[:5]), max_steps=2)
    for trainer in (truncated, short):
        trainer.run()
    assert truncated.state.best_nats == short.state.best_nats


def test_weights_with_the_lowest_validation_loss_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([5.0, 3.0, 4.0, 3.0, 6.0])  # of the validations at steps 3, 6, ..., 15; the first 3.0 is the best
    monkeypatch.setattr(Validator, "sum_losses", lambda self, *_: next(losses) * self.num_tokens)
    trainer = start(tmp_path / "run", letters_corpus(tmp_path / "corpus"), max_steps=15, eval_interval=3)
    train_until(trainer, 6)
    expected = (trainer.folder.checkpoints()[-1] / "model.safetensors").rename(tmp_path / "expected.safetensors")
    trainer.run()
    assert trainer.state.best_nats == 3.0
    assert all(equals_best(trainer.folder, expected))
    assert not any(equals_best(trainer.folder, trainer.folder.choose_weights("last").used.file))


def test_without_validation_text_the_last_weights_are_the_best(tmp_path: Path) -> None:
    trainer = start(tmp_path / "run", letters_corpus(tmp_path / "corpus", num_valid=0), eval_interval=3)
    train_until(trainer, 5)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert trainer.folder.choose_weights("best").used.file == trainer.folder.choose_weights("last").used.file
    assert trainer.run()
    assert trainer.state.best_nats is None
    assert all(equals_best(trainer.folder, trainer.folder.choose_weights("last").used.file))


def test_average_that_could_not_be_saved_at_the_end_is_saved_when_the_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without validation text it is saved after the last checkpoint: the disk was full, say."""
    settings = {"max_steps": 6, "weight_average": "ema", "ema_decay": 0.8}
    corpus = letters_corpus(tmp_path / "corpus", num_valid=0)
    whole, failed = (start(tmp_path / name, corpus, **settings) for name in ("whole", "failed"))
    assert whole.run()
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_weights", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failed.run()
    assert reopened(failed).run()
    expected = load_tensors(whole.folder.path / "model.safetensors")[0]
    assert_same_tensors(load_tensors(failed.folder.path / "model.safetensors")[0], expected)


def test_stop_validates_the_last_weights(tmp_path: Path) -> None:
    """The checkpoint is complete before the validation, so stopping again in that validation loses nothing."""
    corpus = letters_corpus(tmp_path / "corpus")
    trainer = start(tmp_path / "run", corpus, eval_interval=5)
    train_until(trainer, 8)
    (line,) = [line for line in lines_of(trainer, "valid") if line["step"] == 8]
    used, (last,) = trainer.folder.choose_weights().used, trainer.folder.choose_weights().others
    assert (used.name, used.step, used.valid_nats_per_token) == ("best", 8, line["nats_per_token"])
    assert (last.name, last.step, last.valid_nats_per_token) == ("last", 8, line["nats_per_token"])
    assert lines_of(reopened(trainer), "valid")[-1] == line
    again = start(tmp_path / "again", corpus, eval_interval=5)
    again.callbacks += [StopAt(8), StopInValidation(8)]
    assert not again.run()
    chosen = again.folder.choose_weights()
    assert (chosen.used.step, chosen.others[0].step, chosen.others[0].valid_nats_per_token) == (5, 8, None)
    assert "last weights are 3 steps newer" in chosen.lines()[1]
    assert "checkpoint=last" in chosen.lines()[1]
    files = [run.folder.choose_weights("last").used.file.read_bytes() for run in (trainer, again)]
    assert files[0] == files[1]


class Recorder(Callback):
    """Records the calls of its methods, and fails in the step `fail_at`, if any."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list[Any] = []
        self.fail_at = fail_at

    @override
    def on_train_begin(self, trainer: Trainer) -> None:
        self.calls.append("begin")

    @override
    def on_step(self, trainer: Trainer, num_tokens: int) -> None:
        self.calls.append((trainer.state.step, num_tokens))
        if trainer.state.step == self.fail_at:
            raise ZeroDivisionError

    @override
    def on_validation_progress(self, trainer: Trainer, num_scored: int, num_tokens: int) -> None:
        self.calls.append((num_scored / num_tokens, "validation"))

    @override
    def on_metrics(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        self.calls.append((metrics["split"], metrics["step"]))

    @override
    def on_train_end(self, trainer: Trainer) -> None:
        self.calls.append("end")


def test_callbacks_are_called_at_every_event(tmp_path: Path) -> None:
    trainer = start(tmp_path / "run", letters_corpus(tmp_path / "corpus"), max_steps=8, log_interval=4, eval_interval=4)
    recorder = Recorder()
    trainer.callbacks.append(recorder)
    assert trainer.run()
    begin, *calls, end = recorder.calls
    assert (begin, end) == ("begin", "end")
    # the last segment of an epoch, the seventh, has one token
    steps = [(step, 1 if step == 7 else 21) for step in range(1, 9)]
    assert [call for call in calls if isinstance(call[0], int)] == steps
    assert [call[0] for call in calls if call[1] == "validation"][-1] == 1
    metrics = [("train", 4), ("valid", 4), ("train", 8), ("valid", 8)]
    assert [call for call in calls if isinstance(call[0], str)] == metrics
    assert calls.index(("train", 4)) < calls.index((5, 21))


def test_on_train_end_is_called_after_an_error(tmp_path: Path) -> None:
    trainer = start(tmp_path / "run", letters_corpus(tmp_path / "corpus", num_valid=0))
    recorder = Recorder(fail_at=2)
    trainer.callbacks.append(recorder)
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert recorder.calls == ["begin", (1, 21), ("train", 1), (2, 21), "end"]
