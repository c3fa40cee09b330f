"""Gradients are those of documents read one by one; training resumes bit for bit; metrics are those of their names.

Shape suffixes: T tokens, D model width.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from labelled import OPTIONS, TRAIN, contents, documents
from small_runs import SEGMENT, make_run
from tensors import assert_same_tensors
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import transformer_xl.integrations.huggingface  # noqa: F401 (registers our models)
from transformer_xl import (
    Classification,
    Run,
    TrainConfig,
    UserError,
    classify,
    convert,
    embed,
    evaluate,
    finetune,
    finetune_classifier,
    load,
    load_classifier,
    prepare,
    resume_classifier,
)
from transformer_xl.apps.classify import training
from transformer_xl.apps.classify.training import ClassifierTrainer, DocumentStepper, Examples
from transformer_xl.run_folder import HEAD, RunFolder
from transformer_xl.tensor_file import load_tensors
from transformer_xl.training.train import TrainResult

LENGTHS = (3, SEGMENT, 30, SEGMENT + 1, 3 * SEGMENT)


@pytest.fixture
def base(tmp_path: Path) -> Run:
    return make_run(tmp_path / "base", dropout=0.1)


def tuned(base: Run, name: str, **arguments: Any) -> TrainResult:
    """Train a classifier beside the base."""
    assert base.path is not None
    options = {"train": TRAIN, **OPTIONS} | arguments
    return finetune_classifier(base.path, *documents(40), base.path.parent / name, **options)


def slow_loss(
    model: torch.nn.Module, document: list[int], label: int, pooling: str, loss_segments: int
) -> torch.Tensor:
    """Return the mean loss at the ends of the last segments of a document that is read alone."""
    memory, states, losses = model.initial_memory(1), [], []
    parts = torch.tensor(document).split(SEGMENT)
    for number, part in enumerate(parts):
        hidden_BTD, memory = model(part[None], memory)
        pooled = torch.cat([*states, hidden_BTD[0]]).mean(0) if pooling == "mean" else hidden_BTD[0, -1]
        states.append(hidden_BTD[0].detach())
        if number >= len(parts) - loss_segments:
            losses.append(F.cross_entropy(model.score(pooled), torch.tensor(label)))
    return torch.stack(losses).mean()


@pytest.mark.parametrize(("pooling", "loss_segments"), [("last", 1), ("mean", 1), ("last", 3), ("mean", 9)])
@pytest.mark.parametrize("name", ["transformer-xl", "n-grams", "lstm"])
def test_gradients_are_those_of_documents_read_one_by_one(
    name: str, pooling: str, loss_segments: int, tmp_path: Path
) -> None:
    run, rng = make_run(tmp_path / "base", name, dropout=0.0), np.random.default_rng(3)
    options = {"train": TRAIN | {"batch_size": len(LENGTHS), "max_steps": 1, "micro_batch_size": 3}, **OPTIONS}
    assert run.path is not None
    path = tmp_path / "classifier"
    finetune_classifier(run.path, *documents(40), path, **options, pooling=pooling, loss_segments=loss_segments)
    tensors, _ = load_tensors(path / "documents.safetensors")
    trainer = ClassifierTrainer(RunFolder.open(path), load_classifier(path).record, tensors, torch.device("cpu"))
    model, stepper = trainer.model, trainer.stepper
    model.load_state_dict(load_tensors(path / "model.safetensors")[0])
    examples = Examples([rng.integers(0, 256, length) for length in LENGTHS], [0, 2, 1, 1, 2])
    losses = [
        slow_loss(model, document.tolist(), label, pooling, loss_segments)
        for document, label in zip(examples.documents, examples.labels, strict=True)
    ]
    torch.stack(losses).mean().backward()
    expected = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    assert HEAD in expected
    model.zero_grad()
    parts = [stepper.backward(examples.select(part)) for part in stepper.micro_batches]
    torch.testing.assert_close(sum(parts), torch.stack(losses).mean().detach(), rtol=1e-5, atol=1e-6)
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert_same_tensors(found, expected, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize(
    ("stop_at", "name"), [(0, "transformer-xl"), (3, "transformer-xl"), (7, "transformer-xl"), (7, "xlnet")]
)
def test_resumed_training_is_bit_equal_to_an_uninterrupted_one(
    stop_at: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped by Ctrl-C, after which a checkpoint is written, or killed in a step."""
    base = make_run(tmp_path / "base", name, dropout=0.1)
    whole, step = tuned(base, "whole", loss_segments=2, freeze=["layers.0.*"]), DocumentStepper.step
    assert whole.finished
    for name, stop in (("stopped", lambda: os.kill(os.getpid(), signal.SIGINT)), ("killed", lambda: 1 / 0)):

        def step_and_stop(stepper: DocumentStepper, stop=stop):
            if stepper.num_steps == stop_at:
                stop()
            return step(stepper)

        with monkeypatch.context() as patch:
            patch.setattr(DocumentStepper, "step", step_and_stop)
            with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
                tuned(base, name, loss_segments=2, freeze=["layers.0.*"])
        path = base.path.parent / name
        load(path)  # the language model can be used at any time
        torch.manual_seed(104_729)  # any other seed: a new process would have another random state
        resumed = resume_classifier(path, **OPTIONS)
        assert resumed.finished
        assert contents(path, 8) == contents(whole.path, 8)
    first = {name: one for name, one in base.model.state_dict().items() if name.startswith("layers.0.")}
    weights = load_tensors(whole.path / "model.safetensors")[0]
    assert_same_tensors({name: weights[name] for name in first}, first)


def test_each_epoch_reads_every_document_once_in_an_order_of_its_own(
    base: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []

    def backward(_: DocumentStepper, examples: Examples) -> torch.Tensor:
        read.extend(document.astype(np.uint8).tobytes() for document in examples.documents)
        return torch.zeros(())

    monkeypatch.setattr(DocumentStepper, "backward", backward)
    texts, labels = documents(7, seed=2)
    train = TRAIN | {"batch_size": 3, "max_steps": 7, "eval_interval": 7}
    finetune_classifier(base, texts, labels, tmp_path / "run", valid=(texts, labels), train=train, **OPTIONS)
    epochs = [read[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(epoch) == sorted(text.encode() for text in texts) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_killed_before_the_first_checkpoint_it_begins_again(base: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tuned(base, "whole")
    with monkeypatch.context() as patch:
        patch.setattr(training, "save_checkpoint", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tuned(base, "killed")
    path = resume_classifier(base.path.parent / "killed", **OPTIONS).path
    assert contents(path, 8) == contents(whole.path, 8)


def test_classifier_learns_and_classifies_as_it_was_validated(base: Run, tmp_path: Path) -> None:
    texts, labels = documents(150, seed=5)
    valid = documents(31, seed=6)
    train = TRAIN | {"max_steps": 45, "eval_interval": 15, "batch_size": 12}
    result = finetune_classifier(base, texts, labels, tmp_path / "run", valid=valid, train=train, **OPTIONS)
    classifier = load_classifier(result.path, device="cpu")
    best = classifier.record.best
    assert classifier.record.labels == ("x", "y", "z")
    assert [one.step for one in classifier.record.validations] == [15, 30, 45]
    assert best.loss == min(one.loss for one in classifier.record.validations) < 0.1
    classified = classify(classifier, *valid)
    right_N = [classifier.record.labels.index(label) for label in valid[1]]
    nats_N = -np.log(classified.probabilities_NC[np.arange(31), right_N])
    assert classified.accuracy == best.accuracy > 0.95
    assert nats_N.mean() == pytest.approx(best.loss, rel=1e-4)
    short = classify(classifier, *valid, segment_length=1, memory_length=0)  # each token alone decides
    assert short.accuracy > 0.9
    assert classify(classifier, valid[0]).predicted == classified.predicted
    for wrong, message in (
        ([""], "must be texts"),
        ([0], "must be texts"),
        (5, "labels is of type int"),
        ("x", "texts"),
    ):
        with pytest.raises(UserError, match=message):
            classify(classifier, ["a"], wrong)
    with pytest.raises(UserError, match="the true labels are not known; give labels"):
        _ = classify(classifier, valid[0]).accuracy


def test_folder_is_a_run_of_the_finetuned_language_model(base: Run, tmp_path: Path) -> None:
    path = tuned(base, "classifier").path
    run, classifier = load(path, device="cpu"), load_classifier(path, device="cpu")
    assert run.config.finetune.base == str(base.path)
    assert RunFolder.open(path).verify() == ["there is none of the train and evaluation settings in config.yaml"]
    scores_NC = embed(run, ["abx", "a" * 50]) @ classifier.score_CD.T.numpy()
    probabilities_NC = torch.from_numpy(scores_NC).softmax(-1)
    torch.testing.assert_close(
        torch.from_numpy(classify(classifier, ["abx", "a" * 50]).probabilities_NC), probabilities_NC
    )
    corpus = prepare(out=tmp_path / "corpus", documents={"train": ["abc" * 60], "valid": ["abc" * 20]})
    again = finetune(path, corpus, tmp_path / "again", train={"max_steps": 2, "batch_size": 2}, **OPTIONS)
    assert evaluate(again.run, "valid").nats_per_token > 0
    assert not (tmp_path / "again" / "classifier.json").exists()


def test_metrics_are_those_of_a_table_counted_by_hand() -> None:
    probabilities_NC = np.eye(4, dtype=np.float32)[[0, 0, 1, 1, 1, 0]]
    result = Classification(("a", "b", "c", "d"), probabilities_NC, ("a", "a", "b", "b", "a", "c"))
    assert result.predicted == ("a", "a", "b", "b", "b", "a")
    assert result.confusion_CC.tolist() == [[2, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert result.accuracy == 4 / 6
    # a: precision 2/3, recall 2/3; b: precision 2/3, recall 1; c is never predicted, d is not there
    assert result.f1 == pytest.approx({"a": 2 / 3, "b": 0.8, "c": 0.0})
    assert result.macro_f1 == pytest.approx((2 / 3 + 0.8) / 3)


def test_what_cannot_be_trained_is_refused(base: Run, tmp_path: Path) -> None:
    texts, labels = documents(20)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"labels": labels[1:]}, "19 labels for 20 documents; give one for each"),
        ({"labels": ["x"] * 20}, "all documents have the label 'x'; give documents of two labels or more"),
        ({"labels": [*labels[1:], ""]}, "labels must be texts that are not empty"),
        ({"labels": ["q", *labels[1:]]}, "of 1 documents with the label 'q'.*more documents"),
        ({"valid_fraction": float("nan")}, "valid_fraction nan of"),
        ({"valid_fraction": float("inf")}, "valid_fraction inf of"),
        ({"loss_segments": 10**20}, "must be 1 to 2,147,483,647"),
        ({"labels": 5}, "labels is of type int"),
        ({"valid": texts}, r"give \(documents, labels\)"),
        ({"documents": ["", *texts[1:]]}, "text 1: the text is empty"),
        ({"valid": (["a"], ["q"])}, "the label 'q' is not one of those in training: x, y, z"),
        ({"valid_fraction": 1.0}, "give a lower fraction"),
        ({"loss_segments": 0}, "loss_segments 0: must be 1 to 2"),
        ({"pooling": "max"}, "no pooling 'max'; give last or mean"),
        ({"freeze": ["layer.0.*"]}, "freeze 'layer.0.*' matches no parameter"),
        ({"train": {"compile": "layers"}}, "train.compile has no effect on documents with labels; leave it out"),
        ({"train": TrainConfig(compile="layers")}, "train.compile has no effect on documents with labels"),
        ({"train": {"max_step": 1}}, "max_step"),
        ({"model": {"d_model": 8}}, "model.d_model cannot change in fine-tuning"),
        ({"evaluation": {"method": "dynamic"}}, "the method is dynamic; give method memory"),
        ({"run": base.path}, "holds a run already"),
    ]
    for given, message in cases:
        arguments = {"documents": texts, "labels": labels, "run": tmp_path / "new", "train": TRAIN, **OPTIONS} | given
        with pytest.raises(UserError, match=message):
            finetune_classifier(base, **arguments)
        assert not (tmp_path / "new").exists()
    with pytest.raises(
        UserError, match=r"not the folder of a classifier \(no classifier.json\); make one: txl finetune"
    ):
        load_classifier(base.path)
    diverging = {"train": TRAIN | {"learning_rate": 1e30, "warmup_steps": 0}}
    with pytest.raises(UserError, match=r"the loss became .*lower train\.learning_rate"):
        tuned(base, "diverged", **diverging)
    with pytest.raises(UserError, match=r"diverged is not trained yet; go on with: txl train --resume .*diverged"):
        load_classifier(base.path.parent / "diverged")
    with pytest.raises(UserError, match="diverged is not trained yet"):
        convert(base.path.parent / "diverged", tmp_path / "hub", to="huggingface")


def test_damaged_files_are_named(base: Run) -> None:
    path = tuned(base, "classifier").path
    record = (path / "classifier.json").read_text()
    for damaged, message in (
        ("{", "classifier.json is damaged"),
        (record.replace('"1"', '"2"', 1), "format: Input should be '1'"),
        ('{"labels": 1}', "classifier.json: "),
    ):
        (path / "classifier.json").write_text(damaged)
        with pytest.raises(UserError, match=message):
            load_classifier(path)
    (path / "classifier.json").write_text(record.replace('"x"', '"v", "x"'))
    with pytest.raises(UserError, match=r"score\.weight is missing or is not of 4 labels"):
        load_classifier(path)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_converted_classifier_gives_the_same_probabilities(base: Run, tmp_path: Path, pooling: str) -> None:
    """In transformers, of documents of several segments, alone and in a batch that is padded on either side."""
    result = tuned(base, "tuned", pooling=pooling, loss_segments=3)
    convert(result.path, tmp_path / "hub", to="huggingface")
    texts, _ = documents(6, seed=5, longest=3 * SEGMENT)
    probabilities_NC = classify(load_classifier(result.path), texts).probabilities_NC
    best = load_classifier(result.path).record.best
    assert best is not None
    assert f"{best.accuracy:.1%} got the right label" in (tmp_path / "hub" / "README.md").read_text()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hub")
    assert list(model.config.id2label.values()) == list(load_classifier(result.path).record.labels)
    assert (model.config.classifier_pooling, model.config.classifier_segments) == (pooling, 3)
    for side in ("left", "right"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hub", padding_side=side)
        with torch.no_grad():
            logits_NC = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits
        np.testing.assert_allclose(logits_NC.softmax(-1), probabilities_NC, atol=1e-6)
