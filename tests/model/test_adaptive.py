"""Adaptive embedding and softmax: sums to one, equals the dense construction, order kept, no parameter left out."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import assert_same_tensors
from torch import nn

from transformer_xl.config import TransformerXLConfig, UserError, check_settings
from transformer_xl.model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from transformer_xl.model.transformer_xl import TransformerXL

STYLES = {
    "dense": {"cutoffs": ()},
    "dense, projected": {"cutoffs": (), "d_embed": 6},
    "dense, projections untied": {"cutoffs": (), "d_embed": 6, "tie_projections": "none"},
    "WikiText-103 standard": {},
    "WikiText-103 large": {"div_val": 2, "tie_projections": "all_but_first"},
    "One Billion Word": {"div_val": 2, "tie_projections": "none", "project_same_width": False},
    "weights untied": {"div_val": 2, "tie_word_embeddings": False},
    "one table, weights untied": {"tie_word_embeddings": False, "d_embed": 6, "tie_projections": "none"},
    "one table, projected": {"d_embed": 10, "tie_projections": "all_but_first"},
    "one-token clusters": {"cutoffs": (1, 2, 3, 4), "div_val": 1},
    "tails of one token": {"cutoffs": (21, 22), "div_val": 3},
}


def make(
    seed: int = 3, dtype: torch.dtype = torch.float64, **given_settings
) -> tuple[AdaptiveEmbedding, AdaptiveSoftmax]:
    small = {"vocab_size": 23, "d_model": 14, "n_heads": 2, "cutoffs": (5, 11, 19)}
    config = TransformerXLConfig(**{**small, **given_settings})
    embedding = AdaptiveEmbedding(config)
    softmax = AdaptiveSoftmax(config, embedding)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (*embedding.parameters(), *softmax.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return embedding.to(dtype), softmax.to(dtype)


def hidden(rows: int = 3, length: int = 7, seed: int = 5) -> torch.Tensor:
    return torch.randn(rows, length, 14, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense_log_probabilities(
    embedding: AdaptiveEmbedding, softmax: AdaptiveSoftmax, hidden_D: torch.Tensor
) -> list[float]:
    """One place, written out token by token from the definition; reads the weights by name and nothing else."""
    edges = softmax.edges
    weights = {f"embedding.{name}": value for name, value in embedding.state_dict().items()}
    weights |= {f"softmax.{name}": value for name, value in softmax.state_dict().items()}
    one_table = "embedding.tables.1" not in weights

    def table(cluster: int) -> torch.Tensor:
        side = "embedding" if "softmax.tables.0" not in weights else "softmax"
        if one_table:
            return weights[f"{side}.tables.0"][edges[cluster] : edges[cluster + 1]]
        return weights[f"{side}.tables.{cluster}"]

    def narrowed(cluster: int) -> torch.Tensor:
        own, shared = f"softmax.projections.{cluster}", f"embedding.projections.{0 if one_table else cluster}"
        projection = weights.get(own, weights.get(shared))
        return hidden_D if projection is None else projection.T @ hidden_D

    def bias(token: int) -> float:
        return float(weights["softmax.bias"][token])

    head = [float(table(0)[token] @ narrowed(0)) + bias(token) for token in range(edges[1])]
    tails = range(1, len(edges) - 1)
    head += [
        float(weights["softmax.cluster_weight"][i - 1] @ narrowed(0) + weights["softmax.cluster_bias"][i - 1])
        for i in tails
    ]
    normaliser = torch.tensor(head, dtype=torch.float64).logsumexp(0).item()
    found = [score - normaliser for score in head[: edges[1]]]
    for i in tails:
        scores = [float(row @ narrowed(i)) + bias(edges[i] + place) for place, row in enumerate(table(i))]
        within = torch.tensor(scores, dtype=torch.float64).logsumexp(0).item()
        found += [head[edges[1] + i - 1] - normaliser + score - within for score in scores]
    return found


@pytest.mark.parametrize("style", STYLES)
def test_equals_the_dense_construction(style):
    """Log-probabilities of every token at every place, by the definition; and they sum to one."""
    embedding, softmax = make(**STYLES[style])
    found_BTV = softmax.logits(hidden()).log_softmax(-1)
    torch.testing.assert_close(found_BTV.exp().sum(-1), torch.ones(3, 7, dtype=torch.float64))
    wanted = [[dense_log_probabilities(embedding, softmax, place) for place in row] for row in hidden()]
    torch.testing.assert_close(found_BTV, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("style", [style for style in STYLES if not style.startswith("dense")])
def test_scores_with_tails_are_log_probabilities(style):
    _, softmax = make(**STYLES[style])
    torch.testing.assert_close(softmax.logits(hidden()).exp().sum(-1), torch.ones(3, 7, dtype=torch.float64))


@pytest.mark.parametrize("style", STYLES)
def test_nats_stand_in_input_order(style):
    """Each place's loss is that of its own target, whatever cluster the target and its neighbours belong to."""
    _, softmax = make(**STYLES[style])
    targets_BT = (torch.arange(21) * 8 % 23).view(3, 7)
    wanted_BT = -softmax.logits(hidden()).log_softmax(-1).gather(-1, targets_BT[..., None])[..., 0]
    torch.testing.assert_close(softmax.nats(hidden(), targets_BT), wanted_BT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("targets", [[0, 1, 4], [22, 22, 22], [0, 12, 22]], ids=["head", "last tail", "some"])
def test_gradients_equal_those_of_the_dense_construction(style, targets):
    """Through nats and through the scores of the whole vocabulary; none is missing, also of a tail without targets."""
    embedding, softmax = make(**STYLES[style])
    rows_BTD = hidden(1, 3).requires_grad_()
    targets_BT = torch.tensor([targets])
    wanted_BT = F.cross_entropy(softmax.logits(rows_BTD)[0], targets_BT[0], reduction="none")
    losses = (softmax.nats(rows_BTD, targets_BT).sum(), wanted_BT.sum())
    assert_same_tensors(*(gradients(loss, rows_BTD, embedding, softmax) for loss in losses), atol=1e-12)


def gradients(loss, hidden_BTD, embedding, softmax):
    """By name, without those that are missing: tables that only the input side uses have none."""
    named = {"hidden": hidden_BTD, **dict(nn.ModuleDict({"in": embedding, "out": softmax}).named_parameters())}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: grad for name, grad in zip(named, found, strict=True) if grad is not None}


@pytest.mark.parametrize("style", STYLES)
def test_all_parameters_take_part_in_each_step(style):
    """A step on text of head tokens alone, and of last-tail tokens alone, leaves no parameter without a gradient."""
    small = {"vocab_size": 23, "d_model": 14, "n_heads": 2, "cutoffs": (5, 11, 19), "n_layers": 2, "d_ff": 19}
    model = TransformerXL(TransformerXLConfig(**{**small, **STYLES[style]}))
    for token in (0, 22):
        text_BT = torch.full((2, 3), token)
        model.nats(model(text_BT)[0], text_BT).sum().backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("style", STYLES)
def test_embedding_rows_are_projected_rows_of_the_own_cluster(style):
    embedding, _ = make(**STYLES[style])
    rows_VD = embedding(torch.arange(23)[None])[0]
    assert rows_VD.shape == (23, 14)
    for index, (start, stop) in enumerate(pairwise(embedding.edges)):
        table, projection = embedding.cluster_table(index), embedding.projection(index)
        wanted = table if projection is None else table @ projection.T
        torch.testing.assert_close(rows_VD[start:stop], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("count", [1, 2, 7, 23, 40])
def test_top_equals_the_largest_of_all_scores(style, count):
    _, softmax = make(**STYLES[style])
    scores_BTV = softmax.logits(hidden())
    wanted_BTK, wanted_id_BTK = scores_BTV.sort(-1, descending=True)
    found_BTK, id_BTK = softmax.topk(hidden(), count)
    assert found_BTK.shape[-1] == min(count, 23)
    torch.testing.assert_close(found_BTK, wanted_BTK[..., :count], rtol=0, atol=1e-12)
    assert torch.equal(id_BTK, wanted_id_BTK[..., :count])


def test_top_leaves_out_tails_that_cannot_matter(monkeypatch):
    """Where the head is sure of a token of its own, no tail is scored; where it is not, the tail is."""
    _, softmax = make()
    asked: list[int] = []
    logits = softmax._cluster_logits
    monkeypatch.setattr(softmax, "_cluster_logits", lambda rows, index: (asked.append(index), logits(rows, index))[1])
    with torch.no_grad():
        softmax.bias[:5] = 40.0
    softmax.topk(hidden(), 5)
    assert asked == [0]
    softmax.topk(hidden(), 6)  # the head has five tokens: the sixth may stand anywhere
    assert asked[:3] == [0, 0, 1]
    asked.clear()
    with torch.no_grad():
        softmax.cluster_bias[1] = 80.0
    assert softmax.topk(hidden(), 3)[1].min() >= 11
    assert asked == [0, 2]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cutoffs(data):
    """Any rising cutoffs, div_val and tying: probabilities sum to one and losses belong to their targets."""
    size = data.draw(st.integers(2, 40))
    cutoffs = tuple(sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=5))))
    div_val = data.draw(st.integers(1, 3))
    tying = data.draw(st.sampled_from(["all", "all_but_first", "none"]))
    values = {"vocab_size": size, "cutoffs": cutoffs, "div_val": div_val, "tie_projections": tying}
    values |= {"tie_word_embeddings": data.draw(st.booleans()), "project_same_width": data.draw(st.booleans())}
    if div_val ** len(cutoffs) > 14:
        with pytest.raises(UserError, match="leaves the last of"):
            check_settings(TransformerXLConfig, {"d_model": 14, "n_heads": 2, **values}, "test")
        return
    _, softmax = make(**values)
    log_BTV = softmax.logits(hidden()).log_softmax(-1)
    torch.testing.assert_close(log_BTV.exp().sum(-1), torch.ones(3, 7, dtype=torch.float64))
    targets_BT = torch.randint(0, size, (3, 7), generator=torch.Generator().manual_seed(size))
    wanted_BT = -log_BTV.gather(-1, targets_BT[..., None])[..., 0]
    torch.testing.assert_close(softmax.nats(hidden(), targets_BT), wanted_BT, rtol=0, atol=1e-10)


def plain_bfloat16(softmax: AdaptiveSoftmax, rows_BTD: torch.Tensor) -> torch.Tensor:
    """Log-probabilities when each cluster is one ordinary bfloat16 matrix product, and the rest float32."""

    def scores(cluster: int) -> torch.Tensor:
        identity, zero = torch.eye(14, dtype=torch.float64), torch.zeros(1, 14, dtype=torch.float64)
        bias_V = softmax._cluster_logits(zero, cluster)[0]
        weight_VD = (softmax._cluster_logits(identity, cluster) - bias_V).T
        return F.linear(rows_BTD.bfloat16(), weight_VD.bfloat16(), bias_V.bfloat16()).float()

    head_BTV, num_head = scores(0).log_softmax(-1), softmax.edges[1]
    parts = [head_BTV[..., :num_head]]
    for i in range(1, softmax.num_tails + 1):
        parts.append(head_BTV[..., num_head + i - 1, None] + scores(i).log_softmax(-1))
    return torch.cat(parts, -1)


@pytest.mark.parametrize("style", STYLES)
def test_bfloat16(style):
    """In bfloat16, by autocast and throughout: float32 losses, no further off than twice plain bfloat16 is."""
    embedding, softmax = make(**STYLES[style])
    rows_BTD = hidden(13, 17)
    targets_BT = (torch.arange(13 * 17) * 8 % 23).view(13, 17)
    with torch.no_grad():
        exact = softmax.nats(rows_BTD, targets_BT)
        plain = -plain_bfloat16(softmax, rows_BTD).gather(-1, targets_BT[..., None])[..., 0]
        bound = 2 * (plain - exact).abs().max()
    embedding, softmax = embedding.float(), softmax.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert embedding(targets_BT).shape == (13, 17, 14)
        found = softmax.nats(rows_BTD.float(), targets_BT)
        found.sum().backward()
    assert found.dtype == torch.float32
    assert (found.double() - exact).abs().max() <= bound
    embedding, softmax = copy.deepcopy((embedding, softmax))
    embedding, softmax = embedding.bfloat16(), softmax.bfloat16()
    assert embedding(targets_BT).dtype == torch.bfloat16
    found = softmax.nats(rows_BTD.bfloat16(), targets_BT)
    assert found.dtype == torch.float32
    assert (found.double() - exact).abs().max() <= bound
    assert softmax.topk(rows_BTD.bfloat16(), 3)[1].shape == (13, 17, 3)


def test_tied_weights_are_counted_and_saved_once():
    model = TransformerXL(
        TransformerXLConfig(vocab_size=23, d_model=14, n_heads=2, cutoffs=(5, 11), div_val=2, n_layers=2)
    )
    names = set(model.state_dict())
    assert {"embedding.tables.0", "embedding.projections.2", "softmax.bias", "softmax.cluster_weight"} <= names
    assert not any(name.startswith(("softmax.tables", "softmax.projections", "softmax._embedding")) for name in names)
    again = copy.deepcopy(model)
    assert again.softmax._embedding[0] is again.embedding
    text_BT = torch.tensor([[0, 7, 22]])
    torch.testing.assert_close(
        again.eval().nats(again(text_BT)[0], text_BT), model.eval().nats(model(text_BT)[0], text_BT)
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cutoffs": "5,3"}, "cutoffs 5, 3 must increase"),
        ({"cutoffs": "5,5"}, "must increase"),
        ({"cutoffs": "0,5"}, "starting at 1"),
        ({"cutoffs": "5,23"}, "below vocab_size 23"),
        ({"cutoffs": [5, 99]}, "below vocab_size 23"),
        ({"cutoffs": "5;7"}, "integers separated by commas"),
        ({"cutoffs": "five"}, "integers separated by commas"),
        ({"cutoffs": "5,7", "div_val": 4}, "div_val 4 leaves the last of 2 tails"),
        ({"div_val": 0}, "div_val"),
        ({"tie_projections": "some"}, "tie_projections"),
    ],
)
def test_wrong_clusters_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        check_settings(TransformerXLConfig, {"vocab_size": 23, "d_model": 14, "n_heads": 2, **values}, "test")


def test_cutoffs_still_to_be_found_build_no_model():
    with pytest.raises(UserError, match="cutoffs auto"):
        TransformerXL(TransformerXLConfig(vocab_size=23, d_model=14, n_heads=2, cutoffs="auto"))


@pytest.mark.parametrize("style", STYLES)
def test_in_pieces_it_is_the_same_and_keeps_no_scores(monkeypatch, style):
    """Where the scores of all places are too many to keep, head and tails make them place by place."""
    targets_BT = torch.arange(21).view(3, 7) % 23
    results, kept_numbers = [], []
    for at_once in (10**6, 1):
        monkeypatch.setattr("transformer_xl.model.cross_entropy._SCORES_AT_ONCE", at_once)
        embedding, softmax = make(**STYLES[style])
        hidden_BTD, kept = hidden().requires_grad_(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            nats_BT = softmax.nats(hidden_BTD, targets_BT)
        results.append({"nats": nats_BT, **gradients(nats_BT.pow(2).sum(), hidden_BTD, embedding, softmax)})
        kept_numbers.append(sum(t.numel() for t in kept if t.ndim == 2 and len(t) == targets_BT.numel()))
    assert_same_tensors(*results, atol=1e-11)
    assert kept_numbers[1] <= kept_numbers[0] - targets_BT.numel() * (softmax.edges[1] + softmax.num_tails)
