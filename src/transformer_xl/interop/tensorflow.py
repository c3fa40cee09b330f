"""Read checkpoints of the authors' TensorFlow code (`tf/` of their repository), such as those they published.

The published folders are read as they are unpacked:

    tf_wt103/model/{checkpoint, model.ckpt-0.index, model.ckpt-0.data-00000-of-00001}
    tf_wt103/data/{cache.pkl, corpus-info.json}

Sizes come from the shapes of the variables. What shapes do not tell (memory lengths, clamp, dropout) comes from the
recipe that was published for the data set, if the sizes are those of that recipe. Names of the variables (tf/model.py),
with `transformer/` in front of each:

    adaptive_embed/[cutoff_i/]{lookup_table (V, E), proj_W (E, D)}      r_w_bias, r_r_bias ([L,] N, H)
    adaptive_softmax/{bias (V,)} or cutoff_i/{b, proj (E, D)}, cutoff_0/{cluster_W (tails, E), cluster_b}
    layer_l/rel_attn/{qkv, r, o}/kernel, ff/{layer_1, layer_2}/{kernel, bias}, {rel_attn, ff}/LayerNorm/{gamma, beta}

Kernels and projections are stored (in, out), so they are transposed; tables are not.

Letters: V tokens of the vocabulary or
of a cluster, E embedding width, D model width, L layers, N heads, H head width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import UserError, load_recipe
from transformer_xl.files import as_user_error
from transformer_xl.interop.imported import ImportedModel
from transformer_xl.interop.tensor_bundle import TensorBundle
from transformer_xl.interop.tokenizers import read_tokenizer
from transformer_xl.text.tokenizers import Tokenizer
from transformer_xl.text.tokenizers.storage import read_json_object

_SCOPE = "transformer/"
_ADAM = re.compile(r"/Adam(_\d+)?$")
_NORM_EPSILON = 1e-12  # of tf.contrib.layers.layer_norm
_RECIPES = {
    "enwik8": "enwik8-24l",
    "text8": "text8-24l",
    "wt103": "wikitext-103-large",
    "lm1b": "lm1b-large",
}  # published recipe of each data set, by the authors' name for it
_SIZES = ("n_layers", "d_model", "n_heads", "d_head", "d_ff")
_DATA_SETS = {204: "enwik8", 27: "text8", 267_735: "wt103"}  # vocabulary sizes that identify the data set
_NO_LENGTHS = (
    "the files do not tell the segment, memory and clamp lengths, nor dropout, and this is not a published model: "
    "these settings are the defaults. The authors' --same_length is an attention_window of memory_length + 1"
)
_NO_LINE_ENDS = (
    "the authors' enwik8 has no line ends, as they split it at them and dropped them. Remove them from a text "
    "(tr -d '\\n') before evaluating on it"
)
_ENDING = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")
_WANTED = "wanted a .index file and its .data files; give their folder, or their path without the ending"


def recognizes(path: Path) -> bool:
    """Return whether the path is a TensorFlow checkpoint: its folder, its prefix, one of its files, or `checkpoint`."""
    with suppress(OSError, ValueError):
        return bool(_prefixes(path)) or _names_a_checkpoint(path)
    return False


def read(path: Path) -> ImportedModel:
    """Read a checkpoint: a folder, a prefix such as `model.ckpt-0`, one of its files, or the text file `checkpoint`.

    Raises:
        UserError: files are missing or damaged, there are several checkpoints, or it is of another model.
    """
    with as_user_error(f"reading {path}"):
        prefix = _prefix(path)
    variables = _Variables(prefix)
    model = _model_settings(variables)
    weights = dict(_weights(variables))
    if variables.unread():
        raise variables.error(f"'{_SCOPE}{variables.unread()[0]}' is not part of this model")
    return _with_dataset_settings(model, weights, prefix.parent)


def _names_a_checkpoint(path: Path) -> bool:
    text = path / "checkpoint" if path.is_dir() else path
    if text.name != "checkpoint" or not text.is_file():
        return False
    with text.open("rb") as file:
        return b"model_checkpoint_path" in file.read(100)


def _prefixes(path: Path) -> list[Path]:
    """Return the checkpoints of a path, sorted by name; of several, only the one that the file `checkpoint` names."""
    if path.is_dir() or path.name == "checkpoint":
        folder = path if path.is_dir() else path.parent
        found = [place for inner in (folder, folder / "model") for place in sorted(inner.glob("*.index"))]
        prefixes = [place.with_suffix("") for place in found]
        return [prefix for prefix in prefixes if prefix.name == _newest(prefix.with_name("checkpoint"))] or prefixes
    prefix = path.with_name(_ENDING.sub("", path.name))
    return [prefix] if prefix.with_name(f"{prefix.name}.index").is_file() else []


def _newest(text: Path) -> str | None:
    """Return the name of the newest checkpoint, as the text file `checkpoint` states it."""
    if not text.is_file():
        return None
    found = re.search(
        r'^model_checkpoint_path: "(.*)"', text.read_text(encoding="utf-8", errors="replace"), flags=re.MULTILINE
    )
    return Path(found[1]).name if found else None


def _prefix(path: Path) -> Path:
    prefixes = _prefixes(path)
    if not prefixes:
        what = "names a checkpoint, but holds no weights" if _names_a_checkpoint(path) else "no TensorFlow checkpoint"
        raise UserError(f"{path}: {what}; {_WANTED}")
    if len(prefixes) > 1:
        raise UserError(f"{path}: {len(prefixes)} checkpoints; give one of them, such as {prefixes[-1]}")
    return prefixes[0]


class _Variables:
    """The variables of the model, by name without the scope; Adam's moments and counters are left out."""

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        self._bundle = TensorBundle.open(prefix)
        self._shapes = {
            name.removeprefix(_SCOPE): shape
            for name, shape in self._bundle.shapes.items()
            if name.startswith(_SCOPE) and not _ADAM.search(name)
        }
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def count(self, pattern: str) -> int:
        """Return how many variables have this name with 0, 1, 2, ... in place of {}."""
        number = 0
        while pattern.format(number) in self:
            number += 1
        return number

    def shape(self, name: str, *dimensions: int) -> tuple[int, ...]:
        """Return the shape of a variable, which must have one of these numbers of dimensions.

        Raises:
            UserError: there is no variable of that name, or it has another number of dimensions.
        """
        if name not in self._shapes:
            raise self.error(f"no variable '{_SCOPE}{name}'")
        shape = self._shapes[name]
        if len(shape) not in dimensions or 0 in shape:
            raise self.error(f"'{_SCOPE}{name}' has the shape {shape}")
        return shape

    def tensor(self, name: str) -> Tensor:
        """Return a variable in float32."""
        self.shape(name, 1, 2, 3)
        self._read.add(name)
        return torch.from_numpy(self._bundle.tensor(_SCOPE + name)).float()

    def transposed(self, name: str) -> Tensor:
        """Return a kernel or projection, stored (in, out), as (out, in)."""
        self.shape(name, 2)
        return self.tensor(name).T.contiguous()

    def unread(self) -> list[str]:
        """Return the names of variables that were not read."""
        return sorted(set(self._shapes) - self._read)

    def error(self, what: str) -> UserError:
        """Return the UserError to raise."""
        return UserError(f"{self._prefix}: {what}; wanted a checkpoint of the authors' tf/model.py")


def _model_settings(variables: _Variables) -> dict[str, Any]:
    """Return the settings of TransformerXLConfig that the shapes tell."""
    *layers, heads, d_head = variables.shape("r_w_bias", 2, 3)
    _, width = variables.shape("layer_0/rel_attn/o/kernel", 2)
    table_widths = [variables.shape(f"{name}lookup_table", 2)[1] for name in _tables(variables)]
    return {
        "vocab_size": _edges(variables)[-1],
        "n_layers": variables.count("layer_{}/rel_attn/o/kernel"),
        "d_model": width,
        "n_heads": heads,
        "d_head": d_head,
        "d_ff": variables.shape("layer_0/ff/layer_1/kernel", 2)[1],
        "d_embed": table_widths[0],
        "cutoffs": _edges(variables)[1:-1],
        "div_val": table_widths[0] // table_widths[1] if len(table_widths) > 1 else 1,
        "tie_projections": _tied_projections(variables),
        "project_same_width": not (
            len(table_widths) > 1 and table_widths[0] == width and f"{_tables(variables)[0]}proj_W" not in variables
        ),
        "tie_attention_biases": not layers,
        "norm_eps": _NORM_EPSILON,
        "attend_empty_memory": True,
    }


def _tables(variables: _Variables) -> list[str]:
    """Return the name prefix of each embedding table and its projection."""
    if "adaptive_embed/lookup_table" in variables:
        return ["adaptive_embed/"]
    number = max(variables.count("adaptive_embed/cutoff_{}/lookup_table"), 1)
    return [f"adaptive_embed/cutoff_{index}/" for index in range(number)]


def _biases(variables: _Variables) -> list[str]:
    """Return the names of the softmax biases, one for each cluster."""
    number = variables.count("adaptive_softmax/cutoff_{}/b")
    return [f"adaptive_softmax/cutoff_{index}/b" for index in range(number)] or ["adaptive_softmax/bias"]


def _edges(variables: _Variables) -> tuple[int, ...]:
    """Return 0, the cutoffs and V."""
    return (0, *accumulate(variables.shape(name, 1)[0] for name in _biases(variables)))


def _tied_projections(variables: _Variables) -> str:
    """Return for which clusters the softmax shares the embedding's projection."""
    clusters = range(len(_biases(variables)))
    own = {index for index in clusters if f"adaptive_softmax/cutoff_{index}/proj" in variables}
    if not own:
        return "all"
    tables = _tables(variables)
    projected = {index for index in clusters if f"{tables[min(index, len(tables) - 1)]}proj_W" in variables}
    if own not in ({0}, projected):
        raise variables.error(f"projections of its own for the clusters {sorted(own)} of {sorted(projected)} alone")
    return "all_but_first" if own == {0} else "none"


def _weights(variables: _Variables) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under our names."""
    for ours, theirs in (("content_bias", "r_w_bias"), ("position_bias", "r_r_bias")):
        bias = variables.tensor(theirs)
        yield ours, bias if bias.ndim == 3 else bias[None]
    for index, table in enumerate(_tables(variables)):
        yield f"embedding.tables.{index}", variables.tensor(f"{table}lookup_table")
        if f"{table}proj_W" in variables:
            yield f"embedding.projections.{index}", variables.transposed(f"{table}proj_W")
    yield "softmax.bias", torch.cat([variables.tensor(name) for name in _biases(variables)])
    if "adaptive_softmax/cutoff_0/b" in variables:
        yield "softmax.cluster_weight", variables.tensor("adaptive_softmax/cutoff_0/cluster_W")
        yield "softmax.cluster_bias", variables.tensor("adaptive_softmax/cutoff_0/cluster_b")
    for index in range(len(_biases(variables))):
        if f"adaptive_softmax/cutoff_{index}/proj" in variables:
            yield f"softmax.projections.{index}", variables.transposed(f"adaptive_softmax/cutoff_{index}/proj")
    for index in range(variables.count("layer_{}/rel_attn/o/kernel")):
        yield from _layer(variables, f"layer_{index}/", f"layers.{index}.")


def _layer(variables: _Variables, theirs: str, ours: str) -> Iterator[tuple[str, Tensor]]:
    qkv = variables.transposed(f"{theirs}rel_attn/qkv/kernel")
    for name, part in zip(("q_proj", "k_proj", "v_proj"), qkv.tensor_split(3), strict=True):
        yield f"{ours}attention.{name}.weight", part.contiguous()
    yield f"{ours}attention.r_proj.weight", variables.transposed(f"{theirs}rel_attn/r/kernel")
    yield f"{ours}attention.o_proj.weight", variables.transposed(f"{theirs}rel_attn/o/kernel")
    for name, kernel in (("up_proj", "layer_1"), ("down_proj", "layer_2")):
        yield f"{ours}feed_forward.{name}.weight", variables.transposed(f"{theirs}ff/{kernel}/kernel")
        yield f"{ours}feed_forward.{name}.bias", variables.tensor(f"{theirs}ff/{kernel}/bias")
    for name, norm in (("attention", "rel_attn"), ("feed_forward", "ff")):
        yield f"{ours}{name}.norm.weight", variables.tensor(f"{theirs}{norm}/LayerNorm/gamma")
        yield f"{ours}{name}.norm.bias", variables.tensor(f"{theirs}{norm}/LayerNorm/beta")


def _with_dataset_settings(model: dict[str, Any], weights: dict[str, Tensor], folder: Path) -> ImportedModel:
    """Add what the data set tells: lengths, dropout and tokenizer."""
    name, tokenizer = _corpus(folder, model["vocab_size"])
    recipe = load_recipe(_RECIPES[name]) if name in _RECIPES else None
    train: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    remarks: list[str] = [_NO_LINE_ENDS] if name == "enwik8" else []
    if recipe is not None and all(recipe.model[size] == model[size] for size in _SIZES):
        model = {**model, **{setting: recipe.model[setting] for setting in ("dropout", "attention_dropout")}}
        train = {setting: recipe.train[setting] for setting in ("segment_length", "memory_length")}
        lengths = ("segment_length", "memory_length", "clamp_length")
        evaluation = {setting: recipe.evaluation[setting] for setting in lengths}
        evaluation["attention_window"] = recipe.evaluation["memory_length"] + 1  # as their --same_length
    else:
        remarks.append(_NO_LENGTHS)
    return ImportedModel(model, train, evaluation, weights, tokenizer, tuple(remarks))


def _corpus(folder: Path, size: int) -> tuple[str | None, Tokenizer | None]:
    """Return the authors' name of the data set, and its tokenizer; None where it is not known.

    They are beside the checkpoint, in `data` there, or in `data` beside its folder: corpus-info.json names the data
    set, and cache.pkl is their data_utils.Corpus, as Python 2 pickled it.

    Args:
        folder: the folder of the checkpoint.
        size: V, the vocabulary size.

    Raises:
        UserError: a file is damaged, or belongs to another model.
    """
    with as_user_error(f"reading {folder}"):
        folders = (folder, folder / "data", folder.resolve().parent / "data")
        info, cache = (
            next((place / name for place in folders if (place / name).is_file()), None)
            for name in ("corpus-info.json", "cache.pkl")
        )
    name = _DATA_SETS.get(size)
    if info is not None:
        values = read_json_object(info, "copy it again from where it came")
        _check_size(info, values.get("vocab_size"), size)
        name = str(values.get("dataset", name))
    if cache is None:
        return name, None
    tokenizer = read_tokenizer(cache)
    _check_size(cache, tokenizer.vocab_size, size)
    return name, tokenizer


def _check_size(path: Path, found: object, size: int) -> None:
    if found != size:
        raise UserError(
            f"{path} has a vocabulary of {found} tokens, and the checkpoint one of {size}; put the files of one model "
            "together"
        )
