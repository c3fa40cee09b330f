"""Classifiers of documents: `load_classifier` reads one from its folder, and `classify` applies it.

A classifier's folder is the folder of a run, its fine-tuned language model, with more files:

model.safetensors     the weights of the language model with the lowest validation loss, and `score.weight`
classifier.json       labels, pooling, and what was measured in training
documents.safetensors the tokens and labels that it is trained with
training/checkpoints/ checkpoints, from which its training resumes

The score of a label is the product of the pooled hidden state of a document with a row of `score.weight`, as in
transformers' models for sequence classification, and the probabilities are their softmax.

Shape suffixes: N documents, C labels, D model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import Unpack

from transformer_xl.apps.classify.embedding import embed
from transformer_xl.config import EvaluationConfig, Settings, UserError, check_settings, check_type, checked_names
from transformer_xl.display import Displayed
from transformer_xl.evaluation.evaluate import override_config
from transformer_xl.evaluation.plan import ProgressCallback
from transformer_xl.evaluation.pooling import Pooling
from transformer_xl.evaluation.score import Texts
from transformer_xl.files import as_path, parse_json, quoted, read_bytes
from transformer_xl.run import Run, load
from transformer_xl.run_folder import CLASSIFIER_FILE, HEAD
from transformer_xl.tensor_file import DAMAGED, load_tensors

if TYPE_CHECKING:
    from transformer_xl.config.typed_settings import EvaluationSettings


class Validation(Settings):
    """How good a classifier was after some steps of training, on documents that it was not trained with."""

    step: int
    train_loss: float
    """Mean loss of the documents since the validation before, in nats per document."""
    loss: float
    """Mean loss of the validation documents, in nats per document."""
    accuracy: float
    """Fraction of the validation documents whose label is predicted."""


class ClassifierRecord(Settings):
    """The contents of classifier.json."""

    format: Literal["1"] = "1"
    labels: tuple[str, ...]
    """The labels in the order of the scores."""
    pooling: Pooling = "last"
    loss_segments: int = 2
    """Number of segments at the end of a document that it was trained with a loss."""
    num_train: int
    """Number of documents that it is trained with."""
    num_valid: int
    """Number of documents that it is validated with."""
    validations: tuple[Validation, ...] = ()

    @property
    def best(self) -> Validation | None:
        """The validation with the lowest loss, whose weights are kept; None before the first."""
        return min(self.validations, key=lambda one: one.loss, default=None)


@dataclass(frozen=True, eq=False, repr=False)
class Classifier(Displayed):
    """A classifier of documents, ready to use."""

    run: Run
    """The language model that reads the documents."""
    record: ClassifierRecord
    """Labels, pooling, and what was measured in training."""
    score_CD: Tensor
    """The weights of the labels' scores."""


@dataclass(frozen=True, eq=False, repr=False)
class Classification(Displayed):
    """The labels of documents, as a classifier predicts them."""

    labels: tuple[str, ...]
    """All labels, in the order of the columns of `probabilities_NC`."""
    probabilities_NC: npt.NDArray[np.float32]
    """The probability of each label for each document."""
    given: tuple[str, ...] | None = None
    """The true labels of the documents, or None if they were not given."""

    @property
    def predicted(self) -> tuple[str, ...]:
        """The most probable label of each document."""
        return tuple(self.labels[index] for index in self.probabilities_NC.argmax(-1))

    @property
    def confusion_CC(self) -> npt.NDArray[np.int64]:
        """Number of documents by true label (rows) and predicted label (columns).

        Raises:
            UserError: no true labels were given.
        """
        if self.given is None:
            raise UserError("the true labels are not known; give labels")
        counts_CC = np.zeros((len(self.labels), len(self.labels)), dtype=np.int64)
        np.add.at(counts_CC, (label_indices(self.given, self.labels), self.probabilities_NC.argmax(-1)), 1)
        return counts_CC

    @property
    def accuracy(self) -> float:
        """Fraction of the documents whose label is predicted."""
        return float(np.trace(self.confusion_CC) / self.confusion_CC.sum())

    @property
    def f1(self) -> dict[str, float]:
        """F1 (the harmonic mean of precision and recall) by label, of all that are given or predicted."""
        counts_CC = self.confusion_CC
        totals = zip(
            self.labels, np.diag(counts_CC).tolist(), (counts_CC.sum(0) + counts_CC.sum(1)).tolist(), strict=True
        )
        return {label: 2 * right / total for label, right, total in totals if total}

    @property
    def macro_f1(self) -> float:
        """The mean of `f1` over its labels."""
        return sum(self.f1.values()) / len(self.f1)

    def metrics(self) -> dict[str, Any]:
        """Return what is known of the labels by name, for JSON; empty without true labels."""
        if self.given is None:
            return {}
        values = {"accuracy": self.accuracy, "macro_f1": self.macro_f1, "f1": self.f1}
        return values | {"labels": list(self.labels), "confusion": self.confusion_CC.tolist()}


@checked_names
def load_classifier(path: Path | str, *, device: str = "auto") -> Classifier:
    """Load a classifier from its folder.

    Args:
        path: folder of `finetune_classifier`.
        device: auto, cuda, mps or cpu.

    Raises:
        UserError: it is not the folder of a classifier, or its files are damaged.
    """
    path = as_path(path, "path")
    record = read_record(path)
    if record.best is None:
        raise UserError(f"{path} is not trained yet; go on with: txl train --resume {quoted(path)}")
    run = load(path, device=device)
    assert run.weights is not None
    tensors, _ = load_tensors(run.weights.used.file)
    shape = len(record.labels), run.config.model.d_model
    if HEAD not in tensors or tensors[HEAD].shape != shape:
        reason = f"{HEAD} is missing or is not of {shape[0]:,} labels"
        raise UserError(DAMAGED.format(run.weights.used.file, reason))
    return Classifier(run, record, tensors[HEAD])


def read_record(path: Path) -> ClassifierRecord:
    """Read classifier.json.

    Raises:
        UserError: the folder has none, or it is damaged.
    """
    file = path / CLASSIFIER_FILE
    if not file.is_file():
        raise UserError(
            f"{path} is not the folder of a classifier (no {CLASSIFIER_FILE}); make one: txl finetune RUN FILES --task "
            "classification --labels COLUMN"
        )
    try:
        values = parse_json(read_bytes(file))
    except ValueError as error:
        raise UserError(DAMAGED.format(file, error)) from None
    check_type(values, dict, str(file), "copy it again")
    return check_settings(ClassifierRecord, values, str(file))


def classify(
    classifier: Classifier,
    documents: Texts,
    labels: Sequence[str] | None = None,
    *,
    config: EvaluationConfig | None = None,
    progress: ProgressCallback | None = None,
    **overrides: Unpack[EvaluationSettings],
) -> Classification:
    """Return the probability of each label for each document, and with true labels, how good they are.

        classify(load_classifier("runs/topics"), ["A document of any length."]).predicted

    Args:
        classifier: a loaded classifier.
        documents: as for `embed`.
        labels: the true label of each document, or None.
        config: as for `embed`; the lengths of segment and memory are those of training unless they are given.
        progress: as for `embed`.
        overrides: as for `embed`.

    Raises:
        UserError: a label is not one of the classifier's, there is not one for each document, or a reason that `embed`
            lists.
    """
    check_type(classifier, Classifier, "classifier", "give a loaded one, such as load_classifier('runs/mine')")
    config = override_config(config, overrides, "documents", "labels", "progress")
    given = None if labels is None else checked_labels(labels)
    label_indices(given or (), classifier.record.labels)
    vectors_ND = embed(classifier.run, documents, pooling=classifier.record.pooling, config=config, progress=progress)
    if given is not None and len(given) != len(vectors_ND):
        raise UserError(f"{len(given):,} labels for {len(vectors_ND):,} documents; give one for each")
    probabilities_NC = (torch.from_numpy(vectors_ND) @ classifier.score_CD.T).softmax(-1).numpy()
    return Classification(classifier.record.labels, probabilities_NC, given)


def label_indices(labels: Sequence[str], known: Sequence[str]) -> list[int]:
    """Return the index of each label.

    Raises:
        UserError: one is not known.
    """
    index_of = {label: index for index, label in enumerate(known)}
    if unknown := [label for label in labels if label not in index_of]:
        raise UserError(f"the label {unknown[0]!r} is not one of those in training: {', '.join(known)}")
    return [index_of[label] for label in labels]


def checked_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the labels of documents.

    Raises:
        UserError: they are no texts, or one is empty.
    """
    advice = "give a list with one for each document"
    check_type(labels, Iterable, "labels", advice)
    given = () if isinstance(labels, str) else tuple(labels)
    if isinstance(labels, str) or not all(isinstance(label, str) and label for label in given):
        raise UserError(f"labels must be texts that are not empty; {advice}")
    return given
