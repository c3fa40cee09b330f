"""Cross-entropy without the scores: the plain way's numbers and gradients, and none of its memory."""

import pytest
import torch
import torch.nn.functional as F
from tensors import assert_same_tensors, named_gradients

from transformer_xl.model.cross_entropy import linear_cross_entropy

PLACES, WIDTH, SCORES = 11, 5, 23
SIZES = ((PLACES, WIDTH), (SCORES, WIDTH), (SCORES,))


NAMES = ("hidden", "weight", "bias")


def draw(dtype=torch.float64, *, autograd=True):
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in SIZES]
    target_K = torch.randint(SCORES, (PLACES,), generator=generator)
    return [tensor.requires_grad_(autograd) for tensor in tensors], target_K


@pytest.mark.parametrize("at_once", [1, SCORES, 4 * SCORES + 1, 10**6])
def test_equals_the_plain_way(monkeypatch, at_once):
    monkeypatch.setattr("transformer_xl.model.cross_entropy._SCORES_AT_ONCE", at_once)
    tensors, target_K = draw()
    weight_K = torch.randn(PLACES, dtype=torch.float64)
    results = []
    for way in (linear_cross_entropy, lambda *given: F.cross_entropy(F.linear(*given[:3]), given[3], reduction="none")):
        nats_K = way(*tensors, target_K)
        grads = named_gradients((nats_K * weight_K).sum(), dict(zip(NAMES, tensors, strict=True)))
        results.append({"nats": nats_K, **grads})
    assert_same_tensors(*results, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
def test_in_bfloat16_as_good_as_the_plain_way(monkeypatch, autocast):
    exact, target_K = draw()
    wanted = [F.cross_entropy(F.linear(*exact), target_K)]
    wanted += torch.autograd.grad(wanted[0], exact)
    errors = []
    for at_once in (10**6, 2 * SCORES):
        monkeypatch.setattr("transformer_xl.model.cross_entropy._SCORES_AT_ONCE", at_once)
        tensors, _ = draw(torch.float32 if autocast else torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            nats_K = linear_cross_entropy(*tensors, target_K)
        assert nats_K.dtype == torch.float32
        found = [nats_K.mean(), *torch.autograd.grad(nats_K.mean(), tensors)]
        errors.append([(one - other).norm() / other.norm() for one, other in zip(found, wanted, strict=True)])
    for plain, pieces in zip(*errors, strict=True):
        assert 1e-6 < pieces < 1.5 * plain + 1e-3  # float32 would be more exact


def test_keeps_no_scores(monkeypatch):
    monkeypatch.setattr("transformer_xl.model.cross_entropy._SCORES_AT_ONCE", SCORES)
    tensors, target_K = draw()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear_cross_entropy(*tensors, target_K)
    given = sum(tensor.numel() for tensor in tensors)
    assert sum(tensor.numel() for tensor in kept) == given + 2 * PLACES  # targets and sums


def test_without_gradients():
    tensors, target_K = draw(autograd=False)
    assert not linear_cross_entropy(*tensors, target_K).requires_grad
