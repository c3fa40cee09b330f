"""Read checkpoints of the authors' TensorFlow code (`tf/` in the authors' repository), such as the published models.

Those of XLNet's code are found here too, and read by xlnet.py: the published zip archive, or what it unpacks to.

The published archives are read in the layout in which they unpack:

    tf_wt103/model/{checkpoint, model.ckpt-0.index, model.ckpt-0.data-00000-of-00001}
    tf_wt103/data/cache.pkl

Model sizes come from the shapes of the variables. Settings that the shapes do not determine (memory and clamp lengths,
dropout) come from the recipe published for the data set, if the model sizes match that recipe. The variables have these
names (tf/model.py), each prefixed with `transformer/`:

    adaptive_embed/[cutoff_i/]{lookup_table (V, E), proj_W (E, D)}      r_w_bias, r_r_bias ([L,] N, H)
    adaptive_softmax/{bias (V,)} or cutoff_i/{b, proj (E, D)}, cutoff_0/{cluster_W (tails, E), cluster_b}
    layer_l/rel_attn/{qkv, r, o}/kernel, ff/{layer_1, layer_2}/{kernel, bias}, {rel_attn, ff}/LayerNorm/{gamma, beta}

Kernels and projections are stored as (in, out), so they are transposed; embedding tables are not. r_w_bias and r_r_bias
are the paper's u and v, for each layer or shared by all. A cutoff is a token id at which the vocabulary is split into
clusters: the head of frequent tokens, and the tails, whose embeddings can be narrower (by the factor `div_val` each).

Dimensions: V tokens of the vocabulary or of a cluster, E embedding width, D model width, L layers, N heads, H head
width.
"""

from __future__ import annotations

import itertools
import re
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import UserError, load_recipe
from transformer_xl.files import as_user_error
from transformer_xl.integrations.checkpoints import xlnet
from transformer_xl.integrations.checkpoints.source_config import ImportedModel, check_counts
from transformer_xl.integrations.checkpoints.tensor_bundle import TensorBundle
from transformer_xl.integrations.checkpoints.tokenizers import read_tokenizer
from transformer_xl.text.sources.archives import extract

_SCOPE = "transformer/"  # prefix of the model's variables
_ADAM = re.compile(r"/Adam(_\d+)?$")  # suffix of the optimizer's running averages
_NORM_EPSILON = 1e-12  # the default of tf.contrib.layers.layer_norm
# the recipe of the published model for each data set, by the size of its vocabulary
_RECIPES = {204: "enwik8-24l", 27: "text8-24l", 267_735: "wikitext-103-large", 793_471: "lm1b-large"}
# a model with these sizes of the recipe is the published one
_SIZES = ("n_layers", "d_model", "n_heads", "d_head", "d_ff")
_NO_LENGTHS = (
    "the files do not contain the segment, memory and clamp lengths or dropout, and this is not a published model, so "
    "these settings have their defaults. The authors' --same_length equals an attention_window of memory_length + 1"
)
_NO_NEWLINES = "the authors removed all newlines from enwik8; remove them from a text (tr -d '\\n') before evaluation"
# suffix of a checkpoint's files; their path without it is the checkpoint's prefix
_SUFFIX = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")


def recognizes(path: Path) -> bool:
    """Return whether the path is a TensorFlow checkpoint: its folder, prefix, one of its files, or XLNet's archive."""
    with suppress(OSError, ValueError):
        return bool(_prefixes(path)) or _is_archive(path)
    return False


def _is_archive(path: Path) -> bool:
    """Return whether the path is a zip archive with XLNet's settings."""
    with suppress(OSError, ValueError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        return any(Path(name).name == xlnet.CONFIG_FILE for name in archive.namelist())
    return False


def read(path: Path) -> ImportedModel:
    """Read a checkpoint: a folder, a prefix such as `model.ckpt-0`, one of its files, or the text file `checkpoint`.

    Raises:
        UserError: files are missing or damaged, the path matches several checkpoints, or the variables are not those
            of the authors' model.
    """
    if path.is_file() and _is_archive(path):
        with as_user_error(f"unpacking {path}"), tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / path.stem
            extract(path, xlnet.FILES, folder)
            try:
                return read(folder)
            except UserError as error:
                raise UserError(str(error).replace(str(folder), str(path))) from None
    with as_user_error(f"reading {path}"):
        prefixes = _prefixes(path)
    if not prefixes:
        raise UserError(f"{path}: no TensorFlow checkpoint; pass a folder with a .index file and its .data files")
    if len(prefixes) > 1:
        raise UserError(f"{path}: {len(prefixes)} checkpoints; pass one of them, such as {prefixes[-1]}")
    if (prefixes[0].parent / xlnet.CONFIG_FILE).is_file():
        return xlnet.read_tensorflow(prefixes[0])
    variables = _Variables(prefixes[0])
    model = _model_settings(variables)
    weights = dict(_weights(variables))
    if unread := variables.unread():
        raise variables.error(f"'{_SCOPE}{unread[0]}' is not part of this model")
    return _with_dataset_settings(model, weights, prefixes[0].parent)


def _prefixes(path: Path) -> list[Path]:
    """Return the prefixes of the checkpoints at a path: of a folder, those in it and in its subfolder `model`."""
    if not path.is_dir() and path.name != "checkpoint":
        prefix = path.with_name(_SUFFIX.sub("", path.name))
        return [prefix] if prefix.with_name(f"{prefix.name}.index").is_file() else []
    folder = path if path.is_dir() else path.parent
    return [file.with_suffix("") for parent in (folder, folder / "model") for file in sorted(parent.glob("*.index"))]


class _Variables:
    """The variables of the model, by name without the scope; Adam's moments and counters are left out."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self._bundle = TensorBundle(prefix)
        self._shapes = {
            name.removeprefix(_SCOPE): shape
            for name, shape in self._bundle.shapes.items()
            if name.startswith(_SCOPE) and not _ADAM.search(name)
        }
        self._bundle.check_data(_SCOPE + name for name in self._shapes)
        self._read: set[str] = set()
        num_tables = max(self.count("adaptive_embed/cutoff_{}/lookup_table"), 1)
        tables = [f"adaptive_embed/cutoff_{index}/" for index in range(num_tables)]
        self.tables = ["adaptive_embed/"] if "adaptive_embed/lookup_table" in self else tables
        """The name prefix of each embedding table and its projection."""
        num_clusters = self.count("adaptive_softmax/cutoff_{}/b")
        biases = [f"adaptive_softmax/cutoff_{index}/b" for index in range(num_clusters)]
        self.biases = biases or ["adaptive_softmax/bias"]
        """The names of the softmax biases, one for each cluster."""

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def count(self, pattern: str) -> int:
        """Return how many consecutive variables exist with 0, 1, 2, ... substituted for {} in `pattern`."""
        return next(index for index in itertools.count() if pattern.format(index) not in self)

    def shape(self, name: str, *dimensions: int) -> tuple[int, ...]:
        """Return the shape of a variable, whose number of dimensions must be one of `dimensions`.

        Raises:
            UserError: no variable has that name, or it has another number of dimensions.
        """
        if name not in self._shapes:
            raise self.error(f"no variable '{_SCOPE}{name}'")
        shape = self._shapes[name]
        if len(shape) not in dimensions or 0 in shape:
            raise self.error(f"'{_SCOPE}{name}' has the unexpected shape {shape}")
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

    def error(self, problem: str) -> UserError:
        """Return a UserError that states the problem and which checkpoints are supported."""
        return UserError(f"{self.prefix}: {problem}; expected a checkpoint of the authors' tf/model.py")


def _model_settings(variables: _Variables) -> dict[str, Any]:
    """Return the settings of TransformerXLConfig that follow from the shapes."""
    # 2 or 3 dimensions: ([L,] N, H)
    n_layers = variables.count("layer_{}/rel_attn/o/kernel")
    check_counts(str(variables.prefix), n_layers=n_layers, num_cutoffs=len(variables.biases) - 1)
    *layer_dimension, n_heads, d_head = variables.shape("r_w_bias", 2, 3)
    _, d_model = variables.shape("layer_0/rel_attn/o/kernel", 2)
    boundaries = (
        0,
        *itertools.accumulate(variables.shape(name, 1)[0] for name in variables.biases),
    )  # 0, the cutoffs and V
    table_widths = [variables.shape(f"{name}lookup_table", 2)[1] for name in variables.tables]
    return {
        "vocab_size": boundaries[-1],
        "n_layers": n_layers,
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": d_head,
        "d_ff": variables.shape("layer_0/ff/layer_1/kernel", 2)[1],
        "d_embed": table_widths[0],
        "cutoffs": boundaries[1:-1],
        "div_val": table_widths[0] // table_widths[1] if len(table_widths) > 1 else 1,
        "tie_projections": _tied_projections(variables),
        # whether an embedding table that is as wide as the model is projected nevertheless
        "project_same_width": not (
            len(table_widths) > 1 and table_widths[0] == d_model and f"{variables.tables[0]}proj_W" not in variables
        ),
        "tie_attention_biases": not layer_dimension,
        "norm_eps": _NORM_EPSILON,
        "attend_empty_memory": True,  # queries attend to slots that are not filled yet, which are zeros
    }


def _tied_projections(variables: _Variables) -> str:
    """Return `tie_projections`: for which clusters the softmax shares the embedding's projection."""
    clusters = range(len(variables.biases))
    untied = {index for index in clusters if f"adaptive_softmax/cutoff_{index}/proj" in variables}
    if not untied:
        return "all"
    tables = variables.tables
    projected = {index for index in clusters if f"{tables[min(index, len(tables) - 1)]}proj_W" in variables}
    if untied not in ({0}, projected):
        raise variables.error(f"separate softmax projections for clusters {sorted(untied)} of {sorted(projected)} only")
    return "all_but_first" if untied == {0} else "none"


def _weights(variables: _Variables) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by the names of this package's model."""
    for name, tf_name in (("content_bias", "r_w_bias"), ("position_bias", "r_r_bias")):
        bias = variables.tensor(tf_name)
        yield name, bias if bias.ndim == 3 else bias[None]
    for index, table in enumerate(variables.tables):
        yield f"embedding.tables.{index}", variables.tensor(f"{table}lookup_table")
        if f"{table}proj_W" in variables:
            yield f"embedding.projections.{index}", variables.transposed(f"{table}proj_W")
    yield "softmax.bias", torch.cat([variables.tensor(name) for name in variables.biases])
    if "adaptive_softmax/cutoff_0/b" in variables:
        yield "softmax.cluster_weight", variables.tensor("adaptive_softmax/cutoff_0/cluster_W")
        yield "softmax.cluster_bias", variables.tensor("adaptive_softmax/cutoff_0/cluster_b")
    for index in range(len(variables.biases)):
        if f"adaptive_softmax/cutoff_{index}/proj" in variables:
            yield f"softmax.projections.{index}", variables.transposed(f"adaptive_softmax/cutoff_{index}/proj")
    for index in range(variables.count("layer_{}/rel_attn/o/kernel")):
        yield from _layer(variables, f"layer_{index}/", f"layers.{index}.")


def _layer(variables: _Variables, tf_prefix: str, prefix: str) -> Iterator[tuple[str, Tensor]]:
    qkv = variables.transposed(f"{tf_prefix}rel_attn/qkv/kernel")
    for name, part in zip(("q_proj", "k_proj", "v_proj"), qkv.tensor_split(3), strict=True):
        yield f"{prefix}attention.{name}.weight", part.contiguous()
    yield f"{prefix}attention.r_proj.weight", variables.transposed(f"{tf_prefix}rel_attn/r/kernel")
    yield f"{prefix}attention.o_proj.weight", variables.transposed(f"{tf_prefix}rel_attn/o/kernel")
    for name, kernel in (("up_proj", "layer_1"), ("down_proj", "layer_2")):
        yield f"{prefix}feed_forward.{name}.weight", variables.transposed(f"{tf_prefix}ff/{kernel}/kernel")
        yield f"{prefix}feed_forward.{name}.bias", variables.tensor(f"{tf_prefix}ff/{kernel}/bias")
    for name, norm in (("attention", "rel_attn"), ("feed_forward", "ff")):
        yield f"{prefix}{name}.norm.weight", variables.tensor(f"{tf_prefix}{norm}/LayerNorm/gamma")
        yield f"{prefix}{name}.norm.bias", variables.tensor(f"{tf_prefix}{norm}/LayerNorm/beta")


def _with_dataset_settings(model: dict[str, Any], weights: dict[str, Tensor], folder: Path) -> ImportedModel:
    """Add the settings that depend on the data set (lengths and dropout), and the tokenizer.

    The tokenizer is in cache.pkl, the authors' data_utils.Corpus, pickled by Python 2, which is searched for in the
    checkpoint's folder, in its subfolder `data`, and in the folder `data` next to it.

    Raises:
        UserError: that file is damaged.
    """
    with as_user_error(f"reading {folder}"):
        folders = (folder, folder / "data", folder.resolve().parent / "data")
        cache = next((parent / "cache.pkl" for parent in folders if (parent / "cache.pkl").is_file()), None)
    tokenizer, name = None if cache is None else read_tokenizer(cache), _RECIPES.get(model["vocab_size"])
    notes = (_NO_NEWLINES,) if name == "enwik8-24l" else ()
    recipe = None if name is None else load_recipe(name)
    if recipe is None or any(recipe.model[size] != model[size] for size in _SIZES):
        # no settings of training and evaluation
        return ImportedModel(model, {}, {}, weights, tokenizer, (*notes, _NO_LENGTHS))
    dropout = {setting: recipe.model[setting] for setting in ("dropout", "attention_dropout")}
    train = {setting: recipe.train[setting] for setting in ("segment_length", "memory_length")}
    evaluation = {setting: recipe.evaluation[setting] for setting in (*train, "clamp_length")}
    evaluation["attention_window"] = recipe.evaluation["memory_length"] + 1  # the authors' --same_length
    return ImportedModel({**model, **dropout}, train, evaluation, weights, tokenizer, notes)
