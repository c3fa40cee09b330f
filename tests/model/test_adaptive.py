"""Adaptive embedding and softmax: equal to their definition, losses in input order, gradients for every parameter.

The vocabulary is divided into clusters at the cutoffs: cluster 0 is the head, the others are tails.

Shape suffixes: B batch size, T new tokens, K most likely tokens, D model width (14), V vocabulary (23).
"""

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

# Settings of clusters and tying: the vocabulary has 23 tokens, by default with cutoffs 5, 11, 19. Those named after a
# data set have the same tying as the authors' models for it (standard and large: the paper's two sizes). div_val is the
# factor by which embeddings get narrower from cluster to cluster; tie_projections says which clusters of the softmax
# use the embedding's projections to the model's width (by default all); with project_same_width false, a cluster whose
# embeddings have the model's width already is not projected.
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
    seed: int = 3, dtype: torch.dtype = torch.float64, **model_settings
) -> tuple[AdaptiveEmbedding, AdaptiveSoftmax]:
    """Return an embedding and its softmax with random weights."""
    small = {"vocab_size": 23, "d_model": 14, "n_heads": 2, "cutoffs": (5, 11, 19)}
    config = TransformerXLConfig(**{**small, **model_settings})  # settings in model_settings replace those of `small`
    embedding = AdaptiveEmbedding(config)
    softmax = AdaptiveSoftmax(config, embedding)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (*embedding.parameters(), *softmax.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return embedding.to(dtype), softmax.to(dtype)


def hidden(rows: int = 3, length: int = 7, seed: int = 5) -> torch.Tensor:
    """Return random hidden states of 14 elements for batch rows of `length` tokens, (rows, length, 14)."""
    return torch.randn(rows, length, 14, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_probabilities_by_definition(
    embedding: AdaptiveEmbedding, softmax: AdaptiveSoftmax, hidden_D: torch.Tensor
) -> list[float]:
    """Return the log-probability of every token at one position, computed from the weights token by token."""
    edges = softmax.edges
    weights = {f"embedding.{name}": value for name, value in embedding.state_dict().items()}
    weights |= {f"softmax.{name}": value for name, value in softmax.state_dict().items()}
    is_one_table = "embedding.tables.1" not in weights

    def table(cluster: int) -> torch.Tensor:
        module = "embedding" if "softmax.tables.0" not in weights else "softmax"
        if is_one_table:
            return weights[f"{module}.tables.0"][edges[cluster] : edges[cluster + 1]]
        return weights[f"{module}.tables.{cluster}"]

    def projected(cluster: int) -> torch.Tensor:
        tied_name = f"embedding.projections.{0 if is_one_table else cluster}"
        projection = weights.get(f"softmax.projections.{cluster}", weights.get(tied_name))
        return hidden_D if projection is None else projection.T @ hidden_D

    def token_logits(cluster: int) -> list[float]:
        biases = weights["softmax.bias"][edges[cluster] : edges[cluster + 1]].tolist()
        return [float(row @ projected(cluster)) + bias for row, bias in zip(table(cluster), biases, strict=True)]

    tails = range(1, len(edges) - 1)
    head = token_logits(0) + [
        float(weights["softmax.cluster_weight"][i - 1] @ projected(0) + weights["softmax.cluster_bias"][i - 1])
        for i in tails
    ]
    head_logsumexp = torch.tensor(head, dtype=torch.float64).logsumexp(0).item()
    result = [logit - head_logsumexp for logit in head[: edges[1]]]
    for i in tails:
        logits = token_logits(i)
        tail_logsumexp = torch.tensor(logits, dtype=torch.float64).logsumexp(0).item()
        result += [head[edges[1] + i - 1] - head_logsumexp + logit - tail_logsumexp for logit in logits]
    return result


@pytest.mark.parametrize("style", STYLES)
def test_log_probabilities_equal_definition(style):
    """Compare every token at every position; with tails, the results of `logits` are log-probabilities already."""
    embedding, softmax = make(**STYLES[style])
    log_p_BTV = softmax.logits(hidden()) if softmax.num_tails else softmax.logits(hidden()).log_softmax(-1)
    expected = [[log_probabilities_by_definition(embedding, softmax, row_D) for row_D in rows] for rows in hidden()]
    torch.testing.assert_close(log_p_BTV, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("style", STYLES)
# the names of the cases describe the targets for the default cutoffs
@pytest.mark.parametrize("targets", [[0, 1, 4], [22, 22, 22], [22, 0, 12]], ids=["head", "last tail", "mixed"])
def test_losses_and_gradients_equal_those_of_all_logits(style, targets):
    """Losses are in input order; parameters of a tail without targets have gradients too."""
    embedding, softmax = make(**STYLES[style])
    rows_BTD = hidden(1, 3).requires_grad_()
    targets_BT = torch.tensor([targets])
    losses_BT = softmax.nats(rows_BTD, targets_BT)
    expected_BT = F.cross_entropy(softmax.logits(rows_BTD)[0], targets_BT[0], reduction="none")[None]
    torch.testing.assert_close(losses_BT, expected_BT, rtol=0, atol=1e-12)
    sums = losses_BT.sum(), expected_BT.sum()
    assert_same_tensors(*(gradients(loss, rows_BTD, embedding, softmax) for loss in sums), atol=1e-12)


def test_losses_of_the_last_position_need_no_contiguous_targets():
    """Torch warns about targets that are not contiguous, and warnings are errors."""
    _, softmax = make(**STYLES["WikiText-103 standard"])
    rows_BTD, targets_BT = hidden(), torch.arange(21).view(3, 7)
    expected_BT = softmax.nats(rows_BTD, targets_BT)[:, -1:]
    torch.testing.assert_close(softmax.nats(rows_BTD[:, -1:], targets_BT[:, -1:]), expected_BT, rtol=0, atol=1e-12)


def gradients(loss, hidden_BTD, embedding, softmax):
    """Return gradients by name, without those that are None: tables that only the embedding uses have none here."""
    named = {"hidden": hidden_BTD, **dict(nn.ModuleDict({"in": embedding, "out": softmax}).named_parameters())}
    actual = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: grad for name, grad in zip(named, actual, strict=True) if grad is not None}


@pytest.mark.parametrize("style", STYLES)
def test_every_parameter_gets_a_gradient_in_each_step(style):
    """Tested with all tokens in the head (id 0), and with all in the last tail (id 22)."""
    small = {"vocab_size": 23, "d_model": 14, "n_heads": 2, "cutoffs": (5, 11, 19), "n_layers": 2, "d_ff": 19}
    model = TransformerXL(TransformerXLConfig(**{**small, **STYLES[style]}))
    for token in (0, 22):
        text_BT = torch.full((2, 3), token)
        model.nats(model(text_BT)[0], text_BT).sum().backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("style", STYLES)
def test_embeddings_are_projected_rows_of_their_cluster(style):
    embedding, _ = make(**STYLES[style])
    rows_VD = embedding(torch.arange(23)[None])[0]
    assert rows_VD.shape == (23, 14)
    for index, (start, stop) in enumerate(pairwise(embedding.edges)):
        table, projection = embedding.cluster_table(index), embedding.projection(index)
        expected = table if projection is None else table @ projection.T
        torch.testing.assert_close(rows_VD[start:stop], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("count", [1, 7, 40])  # 40 is more than the vocabulary has
def test_topk_equals_topk_of_all_logits(style, count):
    _, softmax = make(**STYLES[style])
    logits_BTV = softmax.logits(hidden())
    expected_BTK, expected_id_BTK = logits_BTV.sort(-1, descending=True)
    actual_BTK, id_BTK = softmax.topk(hidden(), count)
    assert actual_BTK.shape[-1] == min(count, 23)
    torch.testing.assert_close(actual_BTK, expected_BTK[..., :count], rtol=0, atol=1e-12)
    assert torch.equal(id_BTK, expected_id_BTK[..., :count])


def test_topk_skips_tails_that_cannot_contain_the_best_tokens(monkeypatch):
    _, softmax = make()
    computed: list[int] = []  # indices of the clusters whose logits were computed
    logits = softmax._cluster_logits
    monkeypatch.setattr(
        softmax, "_cluster_logits", lambda rows, index: (computed.append(index), logits(rows, index))[1]
    )
    with torch.no_grad():
        softmax.bias[:5] = 40.0  # the tokens of the head are far more likely than any tail
    softmax.topk(hidden(), 5)
    assert computed == [0]
    softmax.topk(hidden(), 6)  # the head has five tokens, the sixth may be in any cluster
    assert computed[:3] == [0, 0, 1]
    computed.clear()
    with torch.no_grad():
        softmax.cluster_bias[1] = 80.0  # tail 2, ids 11 to 18, is far more likely than the head
    assert softmax.topk(hidden(), 3)[1].min() >= 11
    assert computed == [0, 2]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_settings_give_probabilities_and_matching_losses(data):
    """Any ascending cutoffs, div_val and tying: probabilities sum to 1, and losses are those of the targets."""
    size = data.draw(st.integers(2, 40))
    cutoffs = tuple(sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=5))))
    div_val = data.draw(st.integers(1, 3))
    tying = data.draw(st.sampled_from(["all", "all_but_first", "none"]))
    values = {"vocab_size": size, "cutoffs": cutoffs, "div_val": div_val, "tie_projections": tying}
    values |= {"tie_word_embeddings": data.draw(st.booleans()), "project_same_width": data.draw(st.booleans())}
    if div_val ** len(cutoffs) > 14:  # embeddings of the last cluster would have less than one element
        with pytest.raises(UserError, match="leaves the last of"):
            check_settings(TransformerXLConfig, {"d_model": 14, "n_heads": 2, **values}, "test")
        return
    _, softmax = make(**values)
    log_p_BTV = softmax.logits(hidden()).log_softmax(-1)
    torch.testing.assert_close(log_p_BTV.exp().sum(-1), torch.ones(3, 7, dtype=torch.float64))
    targets_BT = torch.randint(0, size, (3, 7), generator=torch.Generator().manual_seed(size))
    expected_BT = -log_p_BTV.gather(-1, targets_BT[..., None])[..., 0]
    torch.testing.assert_close(softmax.nats(hidden(), targets_BT), expected_BT, rtol=0, atol=1e-10)


def log_probabilities_in_bfloat16(softmax: AdaptiveSoftmax, rows_BTD: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities from one bfloat16 matrix product for each cluster, and float32 otherwise."""

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
def test_bfloat16_losses_are_float32_and_close(style):
    """With autocast and with bfloat16 weights, the error is at most twice that of `log_probabilities_in_bfloat16`."""
    embedding, softmax = make(**STYLES[style])
    rows_BTD = hidden(13, 17)
    targets_BT = (torch.arange(13 * 17) * 8 % 23).view(13, 17)  # all tokens, those of different clusters in turn
    with torch.no_grad():
        exact = softmax.nats(rows_BTD, targets_BT)
        plain = -log_probabilities_in_bfloat16(softmax, rows_BTD).gather(-1, targets_BT[..., None])[..., 0]
        max_error = 2 * (plain - exact).abs().max()
    embedding, softmax = embedding.float(), softmax.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert embedding(targets_BT).shape == (13, 17, 14)
        actual = softmax.nats(rows_BTD.float(), targets_BT)
        actual.sum().backward()
    assert actual.dtype == torch.float32
    assert (actual.double() - exact).abs().max() <= max_error
    embedding, softmax = copy.deepcopy((embedding, softmax))
    embedding, softmax = embedding.bfloat16(), softmax.bfloat16()
    assert embedding(targets_BT).dtype == torch.bfloat16
    actual = softmax.nats(rows_BTD.bfloat16(), targets_BT)
    assert actual.dtype == torch.float32
    assert (actual.double() - exact).abs().max() <= max_error
    assert softmax.topk(rows_BTD.bfloat16(), 3)[1].shape == (13, 17, 3)


def test_tied_weights_are_saved_once_and_stay_tied_in_a_copy():
    model = TransformerXL(
        TransformerXLConfig(vocab_size=23, d_model=14, n_heads=2, cutoffs=(5, 11), div_val=2, n_layers=2)
    )
    names = set(model.state_dict())
    assert {"embedding.tables.0", "embedding.projections.2", "softmax.bias", "softmax.cluster_weight"} <= names
    assert not any(name.startswith(("softmax.tables", "softmax.projections", "softmax._embedding")) for name in names)
    copied = copy.deepcopy(model)
    assert copied.softmax._embedding[0] is copied.embedding
    text_BT = torch.tensor([[0, 7, 22]])
    torch.testing.assert_close(
        copied.eval().nats(copied(text_BT)[0], text_BT), model.eval().nats(model(text_BT)[0], text_BT)
    )


@pytest.mark.parametrize(
    ("values", "message"),  # cutoffs as on the command line
    [
        ({"cutoffs": "5,3"}, "cutoffs 5, 3 must increase"),
        ({"cutoffs": "0,5"}, "starting at 1"),
        ({"cutoffs": "5;7"}, "integers separated by commas"),
        ({"div_val": 0}, "div_val"),
        ({"tie_projections": "some"}, "tie_projections"),
    ],
)
def test_invalid_clusters_raise(values, message):
    with pytest.raises(UserError, match=message):
        check_settings(TransformerXLConfig, {"vocab_size": 23, "d_model": 14, "n_heads": 2, **values}, "test")


def test_model_with_cutoffs_auto_raises():
    """A training run replaces auto by cutoffs chosen from its corpus before it builds the model."""
    with pytest.raises(UserError, match="cutoffs auto"):
        TransformerXL(TransformerXLConfig(vocab_size=23, d_model=14, n_heads=2, cutoffs="auto"))


@pytest.mark.parametrize("style", STYLES)
def test_chunked_losses_are_the_same_and_save_no_logits(monkeypatch, style):
    """With `_MAX_LOGITS` 1, the logits of head and tails are computed in chunks, here one position at a time."""
    targets_BT = torch.arange(21).view(3, 7) % 23
    results, saved_elements = [], []
    for max_logits in (10**6, 1):
        monkeypatch.setattr("transformer_xl.ops.cross_entropy._MAX_LOGITS", max_logits)
        embedding, softmax = make(**STYLES[style])
        hidden_BTD, saved = hidden().requires_grad_(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            losses_BT = softmax.nats(hidden_BTD, targets_BT)
        results.append({"nats": losses_BT, **gradients(losses_BT.pow(2).sum(), hidden_BTD, embedding, softmax)})
        saved_elements.append(sum(t.numel() for t in saved if t.ndim == 2 and len(t) == targets_BT.numel()))
    assert_same_tensors(*results, atol=1e-11)
    # elements of saved matrices with a row for each target: without chunks, these include the logits of the head
    assert saved_elements[1] <= saved_elements[0] - targets_BT.numel() * (softmax.edges[1] + softmax.num_tails)
