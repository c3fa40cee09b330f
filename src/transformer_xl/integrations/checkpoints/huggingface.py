"""Read and write Hugging Face's folders: config.json, weights and vocabulary.

Folders that `pretrained.py` writes, and XLNet's, are recognized by their model type. The others are TransfoXL's: their
layout is that of transformers 4.37.2, among the last versions that contain the model (TransfoXLLMHeadModel). As in
transformers, queries of an imported model attend to the zeros of an empty memory, and `same_length` lets each query
attend to `mem_len` keys. source_config.py explains the other names of config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from transformer_xl.checkpoint_record import MemoryLengths
from transformer_xl.config import EvaluationConfig, RunConfig, TransformerXLConfig, UserError
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.files import as_user_error, atomic_folder, write_text
from transformer_xl.integrations.checkpoints import pretrained, xlnet
from transformer_xl.integrations.checkpoints.source_config import (
    SHARED_SETTINGS,
    ImportedModel,
    SourceConfig,
    format_value,
    tied_projection_flags,
)
from transformer_xl.integrations.checkpoints.tokenizers import (
    first_existing,
    read_checkpoint_json,
    read_tokenizer,
    words_of,
)
from transformer_xl.integrations.checkpoints.torch_file import TorchFile
from transformer_xl.integrations.checkpoints.weight_names import HUGGING_FACE, export_weights, import_weights
from transformer_xl.tensor_file import write_safetensors
from transformer_xl.text.tokenizers import Tokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

# files of weights and of vocabularies; the first one that exists is read
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
VOCABULARIES = ("vocab.json", "vocab.txt", "vocab.pkl", "vocab.bin")
MODEL_TYPE = "transfo-xl"
READERS = "transformers 4.37.2 and older"
"""Who can read the folders that `write` makes."""
_MAX_HEADER = 2**24  # bytes of the names and shapes in a safetensors file, far more than in real ones
# defaults of TransfoXLConfig, for settings that config.json lacks (4.37.2 never writes tgt_len, the segment length)
_DEFAULTS = {
    "vocab_size": 267735, "cutoffs": [20000, 40000, 200000], "d_model": 1024, "d_embed": 1024, "n_head": 16,
    "d_head": 64, "d_inner": 4096, "div_val": 4, "n_layer": 18, "mem_len": 1600, "clamp_len": 1000,
    "same_length": True, "untie_r": True, "dropout": 0.1, "tgt_len": 128, "proj_share_all_but_first": True,
}  # fmt: skip


def recognizes(path: Path) -> bool:
    """Return whether the path is a folder with a config.json."""
    return (path / "config.json").is_file()


def read(path: Path) -> ImportedModel:
    """Read a folder of either layout.

    Raises:
        UserError: a file is missing, damaged, of another architecture, or cannot be expressed in this package.
    """
    file = path / "config.json"
    values = read_checkpoint_json(file)
    model_type = values.get("model_type", MODEL_TYPE) if isinstance(values, dict) else type(values).__name__
    if model_type == pretrained.MODEL_TYPE:
        return pretrained.read(path, _read_weights(_weights_file(path)))
    if model_type == xlnet.MODEL_TYPE:
        return xlnet.read_folder(path, _read_weights(_weights_file(path)))
    if model_type != MODEL_TYPE:
        known = f"'{MODEL_TYPE}', '{xlnet.MODEL_TYPE}' and '{pretrained.MODEL_TYPE}'"
        raise UserError(f"{file}: a model of type {format_value(model_type)}; only {known} can be converted")
    imported, _ = read_model(path, predicts_tokens=True)
    return imported


def read_model(path: Path, *, predicts_tokens: bool = False) -> tuple[ImportedModel, dict[str, Tensor]]:
    """Read a folder of any of the old classes: TransfoXLModel and those with a head.

    Args:
        path: a folder whose model type is that of TransfoXL.
        predicts_tokens: whether to refuse one that has no softmax.

    Returns:
        the model, without weights of a softmax where the folder has none; and the weights of a classifier, `score.*`.

    Raises:
        UserError: a file is missing, damaged, of another architecture, or cannot be expressed in this package.
    """
    file = path / "config.json"
    config, lengths = read_settings(read_checkpoint_json(file), str(file))
    weights_file = _weights_file(path)
    weights = _read_weights(weights_file)
    if predicts_tokens:
        pretrained.check_predicts_tokens(weights, "crit.", str(weights_file))
    head = {name: weights.pop(name).float() for name in [*weights] if name.startswith("score.")}
    names, has_softmax = HUGGING_FACE, any(name.startswith("crit.") for name in weights)
    if not any(name.startswith(HUGGING_FACE.prefix) for name in weights):  # TransfoXLModel itself
        names = replace(HUGGING_FACE, prefix="")
    imported = ImportedModel(
        model=config.model_dump(),
        train=lengths,
        evaluation={**lengths, "attention_window": config.attention_window},
        weights=import_weights(config, names, weights, str(weights_file), has_softmax=has_softmax),
        tokenizer=read_folder_tokenizer(path),
    )
    return imported, head


def read_settings(values: Mapping[str, Any], source: str) -> tuple[TransformerXLConfig, dict[str, int]]:
    """Return the settings of the model, and the lengths of segment and memory, in TransfoXL's config.json.

    Raises:
        UserError: a setting has the wrong type or value, or cannot be expressed in this package.
    """
    settings = SourceConfig({**_DEFAULTS, **values}, source)
    # TransfoXLConfig derives tie_projs (a flag for each cluster) from this setting
    shared = settings.get("proj_share_all_but_first", True)
    tied_projections = {"tie_projs": [False, *[shared] * len(settings.get_ints("cutoffs"))]}
    settings = SourceConfig({**_DEFAULTS, **tied_projections, **values}, source)
    return settings.model_config(attend_empty_memory=True), settings.lengths()


def _weights_file(path: Path) -> Path:
    """Return the file of the weights, or the index of the files.

    Raises:
        UserError: the folder has none.
    """
    file = first_existing(path, WEIGHT_FILES)
    if file is None:
        raise UserError(
            f"{path} has no weights; expected {' or '.join(WEIGHT_FILES)} in the same folder as config.json"
        )
    return file


def _read_weights(file: Path) -> dict[str, Tensor]:
    """Return all weights, memory-mapped, from one file or from the parts (shards) that an index file lists."""
    if file.suffix == ".json":
        index = read_checkpoint_json(file)
        shards = index.get("weight_map") if isinstance(index, dict) else None  # weight name -> file name
        names = list(shards.values()) if isinstance(shards, dict) else [None]
        if not all(isinstance(name, str) and Path(name).name == name and not name.endswith(".json") for name in names):
            raise UserError(f"{file} has no weight_map to files of weights in its folder; get it again")
        weights: dict[str, Tensor] = {}
        for shard in sorted(set(names)):
            weights |= _read_weights(file.parent / shard)
        return weights
    if file.suffix == ".bin":
        content = TorchFile(file)
        if not isinstance(content.value, dict):
            raise UserError(f"{file} contains no weights by name; get it again")
        return content.tensors(content.value)
    with as_user_error(f"reading {file}"), file.open("rb") as content:
        header_size = int.from_bytes(content.read(8), "little")  # of the JSON with names and shapes that follows
    if header_size > _MAX_HEADER:
        raise UserError(f"{file} is damaged (its header has {header_size:,} bytes); get it again")
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged (not a complete safetensors file: {error}); get it again") from None


def read_folder_tokenizer(folder: Path) -> Tokenizer | None:
    """Read the vocabulary of a TransfoXL folder as a tokenizer that splits text by the Moses tokenizer's rules.

    TransfoXLTokenizer does the same. `lower_case` in tokenizer_config.json overrides that of a pickled vocabulary.

    Returns:
        the tokenizer, or None if the folder has no vocabulary.

    Raises:
        UserError: a file is damaged.
    """
    vocabulary_file = first_existing(folder, VOCABULARIES)
    if vocabulary_file is None:
        return None
    file = folder / "tokenizer_config.json"
    values = read_checkpoint_json(file) if file.is_file() else {}
    lower_case = values.get("lower_case") if isinstance(values, dict) else None
    return read_tokenizer(
        vocabulary_file, pre_tokenizer="moses", lowercase=lower_case if isinstance(lower_case, bool) else None
    )


def write(
    path: Path,
    config: RunConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    memory_lengths: MemoryLengths | None = None,
) -> tuple[str, ...]:
    """Write a model as a folder that transformers 4.37.2 and older load; return notes for the user.

    The words go into vocab.txt, which TransfoXLTokenizer reads without unpickling, and also into vocab.json if a word
    contains whitespace, which vocab.txt cannot represent. `mem_len` is the memory length with which `evaluate` uses
    these weights, for which losses at several lengths may have been measured (`memory_lengths`).

    Raises:
        UserError: the folder exists, or TransfoXL cannot express the model.
    """
    model = config.model
    if not isinstance(model, TransformerXLConfig):
        raise UserError(f"TransfoXL cannot express {model.architecture}, only Transformer-XL itself")
    expressible_values = {
        "max_ngram": 1,
        "qk_norm": False,
        "learned_attention_biases": True,
        "tie_key_projections": False,
        "value_embeddings": False,
        "key_offset": False,
        "attention_sinks": False,
    }
    for name, expressible in expressible_values.items():
        if (value := getattr(model, name)) != expressible:
            raise UserError(f"TransfoXL cannot express a model with {name} {str(value).lower()}: it has no such part")
    if model.norm_first and model.final_norm:
        raise UserError("TransfoXL cannot express a pre-norm model with a final LayerNorm (final_norm): it has none")
    plan = EvaluationPlan.resolve(config, EvaluationConfig(method="memory"), memory_lengths=memory_lengths)
    memory = plan.context_limits.memory_length
    same_length, notes = _same_length(config, memory)
    if not model.attend_empty_memory:
        notes.append("TransfoXL attends to empty memory slots, this model does not: first segments will differ")
    words = words_of(tokenizer)
    if not (isinstance(tokenizer, WordTokenizer) and tokenizer.pre_tokenizer.name == "moses"):
        notes.append(
            f"TransfoXLTokenizer does not read text as this run's tokenizer ({tokenizer.kind}) does: encode text with "
            "that and pass the ids to the model"
        )
    tensors = export_weights(model, HUGGING_FACE, weights)
    # the frequencies of the sinusoidal position encoding, which TransfoXL stores as a buffer
    tensors["transformer.pos_emb.inv_freq"] = 1 / (10000 ** (torch.arange(0.0, model.d_model, 2.0) / model.d_model))
    with atomic_folder(path) as temporary:
        lengths = {"mem_len": memory, "same_length": same_length}
        values = {**_config_values(config, model), **lengths, "eos_token_id": tokenizer.eos_token_id}
        pretrained.write_config(temporary / "config.json", values)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        write_safetensors(temporary / "model.safetensors", contiguous, {"format": "pt"})
        if words is not None:
            write_text(temporary / "vocab.txt", "".join(f"{word}\n" for word in words))
            lower_case = isinstance(tokenizer, WordTokenizer) and tokenizer.pre_tokenizer.lowercase
            tokenizer_config = {"tokenizer_class": "TransfoXLTokenizer", "lower_case": lower_case}
            pretrained.write_config(temporary / "tokenizer_config.json", tokenizer_config)
            if any(word.split() != [word] for word in words):  # at whitespace TransfoXLTokenizer cuts a line
                pretrained.write_config(temporary / "vocab.json", list(words))
                notes.append("words with whitespace are cut in vocab.txt for TransfoXLTokenizer; vocab.json has them")
    return tuple(notes)


def _same_length(config: RunConfig, memory_length: int) -> tuple[bool, list[str]]:
    """Return the value of `same_length`, and notes on an attention window that it cannot express.

    With `same_length` each query attends to `mem_len` keys, without it to all keys.

    Raises:
        UserError: the attention window differs from the memory length, in training and in evaluation.
    """
    train_window = config.model.limit("attention_window")
    window = config.evaluation.attention_window or train_window
    if window in (None, memory_length):
        return window is not None, []
    if train_window not in (None, memory_length):
        raise UserError(
            f"TransfoXL cannot express attention_window {train_window} with memory_length {memory_length}; "
            "set evaluation.attention_window and evaluation.memory_length of the run to the same number"
        )
    note = f"TransfoXL cannot express attention_window {window}, which evaluation uses, with mem_len {memory_length}"
    return train_window is not None, [note]


def _config_values(config: RunConfig, model: TransformerXLConfig) -> dict[str, Any]:
    """Return the values of config.json, except mem_len, same_length and eos_token_id."""
    num_clusters = len(model.cluster_widths)
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["TransfoXLLMHeadModel"],
        **{theirs: getattr(model, ours) for theirs, (ours, _) in SHARED_SETTINGS.items()},
        "d_head": model.head_dim,
        "d_embed": model.d_embed or model.d_model,
        "cutoffs": list(model.cluster_boundaries[1:-1]),
        "adaptive": num_clusters > 1,
        "tie_projs": tied_projection_flags(num_clusters)[model.tie_projections],
        "untie_r": not model.tie_attention_biases,
        "tgt_len": config.evaluation.segment_length or config.train.segment_length,
        "clamp_len": config.evaluation.clamp_length or model.clamp_length or -1,  # -1: no limit
        "attn_type": 0,  # the paper's relative attention
        "sample_softmax": -1,  # the full softmax
        "torch_dtype": "float32",
    }
