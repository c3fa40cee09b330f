"""RMSNorm equals torch's, in value and gradient."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from native_operators import NATIVE, needs_native
from torch._subclasses.fake_tensor import FakeTensorMode

from transformer_xl.model.norm import RMSNorm
from transformer_xl.ops.native import chosen


@pytest.fixture(params=["torch", NATIVE])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test with each implementation of RMSNorm on a CPU."""
    with chosen(norm=request.param):
        yield request.param


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 0, 8), (2, 300, 3, 8)])
def test_equals_torch_s_rms_norm_with_its_gradients(shape):
    torch.manual_seed(1)
    norm, x = RMSNorm(8, eps=1e-5).double(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    torch.nn.init.normal_(norm.weight)
    expected = F.rms_norm(x, (8,), norm.weight, 1e-5)
    out = norm(x)
    dout = torch.randn_like(out)
    gradients = [torch.autograd.grad(one, (x, norm.weight), dout) for one in (out, expected)]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("kernel")
def test_zeros_and_bfloat16():
    norm = RMSNorm(64, eps=1e-5)
    x = torch.cat([torch.zeros(1, 64), torch.randn(3, 64)]).bfloat16().requires_grad_()
    out = norm(x)
    expected = F.rms_norm(x.float(), (64,), norm.weight, 1e-5)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected.bfloat16(), rtol=2**-8, atol=0)
    gradients = [torch.autograd.grad(one.float().square().sum(), (x, norm.weight)) for one in (out, expected)]
    assert gradients[0][0].isfinite().all()
    torch.testing.assert_close(gradients[0][0], gradients[1][0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(gradients[0][1], gradients[1][1], rtol=0.02, atol=0.1)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_results_do_not_depend_on_threads_or_layout(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    norm, threads = RMSNorm(24, eps=1e-5), torch.get_num_threads()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3000, 48, dtype=dtype)[:, ::2].requires_grad_()
    dout = torch.randn(3000, 24, dtype=dtype)
    found = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            for one in (x, x.detach().contiguous().requires_grad_()):
                out = norm(one)
                found.append((out.detach(), *torch.autograd.grad(out, (one, norm.weight), dout)))
    finally:
        torch.set_num_threads(threads)
    with torch.no_grad():
        assert torch.equal(norm(x), found[0][0])
    torch.testing.assert_close(found[1:], [found[0]] * 3, rtol=0, atol=0)


@needs_native
def test_shapes_of_the_gradient_are_known_without_computing() -> None:
    with FakeTensorMode():
        norm, x = RMSNorm(8, eps=1e-5), torch.empty(2, 3, 8, requires_grad=True)
        norm(x).sum().backward()
    assert x.grad is not None
    assert norm.weight.grad is not None
    assert (x.grad.shape, norm.weight.grad.shape) == ((2, 3, 8), (8,))
