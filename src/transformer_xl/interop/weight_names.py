"""Which weights are which: one table for both directions, from other programs' names to ours and back.

Each line of the table says: these of our weights, one under the other, are those of theirs, one under the other. So the
fused matrix of queries, keys and values, biases kept layer by layer or all in one, and softmax biases kept cluster by
cluster need no code of their own. The one thing that is more than cutting: the columns of the tails in the head, which
the authors' PyTorch code and NVIDIA's have the other way round.

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
Part = tuple[str, Shape]


@dataclass(frozen=True)
class WeightMapping:
    """Some weights of ours and the same ones of theirs."""

    ours: tuple[Part, ...]
    theirs: tuple[Part, ...]
    reversed_rows: bool = False
    """Their rows stand in the opposite order."""


@dataclass(frozen=True)
class WeightNames:
    """How one program calls the weights."""

    prefix: str = ""
    """Of everything but the softmax."""
    out_table: str = "crit.out_layers.{}.weight"
    out_bias: str = "crit.out_layers.{}.bias"
    reversed_clusters: bool = True
    """Tails are counted from the end of the head."""


HUGGING_FACE = WeightNames(prefix="transformer.", reversed_clusters=False)
OFFICIAL = WeightNames()
NVIDIA = WeightNames(out_table="crit.out_layers_weights.{}", out_bias="crit.out_layers_biases.{}")


def weight_mappings(config: TransformerXLConfig, layout: WeightNames) -> Iterator[WeightMapping]:
    """The whole table for one model, with every shape."""
    yield from _embedding(config, layout)
    yield from _softmax(config, layout)
    yield from _biases(config, layout)
    for index in range(config.n_layers):
        yield from _layer(config, f"{layout.prefix}layers.{index}.", index)


def _same(ours: str, theirs: str, shape: Shape) -> WeightMapping:
    return WeightMapping(((ours, shape),), ((theirs, shape),))


def _cluster_sizes(config: TransformerXLConfig) -> list[int]:
    edges = config.cluster_boundaries
    return [edges[-1]] if config.div_val == 1 else [stop - start for start, stop in pairwise(edges)]


def _projected(config: TransformerXLConfig) -> list[int]:
    """The clusters that these programs project: with div_val all, else all or none."""
    needed = config.div_val > 1 or config.cluster_widths[0] != config.d_model
    return list(range(len(config.cluster_widths))) if needed else []


def _embedding(config: TransformerXLConfig, layout: WeightNames) -> Iterator[WeightMapping]:
    sizes, widths = _cluster_sizes(config), config.cluster_widths
    for index, size in enumerate(sizes):
        name = f"{layout.prefix}word_emb.emb_layers.{index}.weight"
        yield _same(f"embedding.tables.{index}", name, (size, widths[index]))
    for index in _projected(config)[: len(sizes)]:
        name = f"{layout.prefix}word_emb.emb_projs.{index}"
        yield _same(f"embedding.projections.{index}", name, (config.d_model, widths[index]))


def _softmax(config: TransformerXLConfig, layout: WeightNames) -> Iterator[WeightMapping]:
    sizes, widths = _cluster_sizes(config), config.cluster_widths
    biases = tuple((layout.out_bias.format(index), (size,)) for index, size in enumerate(sizes))
    yield WeightMapping((("softmax.bias", (config.vocab_size,)),), biases)
    if not config.tie_word_embeddings:
        for index, size in enumerate(sizes):
            yield _same(f"softmax.tables.{index}", layout.out_table.format(index), (size, widths[index]))
    tied = {"all": 0, "all_but_first": 1, "none": len(widths)}[config.tie_projections]
    for index in _projected(config)[:tied]:
        yield _same(f"softmax.projections.{index}", f"crit.out_projs.{index}", (config.d_model, widths[index]))
    tails = len(widths) - 1
    if tails:
        for part, shape in (("weight", (tails, widths[0])), ("bias", (tails,))):
            found = _same(f"softmax.cluster_{part}", f"crit.cluster_{part}", shape)
            yield WeightMapping(found.ours, found.theirs, reversed_rows=layout.reversed_clusters)


def _biases(config: TransformerXLConfig, layout: WeightNames) -> Iterator[WeightMapping]:
    shape = (config.n_heads, config.head_dim)
    for ours, theirs in (("content_bias", "r_w_bias"), ("position_bias", "r_r_bias")):
        if config.tie_attention_biases:
            yield WeightMapping(((ours, (1, *shape)),), ((f"{layout.prefix}{theirs}", shape),))
        else:
            names = [f"{layout.prefix}layers.{index}.dec_attn.{theirs}" for index in range(config.n_layers)]
            yield WeightMapping(((ours, (config.n_layers, *shape)),), tuple((name, shape) for name in names))


def _layer(config: TransformerXLConfig, their: str, index: int) -> Iterator[WeightMapping]:
    width, inner, wide = config.d_model, config.n_heads * config.head_dim, config.d_ff
    our = f"layers.{index}."
    parts = tuple((f"{our}attention.{name}.weight", (inner, width)) for name in ("q_proj", "k_proj", "v_proj"))
    yield WeightMapping(parts, ((f"{their}dec_attn.qkv_net.weight", (3 * inner, width)),))
    for ours, theirs, shape in (
        ("attention.r_proj.weight", "dec_attn.r_net.weight", (inner, width)),
        ("attention.o_proj.weight", "dec_attn.o_net.weight", (width, inner)),
        ("attention.norm.weight", "dec_attn.layer_norm.weight", (width,)),
        ("attention.norm.bias", "dec_attn.layer_norm.bias", (width,)),
        ("feed_forward.up_proj.weight", "pos_ff.CoreNet.0.weight", (wide, width)),
        ("feed_forward.up_proj.bias", "pos_ff.CoreNet.0.bias", (wide,)),
        ("feed_forward.down_proj.weight", "pos_ff.CoreNet.3.weight", (width, wide)),
        ("feed_forward.down_proj.bias", "pos_ff.CoreNet.3.bias", (width,)),
        ("feed_forward.norm.weight", "pos_ff.layer_norm.weight", (width,)),
        ("feed_forward.norm.bias", "pos_ff.layer_norm.bias", (width,)),
    ):
        yield _same(our + ours, their + theirs, shape)


def aliases(config: TransformerXLConfig, layout: WeightNames) -> dict[str, str]:
    """Names under which a weight may stand a second time, because it is shared; each with its first name."""
    sizes = _cluster_sizes(config)
    emb = f"{layout.prefix}word_emb."
    found = {f"crit.shared_out_projs.{index}": f"{emb}emb_projs.{index}" for index in _projected(config)[: len(sizes)]}
    if config.tie_word_embeddings:
        for index in range(len(sizes)):
            found[layout.out_table.format(index)] = f"{emb}emb_layers.{index}.weight"
    tied = {"all": 0, "all_but_first": 1, "none": len(config.cluster_widths)}[config.tie_projections]
    for index in _projected(config)[tied:]:
        found[f"crit.out_projs.{index}"] = f"{emb}emb_projs.{min(index, len(sizes) - 1)}"
    if config.tie_attention_biases:
        for bias in ("r_w_bias", "r_r_bias"):
            for index in range(config.n_layers):
                found[f"{layout.prefix}layers.{index}.dec_attn.{bias}"] = f"{layout.prefix}{bias}"
    return found


def import_weights(
    config: TransformerXLConfig, layout: WeightNames, theirs: Mapping[str, Tensor], source: str
) -> dict[str, Tensor]:
    """Their weights under our names, in float32; parts of theirs where that needs no copy.

    Raises:
        UserError: a weight is missing, has another shape, or is one that this model does not have.
    """
    if config.n_layers > len(theirs):
        raise UserError(f"{source} has {len(theirs):,} weights, and its settings ask for {config.n_layers:,} layers")
    known, second = list(weight_mappings(config, layout)), aliases(config, layout)
    first = {name: other for other, name in second.items() if other in theirs and name not in theirs}
    needed = {name: shape for match in known for name, shape in match.theirs}
    for name, shape in needed.items():
        place = first.get(name, name)
        if place not in theirs:
            raise UserError(f"{source} has no weight '{name}', which its settings ask for; get the whole of it again")
        if tuple(theirs[place].shape) != shape:
            raise UserError(
                f"{source}: weight '{name}' is {_sizes(theirs[place].shape)}, and the settings ask for "
                f"{_sizes(shape)}; do the two belong together?"
            )
    for name in theirs:
        if name not in needed and name not in second and name != f"{layout.prefix}pos_emb.inv_freq":
            raise UserError(
                f"{source} has a weight '{ascii(name)[1:-1][:120]}' that this model does not; its architecture is "
                "not one that can be converted"
            )
    return _moved(
        ((match.theirs, match.ours, match.reversed_rows) for match in known),
        lambda name: theirs[first.get(name, name)].detach().float(),
    )


def export_weights(config: TransformerXLConfig, layout: WeightNames, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under their names, first names only; an identity for a projection that ours does without."""
    known = list(weight_mappings(config, layout))
    other = ours.keys() - {name for match in known for name, _ in match.ours}
    assert not other, f"not in the table: {other}"
    without = {name: shape for match in known for name, shape in match.ours if name not in ours}
    assert all(".projections." in name for name in without), without

    def weight(name: str) -> Tensor:
        return torch.eye(*without[name]) if name in without else ours[name].detach()

    return _moved(((match.ours, match.theirs, match.reversed_rows) for match in known), weight)


def _moved(
    moves: Iterator[tuple[tuple[Part, ...], tuple[Part, ...], bool]], weight: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """What stands one under the other on one side, cut as the other side has it."""
    moved: dict[str, Tensor] = {}
    for given, wanted, reversed_rows in moves:
        trailing = min((shape[1:] for _, shape in (*given, *wanted)), key=len)
        parts = [weight(name).reshape(-1, *trailing) for name, _ in given]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        rows = rows.flip(0) if reversed_rows else rows
        start = 0
        for name, shape in wanted:
            number = shape[0] if shape[1:] == trailing else shape[0] * shape[1]
            moved[name] = rows[start : start + number].reshape(shape)
            start += number
        assert start == len(rows), f"{wanted} are not the rows of {given}"
    return moved


def _sizes(shape: Shape | torch.Size) -> str:
    return " x ".join(map(str, shape)) or "a single number"
