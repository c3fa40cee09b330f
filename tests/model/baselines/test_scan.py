"""The recurrence without a loop equals the loop, and its gradient the loop's."""

import pytest
import torch
from tensors import assert_same_tensors, copied_tensors, named_gradients

from transformer_xl.model.baselines.scan import linear_recurrence


def by_loop(keep_BTD, added_BTD, first_BD):
    states = [first_BD]
    for place in range(keep_BTD.shape[1]):
        states.append(keep_BTD[:, place] * states[-1] + added_BTD[:, place])
    return torch.stack(states[1:], dim=1)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 13, 37])
def test_equals_the_loop(length):
    torch.manual_seed(0)
    given = [
        torch.rand(2, length, 5, dtype=torch.float64),
        torch.randn(2, length, 5, dtype=torch.float64),
        torch.randn(2, 5, dtype=torch.float64),
    ]
    for tensor in given:
        tensor.requires_grad_()
    kept = copied_tensors(given)
    found_BTD, wanted_BTD = linear_recurrence(*given), by_loop(*given)
    torch.testing.assert_close(found_BTD, wanted_BTD, rtol=0, atol=1e-12)
    weight_BTD = torch.randn(wanted_BTD.shape, dtype=torch.float64)
    grads = (named_gradients((states * weight_BTD).sum(), given) for states in (found_BTD, wanted_BTD))
    assert_same_tensors(*grads, atol=1e-12)
    assert_same_tensors(given, kept)


def test_gates_that_are_shut_or_open_do_no_harm_over_a_long_text():
    """In logarithms, or divided by what is kept, these would be infinities."""
    torch.manual_seed(0)
    keep_BTD = torch.rand(1, 5003, 3).sub(0.3).clamp(0, 1)
    keep_BTD[:, 100:4000, 1], keep_BTD[:, 100:4000, 2] = 0, 1
    keep_BTD.requires_grad_()
    added_BTD = torch.randn(1, 5003, 3) * 0.01
    found_BTD = linear_recurrence(keep_BTD, added_BTD, torch.ones(1, 3))
    wanted_BTD = by_loop(keep_BTD.double(), added_BTD.double(), torch.ones(1, 3).double())
    torch.testing.assert_close(found_BTD.double(), wanted_BTD, rtol=0, atol=2e-5)
    found_BTD.sum().backward()
    assert keep_BTD.grad is not None
    assert keep_BTD.grad.isfinite().all()
