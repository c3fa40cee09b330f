"""PackedLinear equals torch's Linear, never multiplies with earlier weights, and computes each row by itself.

Only matrices of at least 512 x 512 are packed.
"""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from transformer_xl.model.linear import PackedLinear, packs

needs_packing = pytest.mark.skipif(not packs(torch.float32), reason="oneDNN packs no weights here")


@pytest.mark.parametrize("shape", [(512,), (1, 512), (2, 7, 512), (0, 512), (40, 11, 512)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_equals_torch_s_linear(shape, bias, dtype, tolerance):
    torch.manual_seed(1)
    linear, x = PackedLinear(512, 513, bias=bias, dtype=dtype), torch.randn(shape, dtype=dtype)
    expected = F.linear(x, linear.weight, linear.bias)
    for _ in range(2):
        with torch.inference_mode():
            torch.testing.assert_close(linear(x), expected, rtol=0, atol=tolerance)
    assert torch.equal(linear(x), expected)  # with gradients: the same function
    assert linear(x).requires_grad
    with torch.no_grad():  # an input with gaps
        torch.testing.assert_close(linear(torch.stack([x, x], -1)[..., 0]), expected, rtol=0, atol=tolerance)


def test_autocast_gives_bfloat16_as_torch_s_linear_does():
    torch.manual_seed(1)
    linear, x = PackedLinear(512, 513), torch.randn(5, 512)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out, expected = linear(x), F.linear(x, linear.weight, linear.bias)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-7)


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(512, 512), (410, 1001)])
def test_a_row_s_result_depends_on_no_other_row_nor_on_threads(dtype, sizes):
    torch.manual_seed(1)
    linear, x = PackedLinear(*sizes, dtype=dtype), torch.randn(300, sizes[0], dtype=dtype)
    threads = torch.get_num_threads()
    with torch.inference_mode():
        every = linear(x)
        try:
            for number, first, count in [(1, 0, 1), (1, 299, 1), (2, 7, 5), (2, 100, 64), (1, 33, 200), (3, 0, 300)]:
                torch.set_num_threads(number)
                assert torch.equal(linear(x[first : first + count]), every[first : first + count])
        finally:
            torch.set_num_threads(threads)


def in_place(linear: PackedLinear) -> None:
    linear.weight.mul_(2)


def of_bias(linear: PackedLinear) -> None:
    linear.bias.add_(1)


def load_state_dict(linear: PackedLinear) -> None:
    linear.load_state_dict({name: 2 * value for name, value in linear.state_dict().items()})


def replace_parameter(linear: PackedLinear) -> None:
    linear.weight = nn.Parameter(2 * linear.weight)


def change_dtype(linear: PackedLinear) -> None:
    linear.double()
    linear.float()
    linear.weight.data = 2 * linear.weight.data


def fused_step(linear: PackedLinear) -> None:
    linear.weight.grad = torch.ones_like(linear.weight)
    torch.optim.AdamW([linear.weight], lr=0.5, fused=True).step()


@needs_packing
@pytest.mark.parametrize("change", [in_place, of_bias, load_state_dict, replace_parameter, change_dtype, fused_step])
def test_changed_weights_are_packed_anew(change):
    torch.manual_seed(1)
    linear, x = PackedLinear(512, 512), torch.randn(3, 512)
    with torch.no_grad():
        before = linear(x)
        assert linear._packed is not None
        change(linear)
        after = linear(x)
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(after, F.linear(x, linear.weight, linear.bias), rtol=1e-4, atol=1e-4)


@needs_packing
def test_other_weights_at_the_same_address_are_packed_anew():
    """torch counts no change through `.data`, and memory that was freed is soon used again."""
    linear, x = PackedLinear(512, 512), torch.randn(3, 512)
    with torch.no_grad():
        linear(x)
        for _ in range(20):
            address, replaced = linear.weight.data_ptr(), -linear.weight.data
            linear.weight.data = torch.empty(0)
            linear.weight.data = replaced.clone()
            after = linear(x)
            torch.testing.assert_close(after, F.linear(x, linear.weight, linear.bias), rtol=1e-4, atol=1e-4)
            if linear.weight.data_ptr() == address:
                return
    pytest.skip("memory was not used again")


@needs_packing
def test_packed_weights_stay_out_of_copies_files_and_training():
    linear, x = PackedLinear(512, 512), torch.randn(3, 512)
    with torch.no_grad():
        expected = linear(x)
    copied = copy.deepcopy(linear)
    file = io.BytesIO()
    torch.save(linear, file)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        assert other._packed is None
        with torch.no_grad():
            assert torch.equal(other(x), expected)
    linear(x)  # with gradients: as in training, which needs the memory
    assert linear._packed is None
