"""FastDropout on a CPU: the probability, the scale, and one mask for the forward and the backward pass.

Like every new module, FastDropout is in training mode unless `eval` is called.
"""

import pytest
import torch

from transformer_xl.model.dropout import FastDropout


@pytest.mark.parametrize("p", [0.1, 0.9])
@pytest.mark.parametrize("relu", [False, True])
def test_zeroes_a_fraction_p_and_scales_the_rest(p, relu):
    torch.manual_seed(5)
    x = torch.randn(300, 401, dtype=torch.float64, requires_grad=True)
    out = FastDropout(p, relu=relu)(x)
    before = x.relu() if relu else x
    is_kept = (out != 0) | (before == 0)  # an input of 0 (by ReLU) gives 0 in either case
    torch.testing.assert_close(out, torch.where(is_kept, before / (1 - p), 0.0), rtol=0, atol=1e-14)
    assert abs((out[x > 0] == 0).double().mean().item() - p) < 0.01
    weight = torch.randn_like(x)
    (grad,) = torch.autograd.grad((out * weight).sum(), x)
    has_gradient = (out != 0) if relu else is_kept
    torch.testing.assert_close(grad, torch.where(has_gradient, weight / (1 - p), 0.0), rtol=0, atol=1e-13)


def test_elements_that_share_a_random_number_are_independent():
    """One int64 random number determines which of four elements are dropped."""
    torch.manual_seed(6)
    is_kept = FastDropout(0.5)(torch.ones(200_000)).view(-1, 4) > 0
    for one in range(4):
        assert abs(is_kept[:, one].double().mean() - 0.5) < 0.01
        for other in range(one):
            assert abs((is_kept[:, one] == is_kept[:, other]).double().mean() - 0.5) < 0.01


@pytest.mark.parametrize("relu", [False, True])
def test_nothing_is_dropped_in_evaluation_or_with_p_0(relu):
    x = torch.randn(7, 5)
    expected = x.relu() if relu else x
    assert torch.equal(FastDropout(0.5, relu=relu).eval()(x), expected)
    assert torch.equal(FastDropout(0.0, relu=relu)(x), expected)


def test_with_relu_only_the_output_is_saved():
    saved = []
    x = torch.randn(64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = FastDropout(0.5, relu=True)(x)
    assert len(saved) == 1  # `saved`: what autograd keeps for the backward pass
    assert torch.equal(saved[0], out)
