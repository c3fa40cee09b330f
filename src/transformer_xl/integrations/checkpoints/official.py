"""Read model.pt of the authors' PyTorch code: a whole torch module, saved with torch.save.

The pickle in that file names the authors' classes, but none of them is imported: the reader takes the attributes,
parameters and submodules that the pickle stores for each module. The embedding is the submodule `word_emb`, the softmax
`crit`. The vocabulary is in another file, cache.pt, which contains the pickled corpus.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.integrations.checkpoints.source_config import ImportedModel, SourceConfig
from transformer_xl.integrations.checkpoints.tokenizers import first_existing, read_tokenizer
from transformer_xl.integrations.checkpoints.torch_file import TorchFile
from transformer_xl.integrations.checkpoints.unpickler import PickledObject
from transformer_xl.integrations.checkpoints.weight_names import OFFICIAL, import_weights

_MODEL, _CLASS = "model.pt", "MemTransformerLM"
# files of vocabularies; the first one that exists is read
_VOCABULARIES = ("cache.pt", "vocab.pkl", "vocab.txt", "vocab.json")
_CLASSES = (
    *(f"mem_transformer.{name}" for name in (
        _CLASS, "AdaptiveEmbedding", "PositionalEmbedding", "PositionwiseFF",
        # the layers of all kinds of attention, for a message that says which kind cannot be converted
        "DecoderLayer", "RelLearnableDecoderLayer", "RelPartialLearnableDecoderLayer",
        "MultiHeadAttn", "RelMultiHeadAttn", "RelLearnableMultiHeadAttn", "RelPartialLearnableMultiHeadAttn",
    )),
    "proj_adaptive_softmax.ProjectedAdaptiveLogSoftmax", "log_uniform_sampler.LogUniformSampler",
)  # fmt: skip
ALLOWED_CLASSES = frozenset(
    [
        *_CLASSES,
        *(f"utils.{name}" for name in _CLASSES),
        *(f"torch.nn.modules.{name}" for name in (
            "activation.ReLU", "container.ModuleList", "container.ParameterList", "container.Sequential",
            "dropout.Dropout", "linear.Linear", "normalization.LayerNorm", "sparse.Embedding",
        )),
        "torch.nn.parameter.Parameter",
        "torch.nn.backends.thnn._get_thnn_function_backend",  # of early torch versions
    ]
)  # fmt: skip
"""Classes that the pickle may name; none of them is imported."""
_MAX_ENTRIES, _MAX_NAME_LENGTH = 100_000, 1000  # in a hostile file modules can contain themselves and each other


def recognizes(path: Path) -> bool:
    """Return whether the path is model.pt, or a folder that contains it."""
    return (path.name == _MODEL and path.is_file()) or (path / _MODEL).is_file()


def read(path: Path) -> ImportedModel:
    """Read model.pt, and the vocabulary from cache.pt or another vocabulary file in the same folder, if any.

    Raises:
        UserError: a file is damaged, contains another model class, names a class that is not allowed, or cannot be
            expressed in this package.
    """
    file = path / _MODEL if path.is_dir() else path
    source = str(file)
    content = TorchFile(file, ALLOWED_CLASSES)
    model = content.value
    if not isinstance(model, PickledObject) or model.name.rpartition(".")[2] != _CLASS:
        what = model.name if isinstance(model, PickledObject) else type(model).__name__
        raise UserError(f"{file} contains {what}; expected the authors' {_CLASS}, as their train.py saves it")
    # This check comes before the search for submodules, whose names are different with another attn_type (the kind of
    # attention; 0 is the paper's).
    SourceConfig(model.attributes, source).check_supported()
    modules = dict(_modules(model, source))
    if not {"layers.0.dec_attn", "crit", "word_emb"} <= modules.keys():
        raise UserError(f"{file} is not a complete {_CLASS} (no layers, embedding or softmax); get it again")
    weights = content.tensors(dict(_entries(modules.items(), "_parameters", source)))
    settings = SourceConfig(_settings(modules, weights, source), source)
    config, lengths = settings.model_config(), settings.lengths()
    vocabulary_file = first_existing(file.parent, _VOCABULARIES)
    return ImportedModel(
        model=config.model_dump(),
        train=lengths,
        evaluation={**lengths, "attention_window": config.attention_window},
        weights=import_weights(config, OFFICIAL, weights, source),
        tokenizer=None if vocabulary_file is None else read_tokenizer(vocabulary_file),
    )


def _modules(model: PickledObject, source: str) -> Iterator[tuple[str, PickledObject]]:
    """Yield the name and the module of every submodule; the model itself comes first, with an empty name."""
    found = [("", model)]
    submodules = _entries(found, "_modules", source)  # goes on with what is appended to `found`
    found.extend((name, module) for name, module in submodules if isinstance(module, PickledObject))
    yield from found


def _entries(modules: Iterable[tuple[str, PickledObject]], attribute: str, source: str) -> Iterator[tuple[str, object]]:
    """Yield the entries of a dictionary that each module has, except those that are None, by their full names.

    Args:
        modules: modules by name.
        attribute: name of the dictionary, `_modules` or `_parameters`.
        source: path of the file, for messages.
    """
    count = 0
    for prefix, module in modules:
        entries = module.attributes.get(attribute)
        for name, value in entries.items() if isinstance(entries, dict) else ():
            count += 1
            full_name = f"{prefix}.{name}".lstrip(".")
            if count > _MAX_ENTRIES or len(full_name) > _MAX_NAME_LENGTH:
                raise UserError(f"{source} is damaged (a module contains itself); get it again")
            if value is not None:
                yield full_name, value


def _settings(modules: dict[str, PickledObject], weights: Mapping[str, Tensor], source: str) -> dict[str, Any]:
    """Collect the settings from the attributes of the modules, under Hugging Face's names."""

    def attribute(module: str, name: str) -> Any:
        return modules[module].attributes.get(name) if module in modules else None

    # A weight of the softmax is tied if it has the same storage as a weight of the embedding.
    embedding_tensors = {tensor.data_ptr() for name, tensor in weights.items() if name.startswith("word_emb.")}
    tied = {name for name, tensor in weights.items() if tensor.data_ptr() in embedding_tensors}
    cutoffs = SourceConfig(modules["crit"].attributes, source).get_ints("cutoffs")[:-1]  # the last one is V
    return {
        **modules[""].attributes,
        "vocab_size": attribute("", "n_token"),
        "cutoffs": cutoffs,
        "div_val": attribute("crit", "div_val"),
        "d_inner": attribute("layers.0.pos_ff.CoreNet.0", "out_features"),  # the first linear layer
        "dropout": attribute("drop", "p"),
        "dropatt": attribute("layers.0.dec_attn.dropatt", "p"),
        "pre_lnorm": attribute("layers.0.dec_attn", "pre_lnorm"),
        "layer_norm_epsilon": attribute("layers.0.dec_attn.layer_norm", "eps"),
        "tie_word_embeddings": "crit.out_layers.0.weight" in tied,
        "tie_projs": [f"crit.out_projs.{index}" in tied for index in range(len(cutoffs) + 1)],
    }
