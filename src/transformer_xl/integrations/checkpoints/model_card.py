"""The model card of an exported folder: README.md, with what is known of a run, and nothing that is not.

It has no paths of the machine that trained the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from transformer_xl.config import UserError
from transformer_xl.run import Run
from transformer_xl.run_folder import read_last_start
from transformer_xl.text.token_store import Corpus

_NAMES = {
    "transformer-xl": "Transformer-XL",
    "xlnet": "XLNet",
    "shaw": "Shaw et al.",
    "vaswani": "Transformer",
    "al-rfou": "Al-Rfou",
}
_LIMITS = """\
It continues text like that which it was trained on. What it writes can be false, and can repeat passages of its
training text. It was trained for no conversation and no instructions."""
_USE = """\
With the package `transformer_xl` installed, and `DIR` the folder or repository of this model:

```python
import transformer_xl.integrations.huggingface
from transformers import {0}, AutoTokenizer

model = {0}.from_pretrained("DIR")
tokenizer = AutoTokenizer.from_pretrained("DIR")
```

Without the first import, give both `trust_remote_code=True`: a module in the folder then does it."""
_XLNET_USE = """\
Transformers opens the folder or repository of this model, `DIR`, by itself:

```python
from transformers import AutoTokenizer, XLNetLMHeadModel

model = XLNetLMHeadModel.from_pretrained("DIR")
tokenizer = AutoTokenizer.from_pretrained("DIR")
```"""
_NO_LICENCE = "None was given. Without one, nobody else may use the model; ask who published it."


def model_card(run: Run, name: str, license: str | None = None, classifier: dict[str, Any] | None = None) -> str:
    """Return the text of README.md for a run's folder for transformers.

    Args:
        run: the loaded run.
        name: name of the model.
        license: identifier of its licence on the Hub, such as apache-2.0; None says that none was given.
        classifier: the contents of a classifier's classifier.json, or None for a language model.

    Raises:
        UserError: the licence is no identifier.
    """
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.\-]*", license):
        raise UserError(f"license {license!r} is no identifier of the Hub; give one such as apache-2.0 or cc-by-4.0")
    config, classes = run.config, "AutoModelForCausalLM" if classifier is None else "AutoModelForSequenceClassification"
    architecture = _NAMES.get(config.model.architecture, config.model.architecture.upper())
    metadata = {"library_name": "transformers", "tags": ["transformer-xl", "long-context"]}
    metadata["pipeline_tag"] = "text-generation" if classifier is None else "text-classification"
    metadata |= {"license": license} if license else {}
    sizes = {"architecture": architecture, "parameters": f"{run.model.num_parameters():,}"}
    sizes |= {name: f"{config.model.flat()[name]:,}" for name in ("n_layers", "d_model") if name in config.model.flat()}
    sizes["tokenizer"] = f"{run.tokenizer.kind}, {run.tokenizer.vocab_size:,} tokens"
    sizes["memory length"] = f"{config.train.memory_length:,} in training"
    kind = "language model" if classifier is None else f"classifier of texts into {', '.join(classifier['labels'])}"
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n# {name}",
        f"A {architecture} {kind}, which reads texts of any length in segments with memory.",
        f"## Sizes\n\n{_table(sizes)}",
        f"## Data\n\n{_data(run)}",
        f"## Training\n\n{_table(_training(run))}",
        f"## Results\n\n{_results(run) if classifier is None else _classifier_results(classifier)}",
        f"## Use\n\n{_XLNET_USE if architecture == 'XLNet' and not classifier else _USE.format(classes)}",
        *([] if classifier else [f"## Limits\n\n{_LIMITS}"]),
        f"## Licence\n\n{license or _NO_LICENCE}",
    ]
    return "\n\n".join(parts) + "\n"


def _data(run: Run) -> str:
    """Describe the corpus, if it is still where the run was trained on it."""
    reference = run.config.corpus
    try:
        corpus = None if reference is None else Corpus.open(reference.path)
    except UserError:
        corpus = None
    if reference is None or corpus is None or corpus.record.splits["train"].sha256 != reference.train_sha256:
        return "Not known: the corpus was not recorded, or is no longer where it was."
    counts = {
        split: f"{record.num_tokens:,} tokens, {record.num_bytes:,} bytes, {record.num_documents:,} documents"
        for split, record in corpus.record.splits.items()
    }
    return f"The corpus `{corpus.name}`:\n\n{_table(counts)}"


def _training(run: Run) -> dict[str, str]:
    """Return what is known of the training, by name."""
    train, used = run.config.train, run.weights.used if run.weights else None
    facts = {}
    if used and used.step:
        facts["steps"] = f"{used.step:,} of {train.max_steps:,}"
        facts["tokens in a step"] = f"{train.batch_size:,} x {train.segment_length:,}"
        facts["optimizer"] = f"{train.optimizer}, learning rate {train.learning_rate:g}"
    start = read_last_start(run.path) or {} if run.path else {}
    facts |= {key: str(start[key]) for key in ("date", "transformer_xl", "torch", "processor") if start.get(key)}
    return facts or {"recorded": "nothing: the weights were converted or saved without their training"}


def _results(run: Run) -> str:
    """Describe the validation loss, with how it was measured."""
    used = run.weights.used if run.weights else None
    if not used or used.valid_nats_per_token is None:
        return "The validation loss is not known."
    train = run.config.train
    part = "" if train.eval_tokens is None else f"the first {train.eval_tokens:,} tokens of "
    text = (
        f"Validation loss in training: {used.valid_nats_per_token:.4f} nats per token, on {part}the validation text of "
        f"the corpus in {train.batch_size:,} rows, with segments of {train.segment_length:,} and memory of "
        f"{train.memory_length:,} tokens."
    )
    lengths = used.memory_lengths
    if lengths is None:
        return text
    rows = {f"{length:,}": f"{nats:.4f}" for length, nats in lengths.nats_per_token.items()}
    return (
        f"{text}\n\nBy memory length, on its first {lengths.num_tokens:,} tokens, in segments of "
        f"{lengths.segment_length:,}; evaluation uses {lengths.chosen:,}:\n\n"
        + _table(rows, "memory length", "nats per token")
    )


def _classifier_results(record: dict[str, Any]) -> str:
    """Describe the best validation of a classifier."""
    best = min(record["validations"], key=lambda one: one["loss"])
    return (
        f"Of {record['num_valid']:,} documents that it was not trained with, {best['accuracy']:.1%} got the right "
        f"label (loss {best['loss']:.4f} nats per document). It was trained with {record['num_train']:,} documents."
    )


def _table(rows: Mapping[Any, str], *titles: str) -> str:
    titles = titles or ("", "")
    lines = [f"| {' | '.join(titles)} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows.items())])
