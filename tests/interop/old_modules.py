"""The authors' PyTorch module and NVIDIA's as their pickles know them, and a slow way to their losses.

Only what lands in a file is as in their code: names of classes, modules, attributes and parameters. The losses are
worked out one query at a time from the rules that their code follows: an empty first memory, tails counted from the end
of the head, and so many keys for each query with `same_length`.

Letters: T tokens, S keys, D model width, N heads, H head width, E embedding width, V vocabulary.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Old:
    """SourceConfig of an old model."""

    cutoffs: tuple[int, ...] = (5, 11)
    div_val: int = 1
    d_embed: int = 8
    tie_weight: bool = True
    tie_projs: tuple[bool, ...] = (False, True, True)
    pre_lnorm: bool = False
    same_length: bool = False
    clamp_len: int = -1
    nvidia: bool = False
    n_token: int = 23
    n_layer: int = 2
    n_head: int = 2
    d_model: int = 8
    d_head: int = 3
    d_inner: int = 7
    tgt_len: int = 5
    mem_len: int = 6


class MemTransformerLM(nn.Module):
    pass


class AdaptiveEmbedding(nn.Module):
    pass


class ProjectedAdaptiveLogSoftmax(nn.Module):
    pass


class RelPartialLearnableDecoderLayer(nn.Module):
    pass


class RelPartialLearnableMultiHeadAttn(nn.Module):
    pass


class PositionwiseFF(nn.Module):
    pass


class PositionalEmbedding(nn.Module):
    pass


class Vocab:
    pass


class Corpus:
    pass


_HOMES: dict[type, str] = {
    **dict.fromkeys(
        (MemTransformerLM, AdaptiveEmbedding, RelPartialLearnableDecoderLayer, RelPartialLearnableMultiHeadAttn,
         PositionwiseFF, PositionalEmbedding), "mem_transformer",
    ),
    ProjectedAdaptiveLogSoftmax: "proj_adaptive_softmax",
    Vocab: "utils.vocabulary",
    Corpus: "data_utils",
}  # fmt: skip


@contextmanager
def old_modules() -> Iterator[None]:
    """While it lasts, these classes stand where the old programs had theirs, so that a pickle names them so."""
    homes = {kind: kind.__module__ for kind in _HOMES}
    made = {name: ModuleType(name) for name in {"utils", *_HOMES.values()}}
    for kind, home in _HOMES.items():
        setattr(made[home], kind.__name__, kind)
        kind.__module__ = home
        made[home].__file__ = __file__  # older files of torch.save hold the text of a class
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]
        for kind, home in homes.items():
            kind.__module__ = home


def _with(module: nn.Module, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _random(*size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size) * 0.5)


def old_model(old: Old, seed: int = 5) -> Any:
    """A module with the parts and attributes of theirs, and random weights."""
    torch.manual_seed(seed)
    ends = [0, *old.cutoffs, old.n_token]
    sizes = [old.n_token] if old.div_val == 1 else [stop - start for start, stop in pairwise(ends)]
    widths = [old.d_embed // old.div_val**index for index in range(len(ends) - 1)]
    needed = old.div_val > 1 or old.d_embed != old.d_model
    embedding = _with(
        AdaptiveEmbedding(), n_token=old.n_token, cutoffs=ends[1:], div_val=old.div_val,
        emb_layers=nn.ModuleList(nn.Embedding(size, width) for size, width in zip(sizes, widths, strict=False)),
        emb_projs=nn.ParameterList([_random(old.d_model, width) for width in widths[: len(sizes)]] if needed else []),
    )  # fmt: skip
    crit = _with(ProjectedAdaptiveLogSoftmax(), n_token=old.n_token, cutoffs=ends[1:], div_val=old.div_val)
    if old.cutoffs:
        crit.cluster_weight = _random(len(old.cutoffs), old.d_embed)
        crit.cluster_bias = _random(len(old.cutoffs))
    _fill_softmax(old, crit, embedding, list(zip(sizes, widths, strict=False)), widths if needed else [])
    model = _with(
        MemTransformerLM(), n_token=old.n_token, d_embed=old.d_embed, d_model=old.d_model, n_head=old.n_head,
        d_head=old.d_head, n_layer=old.n_layer, tgt_len=old.tgt_len, mem_len=old.mem_len, ext_len=0, attn_type=0,
        sample_softmax=-1, same_length=old.same_length, clamp_len=old.clamp_len, drop=nn.Dropout(0.1),
        word_emb=embedding, crit=crit, layers=nn.ModuleList(_layer(old) for _ in range(old.n_layer)),
        r_w_bias=_random(old.n_head, old.d_head), r_r_bias=_random(old.n_head, old.d_head),
    )  # fmt: skip
    model.pos_emb = PositionalEmbedding()
    model.pos_emb.register_buffer("inv_freq", 1 / (10000 ** (torch.arange(0.0, old.d_model, 2.0) / old.d_model)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def _fill_softmax(old: Old, crit: Any, embedding: Any, tables: list[tuple[int, int]], projected: list[int]) -> None:
    """What is tied is the very same object in the authors' code; NVIDIA's leaves it out."""
    projections: list[Any] = []
    for index, width in enumerate(projected):
        tied = old.tie_projs[index]
        own = embedding.emb_projs[min(index, len(tables) - 1)] if tied else _random(old.d_model, width)
        projections.append(None if tied and old.nvidia else own)
    crit.out_projs = nn.ParameterList(projections or ([None] if old.nvidia else [None] * (len(old.cutoffs) + 1)))
    if old.nvidia:
        crit.shared_out_projs = embedding.emb_projs
        crit.out_layers_biases = nn.ParameterList(_random(size) for size, _ in tables)
        if not old.tie_weight:
            crit.out_layers_weights = nn.ParameterList(_random(*table) for table in tables)
        return
    crit.out_layers = nn.ModuleList(nn.Linear(width, size) for size, width in tables)
    if old.tie_weight:
        for layer, table in zip(crit.out_layers, embedding.emb_layers, strict=True):
            layer.weight = table.weight


def _layer(old: Old) -> nn.Module:
    inner = old.n_head * old.d_head
    attention = _with(
        RelPartialLearnableMultiHeadAttn(), n_head=old.n_head, d_head=old.d_head, pre_lnorm=old.pre_lnorm,
        qkv_net=nn.Linear(old.d_model, 3 * inner, bias=False), drop=nn.Dropout(0.1), dropatt=nn.Dropout(0.2),
        o_net=nn.Linear(inner, old.d_model, bias=False), layer_norm=nn.LayerNorm(old.d_model),
        r_net=nn.Linear(old.d_model, inner, bias=False),
    )  # fmt: skip
    parts = nn.Linear(old.d_model, old.d_inner), nn.ReLU(), nn.Dropout(0.1), nn.Linear(old.d_inner, old.d_model)
    feedforward = _with(
        PositionwiseFF(), CoreNet=nn.Sequential(*parts, nn.Dropout(0.1)), layer_norm=nn.LayerNorm(old.d_model)
    )
    return _with(RelPartialLearnableDecoderLayer(), dec_attn=attention, pos_ff=feedforward)


@torch.no_grad()
def old_nats(old: Old, model: Any, tokens_T: Tensor, targets_T: Tensor) -> Tensor:
    """The loss of each target of one text in nats, float64 (T,), read in segments of tgt_len."""
    model = model.double()
    memories: list[Tensor] = [torch.zeros(0, old.d_model, dtype=torch.float64)] * old.n_layer
    found: list[Tensor] = []
    for start in range(0, len(tokens_T), old.tgt_len):
        stop = start + old.tgt_len
        x_TD = torch.stack([_embedded(old, model, int(token)) for token in tokens_T[start:stop]])
        for index, layer in enumerate(model.layers):
            key_SD = torch.cat([memories[index], x_TD])
            memories[index] = key_SD[max(0, len(key_SD) - old.mem_len) :]
            x_TD = _attended(old, model, layer, x_TD, key_SD)
        found += [_nats(old, model, x_D, int(target)) for x_D, target in zip(x_TD, targets_T[start:stop], strict=True)]
    return torch.stack(found)


def _cluster(old: Old, token: int) -> tuple[int, int]:
    """The cluster of a token, and its place there."""
    starts = [0, *old.cutoffs]
    index = max(place for place, start in enumerate(starts) if token >= start)
    return index, token - starts[index]


def _embedded(old: Old, model: Any, token: int) -> Tensor:
    index, place = (0, token) if old.div_val == 1 else _cluster(old, token)
    row_E = model.word_emb.emb_layers[index].weight[place]
    if len(model.word_emb.emb_projs):
        row_E = model.word_emb.emb_projs[index] @ row_E
    return row_E * old.d_model**0.5


def _attended(old: Old, model: Any, layer: Any, x_TD: Tensor, key_SD: Tensor) -> Tensor:
    part, keys = layer.dec_attn, old.mem_len + (1 if old.nvidia else 0)
    normed_SD = part.layer_norm(key_SD) if old.pre_lnorm else key_SD
    query, key, value = (rows.unflatten(-1, (old.n_head, old.d_head)) for rows in part.qkv_net(normed_SD).chunk(3, -1))
    before = len(key_SD) - len(x_TD)
    frequency = 1 / (10000 ** (torch.arange(0, old.d_model, 2, dtype=torch.float64) / old.d_model))
    rows = []
    for place in range(before, len(key_SD)):
        seen = [other for other in range(place + 1) if not old.same_length or place - other < keys]
        scores = []
        for other in seen:
            distance = place - other if old.clamp_len < 0 else min(place - other, old.clamp_len)
            angle = distance * frequency
            position = part.r_net(torch.cat([angle.sin(), angle.cos()])).view(old.n_head, old.d_head)
            content = ((query[place] + model.r_w_bias) * key[other]).sum(-1)
            scores.append(content + ((query[place] + model.r_r_bias) * position).sum(-1))
        weight_SN = (torch.stack(scores) / old.d_head**0.5).softmax(0)
        vector = (weight_SN[..., None] * value[seen]).sum(0).flatten()
        rows.append(x_TD[place - before] + part.o_net(vector))
    sum_TD = torch.stack(rows)
    sum_TD = sum_TD if old.pre_lnorm else part.layer_norm(sum_TD)
    part = layer.pos_ff
    wide, _, _, down_proj, _ = part.CoreNet
    inner_TD = part.layer_norm(sum_TD) if old.pre_lnorm else sum_TD
    out_TD = sum_TD + down_proj(wide(inner_TD).relu())
    return out_TD if old.pre_lnorm else part.layer_norm(out_TD)


def _nats(old: Old, model: Any, x_D: Tensor, target: int) -> Tensor:
    index, place = _cluster(old, target)
    crit, ends = model.crit, [0, *old.cutoffs, old.n_token]

    def scores(cluster: int) -> Tensor:
        table = 0 if old.div_val == 1 else cluster
        if old.nvidia:
            weight = model.word_emb.emb_layers[table].weight if old.tie_weight else crit.out_layers_weights[table]
            bias = crit.out_layers_biases[table]
        else:
            weight, bias = crit.out_layers[table].weight, crit.out_layers[table].bias
        if old.div_val == 1:
            weight, bias = (rows[ends[cluster] : ends[cluster + 1]] for rows in (weight, bias))
        if cluster == 0 and old.cutoffs:
            weight, bias = torch.cat([weight, crit.cluster_weight]), torch.cat([bias, crit.cluster_bias])
        return weight @ _narrowed(old, model, x_D, cluster) + bias

    head_V = scores(0).log_softmax(-1)
    return -head_V[place] if index == 0 else -(head_V[-index] + scores(index).log_softmax(-1)[place])


def _narrowed(old: Old, model: Any, x_D: Tensor, cluster: int) -> Tensor:
    shared = model.word_emb.emb_projs
    if not len(shared):
        return x_D
    projection = model.crit.out_projs[cluster] if not (old.nvidia and old.tie_projs[cluster]) else None
    return (shared[min(cluster, len(shared) - 1)] if projection is None else projection).T @ x_D


def old_vocabulary(words: list[str], *, lower_case: bool = False) -> Vocab:
    """A Vocab with these words."""
    tokenizer = Vocab()
    tokenizer.__dict__.update(
        counter=Counter(words), special=["<eos>"], min_freq=0, max_size=None, lower_case=lower_case, delimiter=None,
        vocab_file=None, idx2sym=list(words), sym2idx=OrderedDict((word, place) for place, word in enumerate(words)),
    )  # fmt: skip
    return tokenizer


def old_corpus(words: list[str], **settings: Any) -> Corpus:
    """A Corpus with its Vocab, and tensors for text, as cache.pt has them."""
    corpus = Corpus()
    text = {name: torch.arange(7) for name in ("train", "valid", "test")}
    corpus.__dict__.update(dataset="wt103", vocab=old_vocabulary(words, **settings), **text)
    return corpus


def nvidia_checkpoint(old: Old, model: Any, words: list[str] | None) -> dict[str, Any]:
    """What NVIDIA's save_checkpoint writes."""
    names = ("n_token", "n_layer", "n_head", "d_model", "d_head", "d_inner", "d_embed", "div_val", "tie_weight",
             "pre_lnorm", "tgt_len", "mem_len", "same_length", "clamp_len")  # fmt: skip
    config = {name: getattr(old, name) for name in names} | {"cutoffs": list(old.cutoffs)}
    config |= {"dropout": 0.1, "dropatt": 0.2, "dtype": None, "tie_projs": list(old.tie_projs)}
    config |= {"ext_len": 0, "attn_type": 0, "sample_softmax": -1}
    optimizer = torch.optim.Adam(model.parameters())
    return {
        "args": Namespace(eval_tgt_len=old.tgt_len - 2, dataset="wt103", work_dir="LM-TFM"),
        "model_config": config,
        "model_state": model.state_dict(),
        "optimizer_state": optimizer.state_dict(),
        "scheduler_state": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10).state_dict(),
        "vocab": None if words is None else old_vocabulary(words),
        "amp_state": None, "epoch": 1, "batch": 2, "last_iter": 3, "train_step": 4, "best_val_loss": 1.5,
    }  # fmt: skip
