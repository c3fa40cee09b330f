"""`DocumentClassifier`: a step of datatrove's pipelines that adds the label of each document to its metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from typing_extensions import override

from transformer_xl.apps.classify.classifier import classify, load_classifier
from transformer_xl.integrations.datatrove import DocumentStep


class DocumentClassifier(DocumentStep):
    """Adds the most probable label of each document, and the probability of each label; no document is dropped.

    The arguments are those of `DocumentStep`, with the folder of a classifier, made by `finetune_classifier`; lengths
    of segment and memory are those of training unless they are given. With the prefix txl, the metadata are `txl_label`
    and, by label, `txl_probabilities`.
    """

    name = "Labels of a transformer_xl classifier"

    @override
    def open(self, rank: int) -> Callable[[dict[str, bytes]], Iterable[dict[str, Any]]]:
        classifier = load_classifier(self.model, device=self.device)

        def read(texts: dict[str, bytes]) -> Iterator[dict[str, Any]]:
            result = classify(classifier, texts, config=self.config)
            for label, numbers in zip(result.predicted, result.probabilities_NC.tolist(), strict=True):
                yield {"label": label, "probabilities": dict(zip(result.labels, numbers, strict=True))}

        return read
