"""Folders for transformers 5: config.json, model.safetensors and the tokenizer, in this package's names.

    write(path, config, weights, tokenizer)         without transformers: plain JSON and safetensors
    read(path)                                      back to what a run consists of

`transformer_xl.integrations.huggingface` registers the classes that open such a folder. Weights have the names of
`LanguageModel.state_dict()` behind `model.`, so every architecture and setting can be written, bit for bit. The folder
also has a module that only imports this package: with `trust_remote_code=True` transformers loads the classes from
there, without the import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from transformer_xl.checkpoint_record import MemoryLengths
from transformer_xl.config import (
    ARCHITECTURES,
    EvaluationConfig,
    ModelConfig,
    RunConfig,
    UserError,
    check_settings,
    run_settings,
)
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.files import atomic_folder, write_json, write_text
from transformer_xl.integrations.checkpoints.source_config import ImportedModel, check_counts, format_value
from transformer_xl.integrations.checkpoints.tokenizers import read_checkpoint_json
from transformer_xl.integrations.checkpoints.transformers_tokenizer import (
    eos_token_id,
    fast_tokenizer,
    pad_token_id,
    token_names,
)
from transformer_xl.run_folder import HEAD
from transformer_xl.tensor_file import write_safetensors
from transformer_xl.text.tokenizers import Tokenizer, load_tokenizer, save_tokenizer
from transformer_xl.text.tokenizers.storage import LIBRARY_FILE, TOKENIZER_FILE

MODEL_TYPE = "transformer-xl"
"""`model_type` in config.json."""
WEIGHT_PREFIX = "model."
"""What precedes our name of each weight."""
READERS = "transformers 5 with this package: import transformer_xl.integrations.huggingface"
"""Who can read such a folder."""

_CODE_FILE = "transformer_xl_code.py"
_CLASSES = {
    "AutoConfig": "PretrainedTransformerXLConfig",
    "AutoModel": "TransformerXLModel",
    "AutoModelForCausalLM": "TransformerXLForCausalLM",
    "AutoModelForSequenceClassification": "TransformerXLForSequenceClassification",
    "AutoModelForTokenClassification": "TransformerXLForTokenClassification",
}
_EXPORTED = (*_CLASSES.values(), "TransformerXLTokenizer", "TransformerXLTokenizersBackend")
_CODE = f'''"""The classes of this folder: those of the package transformer-xl, which has to be installed."""

from transformer_xl.integrations.huggingface import (
{"".join(f"    {name},{chr(10)}" for name in _EXPORTED)})

__all__ = [
{"".join(f'    "{name}",{chr(10)}' for name in _EXPORTED)}]
'''
_MODULE = Path(_CODE_FILE).stem
MODEL_AUTO_MAP = {auto: f"{_MODULE}.{name}" for auto, name in _CLASSES.items()}
"""`auto_map` of config.json: where trust_remote_code finds the classes."""
TOKENIZER_AUTO_MAP = {"AutoTokenizer": [f"{_MODULE}.TransformerXLTokenizer", None]}
"""`auto_map` of tokenizer_config.json."""
FAST_TOKENIZER_AUTO_MAP = {"AutoTokenizer": [None, f"{_MODULE}.TransformerXLTokenizersBackend"]}
"""The same where the folder has a tokenizer.json."""
# Settings that config.json has under another name: transformers gives `attn_implementation` another meaning.
_RENAMED = {"attn_implementation": "attention_kernel"}
_LENGTHS = ("segment_length", "memory_length")
_EVALUATION = (*_LENGTHS, "attention_window", "clamp_length")


def setting_names(architecture: str) -> dict[str, str]:
    """Return our name of each model setting of an architecture, and the one that config.json has for it."""
    return {name: _RENAMED.get(name, name) for name in ARCHITECTURES[architecture].model_validate({}).flat()}


def config_values(config: RunConfig, memory_lengths: MemoryLengths | None) -> dict[str, Any]:
    """Return the settings of config.json for a run.

    Args:
        config: settings of the run.
        memory_lengths: the losses at several memory lengths that were measured for its weights, or None.

    Returns:
        the settings of the model by their names; `segment_length` and `memory_length` of training; and the lengths
        with which `evaluate` and `generate` use these weights, which begin with `evaluation_`.

    Raises:
        UserError: the run has an extended context.
    """
    # transformers reads with memory, whatever method the run is evaluated with
    plan = EvaluationPlan.resolve(config, EvaluationConfig(method="memory"), memory_lengths=memory_lengths)
    plan.refuse_extended_context("a model in transformers")
    flat = config.model.flat()
    values = {theirs: flat[ours] for ours, theirs in setting_names(config.model.architecture).items()}
    values |= {name: getattr(config.train, name) for name in _LENGTHS}
    values["evaluation_segment_length"] = plan.segment_length
    return values | {f"evaluation_{name}": value for name, value in asdict(plan.context_limits).items()}


def model_settings(values: Mapping[str, Any], source: str) -> ModelConfig:
    """Return the settings of the model in the values of config.json.

    Raises:
        UserError: an unknown architecture, or a setting of the wrong type or value.
    """
    architecture = values.get("architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise UserError(f"{source}: no architecture {format_value(architecture)}; known: {', '.join(ARCHITECTURES)}")
    names = setting_names(architecture)
    given = {ours: values[theirs] for ours, theirs in names.items() if theirs in values}
    return check_settings(ARCHITECTURES[architecture], given, source)  # pyrefly: ignore[bad-return]


def read(path: Path, weights: Mapping[str, Tensor]) -> ImportedModel:
    """Return what a run consists of, from a folder.

    Args:
        path: the folder.
        weights: the tensors of its weight files.

    Raises:
        UserError: a file is missing or damaged, or the settings are invalid.
    """
    file = path / "config.json"
    values: dict[str, Any] = read_checkpoint_json(file)
    model = model_settings(values, str(file))
    check_counts(str(file), n_layers=model.n_layers, num_cutoffs=len(model.cluster_widths))
    train = {name: values[name] for name in _LENGTHS if values.get(name) is not None}
    evaluation = {name: values[f"evaluation_{name}"] for name in _EVALUATION if f"evaluation_{name}" in values}
    groups = {"model": model.model_dump(), "train": train, "evaluation": evaluation}
    run_settings(groups, str(file))
    check_predicts_tokens(weights, f"{WEIGHT_PREFIX}softmax.", str(path))
    unnamed = {name.removeprefix(WEIGHT_PREFIX): tensor for name, tensor in weights.items()}
    has_tokenizer = (path / TOKENIZER_FILE).is_file()
    return ImportedModel(
        **groups,
        weights={name: tensor.detach().float() for name, tensor in unnamed.items()},
        tokenizer=load_tokenizer(path / TOKENIZER_FILE) if has_tokenizer else None,
    )


def check_predicts_tokens(weights: Mapping[str, Tensor], prefix: str, source: str) -> None:
    """Check that there is a softmax among the weights of a folder, whose names begin with `prefix`, and no other head.

    Raises:
        UserError: there is none, or there is the `score` of a classifier.
    """
    has_score = any(name.startswith("score.") for name in weights)
    if has_score or not any(name.startswith(prefix) for name in weights):
        kind, auto = ("a model without a head", "AutoModel")
        if has_score:
            kind, auto = "a classifier", "AutoModelForSequenceClassification (or ForTokenClassification)"
        raise UserError(
            f"{source} has {kind}, and a run needs a softmax ({prefix}*), which predicts tokens; open it with {auto} "
            "of transformers, after import transformer_xl.integrations.huggingface, or convert the folder of the "
            "language model that it was made of"
        )


def write(
    path: Path,
    config: RunConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    memory_lengths: MemoryLengths | None = None,
    eos_token: str | None = None,
    add_bos_token: bool = False,
    head: tuple[dict[str, Any], Tensor] | None = None,
    card: str | None = None,
) -> None:
    """Write a model as a folder that transformers 5 opens with this package.

    Args:
        path: the folder to create.
        config: settings of the run.
        weights: tensors by the names of `LanguageModel.state_dict()`.
        tokenizer: the tokenizer.
        memory_lengths: as for `config_values`.
        eos_token: as for `generation_values`.
        add_bos_token: whether the tokenizer begins each text with the beginning-of-sequence token.
        head: settings in config.json and weights of a classifier's head, or None for a language model.
        card: text of README.md, or None to write none.

    Raises:
        UserError: the folder exists, the file system refuses, or the vocabulary has no such token.
    """
    values, generation = config_values(config, memory_lengths), generation_values(tokenizer, eos_token)
    values["pad_token_id"] = generation["pad_token_id"]  # for classes that do not generate
    fast = fast_tokenizer(tokenizer, add_bos_token=add_bos_token)
    fixed = {"architectures": ["TransformerXLForCausalLM"], "dtype": "float32", "model_type": MODEL_TYPE}
    of_head = dict[str, Tensor]()
    if head is not None:
        values |= head[0]
        fixed["architectures"] = ["TransformerXLForSequenceClassification"]
        of_head = {HEAD: head[1].contiguous()}
    with atomic_folder(path) as temporary:
        write_config(temporary / "config.json", {**values, **fixed, "auto_map": MODEL_AUTO_MAP})
        write_config(temporary / "generation_config.json", generation)
        tensors = {f"{WEIGHT_PREFIX}{name}": tensor.detach().contiguous() for name, tensor in weights.items()}
        write_safetensors(temporary / "model.safetensors", {**tensors, **of_head}, {"format": "pt"})
        save_tokenizer(tokenizer, temporary / TOKENIZER_FILE)
        tokenizer_values = {"tokenizer_class": "TransformerXLTokenizer", "auto_map": TOKENIZER_AUTO_MAP}
        if fast is not None:
            write_json(temporary / LIBRARY_FILE, fast)
            tokenizer_values = {
                "tokenizer_class": "TransformerXLTokenizersBackend",
                "auto_map": FAST_TOKENIZER_AUTO_MAP,
            }
        tokenizer_values |= special_values(tokenizer, eos_token)
        added = {"add_bos_token": True} if add_bos_token else {}
        write_config(temporary / "tokenizer_config.json", {**tokenizer_values, **added})
        write_code(temporary)
        if card is not None:
            write_text(temporary / "README.md", card)


def write_code(folder: Path) -> None:
    """Write the module that `auto_map` names, which only imports this package."""
    write_text(folder / _CODE_FILE, _CODE)


def generation_values(tokenizer: Tokenizer, eos_token: str | None = None) -> dict[str, Any]:
    """Return the contents of generation_config.json.

    Args:
        tokenizer: the tokenizer.
        eos_token: the token that ends a text, a word or the text of a token, or None for the token that ends documents.
            Most tokenizers have none: the end-of-sequence token of our tokenizers is the end of a line.

    Raises:
        UserError: the vocabulary has no such token.
    """
    values = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": pad_token_id(tokenizer, eos_token)}
    eos = eos_token_id(tokenizer, eos_token)
    return values if eos is None else {**values, "eos_token_id": eos}


def special_values(tokenizer: Tokenizer, eos_token: str | None) -> dict[str, Any]:
    """Return the special tokens that tokenizer_config.json names, beside those that the tokenizer has by itself."""
    if eos_token is None:
        return {}
    found, names = eos_token_id(tokenizer, eos_token), [*token_names(tokenizer)]
    pads = pad_token_id(tokenizer, eos_token) == found
    if found is not None and eos_token in names:
        eos_token = names[found]  # the vocabulary may write a byte of other text like this
    return {"eos_token": eos_token, "pad_token": eos_token} if pads else {"eos_token": eos_token}


def write_config(path: Path, values: object) -> None:
    """Write JSON as transformers does."""
    write_text(path, json.dumps(values, indent=2, sort_keys=True) + "\n")
