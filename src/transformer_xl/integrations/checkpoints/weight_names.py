"""Names and shapes of the weights in this package and in other programs: one table, used to import and to export.

Each entry of the table says that some of our weights, flattened and concatenated, equal some of the other program's,
flattened and concatenated. This covers the fused matrix of queries, keys and values, attention biases stored per layer
or in one tensor, and softmax biases stored per cluster. The other differences are the order of the rows that score the
tail clusters, which is reversed in the authors' PyTorch code and in NVIDIA's, and matrices that are transposed, as
XLNet's are (its table is in xlnet.py).

The adaptive softmax splits the vocabulary into clusters: the head of frequent tokens, and tails of rarer ones. With
`div_val` above 1 the embeddings of each tail are narrower by that factor than those of the cluster before.

In this file "ours" is this package's model, "theirs" the other program's. In their names, `word_emb` is the embedding,
`crit` the softmax, `dec_attn` the attention and `pos_ff` the feed-forward part of a layer, `qkv_net` the joint
projection to queries, keys and values, `r_net` that of the position encodings, `o_net` that of the output; `r_w_bias`
and `r_r_bias` are the paper's u and v.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from transformer_xl.config import TransformerXLConfig, UserError
from transformer_xl.integrations.checkpoints.source_config import tied_projection_flags

Shape = tuple[int, ...]


@dataclass(frozen=True)
class WeightMapping:
    """Weights of ours and of theirs that contain the same values, by name with their shapes."""

    ours: Mapping[str, Shape]
    theirs: Mapping[str, Shape]
    reversed_rows: bool = False
    """Whether their rows are in reverse order."""
    transposed: bool = False
    """Whether theirs is the transposed matrix of ours, of dimensions that may be split further."""


@dataclass(frozen=True)
class WeightNames:
    """The weight names of one program."""

    prefix: str = ""
    """Prefix of every name outside the softmax."""
    out_table: str = "crit.out_layers.{}.weight"
    """Weight matrix of the softmax for cluster {}."""
    out_bias: str = "crit.out_layers.{}.bias"
    """Bias of the softmax for cluster {}."""
    reversed_clusters: bool = True
    """Whether the rows that score the tail clusters are in reverse order."""


HUGGING_FACE = WeightNames(prefix="transformer.", reversed_clusters=False)
OFFICIAL = WeightNames()
NVIDIA = WeightNames(out_table="crit.out_layers_weights.{}", out_bias="crit.out_layers_biases.{}")


def weight_mappings(config: TransformerXLConfig, names: WeightNames) -> Iterator[WeightMapping]:
    """Yield the table for one model, with the shape of every weight."""
    sizes, widths = _table_sizes(config), config.cluster_widths
    for index, size in enumerate(sizes):
        shape = (size, widths[index])
        yield _one_to_one(f"embedding.tables.{index}", f"{names.prefix}word_emb.emb_layers.{index}.weight", shape)
        if not config.tie_word_embeddings:
            yield _one_to_one(f"softmax.tables.{index}", names.out_table.format(index), shape)
    for index, tied in _projected_clusters(config).items():
        shape = (config.d_model, widths[index])
        if index < len(sizes):
            yield _one_to_one(f"embedding.projections.{index}", f"{names.prefix}word_emb.emb_projs.{index}", shape)
        if not tied:
            yield _one_to_one(f"softmax.projections.{index}", f"crit.out_projs.{index}", shape)
    out_biases = {names.out_bias.format(index): (size,) for index, size in enumerate(sizes)}
    yield WeightMapping({"softmax.bias": (config.vocab_size,)}, out_biases)
    if num_tails := len(widths) - 1:
        for part, shape in (("weight", (num_tails, widths[0])), ("bias", (num_tails,))):
            ours, theirs = {f"softmax.cluster_{part}": shape}, {f"crit.cluster_{part}": shape}
            yield WeightMapping(ours, theirs, names.reversed_clusters)
    heads = (config.n_heads, config.head_dim)
    for name, their_name in (("content_bias", "r_w_bias"), ("position_bias", "r_r_bias")):
        if config.tie_attention_biases:
            yield WeightMapping({name: (1, *heads)}, {f"{names.prefix}{their_name}": heads})
        else:
            theirs = {f"{names.prefix}layers.{index}.dec_attn.{their_name}": heads for index in range(config.n_layers)}
            yield WeightMapping({name: (config.n_layers, *heads)}, theirs)
    for index in range(config.n_layers):
        yield from _layer(config, f"layers.{index}.", f"{names.prefix}layers.{index}.")


def _one_to_one(ours: str, theirs: str, shape: Shape) -> WeightMapping:
    return WeightMapping({ours: shape}, {theirs: shape})


def _table_sizes(config: TransformerXLConfig) -> list[int]:
    """Return the number of tokens in each embedding table: one for each cluster, or with div_val 1 a single one."""
    boundaries = config.cluster_boundaries
    return [boundaries[-1]] if config.div_val == 1 else [stop - start for start, stop in pairwise(boundaries)]


def _projected_clusters(config: TransformerXLConfig) -> dict[int, bool]:
    """Return the clusters that these programs project: with div_val above 1 all, else all or none.

    The value says whether the softmax shares the projection of the embedding.
    """
    if config.div_val == 1 and config.cluster_widths[0] == config.d_model:
        return {}
    return dict(enumerate(tied_projection_flags(len(config.cluster_widths))[config.tie_projections]))


def _layer(config: TransformerXLConfig, prefix: str, their_prefix: str) -> Iterator[WeightMapping]:
    d_model, d_attention, d_ff = config.d_model, config.n_heads * config.head_dim, config.d_ff
    qkv = {f"{prefix}attention.{name}.weight": (d_attention, d_model) for name in ("q_proj", "k_proj", "v_proj")}
    yield WeightMapping(qkv, {f"{their_prefix}dec_attn.qkv_net.weight": (3 * d_attention, d_model)})
    for ours, theirs, shape in (
        ("attention.r_proj.weight", "dec_attn.r_net.weight", (d_attention, d_model)),
        ("attention.o_proj.weight", "dec_attn.o_net.weight", (d_model, d_attention)),
        ("attention.norm.weight", "dec_attn.layer_norm.weight", (d_model,)),
        ("attention.norm.bias", "dec_attn.layer_norm.bias", (d_model,)),
        ("feed_forward.up_proj.weight", "pos_ff.CoreNet.0.weight", (d_ff, d_model)),
        ("feed_forward.up_proj.bias", "pos_ff.CoreNet.0.bias", (d_ff,)),
        ("feed_forward.down_proj.weight", "pos_ff.CoreNet.3.weight", (d_model, d_ff)),
        ("feed_forward.down_proj.bias", "pos_ff.CoreNet.3.bias", (d_model,)),
        ("feed_forward.norm.weight", "pos_ff.layer_norm.weight", (d_model,)),
        ("feed_forward.norm.bias", "pos_ff.layer_norm.bias", (d_model,)),
    ):
        yield _one_to_one(prefix + ours, their_prefix + theirs, shape)


def _aliases(config: TransformerXLConfig, names: WeightNames) -> dict[str, str]:
    """Return further names under which they may store shared weights, each with the name that the table has for it."""
    num_tables, embedding = len(_table_sizes(config)), f"{names.prefix}word_emb."
    aliases: dict[str, str] = {}
    for index, tied in _projected_clusters(config).items():
        projection = f"{embedding}emb_projs.{min(index, num_tables - 1)}"
        if index < num_tables:
            aliases[f"crit.shared_out_projs.{index}"] = projection
        if tied:
            aliases[f"crit.out_projs.{index}"] = projection
    if config.tie_word_embeddings:
        for index in range(num_tables):
            aliases[names.out_table.format(index)] = f"{embedding}emb_layers.{index}.weight"
    if config.tie_attention_biases:
        for bias in ("r_w_bias", "r_r_bias"):
            for index in range(config.n_layers):
                aliases[f"{names.prefix}layers.{index}.dec_attn.{bias}"] = f"{names.prefix}{bias}"
    return aliases


def import_weights(
    config: TransformerXLConfig,
    names: WeightNames,
    theirs: Mapping[str, Tensor],
    source: str,
    *,
    has_softmax: bool = True,
) -> dict[str, Tensor]:
    """Return their weights under our names, in float32; views of their tensors where that needs no copy.

    Args:
        config: settings of the model.
        names: the other program's weight names.
        theirs: every weight of the checkpoint.
        source: path of the file that contains them, for messages.
        has_softmax: whether they include those of the softmax.

    Raises:
        UserError: a weight is missing, has another shape, or does not belong to this model; or one is stored under so
            many names that the file is too small for what would be made of it.
    """
    mappings, aliases = list(weight_mappings(config, names)), _aliases(config, names)
    if not has_softmax:
        mappings = [mapping for mapping in mappings if not any(name.startswith("softmax.") for name in mapping.ours)]
        aliases = {name: other for name, other in aliases.items() if not name.startswith("crit.")}
    return import_mapped(mappings, aliases | {f"{names.prefix}pos_emb.inv_freq": ""}, theirs, source)


def import_mapped(
    mappings: Iterable[WeightMapping], aliases: Mapping[str, str], theirs: Mapping[str, Tensor], source: str
) -> dict[str, Tensor]:
    """Return their weights under our names, as `import_weights` does, by a table.

    Args:
        mappings: the table.
        aliases: further names that their weights may have, each with the name in the table or one that is not needed.
        theirs: every weight of the checkpoint.
        source: path of the file that contains them, for messages.

    Raises:
        UserError: as `import_weights`.
    """
    mappings = list(mappings)
    expected = {name: shape for mapping in mappings for name, shape in mapping.theirs.items()}
    tensors = {aliases[name]: theirs[name] for name in aliases if name in theirs} | {**theirs}
    for name, shape in expected.items():
        if name not in tensors:
            raise UserError(f"{source} has no weight '{name}', which its settings need; download it again")
        actual = tensors[name].shape
        if actual != shape:
            raise UserError(f"{source}: weight '{name}' is {_format(actual)}, but its settings need {_format(shape)}")
    unknown = theirs.keys() - expected.keys() - aliases.keys()
    if unknown:
        raise UserError(
            f"{source}: unknown weight '{ascii(min(unknown))[1:-1][:120]}'; such a model cannot be converted"
        )
    # In a real file a number takes at least 2 bytes and is used twice at most, in embedding and softmax.
    num_bytes = sum(
        {storage.data_ptr(): storage.nbytes() for storage in map(Tensor.untyped_storage, theirs.values())}.values()
    )
    num_parameters = sum(map(math.prod, expected.values()))
    if num_parameters > num_bytes:
        raise UserError(
            f"{source} stores {num_bytes:,} bytes, too few for the {num_parameters:,} parameters of its settings; "
            "get it again"
        )
    ours: dict[str, Tensor] = {}
    for mapping in mappings:
        parts = [tensors[name].detach().float() for name in mapping.theirs]
        ours |= _rearrange(parts, mapping.ours, mapping)
    return ours


def export_weights(config: TransformerXLConfig, names: WeightNames, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our weights under their names, shared ones once.

    Their models project every cluster with div_val above 1. Where ours has no projection (`project_same_width` is off),
    theirs is an identity matrix.
    """
    return export_mapped(weight_mappings(config, names), ours)


def export_mapped(mappings: Iterable[WeightMapping], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our weights under their names, as `export_weights` does, by a table."""
    theirs: dict[str, Tensor] = {}
    exported: set[str] = set()
    for mapping in mappings:
        parts = [ours[name].detach() if name in ours else torch.eye(*shape) for name, shape in mapping.ours.items()]
        theirs |= _rearrange(parts, mapping.theirs, mapping)
        exported |= mapping.ours.keys()
    assert ours.keys() <= exported, f"not in the table: {ours.keys() - exported}"
    return theirs


def _rearrange(tensors: list[Tensor], shapes: Mapping[str, Shape], mapping: WeightMapping) -> dict[str, Tensor]:
    """Flatten and concatenate the tensors of one side of a mapping, and split the values into those of the other."""
    if mapping.reversed_rows:
        tensors = [tensor.flip(0) for tensor in tensors]
    if mapping.transposed:
        tensors = [tensor.flatten(1).T for tensor in tensors]
    values = tensors[0].flatten() if len(tensors) == 1 else torch.cat([tensor.flatten() for tensor in tensors])
    parts = values.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _format(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "a scalar"
