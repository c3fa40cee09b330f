"""Dropout on a CPU: the right share, the right scale, the mask of the forward pass in the backward pass."""

import pytest
import torch

from transformer_xl.model.dropout import FastDropout


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("relu", [False, True])
def test_drops_that_share_and_scales_the_rest(share, relu):
    torch.manual_seed(5)
    x = torch.randn(300, 401, dtype=torch.float64, requires_grad=True)
    out = FastDropout(share, relu=relu)(x)
    given = x.relu() if relu else x
    kept = (out != 0) | (given == 0)
    torch.testing.assert_close(out, torch.where(kept, given / (1 - share), 0.0), rtol=0, atol=1e-14)
    dropped = 1 - (out[x > 0] != 0).double().mean().item()
    assert abs(dropped - share) < 0.01
    weight = torch.randn_like(x)
    (grad,) = torch.autograd.grad((out * weight).sum(), x)
    passed = (out != 0) if relu else kept
    torch.testing.assert_close(grad, torch.where(passed, weight / (1 - share), 0.0), rtol=0, atol=1e-13)


def test_neighbours_are_independent():
    """Four decisions come out of one draw: none may follow from another."""
    torch.manual_seed(6)
    kept = FastDropout(0.5)(torch.ones(200_000)).view(-1, 4) > 0
    for one in range(4):
        assert abs(kept[:, one].double().mean() - 0.5) < 0.01
        for other in range(one):
            assert abs((kept[:, one] == kept[:, other]).double().mean() - 0.5) < 0.01


@pytest.mark.parametrize("relu", [False, True])
def test_nothing_is_dropped_in_evaluation_or_at_share_0(relu):
    x = torch.randn(7, 5)
    wanted = x.relu() if relu else x
    assert torch.equal(FastDropout(0.5, relu=relu).eval()(x), wanted)
    assert torch.equal(FastDropout(0.0, relu=relu)(x), wanted)


def test_follows_from_the_random_state():
    torch.manual_seed(7)
    first, second = (FastDropout(0.5)(torch.ones(100)) for _ in range(2))
    torch.manual_seed(7)
    assert torch.equal(FastDropout(0.5)(torch.ones(100)), first)
    assert not torch.equal(first, second)


def test_with_relu_only_the_output_is_kept():
    kept = []
    x = torch.randn(64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = FastDropout(0.5, relu=True)(x)
    assert len(kept) == 1
    assert torch.equal(kept[0], out)
