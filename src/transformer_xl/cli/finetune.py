"""`txl finetune`: train the weights of a run further on another corpus; `apps/classify/command.py` has classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.flags import (
    EVALUATION,
    MODEL,
    TRAINING,
    EvaluationFlags,
    ModelFlags,
    TrainFlags,
    given_settings,
)
from transformer_xl.cli.options import (
    DEFAULT_DEVICE,
    NO_CLASSIFIER_OPTIONS,
    NO_DOCUMENT_OPTIONS,
    ClassifierFlags,
    DeviceFlags,
    DocumentFlags,
    Integer,
    Json,
)
from transformer_xl.cli.train import print_result
from transformer_xl.config import UserError


def finetune(
    base: Path,
    /,
    *files: Path,
    task: Literal["language-modeling", "classification"] = "language-modeling",
    corpus: Path | None = None,
    run: Path | None = None,
    replace_tokenizer: Annotated[bool, Parameter(negative=())] = False,
    freeze: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    layer_rate_decay: float = 1.0,
    lora_rank: Annotated[int | None, Integer] = None,
    lora_alpha: float | None = None,
    lora_dropout: float | None = None,
    lora_targets: str | None = None,
    checkpoint: Literal["best", "last"] = "best",
    classifier: ClassifierFlags = NO_CLASSIFIER_OPTIONS,
    documents: DocumentFlags = NO_DOCUMENT_OPTIONS,
    model: Annotated[ModelFlags | None, Parameter(group=MODEL)] = None,
    train: Annotated[TrainFlags | None, Parameter(group=TRAINING)] = None,
    evaluation: Annotated[EvaluationFlags | None, Parameter(group=EVALUATION)] = None,
    device_options: DeviceFlags = DEFAULT_DEVICE,
    json: Json = False,
) -> int:
    """Train the weights of a run further, on another corpus or as a classifier of documents, as a new run.

    Settings: those of the run (the learning rate of a converted run or merged adapter is 1e-4) with 1000 steps,
    replaced by flags. It prints the loss of the new text and of the run's own before and after. 'txl train --resume'
    resumes it. With --task classification it trains a classifier on documents with labels, for 'txl classify'.

    Parameters
    ----------
    base
        Folder of the run to begin with, trained here or converted; it is not changed.
    files
        With classification, CSV or JSON lines with a document and its label in each row.
    task
        Predict the next token, or the label of a document of any length.
    corpus
        Folder that 'txl prepare' created; prepare it with --tokenizer RUN to keep the run's tokens.
    run
        New folder for settings, weights and metrics. [default: runs/CORPUS-BASE]
    replace_tokenizer
        Accept a corpus with another tokenizer: tokens that both have keep their embeddings.
    freeze
        Pattern of the names of parameters that are not trained, such as 'layers.0.*'; may be repeated.
    layer_rate_decay
        Factor between the learning rates of a layer and the layer above it, up to 1.
    lora_rank
        Train a LoRA adapter of this rank, and nothing else; the run is small, and the weights stay in the base.
    lora_alpha
        The adapter's product is scaled by alpha / rank. [default: twice the rank]
    lora_dropout
        Probability that dropout zeroes an input of the adapter. [default: 0]
    lora_targets
        Names of the linear layers that are adapted, such as q_proj,v_proj. [default: all]
    checkpoint
        Begin with the weights of the lowest validation loss, or with the last ones.
    classifier
        Options of classification.
    documents
        What is a document, with classification.
    """
    options: dict[str, Any] = given_settings(model=model, train=train, evaluation=evaluation)
    options |= {**vars(device_options), "handle_signals": True, "checkpoint": checkpoint}
    options |= {"freeze": freeze, "layer_rate_decay": layer_rate_decay}
    if task == "classification":
        adapter = {"lora_rank": lora_rank, "lora_alpha": lora_alpha, "lora_dropout": lora_dropout}
        others = {"corpus": corpus, "replace_tokenizer": replace_tokenizer or None, "lora_targets": lora_targets}
        _refuse(adapter | others, "a classifier", "leave it out")
        from transformer_xl.apps.classify.command import finetune_classifier

        return finetune_classifier(base, files, classifier, documents, run=run, json=json, **options)
    given = {name: value or None for name, value in (vars(classifier) | vars(documents)).items()}
    _refuse(given | {"files": files or None}, "a language model", "give --task classification too, or leave it out")
    if corpus is None:
        raise UserError("fine-tuning needs --corpus DIR (from 'txl prepare')")
    from transformer_xl.training import finetune as training

    options |= {"replace_tokenizer": replace_tokenizer}
    options |= {"lora_rank": lora_rank, "lora_alpha": lora_alpha, "lora_dropout": lora_dropout}
    options["lora_targets"] = () if lora_targets is None else lora_targets.split(",")
    result = training.finetune(base, corpus, run, **options)
    return print_result(result, as_json=json)


def _refuse(options: dict[str, Any], what: str, advice: str) -> None:
    """Refuse options that have no effect.

    Raises:
        UserError: one was given.
    """
    if given := [name for name, value in options.items() if value is not None]:
        name = given[0] if given[0] == "files" else f"--{given[0].replace('_', '-')}"
        raise UserError(f"{name} has no effect on {what}; {advice}")
