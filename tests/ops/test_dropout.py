"""FastDropout on a CPU: the probability, the scale, and one mask for the forward and the backward pass.

Like every new module, FastDropout is in training mode unless `eval` is called.
"""

from collections.abc import Iterator

import pytest
import torch
from native_operators import NATIVE, needs_native

from transformer_xl.ops.dropout import FastDropout
from transformer_xl.ops.native import chosen


@pytest.fixture(params=["torch", NATIVE])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test with each implementation of dropout on a CPU."""
    with chosen(dropout=request.param):
        yield request.param


@pytest.mark.usefixtures("kernel")
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


@pytest.mark.usefixtures("kernel")
def test_elements_that_share_a_random_number_are_independent():
    """One int64 random number determines which of four elements are dropped, or one all of them."""
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


@pytest.mark.usefixtures("kernel")
def test_with_relu_only_the_output_is_saved():
    saved = []
    x = torch.randn(64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = FastDropout(0.5, relu=True)(x)
    assert len(saved) == 1  # `saved`: what autograd keeps for the backward pass
    assert torch.equal(saved[0], out)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("relu", [False, True])
def test_native_dropout_is_the_same_for_all_threads_layouts_and_dtypes(dtype: torch.dtype, *, relu: bool) -> None:
    """The elements that are dropped depend on their index alone, also beyond one task of the operator."""
    module, x = FastDropout(0.3, relu=relu), torch.randn(7, 8191, dtype=torch.float64)
    weight = torch.randn(7, 8191, dtype=torch.float64)

    def run(inputs: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(3)
        inputs = inputs.detach().requires_grad_()
        out = module(inputs)
        out.backward(gradient)
        assert out.dtype == inputs.grad.dtype == inputs.dtype
        return out.detach(), inputs.grad

    expected = run(x, weight)
    is_kept = expected[1].flatten()[: 2 * 16384].view(2, -1) != 0  # of two tasks of the operator
    assert (is_kept[0] != is_kept[1]).double().mean() > 0.2
    tolerance = {torch.float64: 0.0, torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    threads = torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            strided = torch.stack([x, x], -1)[..., 0].to(dtype), torch.stack([weight, weight], -1)[..., 1].to(dtype)
            for inputs in ((x.to(dtype), weight.to(dtype)), strided):
                for actual, exact in zip(run(*inputs), expected, strict=True):
                    torch.testing.assert_close(actual.double(), exact, rtol=tolerance, atol=0)
                    assert torch.equal(actual != 0, exact != 0)
    finally:
        torch.set_num_threads(threads)


@needs_native
def test_native_dropout_keeps_what_is_no_number() -> None:
    torch.manual_seed(1)
    out = FastDropout(0.5, relu=True)(torch.full((1000,), float("nan")))
    assert 400 < out.isnan().sum() < 600


@needs_native
def test_native_dropout_draws_on_the_device_of_its_input() -> None:
    with torch.device("meta"):  # a default device, on which the operator would compute nothing
        out = FastDropout(0.5)(torch.ones(1000, device="cpu"))
    assert set(out.tolist()) == {0.0, 2.0}


def test_all_is_dropped_with_p_1() -> None:
    assert not FastDropout(1.0)(torch.ones(10)).any()
