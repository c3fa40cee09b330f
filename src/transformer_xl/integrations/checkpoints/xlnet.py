"""Read and write XLNet's checkpoints: folders of transformers, and those of the authors' TensorFlow code.

    config.json       pytorch_model.bin or model.safetensors   spiece.model, tokenizer.json    transformers
    xlnet_config.json xlnet_model.ckpt.{index, data-*}         spiece.model                    TensorFlow

Both have the same weights by other names, some of them transposed. What they call rel_attn is the attention, r_w_bias,
r_r_bias and r_s_bias are the biases of content, position and segment, seg_embed the embedding of the segment, lm_loss
the softmax. Heads other than the softmax are left out, and a note says so.

XLNet was trained with the tanh form of GELU (`gelu_new` in transformers), which its code calls gelu. In transformers
gelu is the exact form, and its configurations of the published models have gelu.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import ARCHITECTURES, RunConfig, UserError, XLNetConfig, check_settings
from transformer_xl.config.model_config import TransformerConfig
from transformer_xl.files import atomic_folder, read_bytes, write_json, write_text
from transformer_xl.integrations.checkpoints import pretrained
from transformer_xl.integrations.checkpoints.source_config import (
    ImportedModel,
    SourceConfig,
    check_counts,
    format_value,
)
from transformer_xl.integrations.checkpoints.tensor_bundle import TensorBundle, read_message
from transformer_xl.integrations.checkpoints.tokenizers import first_existing, read_checkpoint_json
from transformer_xl.integrations.checkpoints.transformers_tokenizer import fast_tokenizer
from transformer_xl.integrations.checkpoints.weight_names import WeightMapping, export_mapped, import_mapped
from transformer_xl.tensor_file import write_safetensors
from transformer_xl.text.tokenizers import Tokenizer, load_tokenizer, save_tokenizer
from transformer_xl.text.tokenizers.library import LibraryTokenizer
from transformer_xl.text.tokenizers.storage import LIBRARY_FILE, TOKENIZER_FILE, tokenizer_from_json

MODEL_TYPE = "xlnet"
"""`model_type` in config.json."""
CONFIG_FILE, SPIECE_FILE = "xlnet_config.json", "spiece.model"
FILES = CONFIG_FILE, SPIECE_FILE, "xlnet_model.ckpt.index", "xlnet_model.ckpt.data-00000-of-00001"
"""Files in the authors' archives."""
READERS = "transformers (XLNetLMHeadModel), without this package"
"""Who can read the folders that `write` makes."""

_SETTINGS: dict[str, tuple[str, int | float | None]] = {
    "vocab_size": ("vocab_size", None),
    "n_layer": ("n_layers", None),
    "d_model": ("d_model", None),
    "n_head": ("n_heads", None),
    "d_inner": ("d_ff", None),
    "dropout": ("dropout", 0.1),
    "layer_norm_eps": ("norm_eps", 1e-12),
}
"""Their names of settings, with ours and the value where it is missing, or None for an integer that must be there."""
_EXACT_GELU = (
    "its ff_activation gelu is the exact form of GELU in transformers; the run computes the tanh form, with which "
    "XLNet was trained (gelu_new there)"
)
_MEMORY_LENGTH = 384  # with which the published models were trained; their files do not say it
_BIASES = {"r_w_bias": "content_bias", "r_r_bias": "position_bias", "r_s_bias": "segment_bias"}
_OF_TENSORFLOW = (  # patterns in names of TensorFlow's variables, and what transformers' have there
    (r"^transformer/layer_(\d+)/", r"transformer/layer/\1/"),
    (r"word_embedding/lookup_table$", "word_embedding/weight"),
    (r"mask_emb/mask_emb$", "mask_emb"),
    (r"LayerNorm/gamma$", "layer_norm/weight"),
    (r"LayerNorm/beta$", "layer_norm/bias"),
    (r"(rel_attn/[qkvro])/kernel$", r"\1"),
    (r"(ff/layer_[12])/kernel$", r"\1/weight"),
)


def read_folder(folder: Path, weights: Mapping[str, Tensor]) -> ImportedModel:
    """Read a folder of transformers' XLNetLMHeadModel.

    Args:
        folder: the folder.
        weights: the tensors of its weight files.

    Raises:
        UserError: a file is damaged, the model predicts no tokens, or it cannot be expressed in this package.
    """
    values = read_checkpoint_json(folder / "config.json")
    kept, notes = _without_heads(weights, str(folder))
    notes += [_EXACT_GELU] if values.get("ff_activation", "gelu") == "gelu" else []
    return _imported(folder, values, "config.json", {name: weights[name] for name in kept}, notes)


def read_tensorflow(prefix: Path) -> ImportedModel:
    """Read a checkpoint of the authors' code, beside which are xlnet_config.json and spiece.model.

    Raises:
        UserError: a file is missing or damaged, or the variables are not those of XLNet.
    """
    values = read_checkpoint_json(prefix.parent / CONFIG_FILE)
    if not isinstance(values, dict):
        raise UserError(f"{prefix.parent / CONFIG_FILE}: expected settings by name; get it again")
    n_layers = SourceConfig(values, CONFIG_FILE).get("n_layer")
    check_counts(str(prefix.parent / CONFIG_FILE), n_layers=n_layers, num_cutoffs=0)
    bundle, names = TensorBundle(prefix), dict[str, str]()
    for variable in bundle.shapes:
        scope, _, name = variable.partition("/")
        if scope == "model" and not re.search(r"/(Adam(_\d+)?|adam_[mv])$", name):
            for pattern, replacement in _OF_TENSORFLOW:
                name = re.sub(pattern, replacement, name)
            names[name.replace("/", ".")] = variable
    kept, notes = _without_heads(names, str(prefix))
    bundle.check_data(names[name] for name in kept)
    weights = dict[str, Tensor]()
    for name in kept:
        tensor = torch.from_numpy(bundle.tensor(names[name])).float()
        bias = name.removeprefix("transformer.")
        if bias in _BIASES or bias == "seg_embed":  # of all layers, or one that they share
            each = tensor if tensor.ndim == (4 if bias == "seg_embed" else 3) else [tensor] * n_layers
            weights |= {f"transformer.layer.{index}.rel_attn.{bias}": part for index, part in enumerate(each)}
        else:
            weights[name] = tensor.T if re.search(r"\.ff\.layer_[12]\.weight$", name) else tensor
    values |= {"vocab_size": values.get("n_token"), "tie_word_embeddings": "lm_loss.weight" not in weights}
    return _imported(prefix.parent, values, CONFIG_FILE, weights, notes)


def _without_heads(names: Iterable[str], source: str) -> tuple[list[str], list[str]]:
    """Return the names of weights without those of heads other than the softmax, and a note on what was left out.

    Raises:
        UserError: there is no softmax.
    """
    parts = {name: name.partition(".")[0] for name in names}
    others = ", ".join(sorted({part for part in parts.values() if part not in ("transformer", "lm_loss")}))[:120]
    if "lm_loss.bias" not in parts or "transformer" not in parts.values():
        raise UserError(
            f"{source} has no softmax (lm_loss), which predicts tokens, but {ascii(others)[1:-1] or 'no head'}; "
            "convert the language model that it was made of"
        )
    kept = [name for name, part in parts.items() if part in ("transformer", "lm_loss")]
    return kept, [f"left out what predicts no tokens: {ascii(others)[1:-1]}"] if others else []


def _imported(
    folder: Path, values: Mapping[str, Any], file: str, weights: Mapping[str, Tensor], notes: list[str]
) -> ImportedModel:
    """Return the model of settings and weights by transformers' names, with the tokenizer of the folder."""
    source = str(folder / file)
    settings = SourceConfig(values, source)
    for name, known in (("ff_activation", ("gelu", "gelu_new")), ("attn_type", ("bi",))):
        if (value := values.get(name, known[0])) not in known:
            raise UserError(f"{source}: {name} {format_value(value)} cannot be converted; only {' and '.join(known)}")
    model = {ours: settings.get(theirs, default) for theirs, (ours, default) in _SETTINGS.items()}
    check_counts(source, n_layers=model["n_layers"], num_cutoffs=0)
    is_tied, clamp = settings.get("tie_word_embeddings", True), settings.get("clamp_len", -1)
    aliases = {"lm_loss.weight": "transformer.word_embedding.weight"} if is_tied else {}
    tables = [weights[name] for names in aliases.items() for name in names if name in weights]
    if len(tables) == 2 and not torch.equal(*tables):
        raise UserError(
            f"{folder}: lm_loss.weight differs from the embedding, but tie_word_embeddings is true in {file}"
        )
    model |= {
        "attention_dropout": model["dropout"],
        "d_head": settings.get("d_head", model["d_model"] // max(model["n_heads"], 1)),
        "clamp_length": clamp if clamp > 0 else None,
        "tie_word_embeddings": is_tied,
    }
    config: Any = check_settings(ARCHITECTURES[MODEL_TYPE], model, source)
    return ImportedModel(
        model=config.model_dump(),
        train={"memory_length": settings.get("mem_len", _MEMORY_LENGTH)},
        evaluation={},
        weights=import_mapped(_mappings(config), aliases, weights, str(folder)),
        tokenizer=_read_tokenizer(folder),
        notes=tuple(notes),
    )


def _mappings(config: TransformerConfig) -> Iterator[WeightMapping]:
    """Yield the table of weights for one model, by transformers' names, with the shape of every weight."""
    d_model, d_ff, heads = config.d_model, config.d_ff, (config.n_heads, config.head_dim)
    d_attention, table = config.n_heads * config.head_dim, (config.vocab_size, config.d_model)
    layers = [f"transformer.layer.{index}." for index in range(config.n_layers)]
    yield WeightMapping({"embedding.tables.0": table}, {"transformer.word_embedding.weight": table})
    yield WeightMapping({"mask_embedding": (d_model,)}, {"transformer.mask_emb": (1, 1, d_model)})
    yield WeightMapping({"softmax.bias": table[:1]}, {"lm_loss.bias": table[:1]})
    if not config.tie_word_embeddings:
        yield WeightMapping({"softmax.tables.0": table}, {"lm_loss.weight": table})
    for theirs, ours in (_BIASES | {"seg_embed": "segment_embedding"}).items():
        shape = (2, *heads) if theirs == "seg_embed" else heads
        yield WeightMapping({ours: (len(layers), *shape)}, {f"{layer}rel_attn.{theirs}": shape for layer in layers})
    for index, layer in enumerate(layers):
        prefix = f"layers.{index}."
        for name in "qkvr":
            ours = {f"{prefix}attention.{name}_proj.weight": (d_attention, d_model)}
            yield WeightMapping(ours, {f"{layer}rel_attn.{name}": (d_model, *heads)}, transposed=True)
        ours = {f"{prefix}attention.o_proj.weight": (d_model, d_attention)}
        yield WeightMapping(ours, {f"{layer}rel_attn.o": (d_model, *heads)})
        for ours, theirs, shape in (
            ("attention.norm.weight", "rel_attn.layer_norm.weight", (d_model,)),
            ("attention.norm.bias", "rel_attn.layer_norm.bias", (d_model,)),
            ("feed_forward.up_proj.weight", "ff.layer_1.weight", (d_ff, d_model)),
            ("feed_forward.up_proj.bias", "ff.layer_1.bias", (d_ff,)),
            ("feed_forward.down_proj.weight", "ff.layer_2.weight", (d_model, d_ff)),
            ("feed_forward.down_proj.bias", "ff.layer_2.bias", (d_model,)),
            ("feed_forward.norm.weight", "ff.layer_norm.weight", (d_model,)),
            ("feed_forward.norm.bias", "ff.layer_norm.bias", (d_model,)),
        ):
            yield WeightMapping({prefix + ours: shape}, {layer + theirs: shape})


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    """Read the tokenizer of a folder: one that we wrote, spiece.model with XLNet's rules, or tokenizer.json as it is.

    Raises:
        UserError: it is damaged, or has other rules.
    """
    file = first_existing(folder, (TOKENIZER_FILE, SPIECE_FILE, LIBRARY_FILE))
    if file is None or file.name != SPIECE_FILE:
        return None if file is None else load_tokenizer(file)
    settings = folder / "tokenizer_config.json"
    values = read_checkpoint_json(settings) if settings.is_file() else {}
    for name in ("do_lower_case", "keep_accents"):
        if isinstance(values, dict) and values.get(name):
            raise UserError(f"{settings}: {name} cannot be converted; pass another tokenizer, tokenizer=PATH")
    content = base64.b64encode(read_bytes(file)).decode()
    return tokenizer_from_json({"kind": "library", "library": "xlnet", "content": content}, str(file))


def write(
    path: Path, config: RunConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer, card: str
) -> tuple[str, ...]:
    """Write a model as a folder that transformers' own XLNet opens; return notes for the user.

    Raises:
        UserError: the folder exists, or transformers cannot express the model.
    """
    model, notes = config.model, list[str]()
    assert isinstance(model, XLNetConfig)
    unlike = {
        f"n_heads {model.n_heads} of d_head {model.head_dim}": model.n_heads * model.head_dim != model.d_model,
        f"d_embed {model.d_embed}": model.d_embed not in (None, model.d_model),
        "cutoffs": bool(model.cutoffs),
        "qk_norm true": model.qk_norm,
        "attend_empty_memory true": model.attend_empty_memory,
    }
    if name := next((name for name, is_given in unlike.items() if is_given), None):
        raise UserError(f"transformers' XLNet has no {name}, so it cannot hold this model; use it as a run")
    values = {theirs: getattr(model, ours) for theirs, (ours, _) in _SETTINGS.items()} | {
        "architectures": ["XLNetLMHeadModel"],
        "attn_type": "bi",
        "clamp_len": model.limit("clamp_length") or -1,
        "d_head": model.head_dim,
        "dtype": "float32",
        "ff_activation": "gelu_new",
        "mem_len": config.train.memory_length or None,
        "model_type": MODEL_TYPE,
        "tie_word_embeddings": model.tie_word_embeddings,
    }
    if isinstance(tokenizer, LibraryTokenizer) and tokenizer.library == "xlnet":
        spiece = base64.b64decode(tokenizer.content)
        library, kind = _unigram(spiece), "XLNetTokenizer"
    else:
        special = {"eos_token_id": None, **pretrained.generation_values(tokenizer)}  # padding may be behind the last id
        values |= {name: None if index == model.vocab_size else index for name, index in special.items()}
        is_library = isinstance(tokenizer, LibraryTokenizer) and tokenizer.library == "tokenizers"
        spiece, kind = None, "PreTrainedTokenizerFast"
        library = tokenizer.to_json()["content"] if is_library else fast_tokenizer(tokenizer)
        if library is None:
            notes.append(f"transformers cannot read text as this tokenizer ({tokenizer.kind}) does: pass ids")
    tensors = {name: tensor.contiguous() for name, tensor in export_mapped(_mappings(model), weights).items()}
    with atomic_folder(path) as temporary:
        pretrained.write_config(temporary / "config.json", values)
        write_safetensors(temporary / "model.safetensors", tensors, {"format": "pt"})
        if spiece is not None:
            (temporary / SPIECE_FILE).write_bytes(spiece)
        else:
            save_tokenizer(tokenizer, temporary / TOKENIZER_FILE)
        if library is not None:
            write_json(temporary / LIBRARY_FILE, library)
            pretrained.write_config(temporary / "tokenizer_config.json", {"tokenizer_class": kind})
        write_text(temporary / "README.md", card)
    return tuple(notes)


def _unigram(spiece: bytes) -> dict[str, Any]:
    """Return tokenizer.json for a model of sentencepiece, with XLNet's rules as transformers writes them.

    A token that ends in a digit and a comma is split again by XLNet's code; there it becomes improbable instead.
    """
    model, vocab, special = read_message(spiece), list[tuple[str, float]](), list[dict[str, Any]]()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for index, piece in enumerate(map(read_message, model[1])):  # of ModelProto: name, score and type of each token
        name, (score,) = piece[1][0].decode("utf-8"), struct.unpack("<f", piece[2][0].to_bytes(4, "little"))
        vocab.append((name, score - 100 * bool(re.search(r"\d,$", name))))
        if piece.get(3, [1])[0] == 3:  # a control symbol
            special.append({"id": index, "content": name, "special": True, **flags})
    charsmaps = [base64.b64encode(one).decode() for one in read_message(model[3][0]).get(2, ())]  # of NormalizerSpec
    replacements = [{"type": "Replace", "pattern": {"String": two}, "content": '"'} for two in ("``", "''")]
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    mark = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    normalizers = [*replacements, {"type": "NFKD"}, {"type": "StripAccents"}]
    return {
        "version": "1.0",
        "added_tokens": special,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                *normalizers,
                *({"type": "Precompiled", "precompiled_charsmap": one} for one in charsmaps if one),
                spaces,
            ],
        },
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, mark]},
        "post_processor": None,  # XLNetTokenizer has its own
        "decoder": mark,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False},
    }
