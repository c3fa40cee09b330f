"""PackedLinear equals torch's Linear, and computes each row by itself.

Only matrices of at least 512 x 512 are packed. Where gradients are computed, products of both libraries are compared
with float64.
"""

import copy
import io

import pytest
import torch
import torch.nn.functional as F

from transformer_xl.ops import linear as linear_module
from transformer_xl.ops.cross_entropy import linear_cross_entropy
from transformer_xl.ops.linear import MatmulLibrary, PackedLinear, fastest_matmul_library, linear, matmul_library, packs

needs_packing = pytest.mark.skipif(not packs(torch.float32), reason="oneDNN packs no weights here")


@pytest.mark.parametrize("shape", [(512,), (1, 512), (2, 7, 512), (0, 512), (40, 11, 512)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_equals_torch_s_linear(shape, bias, dtype, tolerance):
    torch.manual_seed(1)
    linear, x = PackedLinear(512, 513, bias=bias, dtype=dtype), torch.randn(shape, dtype=dtype)
    expected = F.linear(x, linear.weight, linear.bias)
    with torch.inference_mode():
        assert torch.equal(linear(x), expected)
        linear.pack(dtype)
        torch.testing.assert_close(linear(x), expected, rtol=0, atol=tolerance)
    with matmul_library("blas"):
        assert torch.equal(linear(x), expected)  # with gradients: the same function
    assert linear(x).requires_grad
    with torch.no_grad():  # an input with gaps
        torch.testing.assert_close(linear(torch.stack([x, x], -1)[..., 0]), expected, rtol=0, atol=tolerance)


def test_autocast_gives_bfloat16_as_torch_s_linear_does():
    torch.manual_seed(1)
    linear, x = PackedLinear(512, 513), torch.randn(5, 512)
    linear.pack(torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out, expected = linear(x), F.linear(x, linear.weight, linear.bias)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-7)


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(512, 512), (410, 1001)])
def test_a_row_s_result_depends_on_no_other_row_nor_on_threads(dtype, sizes):
    """But for the last digit in bfloat16 with AMX, whose tiles sum in an order that depends on the number of rows."""
    torch.manual_seed(1)
    rounding = 2**-7 if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else 0
    linear, x = PackedLinear(*sizes, dtype=dtype), torch.randn(300, sizes[0], dtype=dtype)
    threads = torch.get_num_threads()
    linear.pack(dtype)
    with torch.inference_mode():
        every = linear(x)
        try:
            for number, first, count in [(1, 0, 1), (1, 299, 1), (2, 7, 5), (2, 100, 64), (1, 33, 200), (3, 0, 300)]:
                torch.set_num_threads(number)
                some = linear(x[first : first + count])
                torch.testing.assert_close(some, every[first : first + count], rtol=rounding, atol=rounding)
        finally:
            torch.set_num_threads(threads)


@needs_packing
def test_packed_weights_stay_out_of_copies_files_and_gradients():
    linear, x = PackedLinear(512, 512), torch.randn(3, 512)
    linear.pack(torch.float32)
    file = io.BytesIO()
    torch.save(linear, file)
    file.seek(0)
    for other in (copy.deepcopy(linear), torch.load(file, weights_only=False)):
        assert other.packed is None
    assert linear(x).requires_grad
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # packed for another dtype
        torch.testing.assert_close(linear(x), F.linear(x, linear.weight, linear.bias), rtol=0, atol=0)


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(512, 67), (67, 512), (210, 190)])
@pytest.mark.parametrize("shape", [(7, 11), (83,), (3, 5, 2), ()])
@pytest.mark.parametrize(("library", "products"), [("onednn", 3), ("mixed", 2)])
def test_gradients_of_onednn_are_those_of_float64(
    sizes: tuple[int, int],
    shape: tuple[int, ...],
    library: MatmulLibrary,
    products: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    bias: bool,
) -> None:
    calls = []
    product = linear_module._product()
    monkeypatch.setattr(linear_module, "_product", lambda: lambda *args: calls.append(1) or product(*args))
    torch.manual_seed(1)
    x, weight = torch.randn(*shape, sizes[0]), torch.randn(sizes[1], sizes[0])
    tensors = [x, weight, *([torch.randn(sizes[1])] if bias else [])]
    dout = torch.randn(*shape, sizes[1])
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    F.linear(*exact).backward(dout.double())
    for strided in (False, True):  # inputs and gradients with gaps
        used = [tensor.clone().requires_grad_() for tensor in tensors]
        with matmul_library(library):
            out = linear(torch.stack([used[0], used[0]], -1)[..., 0] if strided else used[0], *used[1:])
            torch.testing.assert_close(out.double(), F.linear(*exact), rtol=0, atol=2e-4)
            out.backward(torch.stack([dout, dout], -1)[..., 0] if strided else dout)
        for tensor, expected in zip(used, exact, strict=True):
            torch.testing.assert_close(tensor.grad.double(), expected.grad, rtol=0, atol=2e-4)
    assert len(calls) == 2 * products


@needs_packing
def test_onednn_computes_no_gradient_of_a_frozen_weight() -> None:
    x, weight = torch.randn(5, 210, requires_grad=True), torch.randn(190, 210)
    with matmul_library("onednn"):
        linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(5, -1), rtol=1e-4, atol=1e-4)
    assert weight.grad is None


@needs_packing
@pytest.mark.parametrize("max_logits", [2**22, 1000])
def test_cross_entropy_is_the_same_with_all_libraries(max_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.ops.cross_entropy._MAX_LOGITS", max_logits)
    torch.manual_seed(1)
    tensors, target = [torch.randn(23, 130), torch.randn(307, 130), torch.randn(307)], torch.randint(307, (23,))
    results = []
    for library in ("blas", "mixed", "onednn"):
        used = [tensor.clone().requires_grad_() for tensor in tensors]
        with matmul_library(library):
            losses = linear_cross_entropy(*used, target)
        losses.sum().backward()
        results.append([losses.detach(), *(tensor.grad for tensor in used)])
    for blas, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(other, blas, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "expected"),
    [
        ("AuthenticAMD", "26", "avx2 avx512f", "onednn"),
        ("AuthenticAMD", "25", "avx2 avx512f", "mixed"),
        ("AuthenticAMD", "25", "avx2", "blas"),
        ("GenuineIntel", "26", "avx2 avx512f", "blas"),
        ("", "", "", "blas"),
    ],
)
def test_library_is_chosen_by_the_processor(
    vendor: str, family: str, flags: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"vendor_id": vendor, "cpu family": family, "flags": flags}
    monkeypatch.setattr(linear_module, "processor_field", fields.__getitem__)
    monkeypatch.setattr(linear_module, "packs", lambda _: True)
    assert fastest_matmul_library.__wrapped__() == expected


def test_onednn_does_not_replace_torch_s_products_without_gradients() -> None:
    x, weight = torch.randn(5, 210), torch.randn(190, 210, requires_grad=True)
    with torch.no_grad(), matmul_library("onednn"):
        assert torch.equal(linear(x, weight), F.linear(x, weight))


@needs_packing
def test_bias_of_any_layout_and_wrong_shapes_are_as_for_torch_s_linear() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(3, 128), torch.randn(64, 128, requires_grad=True)
    with matmul_library("onednn"):
        for bias in (torch.randn(64, 2)[:, 0], torch.full((1,), 0.5).expand(64), torch.randn(1)):
            expected = F.linear(x, weight, bias)
            torch.testing.assert_close(linear(x, weight, bias), expected, rtol=1e-4, atol=1e-4)
        for wrong in ((x[:, 1:], None), (x, torch.zeros(63))):
            with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|must match|expanded size"):
                linear(wrong[0], weight, wrong[1])
    packed = PackedLinear(512, 512)
    with torch.no_grad():
        packed(torch.zeros(2, 512))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            packed(torch.zeros(2, 511))


@needs_packing
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.func.jvp imports
def test_onednn_leaves_second_derivatives_and_transforms_to_torch() -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(7, 65), torch.randn(67, 65), torch.randn(67)]

    def penalty(library: str) -> list[torch.Tensor]:
        used = [tensor.clone().requires_grad_() for tensor in tensors]
        with matmul_library(library):
            first = torch.autograd.grad(linear(*used).square().sum(), used, create_graph=True)
        return list(torch.autograd.grad(sum(one.square().sum() for one in first), used))

    for onednn, blas in zip(penalty("onednn"), penalty("blas"), strict=True):
        torch.testing.assert_close(onednn, blas, rtol=1e-4, atol=1e-2)
    with matmul_library("onednn"):
        gradients = torch.func.vmap(torch.func.grad(lambda x: linear(x, *tensors[1:]).sum()))(tensors[0])
        torch.testing.assert_close(gradients, tensors[1].sum(0).expand(7, -1), rtol=1e-4, atol=1e-4)
        _, tangent = torch.func.jvp(lambda x: linear(x, *tensors[1:]), (tensors[0],), (tensors[0],))
    torch.testing.assert_close(tangent, tensors[0] @ tensors[1].T, rtol=1e-4, atol=1e-3)


@needs_packing
def test_onednn_keeps_no_input_of_frozen_weights() -> None:
    x, saved = torch.randn(50, 210, requires_grad=True), []
    with (
        matmul_library("onednn"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        linear(x, torch.randn(190, 210))
    assert [tensor.shape for tensor in saved] == [(190, 210)]
