"""Read and write Hugging Face's TransfoXL folders: config.json, weights and tokenizer.

Written for the layout of transformers 4.37.2, among the last versions that have the model. Losses are the same
as there: zeros of an empty memory are attended to, `same_length` shows each query `mem_len` keys, and the rows for the
tail clusters are in order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from transformer_xl.config import RunConfig, TransformerXLConfig, UserError, check_settings
from transformer_xl.files import as_user_error, atomic_folder, write_text
from transformer_xl.interop.imported import ImportedModel
from transformer_xl.interop.source_config import (
    SourceConfig,
    check_supported,
    format_value,
    length_settings,
    parse_tied_projections,
)
from transformer_xl.interop.tokenizers import first_existing, read_tokenizer, words_of
from transformer_xl.interop.torch_file import TorchFile
from transformer_xl.interop.weight_names import HUGGING_FACE, export_weights, import_weights
from transformer_xl.tensor_file import write_safetensors
from transformer_xl.text.tokenizers import Tokenizer
from transformer_xl.text.tokenizers.storage import read_json
from transformer_xl.text.tokenizers.word import WordTokenizer

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_VOCABULARIES = ("vocab.json", "vocab.txt", "vocab.pkl", "vocab.bin")
_ARCHITECTURE = "transfo-xl"
_DEFAULTS = {
    "vocab_size": 267735,
    "cutoffs": [20000, 40000, 200000],
    "d_model": 1024,
    "d_embed": 1024,
    "n_head": 16,
    "d_head": 64,
    "d_inner": 4096,
    "div_val": 4,
    "n_layer": 18,
    "mem_len": 1600,
    "clamp_len": 1000,
    "same_length": True,
}  # fmt: skip (defaults of TransfoXLConfig; further defaults are where a setting is read)


def recognizes(path: Path) -> bool:
    """Return whether this is a folder with Hugging Face's config.json."""
    return (path / "config.json").is_file()


def read(path: Path) -> ImportedModel:
    """Read a TransfoXL folder.

    Raises:
        UserError: a file is missing, damaged, of another architecture, or cannot be expressed.
    """
    file = path / "config.json"
    values = read_json(file, "get it again")
    if not isinstance(values, dict) or values.get("model_type", _ARCHITECTURE) != _ARCHITECTURE:
        kind = values.get("model_type") if isinstance(values, dict) else type(values).__name__
        raise UserError(f"{file}: a model of type {format_value(kind)}; only '{_ARCHITECTURE}' can be converted")
    settings = SourceConfig({**_DEFAULTS, **values}, str(file))
    model = _model(settings)
    config = check_settings(TransformerXLConfig, model, str(file))
    weights_file = first_existing(path, _WEIGHTS)
    if weights_file is None:
        raise UserError(f"{path} has no weights; wanted {' or '.join(_WEIGHTS)} beside config.json")
    theirs = _weights(weights_file)
    if not any(name.startswith("crit.") for name in theirs):
        raise UserError(
            f"{weights_file} has no softmax (crit.*): a TransfoXLModel or a classifier; wanted a TransfoXLLMHeadModel"
        )
    vocabulary_file = first_existing(path, _VOCABULARIES)
    train, evaluation = length_settings(
        segment=settings.get_int("tgt_len", 128), memory=settings.get_int("mem_len"), window=model["attention_window"]
    )
    return ImportedModel(
        model=model,
        train=train,
        evaluation=evaluation,
        weights=import_weights(config, HUGGING_FACE, theirs, str(weights_file)),
        tokenizer=None if vocabulary_file is None else _read_tokenizer(path, vocabulary_file),
    )


def _model(settings: SourceConfig) -> dict[str, Any]:
    check_supported(settings)
    memory = settings.get_int("mem_len")
    cutoffs = settings.get_ints("cutoffs")
    width = settings.get_int("d_model")
    window = settings.attention_window(memory, keys_beside_memory=0)
    clamp = settings.get_int("clamp_len", -1)
    shared = settings.get_bool("proj_share_all_but_first", default=True)
    tied = settings.get("tie_projs", [False, *[shared] * len(cutoffs)])
    div_val, d_embed = settings.get_int("div_val"), settings.get_int("d_embed")
    projected = div_val > 1 or d_embed != width
    return {
        "vocab_size": settings.get_int("vocab_size"),
        "n_layers": settings.get_int("n_layer"),
        "d_model": width,
        "n_heads": settings.get_int("n_head"),
        "d_head": settings.get_int("d_head"),
        "d_ff": settings.get_int("d_inner"),
        "dropout": settings.get_float("dropout", 0.1),
        "attention_dropout": settings.get_float("dropatt", 0.0),
        "norm_first": settings.get_bool("pre_lnorm", default=False),
        "final_norm": False,
        "norm_eps": settings.get_float("layer_norm_epsilon", 1e-5),
        "d_embed": d_embed,
        "cutoffs": cutoffs,
        "div_val": div_val,
        "tie_word_embeddings": settings.get_bool("tie_word_embeddings", default=True),
        "tie_projections": parse_tied_projections(tied, len(cutoffs) + 1, settings.source) if projected else "all",
        "tie_attention_biases": not settings.get_bool("untie_r", default=True),
        "attend_empty_memory": True,
        "attention_window": window,
        "clamp_length": clamp if clamp > 0 else None,
    }


def _weights(file: Path) -> dict[str, Tensor]:
    """Read all weights, memory-mapped, from one file or from the shards that an index names."""
    if file.suffix != ".json":
        return _weights_in(file)
    index = read_json(file, "get it again")
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{file} has no weight_map; get it again")
    if any(Path(name).name != name for name in places.values()):
        raise UserError(f"{file} names a file outside its folder; get it again")
    found: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        found |= _weights_in(file.parent / name)
    return found


def _weights_in(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".bin":
        content = TorchFile(file, lambda _: False)
        if not isinstance(content.value, dict):
            raise UserError(f"{file} holds no weights by name; get it again")
        return {str(name): content.tensor(record) for name, record in content.value.items()}
    with as_user_error(f"reading {file}"):
        file.open("rb").close()
    try:
        with safe_open(file, framework="pt") as weights:
            return {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged (not a whole safetensors file: {error}); get it again") from None


def _read_tokenizer(folder: Path, file: Path) -> Tokenizer:
    tokenizer = folder / "tokenizer_config.json"
    values = read_json(tokenizer, "get it again") if tokenizer.is_file() else {}
    lower_case = values.get("lower_case") if isinstance(values, dict) else None
    return read_tokenizer(file, pre_tokenizer="moses", lowercase=lower_case if isinstance(lower_case, bool) else None)


def write(path: Path, config: RunConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Write a model as a folder that transformers 4.37.2 and older load; return remarks for the user.

    The words go into vocab.txt, which its tokenizer reads without unpickling, and also into vocab.json if a word
    contains white space, which vocab.txt cannot hold.

    Raises:
        UserError: the folder exists, or TransfoXL cannot express the model.
    """
    model, differences = _expressible(config)
    memory = config.train.memory_length if config.evaluation.memory_length is None else config.evaluation.memory_length
    same_length, remarks = _same_length(config, memory)
    remarks = [*differences, *remarks, *_tokenizer_remarks(tokenizer)]
    theirs = export_weights(model, HUGGING_FACE, weights)
    even_D = torch.arange(0.0, model.d_model, 2.0)
    theirs["transformer.pos_emb.inv_freq"] = 1 / (10000 ** (even_D / model.d_model))
    words = words_of(tokenizer)
    with atomic_folder(path) as aside:
        values = {**_config(config, model), "mem_len": memory, "same_length": same_length}
        write_text(aside / "config.json", _json(values))
        contiguous = {name: tensor.contiguous() for name, tensor in theirs.items()}
        write_safetensors(aside / "model.safetensors", contiguous, {"format": "pt"})
        if words is not None:
            write_text(aside / "vocab.txt", "".join(f"{word}\n" for word in words))
            folded = isinstance(tokenizer, WordTokenizer) and tokenizer.pre_tokenizer.lowercase
            tokenizer_config = {"tokenizer_class": "TransfoXLTokenizer", "lower_case": folded}
            write_text(aside / "tokenizer_config.json", _json(tokenizer_config))
            if _has_other_spaces(words):
                write_text(aside / "vocab.json", _json(list(words)))
    return tuple(remarks)


def _json(values: object) -> str:
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def _has_other_spaces(words: Sequence[str]) -> bool:
    """Return whether a word contains Unicode white space, which ends a word of vocab.txt."""
    return any(word.split() != [word] for word in words)


def _tokenizer_remarks(tokenizer: Tokenizer) -> list[str]:
    """Say how their tokenizer would encode a text differently from the run's own."""
    words, advice = words_of(tokenizer), "encode text with this run's tokenizer and pass the ids to the model"
    if words is None:
        return [f"a {tokenizer.kind} tokenizer has no form there: {advice}"]
    remarks = []
    if not isinstance(tokenizer, WordTokenizer):
        remarks.append(f"their tokenizer splits text into words, and this one is {tokenizer.kind}: {advice}")
    elif tokenizer.pre_tokenizer.name != "moses":
        remarks.append(f"their tokenizer does not split text as '{tokenizer.pre_tokenizer.name}' does: {advice}")
    if _has_other_spaces(words):
        remarks.append(
            "words that contain white space are cut in vocab.txt, so their tokenizer lacks them; see vocab.json"
        )
    return remarks


def _same_length(config: RunConfig, memory: int) -> tuple[bool, list[str]]:
    """Return whether to set `same_length`, for the window that the run is evaluated with, and remarks on what is lost.

    Raises:
        UserError: the attention window differs from the memory length, in training and in evaluation.
    """
    own = config.model.limit("attention_window")
    window = config.evaluation.attention_window or own
    if window in (None, memory):
        return window is not None, []
    if own not in (None, memory):
        raise UserError(
            f"attention_window {own} with memory_length {memory} has no form in TransfoXL, where both are mem_len; "
            "train or evaluate with equal ones"
        )
    lost = f"this run is evaluated with attention_window {window}, which TransfoXL cannot express with mem_len {memory}"
    return own is not None, [lost]


def _expressible(config: RunConfig) -> tuple[TransformerXLConfig, list[str]]:
    """Return the model's settings, if TransfoXL can express them, and remarks on what differs there."""
    model = config.model
    if not isinstance(model, TransformerXLConfig):
        raise UserError(f"{model.architecture} has no form in TransfoXL; only Transformer-XL itself has")
    if model.norm_first and model.final_norm:
        raise UserError("a pre-norm model with a final LayerNorm has no form in TransfoXL, which has none")
    if not model.attend_empty_memory:
        return model, ["TransfoXL attends to empty memory slots, this model does not: first segments will differ"]
    return model, []


def _config(config: RunConfig, model: TransformerXLConfig) -> dict[str, Any]:
    """Return config.json without mem_len and same_length."""
    clusters = len(model.cluster_widths)
    tied = {"all": [True] * clusters, "all_but_first": [False] + [True] * (clusters - 1), "none": [False] * clusters}
    return {
        "model_type": _ARCHITECTURE,
        "architectures": ["TransfoXLLMHeadModel"],
        "vocab_size": model.vocab_size,
        "n_layer": model.n_layers,
        "d_model": model.d_model,
        "n_head": model.n_heads,
        "d_head": model.head_dim,
        "d_inner": model.d_ff,
        "dropout": model.dropout,
        "dropatt": model.attention_dropout,
        "pre_lnorm": model.norm_first,
        "layer_norm_epsilon": model.norm_eps,
        "d_embed": model.d_embed or model.d_model,
        "cutoffs": list(model.cluster_boundaries[1:-1]),
        "div_val": model.div_val,
        "adaptive": clusters > 1,
        "tie_word_embeddings": model.tie_word_embeddings,
        "tie_projs": tied[model.tie_projections],
        "untie_r": not model.tie_attention_biases,
        "tgt_len": config.evaluation.segment_length or config.train.segment_length,
        "clamp_len": config.evaluation.clamp_length or model.clamp_length or -1,
        "attn_type": 0,
        "sample_softmax": -1,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
