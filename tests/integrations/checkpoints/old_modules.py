"""Models as the authors' PyTorch code and NVIDIA's pickle them, and a slow oracle for their losses.

Only what ends up in a file is as in those programs: the names of classes, modules, attributes and parameters. The
oracle computes losses from the rules that their code follows: the first memory is empty, the scores of the tail
clusters are stored last tail first, and `same_length` limits the number of keys of each query. In the authors' names,
`word_emb` is the embedding, `crit` the adaptive softmax, `qkv_net` the joint projection to queries, keys and values,
`r_net` that of the position encodings, and `r_w_bias` and `r_r_bias` are the paper's u and v.

Shape suffixes: T tokens, S keys, D model width, N heads, H head width, E embedding width, V vocabulary.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class OldConfig:
    """Settings of a model, by the names of the authors' train.py."""

    cutoffs: tuple[int, ...] = (5, 11)
    """Token ids at which the vocabulary is split into clusters: the head of frequent tokens, and the tails."""
    div_val: int = 1
    """Factor by which the embeddings of each cluster are narrower than those of the cluster before."""
    d_embed: int = 8
    tie_weight: bool = True
    tie_projs: tuple[bool, ...] = (False, True, True)
    """For each cluster whether the softmax shares the embedding's projection to d_model."""
    pre_lnorm: bool = False
    same_length: bool = False
    clamp_len: int = -1
    """Longer distances between query and key are encoded as this one; -1 for no limit."""
    n_token: int = 23
    n_layer: int = 2
    n_head: int = 2
    d_model: int = 8
    d_head: int = 3
    d_inner: int = 7
    tgt_len: int = 5
    """Length of a segment."""
    mem_len: int = 6
    nvidia: bool = False
    """Whether the model is NVIDIA's, whose `same_length` lets each query see one key more, instead of the authors'."""


class MemTransformerLM(nn.Module):
    __module__ = "mem_transformer"


class AdaptiveEmbedding(nn.Module):
    __module__ = "mem_transformer"


class RelPartialLearnableDecoderLayer(nn.Module):
    __module__ = "mem_transformer"


class RelPartialLearnableMultiHeadAttn(nn.Module):
    __module__ = "mem_transformer"


class PositionwiseFF(nn.Module):
    __module__ = "mem_transformer"


class PositionalEmbedding(nn.Module):
    __module__ = "mem_transformer"


class ProjectedAdaptiveLogSoftmax(nn.Module):
    __module__ = "proj_adaptive_softmax"


class Vocab:
    __module__ = "utils.vocabulary"


class Corpus:
    __module__ = "data_utils"


_CLASSES = (
    MemTransformerLM, AdaptiveEmbedding, RelPartialLearnableDecoderLayer, RelPartialLearnableMultiHeadAttn,
    PositionwiseFF, PositionalEmbedding, ProjectedAdaptiveLogSoftmax, Vocab, Corpus,
)  # fmt: skip


@contextmanager
def old_modules() -> Iterator[None]:
    """Make these classes importable under the old programs' module names while the block runs, as pickle requires."""
    modules = {name: ModuleType(name) for name in ("utils", *(kind.__module__ for kind in _CLASSES))}
    for kind in _CLASSES:
        setattr(modules[kind.__module__], kind.__name__, kind)
        modules[kind.__module__].__file__ = __file__  # the older form of torch.save stores the source of each class
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def _with(module: nn.Module, **attributes: Any) -> Any:
    """Set attributes of a module, and return it."""
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _random(*size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size) * 0.5)


def old_model(config: OldConfig, seed: int = 5) -> Any:
    """Return a module with the submodules and attributes of the authors' or NVIDIA's model, and random weights."""
    torch.manual_seed(seed)
    boundaries = [0, *config.cutoffs, config.n_token]
    sizes = [config.n_token] if config.div_val == 1 else [stop - start for start, stop in pairwise(boundaries)]
    widths = [config.d_embed // config.div_val**index for index in range(len(boundaries) - 1)]
    tables = list(zip(sizes, widths, strict=False))  # number of tokens and width of each embedding table
    projected_widths = widths if config.div_val > 1 or config.d_embed != config.d_model else []
    embedding = _with(
        AdaptiveEmbedding(), n_token=config.n_token, cutoffs=boundaries[1:], div_val=config.div_val,
        emb_layers=nn.ModuleList(nn.Embedding(*table) for table in tables),
        emb_projs=nn.ParameterList(_random(config.d_model, width) for width in projected_widths[: len(sizes)]),
    )  # fmt: skip
    crit = ProjectedAdaptiveLogSoftmax()
    _with(crit, n_token=config.n_token, cutoffs=boundaries[1:], div_val=config.div_val)
    if config.cutoffs:
        crit.cluster_weight = _random(len(config.cutoffs), config.d_embed)
        crit.cluster_bias = _random(len(config.cutoffs))
    _fill_softmax(config, crit, embedding, tables, projected_widths)
    names = ["n_token", "n_layer", "n_head", "d_embed", "d_model", "d_head", "tgt_len", "mem_len", "clamp_len"]
    settings = {name: getattr(config, name) for name in (*names, "same_length")}
    # attn_type 0 is the paper's attention; sample_softmax -1 means the full softmax; ext_len is an additional context
    model = _with(
        MemTransformerLM(), **settings, ext_len=0, attn_type=0, sample_softmax=-1, drop=nn.Dropout(0.1),
        word_emb=embedding, crit=crit, layers=nn.ModuleList(_layer(config) for _ in range(config.n_layer)),
        r_w_bias=_random(config.n_head, config.d_head), r_r_bias=_random(config.n_head, config.d_head),
    )  # fmt: skip
    model.pos_emb = PositionalEmbedding()
    model.pos_emb.register_buffer("inv_freq", 1 / (10000 ** (torch.arange(0.0, config.d_model, 2.0) / config.d_model)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def _fill_softmax(
    config: OldConfig, crit: Any, embedding: Any, tables: list[tuple[int, int]], projected_widths: list[int]
) -> None:
    """Add weights and projections; a tied one is the same object in the authors' code, and left out in NVIDIA's."""
    projections: list[Any] = []
    for index, width in enumerate(projected_widths):
        tied = config.tie_projs[index]
        own = embedding.emb_projs[min(index, len(tables) - 1)] if tied else _random(config.d_model, width)
        projections.append(None if tied and config.nvidia else own)
    no_projections = [None] if config.nvidia else [None] * (len(config.cutoffs) + 1)
    crit.out_projs = nn.ParameterList(projections or no_projections)
    if config.nvidia:
        crit.shared_out_projs = embedding.emb_projs
        crit.out_layers_biases = nn.ParameterList(_random(size) for size, _ in tables)
        if not config.tie_weight:
            crit.out_layers_weights = nn.ParameterList(_random(*table) for table in tables)
        return
    crit.out_layers = nn.ModuleList(nn.Linear(width, size) for size, width in tables)
    if config.tie_weight:
        for layer, table in zip(crit.out_layers, embedding.emb_layers, strict=True):
            layer.weight = table.weight


def _layer(config: OldConfig) -> nn.Module:
    d_attention = config.n_head * config.d_head
    attention = _with(
        RelPartialLearnableMultiHeadAttn(), n_head=config.n_head, d_head=config.d_head, pre_lnorm=config.pre_lnorm,
        qkv_net=nn.Linear(config.d_model, 3 * d_attention, bias=False), drop=nn.Dropout(0.1), dropatt=nn.Dropout(0.2),
        o_net=nn.Linear(d_attention, config.d_model, bias=False), layer_norm=nn.LayerNorm(config.d_model),
        r_net=nn.Linear(config.d_model, d_attention, bias=False),
    )  # fmt: skip
    up, down = nn.Linear(config.d_model, config.d_inner), nn.Linear(config.d_inner, config.d_model)
    core = nn.Sequential(up, nn.ReLU(), nn.Dropout(0.1), down, nn.Dropout(0.1))
    feed_forward = _with(PositionwiseFF(), CoreNet=core, layer_norm=nn.LayerNorm(config.d_model))
    return _with(RelPartialLearnableDecoderLayer(), dec_attn=attention, pos_ff=feed_forward)


@torch.no_grad()
def old_nats(config: OldConfig, model: Any, tokens_T: Tensor, targets_T: Tensor) -> Tensor:
    """Return the loss of each target in nats, float64 (T,), for one sequence in segments of tgt_len."""
    model = model.double()
    memories: list[Tensor] = [torch.zeros(0, config.d_model, dtype=torch.float64)] * config.n_layer
    nats: list[Tensor] = []
    for start in range(0, len(tokens_T), config.tgt_len):
        inputs_T, outputs_T = (ids_T[start : start + config.tgt_len] for ids_T in (tokens_T, targets_T))
        x_TD = torch.stack([_embed(config, model, int(token)) for token in inputs_T])
        for index, layer in enumerate(model.layers):
            x_SD = torch.cat([memories[index], x_TD])
            memories[index] = x_SD[max(0, len(x_SD) - config.mem_len) :]
            x_TD = _apply_layer(config, model, layer, x_TD, x_SD)
        nats += [_nats(config, model, x_D, int(target)) for x_D, target in zip(x_TD, outputs_T, strict=True)]
    return torch.stack(nats)


def _cluster(config: OldConfig, token: int) -> tuple[int, int]:
    """Return the cluster of a token (0: the head), and the index of the token in that cluster."""
    starts = [0, *config.cutoffs]
    cluster = max(index for index, start in enumerate(starts) if token >= start)
    return cluster, token - starts[cluster]


def _embed(config: OldConfig, model: Any, token: int) -> Tensor:
    table, row = (0, token) if config.div_val == 1 else _cluster(config, token)
    x_E = model.word_emb.emb_layers[table].weight[row]
    x_D = model.word_emb.emb_projs[table] @ x_E if len(model.word_emb.emb_projs) else x_E
    return x_D * config.d_model**0.5


def _apply_layer(config: OldConfig, model: Any, layer: Any, x_TD: Tensor, x_SD: Tensor) -> Tensor:
    attention, feed_forward = layer.dec_attn, layer.pos_ff
    max_keys = config.mem_len + (1 if config.nvidia else 0)  # of each query, with same_length
    normed_SD = attention.layer_norm(x_SD) if config.pre_lnorm else x_SD
    heads = (config.n_head, config.d_head)
    q_SNH, k_SNH, v_SNH = (part.unflatten(-1, heads) for part in attention.qkv_net(normed_SD).chunk(3, -1))
    memory_length = len(x_SD) - len(x_TD)
    distance_TS = torch.arange(memory_length, len(x_SD))[:, None] - torch.arange(len(x_SD))
    is_visible_TS = (distance_TS >= 0) & (distance_TS < (max_keys if config.same_length else len(x_SD)))
    if config.clamp_len > 0:
        distance_TS = distance_TS.clamp(max=config.clamp_len)
    frequency = 1 / (10000 ** (torch.arange(0, config.d_model, 2, dtype=torch.float64) / config.d_model))
    angle = distance_TS[..., None] * frequency
    r_TSNH = attention.r_net(torch.cat([angle.sin(), angle.cos()], -1)).unflatten(-1, heads)
    q_T1NH = q_SNH[memory_length:, None]
    scores_TSN = ((q_T1NH + model.r_w_bias) * k_SNH).sum(-1) + ((q_T1NH + model.r_r_bias) * r_TSNH).sum(-1)
    scores_TSN = (scores_TSN / config.d_head**0.5).masked_fill(~is_visible_TS[..., None], -torch.inf)
    context_TNH = (scores_TSN.softmax(1)[..., None] * v_SNH).sum(1)
    x_TD = x_TD + attention.o_net(context_TNH.flatten(1))
    x_TD = x_TD if config.pre_lnorm else attention.layer_norm(x_TD)
    up, down = feed_forward.CoreNet[0], feed_forward.CoreNet[3]
    inner_TD = feed_forward.layer_norm(x_TD) if config.pre_lnorm else x_TD
    out_TD = x_TD + down(up(inner_TD).relu())
    return out_TD if config.pre_lnorm else feed_forward.layer_norm(out_TD)


def _nats(config: OldConfig, model: Any, x_D: Tensor, target: int) -> Tensor:
    """Return the loss of one target; that of a tail token adds the losses of its cluster and of the token in it."""
    cluster, row = _cluster(config, target)
    head_V = _scores(config, model, x_D, 0).log_softmax(-1)
    if cluster == 0:
        return -head_V[row]
    # the head ends with the tails, the last one first, so tail i is at index -i
    return -(head_V[-cluster] + _scores(config, model, x_D, cluster).log_softmax(-1)[row])


def _scores(config: OldConfig, model: Any, x_D: Tensor, cluster: int) -> Tensor:
    """Return the scores of the tokens of a cluster; in the head also those of the tails, last tail first."""
    crit, embedding = model.crit, model.word_emb
    table = 0 if config.div_val == 1 else cluster
    if config.nvidia:
        weight = embedding.emb_layers[table].weight if config.tie_weight else crit.out_layers_weights[table]
        bias = crit.out_layers_biases[table]
    else:
        weight, bias = crit.out_layers[table].weight, crit.out_layers[table].bias
    if config.div_val == 1:
        boundaries = [0, *config.cutoffs, config.n_token]
        rows = slice(boundaries[cluster], boundaries[cluster + 1])
        weight, bias = weight[rows], bias[rows]
    if cluster == 0 and config.cutoffs:
        weight, bias = torch.cat([weight, crit.cluster_weight]), torch.cat([bias, crit.cluster_bias])
    if len(embedding.emb_projs):
        tied = config.nvidia and config.tie_projs[cluster]
        projection = (
            embedding.emb_projs[min(cluster, len(embedding.emb_projs) - 1)] if tied else crit.out_projs[cluster]
        )
        x_D = projection.T @ x_D
    return weight @ x_D + bias


def old_vocabulary(words: list[str], *, lower_case: bool = False) -> Vocab:
    """Return a Vocab with these words, whose ids are their positions in the list."""
    vocabulary = Vocab()
    vocabulary.__dict__.update(
        counter=Counter(words), special=["<eos>"], min_freq=0, max_size=None, lower_case=lower_case, delimiter=None,
        vocab_file=None, idx2sym=list(words), sym2idx=OrderedDict((word, index) for index, word in enumerate(words)),
    )  # fmt: skip
    return vocabulary


def old_corpus(words: list[str], **settings: Any) -> Corpus:
    """Return a Corpus with its Vocab and the token ids of its splits, as the authors' file cache.pt contains it.

    `settings` are those of `old_vocabulary`.
    """
    corpus = Corpus()
    token_ids = {split: torch.arange(7) for split in ("train", "valid", "test")}
    # wt103 is the authors' name of WikiText-103
    corpus.__dict__.update(dataset="wt103", vocab=old_vocabulary(words, **settings), **token_ids)
    return corpus


def nvidia_checkpoint(config: OldConfig, model: Any, words: list[str]) -> dict[str, Any]:
    """Return the dictionary that NVIDIA's save_checkpoint writes; evaluation has segments 2 tokens shorter."""
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()}
    other_settings = {"dropout": 0.1, "dropatt": 0.2, "dtype": None, "ext_len": 0, "attn_type": 0, "sample_softmax": -1}
    optimizer = torch.optim.Adam(model.parameters())
    return {
        "args": Namespace(eval_tgt_len=config.tgt_len - 2, dataset="wt103", work_dir="LM-TFM"),
        "model_config": settings | other_settings,
        "model_state": model.state_dict(),
        "optimizer_state": optimizer.state_dict(),
        "scheduler_state": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10).state_dict(),
        "vocab": old_vocabulary(words),
        "amp_state": None, "epoch": 1, "batch": 2, "last_iter": 3, "train_step": 4, "best_val_loss": 1.5,
    }  # fmt: skip
