"""Read model.pt of the authors' PyTorch code: a whole module, pickled with its classes.

None of those classes is imported. The pickle states the attributes, parameters and submodules of the module, which is
all that is needed. The vocabulary is in another file, cache.pt, which pickles the corpus.
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
_MAX_MODULES = 100_000  # a pickled module can contain itself


def recognizes(path: Path) -> bool:
    """Return whether this is model.pt, or a folder with one."""
    return (path.name == _MODEL and path.is_file()) or (path / _MODEL).is_file()


def _admits(name: str) -> bool:
    return _ADMITTED.fullmatch(name) is not None


def read(path: Path) -> ImportedModel:
    """Read model.pt, and the vocabulary from cache.pt beside it if there is one.

    Raises:
        UserError: a file is damaged, holds another class, names other classes, or cannot be expressed here.
    """
    file = path / _MODEL if path.is_dir() else path
    content = TorchFile(file, _admits)
    found = content.value
    if not isinstance(found, PickledObject) or found.name.rpartition(".")[2] != _CLASS:
        what = found.name if isinstance(found, PickledObject) else type(found).__name__
        raise UserError(f"{file} holds {what}; wanted the authors' {_CLASS}, as their train.py saves it")
    modules = dict(_modules(found, str(file)))
    if "layers.0.dec_attn" not in modules or "crit" not in modules or "word_emb" not in modules:
        check_supported(SourceConfig(found.attributes, str(file)))
        raise UserError(f"{file} is not a whole {_CLASS} (no layers, embedding or softmax); get it again")
    records = {
        f"{name}.{inner}".lstrip("."): record
        for name, module in modules.items()
        for inner, record in _dictionary(module, "_parameters").items()
        if record is not None
    }
    theirs: dict[str, Tensor] = {name: content.tensor(record) for name, record in records.items()}
    shared = _shared(theirs)
    model, memory = (
        _model(found, modules, shared, str(file)),
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


def _dictionary(module: PickledObject, name: str) -> dict[str, Any]:
    found = module.attributes.get(name)
    return found if isinstance(found, dict) else {}


def _modules(model: PickledObject, source: str) -> Iterator[tuple[str, PickledObject]]:
    """Yield every submodule with its name; the module itself comes first, with an empty name."""
    left = [("", model)]
    for number, (name, module) in enumerate(left):
        if number > _MAX_MODULES or len(name) > 1000:
            raise UserError(f"{source} is damaged (a module contains itself); get it again")
        yield name, module
        for inner, record in _dictionary(module, "_modules").items():
            if isinstance(record, PickledObject):
                left.append((f"{name}.{inner}".lstrip("."), record))


def _shared(weights: dict[str, Tensor]) -> set[str]:
    """Return the names of softmax weights and projections that share the embedding's storage."""
    embedded = {tensor.data_ptr() for name, tensor in weights.items() if name.startswith("word_emb.")}
    return {name for name, tensor in weights.items() if name.startswith("crit.") and tensor.data_ptr() in embedded}


def _model(found: PickledObject, modules: dict[str, PickledObject], shared: set[str], source: str) -> dict[str, Any]:
    settings = SourceConfig(found.attributes, source)
    check_supported(settings)
    crit = SourceConfig(modules["crit"].attributes, source)
    attention = SourceConfig(modules["layers.0.dec_attn"].attributes, source)
    norm = SourceConfig(_attributes(modules, "layers.0.dec_attn.layer_norm"), source)
    up_proj = SourceConfig(_attributes(modules, "layers.0.pos_ff.CoreNet.0"), source)
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
        "d_ff": up_proj.get_int("out_features"),
        "dropout": SourceConfig(_attributes(modules, "drop"), source).get_float("p", 0.0),
        "attention_dropout": SourceConfig(_attributes(modules, "layers.0.dec_attn.dropatt"), source).get_float(
            "p", 0.0
        ),
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


def _attributes(modules: dict[str, PickledObject], name: str) -> dict[str, Any]:
    module = modules.get(name)
    return {} if module is None else module.attributes
