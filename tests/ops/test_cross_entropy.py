"""Chunked cross-entropy: results and gradients of the standard computation, without saving its logits.

The tests set `_MAX_LOGITS`, the largest number of logits computed at once; a chunk has as many positions as that
allows, but at least one.

Shape suffixes: K positions, E embedding width, V logits of a position.
"""

import pytest
import torch
import torch.nn.functional as F
from tensors import assert_same_tensors, named_gradients

from transformer_xl.ops.cross_entropy import linear_cross_entropy

POSITIONS, WIDTH, LOGITS = 11, 5, 23
SHAPES = {"hidden": (POSITIONS, WIDTH), "weight": (LOGITS, WIDTH), "bias": (LOGITS,)}


def random_inputs(dtype=torch.float64, *, requires_grad=True):
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES.values()]
    target_K = torch.randint(LOGITS, (POSITIONS,), generator=generator)
    return [tensor.requires_grad_(requires_grad) for tensor in tensors], target_K


def standard(hidden_KE, weight_VE, bias_V, target_K):
    return F.cross_entropy(F.linear(hidden_KE, weight_VE, bias_V), target_K, reduction="none")


# chunks of one position (even if its logits exceed the limit), of one, of four, and no chunks
@pytest.mark.parametrize("max_logits", [1, LOGITS, 4 * LOGITS + 1, 10**6])
def test_chunks_equal_standard_computation(monkeypatch, max_logits):
    monkeypatch.setattr("transformer_xl.ops.cross_entropy._MAX_LOGITS", max_logits)
    tensors, target_K = random_inputs()
    weight_K = torch.randn(POSITIONS, dtype=torch.float64)
    results = []
    for function in (linear_cross_entropy, standard):
        losses_K = function(*tensors, target_K)
        grads = named_gradients((losses_K * weight_K).sum(), dict(zip(SHAPES, tensors, strict=True)))
        results.append({"losses": losses_K, **grads})
    assert_same_tensors(*results, atol=1e-12)
    assert not linear_cross_entropy(*random_inputs(requires_grad=False)[0], target_K).requires_grad


def test_weights_that_are_not_trained_get_no_gradient(monkeypatch):
    monkeypatch.setattr("transformer_xl.ops.cross_entropy._MAX_LOGITS", 2 * LOGITS)
    tensors, target_K = random_inputs()
    frozen = [tensor.detach().requires_grad_(index == 0) for index, tensor in enumerate(tensors)]
    linear_cross_entropy(*frozen, target_K).sum().backward()
    standard(*tensors, target_K).sum().backward()
    torch.testing.assert_close(frozen[0].grad, tensors[0].grad)
    assert (frozen[1].grad, frozen[2].grad) == (None, None)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_error_is_about_that_of_the_standard_computation(monkeypatch, autocast):
    exact, target_K = random_inputs()
    loss = standard(*exact, target_K).mean()
    expected = [loss, *torch.autograd.grad(loss, exact)]
    errors = []
    for max_logits in (10**6, 2 * LOGITS):  # the standard computation, then chunks of two positions
        monkeypatch.setattr("transformer_xl.ops.cross_entropy._MAX_LOGITS", max_logits)
        tensors, _ = random_inputs(torch.float32 if autocast else torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses_K = linear_cross_entropy(*tensors, target_K)
        assert losses_K.dtype == torch.float32
        results = [losses_K.mean(), *torch.autograd.grad(losses_K.mean(), tensors)]
        errors.append([(one - other).norm() / other.norm() for one, other in zip(results, expected, strict=True)])
    for standard_error, chunked_error in zip(*errors, strict=True):
        assert 1e-6 < chunked_error < 1.5 * standard_error + 1e-3  # below 1e-6: float32 was used


def test_no_logits_are_saved(monkeypatch):
    monkeypatch.setattr("transformer_xl.ops.cross_entropy._MAX_LOGITS", LOGITS)  # chunks of one position
    tensors, target_K = random_inputs()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear_cross_entropy(*tensors, target_K)
    num_inputs = sum(tensor.numel() for tensor in tensors)
    assert sum(tensor.numel() for tensor in saved) == num_inputs + 2 * POSITIONS  # targets and logsumexp
