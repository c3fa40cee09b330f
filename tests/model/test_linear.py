"""FewRowsLinear equals torch's Linear, and multiplies few rows with one part of the weights for each thread.

The layers have 13 inputs and 10 outputs, which can be divided among 1, 2 or 5 threads. Few rows are 32 at most, only
without gradient, and not under autocast.
"""

import pytest
import torch
import torch.nn.functional as F

from transformer_xl.model.linear import FewRowsLinear


@pytest.mark.parametrize("shape", [(13,), (2, 7, 13), (0, 13), (5, 11, 13)])
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_torch_s_linear(monkeypatch, shape, threads, bias):
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    torch.manual_seed(1)
    linear, x = FewRowsLinear(13, 10, bias=bias).double(), torch.randn(shape, dtype=torch.float64)
    with torch.inference_mode():
        out = linear(x)
    torch.testing.assert_close(out, F.linear(x, linear.weight, linear.bias), rtol=0, atol=1e-12)
    assert linear(x).requires_grad  # outside inference mode


def test_only_few_rows_without_gradient_or_autocast_are_multiplied_in_parts(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    products = []
    monkeypatch.setattr("torch.bmm", lambda a, b, bmm=torch.bmm: products.append(a.shape) or bmm(a, b))
    linear = FewRowsLinear(13, 10)
    with torch.inference_mode():
        linear(torch.randn(4, 13))
        linear(torch.randn(100, 13))  # too many rows
        with torch.autocast("cpu", torch.bfloat16):
            linear(torch.randn(4, 13))
    linear(torch.randn(4, 13))  # with gradient
    assert products == [(2, 4, 13)]  # of the first call only: two parts, one for each thread
