"""Reads model.pt of the authors' PyTorch code: a whole module, pickled with its classes.

Nothing of those classes is needed or made. What the pickle says of the module is its attributes, its parameters and its
parts, and that is all there is to know. The vocabulary stands in another file, cache.pt, which pickles the corpus.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from transformer_xl.config import TransformerXLConfig, UserError, check_settings
from transformer_xl.interop.imported import ImportedModel
from transformer_xl.interop.source_config import SourceConfig, check_supported, length_settings, parse_tied_projections
from transformer_xl.interop.tokenizers import first_existing, read_tokenizer
from transformer_xl.interop.torch_file import TorchFile
from transformer_xl.interop.unpickler import PickledObject
from transformer_xl.interop.weight_names import OFFICIAL, import_weights

_MODEL, _CLASS = "model.pt", "MemTransformerLM"
_VOCABULARIES = ("cache.pt", "vocab.pkl", "vocab.txt", "vocab.json")
_OWN_MODULES = ("mem_transformer", "proj_adaptive_softmax", "log_uniform_sampler")
_ADMITTED = re.compile(
    rf"(utils\.)?({'|'.join(_OWN_MODULES)})\.[A-Za-z]+"
    r"|torch\.nn\.(modules\.[a-z]+|parameter)\.[A-Za-z]+"
    r"|torch\.nn\.backends\.thnn\._get_thnn_function_backend"
)
_MOST_PARTS = 100_000  # of a module; a pickle can name itself as its own part


def recognizes(path: Path) -> bool:
    """Whether this is model.pt, or a folder with one."""
    return (path.name == _MODEL and path.is_file()) or (path / _MODEL).is_file()


def _admits(name: str) -> bool:
    return _ADMITTED.fullmatch(name) is not None


def read(path: Path) -> ImportedModel:
    """Reads model.pt, and cache.pt beside it for the vocabulary where there is one.

    Raises:
        UserError: something is damaged, of another class, names what it should not, or cannot be expressed.
    """
    file = path / _MODEL if path.is_dir() else path
    content = TorchFile(file, _admits)
    found = content.value
    if not isinstance(found, PickledObject) or found.name.rpartition(".")[2] != _CLASS:
        what = found.name if isinstance(found, PickledObject) else type(found).__name__
        raise UserError(f"{file} holds {what}; wanted the authors' {_CLASS}, as their train.py saves it")
    parts = dict(_parts(found, str(file)))
    if "layers.0.dec_attn" not in parts or "crit" not in parts or "word_emb" not in parts:
        check_supported(SourceConfig(found.attributes, str(file)))
        raise UserError(f"{file} is not a whole {_CLASS} (no layers, embedding or softmax); get it again")
    records = {
        f"{name}.{inner}".lstrip("."): record
        for name, part in parts.items()
        for inner, record in _dictionary(part, "_parameters").items()
        if record is not None
    }
    theirs: dict[str, Tensor] = {name: content.tensor(record) for name, record in records.items()}
    shared = _shared(theirs)
    model, memory = (
        _model(found, parts, shared, str(file)),
        SourceConfig(found.attributes, str(file)).get_int("mem_len"),
    )
    config = check_settings(TransformerXLConfig, model, str(file))
    folder = file.parent
    vocabulary_file = first_existing(folder, _VOCABULARIES)
    train, evaluation = length_settings(
        segment=SourceConfig(found.attributes, str(file)).get_int("tgt_len"),
        memory=memory,
        window=model["attention_window"],
    )
    return ImportedModel(
        model=model,
        train=train,
        evaluation=evaluation,
        weights=import_weights(config, OFFICIAL, theirs, str(file)),
        tokenizer=None if vocabulary_file is None else read_tokenizer(vocabulary_file),
    )


def _dictionary(part: PickledObject, name: str) -> dict[str, Any]:
    found = part.attributes.get(name)
    return found if isinstance(found, dict) else {}


def _parts(model: PickledObject, source: str) -> Iterator[tuple[str, PickledObject]]:
    """Every part of a module by its name, the module itself first, under no name."""
    left = [("", model)]
    for number, (name, part) in enumerate(left):
        if number > _MOST_PARTS or len(name) > 1000:
            raise UserError(f"{source} is damaged (a part of it has itself as a part); get it again")
        yield name, part
        for inner, record in _dictionary(part, "_modules").items():
            if isinstance(record, PickledObject):
                left.append((f"{name}.{inner}".lstrip("."), record))


def _shared(weights: dict[str, Tensor]) -> set[str]:
    """Names of the softmax weights and projections that are the embedding's own, at the same position in the file."""
    embedded = {tensor.data_ptr() for name, tensor in weights.items() if name.startswith("word_emb.")}
    return {name for name, tensor in weights.items() if name.startswith("crit.") and tensor.data_ptr() in embedded}


def _model(found: PickledObject, parts: dict[str, PickledObject], shared: set[str], source: str) -> dict[str, Any]:
    settings = SourceConfig(found.attributes, source)
    check_supported(settings)
    crit = SourceConfig(parts["crit"].attributes, source)
    attention = SourceConfig(parts["layers.0.dec_attn"].attributes, source)
    norm = SourceConfig(_attributes(parts, "layers.0.dec_attn.layer_norm"), source)
    widening = SourceConfig(_attributes(parts, "layers.0.pos_ff.CoreNet.0"), source)
    cutoffs, size = crit.get_ints("cutoffs")[:-1], settings.get_int("n_token")
    width, div_val = settings.get_int("d_model"), crit.get_int("div_val", 1)
    d_embed = settings.get_int("d_embed", width)
    projected = div_val > 1 or d_embed != width
    tied = [f"crit.out_projs.{index}" in shared for index in range(len(cutoffs) + 1)]
    clamp = settings.get_int("clamp_len", -1)
    return {
        "vocab_size": size,
        "n_layers": settings.get_int("n_layer"),
        "d_model": width,
        "n_heads": settings.get_int("n_head"),
        "d_head": settings.get_int("d_head"),
        "d_ff": widening.get_int("out_features"),
        "dropout": SourceConfig(_attributes(parts, "drop"), source).get_float("p", 0.0),
        "attention_dropout": SourceConfig(_attributes(parts, "layers.0.dec_attn.dropatt"), source).get_float("p", 0.0),
        "norm_first": attention.get_bool("pre_lnorm", default=False),
        "final_norm": False,
        "norm_eps": norm.get_float("eps", 1e-5),
        "d_embed": d_embed,
        "cutoffs": cutoffs,
        "div_val": div_val,
        "tie_word_embeddings": "crit.out_layers.0.weight" in shared,
        "tie_projections": parse_tied_projections(tied, len(tied), source) if projected else "all",
        "attention_window": settings.attention_window(settings.get_int("mem_len"), keys_beside_memory=0),
        "clamp_length": clamp if clamp > 0 else None,
    }


def _attributes(parts: dict[str, PickledObject], name: str) -> dict[str, Any]:
    part = parts.get(name)
    return {} if part is None else part.attributes
