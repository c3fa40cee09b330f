"""The parallel linear recurrence c_t = keep_t c_(t-1) + added_t and its gradient equal those of a loop.

Shape suffixes: B batch size, T steps, D width.
"""

import pytest
import torch
from tensors import assert_same_tensors, copied_tensors, named_gradients

from transformer_xl.baselines.recurrent import linear_recurrence


def by_loop(keep_BTD, added_BTD, first_BD):
    states = [first_BD]
    for step in range(keep_BTD.shape[1]):
        states.append(keep_BTD[:, step] * states[-1] + added_BTD[:, step])
    return torch.stack(states[1:], dim=1)


@pytest.mark.parametrize("length", [1, 2, 5, 8, 37])
def test_recurrence_equals_loop(length):
    torch.manual_seed(0)
    shapes = (2, length, 5), (2, length, 5), (2, 5)
    inputs = [torch.rand(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    before = copied_tensors(inputs)
    states_BTD, expected_BTD = linear_recurrence(*inputs), by_loop(*inputs)
    torch.testing.assert_close(states_BTD, expected_BTD, rtol=0, atol=1e-12)
    weight_BTD = torch.randn(expected_BTD.shape, dtype=torch.float64)
    grads = (named_gradients((result * weight_BTD).sum(), inputs) for result in (states_BTD, expected_BTD))
    assert_same_tensors(*grads, atol=1e-12)
    assert_same_tensors(inputs, before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.func.jvp imports
def test_transforms_of_torch_func():
    torch.manual_seed(0)
    inputs = [torch.rand(shape, dtype=torch.float64) for shape in ((2, 5, 3), (2, 5, 3), (2, 3))]
    directions = [torch.rand_like(one) for one in inputs]

    def total(function):
        return lambda *given: function(*given).sin().sum()

    for transform in (
        lambda function: torch.func.grad(total(function), argnums=(0, 1, 2))(*inputs),
        lambda function: torch.func.jvp(total(function), tuple(inputs), tuple(directions)),
        lambda function: torch.func.vmap(lambda *rows: function(*(row[None] for row in rows)))(*inputs),
    ):
        actual, expected = transform(linear_recurrence), transform(by_loop)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_results_are_finite_for_gates_of_0_and_1_over_a_long_text():
    """A computation with logarithms of the gates, or with division by them, would give infinities."""
    torch.manual_seed(0)
    keep_BTD = torch.rand(1, 5003, 3).sub(0.3).clamp(0, 1)
    # element 1 forgets everything in 3,900 steps, element 2 keeps everything
    keep_BTD[:, 100:4000, 1], keep_BTD[:, 100:4000, 2] = 0, 1
    keep_BTD.requires_grad_()
    added_BTD = torch.randn(1, 5003, 3) * 0.01
    states_BTD = linear_recurrence(keep_BTD, added_BTD, torch.ones(1, 3))
    expected_BTD = by_loop(keep_BTD.double(), added_BTD.double(), torch.ones(1, 3).double())
    torch.testing.assert_close(states_BTD.double(), expected_BTD, rtol=0, atol=2e-5)
    states_BTD.sum().backward()
    assert keep_BTD.grad.isfinite().all()
