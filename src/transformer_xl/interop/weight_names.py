"""Names and shapes of the weights here and in other programs: one table, used to import and to export.

Each entry of the table says that some weights of ours, concatenated along their rows, equal some of theirs,
concatenated likewise. This covers the fused matrix of queries, keys and values, attention biases stored per layer or in
one tensor, and softmax biases stored per cluster. The only other difference is the order of the rows that score the
tail clusters, which is reversed in the authors' PyTorch code and in NVIDIA's.

Letters: N heads, H head width, D model width, F feed-forward width, E embedding width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from transformer_xl.config import TransformerXLConfig, UserError

Shape = tuple[int, ...]
NamedShape = tuple[str, Shape]


@dataclass(frozen=True)
class WeightMapping:
    """Weights of ours and of theirs that hold the same rows."""

    ours: tuple[NamedShape, ...]
    theirs: tuple[NamedShape, ...]
    reversed_rows: bool = False
    """Whether their rows are in reverse order."""


@dataclass(frozen=True)
class WeightNames:
    """The weight names of one program."""

    prefix: str = ""
    """Prefix of every name outside the softmax."""
    out_table: str = "crit.out_layers.{}.weight"
    out_bias: str = "crit.out_layers.{}.bias"
    reversed_clusters: bool = True
    """Whether the rows that score the tail clusters are in reverse order."""


HUGGING_FACE = WeightNames(prefix="transformer.", reversed_clusters=False)
OFFICIAL = WeightNames()
NVIDIA = WeightNames(out_table="crit.out_layers_weights.{}", out_bias="crit.out_layers_biases.{}")


def weight_mappings(config: TransformerXLConfig, names: WeightNames) -> Iterator[WeightMapping]:
    """Yield the table for one model, with the shape of every weight."""
    yield from _embedding(config, names)
    yield from _softmax(config, names)
    yield from _biases(config, names)
    for index in range(config.n_layers):
        yield from _layer(config, f"{names.prefix}layers.{index}.", index)


def _one_to_one(ours: str, theirs: str, shape: Shape) -> WeightMapping:
    return WeightMapping(((ours, shape),), ((theirs, shape),))


def _cluster_sizes(config: TransformerXLConfig) -> list[int]:
    edges = config.cluster_boundaries
    return [edges[-1]] if config.div_val == 1 else [stop - start for start, stop in pairwise(edges)]


def _projected(config: TransformerXLConfig) -> list[int]:
    """Return the clusters that these programs project: with div_val above 1 all of them, else all or none."""
    needed = config.div_val > 1 or config.cluster_widths[0] != config.d_model
    return list(range(len(config.cluster_widths))) if needed else []


def _embedding(config: TransformerXLConfig, names: WeightNames) -> Iterator[WeightMapping]:
    sizes, widths = _cluster_sizes(config), config.cluster_widths
    for index, size in enumerate(sizes):
        name = f"{names.prefix}word_emb.emb_layers.{index}.weight"
        yield _one_to_one(f"embedding.tables.{index}", name, (size, widths[index]))
    for index in _projected(config)[: len(sizes)]:
        name = f"{names.prefix}word_emb.emb_projs.{index}"
        yield _one_to_one(f"embedding.projections.{index}", name, (config.d_model, widths[index]))


def _softmax(config: TransformerXLConfig, names: WeightNames) -> Iterator[WeightMapping]:
    sizes, widths = _cluster_sizes(config), config.cluster_widths
    biases = tuple((names.out_bias.format(index), (size,)) for index, size in enumerate(sizes))
    yield WeightMapping((("softmax.bias", (config.vocab_size,)),), biases)
    if not config.tie_word_embeddings:
        for index, size in enumerate(sizes):
            yield _one_to_one(f"softmax.tables.{index}", names.out_table.format(index), (size, widths[index]))
    tied = {"all": 0, "all_but_first": 1, "none": len(widths)}[config.tie_projections]
    for index in _projected(config)[:tied]:
        yield _one_to_one(f"softmax.projections.{index}", f"crit.out_projs.{index}", (config.d_model, widths[index]))
    tails = len(widths) - 1
    if tails:
        for part, shape in (("weight", (tails, widths[0])), ("bias", (tails,))):
            found = _one_to_one(f"softmax.cluster_{part}", f"crit.cluster_{part}", shape)
            yield WeightMapping(found.ours, found.theirs, reversed_rows=names.reversed_clusters)


def _biases(config: TransformerXLConfig, names: WeightNames) -> Iterator[WeightMapping]:
    shape = (config.n_heads, config.head_dim)
    for ours, theirs in (("content_bias", "r_w_bias"), ("position_bias", "r_r_bias")):
        if config.tie_attention_biases:
            yield WeightMapping(((ours, (1, *shape)),), ((f"{names.prefix}{theirs}", shape),))
        else:
            per_layer = [f"{names.prefix}layers.{index}.dec_attn.{theirs}" for index in range(config.n_layers)]
            yield WeightMapping(((ours, (config.n_layers, *shape)),), tuple((name, shape) for name in per_layer))


def _layer(config: TransformerXLConfig, prefix: str, index: int) -> Iterator[WeightMapping]:
    d_model, d_attention, d_ff = config.d_model, config.n_heads * config.head_dim, config.d_ff
    our_prefix = f"layers.{index}."
    parts = tuple(
        (f"{our_prefix}attention.{name}.weight", (d_attention, d_model)) for name in ("q_proj", "k_proj", "v_proj")
    )
    yield WeightMapping(parts, ((f"{prefix}dec_attn.qkv_net.weight", (3 * d_attention, d_model)),))
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
        yield _one_to_one(our_prefix + ours, prefix + theirs, shape)


def shared_names(config: TransformerXLConfig, names: WeightNames) -> dict[str, str]:
    """Return the further names of shared weights, each with the name under which the weight is in the table."""
    sizes = _cluster_sizes(config)
    emb = f"{names.prefix}word_emb."
    found = {f"crit.shared_out_projs.{index}": f"{emb}emb_projs.{index}" for index in _projected(config)[: len(sizes)]}
    if config.tie_word_embeddings:
        for index in range(len(sizes)):
            found[names.out_table.format(index)] = f"{emb}emb_layers.{index}.weight"
    tied = {"all": 0, "all_but_first": 1, "none": len(config.cluster_widths)}[config.tie_projections]
    for index in _projected(config)[tied:]:
        found[f"crit.out_projs.{index}"] = f"{emb}emb_projs.{min(index, len(sizes) - 1)}"
    if config.tie_attention_biases:
        for bias in ("r_w_bias", "r_r_bias"):
            for index in range(config.n_layers):
                found[f"{names.prefix}layers.{index}.dec_attn.{bias}"] = f"{names.prefix}{bias}"
    return found


def import_weights(
    config: TransformerXLConfig, names: WeightNames, theirs: Mapping[str, Tensor], source: str
) -> dict[str, Tensor]:
    """Return their weights under our names, in float32; views of their tensors where that needs no copy.

    Args:
        config: settings of the model.
        names: the other program's weight names.
        theirs: every weight of the checkpoint.
        source: the file they were read from, for messages.

    Raises:
        UserError: a weight is missing, has another shape, or does not belong to this model.
    """
    if config.n_layers > len(theirs):
        raise UserError(f"{source} has {len(theirs):,} weights, and its settings ask for {config.n_layers:,} layers")
    mappings, shared = list(weight_mappings(config, names)), shared_names(config, names)
    stored_as = {name: other for other, name in shared.items() if other in theirs and name not in theirs}
    needed = {name: shape for mapping in mappings for name, shape in mapping.theirs}
    for name, shape in needed.items():
        stored = stored_as.get(name, name)
        if stored not in theirs:
            raise UserError(
                f"{source} has no weight '{name}', which its settings ask for; download the checkpoint again"
            )
        if tuple(theirs[stored].shape) != shape:
            raise UserError(
                f"{source}: weight '{name}' is {_format_shape(theirs[stored].shape)}, and the settings ask for "
                f"{_format_shape(shape)}; do the two belong together?"
            )
    for name in theirs:
        if name not in needed and name not in shared and name != f"{names.prefix}pos_emb.inv_freq":
            raise UserError(
                f"{source} has a weight '{ascii(name)[1:-1][:120]}' that this model does not have; its architecture is "
                "not one that can be converted"
            )
    return _rearranged(
        ((mapping.theirs, mapping.ours, mapping.reversed_rows) for mapping in mappings),
        lambda name: theirs[stored_as.get(name, name)].detach().float(),
    )


def export_weights(config: TransformerXLConfig, names: WeightNames, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our weights under their names, shared ones once; identity matrices for projections that ours omits."""
    mappings = list(weight_mappings(config, names))
    unknown = ours.keys() - {name for mapping in mappings for name, _ in mapping.ours}
    assert not unknown, f"not in the table: {unknown}"
    omitted = {name: shape for mapping in mappings for name, shape in mapping.ours if name not in ours}
    assert all(".projections." in name for name in omitted), omitted

    def weight(name: str) -> Tensor:
        return torch.eye(*omitted[name]) if name in omitted else ours[name].detach()

    return _rearranged(((mapping.ours, mapping.theirs, mapping.reversed_rows) for mapping in mappings), weight)


def _rearranged(
    mappings: Iterator[tuple[tuple[NamedShape, ...], tuple[NamedShape, ...], bool]], weight: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Concatenate the weights of one side of each mapping and split the rows as the other side has them."""
    result: dict[str, Tensor] = {}
    for given, wanted, reversed_rows in mappings:
        trailing = min((shape[1:] for _, shape in (*given, *wanted)), key=len)
        parts = [weight(name).reshape(-1, *trailing) for name, _ in given]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        rows = rows.flip(0) if reversed_rows else rows
        start = 0
        for name, shape in wanted:
            num_rows = shape[0] if shape[1:] == trailing else shape[0] * shape[1]
            result[name] = rows[start : start + num_rows].reshape(shape)
            start += num_rows
        assert start == len(rows), f"{wanted} are not the rows of {given}"
    return result


def _format_shape(shape: Shape | torch.Size) -> str:
    return " x ".join(map(str, shape)) or "a single number"
