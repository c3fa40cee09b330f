"""Linear layers on a CPU, multiplied by the library that is fastest there.

torch has two libraries for float32 on x86: MKL, which `F.linear` calls, and oneDNN. `benchmarks/linear.py` compares
both. bfloat16 is always oneDNN's.

- With gradients, `linear` takes oneDNN on AMD processors from Zen 5 on, whose units of 512 bits MKL does not use; on
  Zen 4 too, but MKL for the gradients of smaller weights; and MKL elsewhere. Nothing is packed, as weights change in
  each step.
- For inference, `PackedLinear.pack` packs a matrix once into the layout in which oneDNN's products read it. A row of a
  result does not depend on the number of threads, and for inputs of at most 1,024 numbers not on the other rows (a row
  of 1,536 numbers alone is summed in another order, and so are rows in bfloat16 on a processor with AMX). Other
  products, as that of the softmax, stay with torch.

Shape suffixes: X any dimensions, R all of them as rows, I input width, O output width.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.device import processor_field

_MIN_WEIGHTS = 2**18  # below, the product takes less time than is saved
_MIN_ONEDNN = 2**12  # weights below which `linear` stays with torch: calling oneDNN takes longer than is saved
_MIN_ONEDNN_GRADIENT = {"onednn": 2**15, "mixed": 2**20}  # the same for the gradient of the weights
_ZEN4_FAMILY, _ZEN5_FAMILY = 25, 26
_PLAIN = (Tensor, nn.Parameter)  # not subclasses, such as quantized or sharded tensors
_ROWS = 512  # for which oneDNN chooses the layout; of 1, 16, 64 and 512 it was fastest for nearly all numbers of rows


MatmulLibrary = Literal["blas", "mixed", "onednn"]
"""What multiplies float32 matrices where gradients are computed: torch's BLAS (MKL on x86), oneDNN, or oneDNN but for
the gradients of weights that are not large."""

_library = ContextVar[MatmulLibrary | None]("library", default=None)


@cache
def fastest_matmul_library() -> MatmulLibrary:
    """Return the faster library for training in float32 on this processor, from a fixed table, never by timing."""
    family = processor_field("cpu family")
    if processor_field("vendor_id") != "AuthenticAMD" or not family.isdecimal() or not packs(torch.float32):
        return "blas"
    is_zen4 = int(family) == _ZEN4_FAMILY and "avx512f" in processor_field("flags").split()  # Zen 3 has no AVX512
    return "onednn" if int(family) >= _ZEN5_FAMILY else "mixed" if is_zen4 else "blas"


@contextmanager
def matmul_library(library: MatmulLibrary) -> Iterator[None]:
    """Within this context, `linear` multiplies with the named library, if torch has it, in place of the fastest."""
    token = _library.set(library)
    try:
        yield
    finally:
        _library.reset(token)


def takes_onednn(x_XI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> bool:
    """Return whether oneDNN multiplies an input and weights of this kind where gradients are computed."""
    return (
        x_XI.dtype == weight_OI.dtype == torch.float32
        and weight_OI.numel() >= _MIN_ONEDNN
        and x_XI.numel() > 0
        and x_XI.is_cpu
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and type(x_XI) in _PLAIN
        and type(weight_OI) in _PLAIN
        # wrong shapes are left to torch, which says what is wrong
        and x_XI.shape[-1] == weight_OI.shape[1]
        and (bias_O is None or (bias_O.shape == weight_OI.shape[:1] and bias_O.dtype == torch.float32))
        and (_library.get() or fastest_matmul_library()) != "blas"
        and packs(torch.float32)
        and bool(torch.backends.mkldnn.enabled)
        and not is_transformed()
    )


def is_transformed() -> bool:
    """Return whether torch.func or forward-mode differentiation is at work, for which operators here have no rules."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def linear(x_XI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, as `F.linear` does; where gradients are computed, by the fastest library."""
    if takes_onednn(x_XI, weight_OI, bias_O):
        return _OneDNNLinear.apply(x_XI, weight_OI, bias_O)
    return F.linear(x_XI, weight_OI, bias_O)


def multiply(x_XI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias by oneDNN, without a gradient; weights may be the transpose of a matrix."""
    # the operator takes no notice of a bias's strides
    return _product()(x_XI, weight_OI, None if bias_O is None else bias_O.contiguous(), "none", [], "")


def multiply_weight_gradient(x_RI: Tensor, dout_RO: Tensor) -> Tensor:
    """Return dout.T @ x, (O, I), by oneDNN, which wants the narrower operand first; by torch where few weights."""
    input_width, output_width = x_RI.shape[1], dout_RO.shape[1]
    library = _library.get() or fastest_matmul_library()
    if library == "blas" or input_width * output_width < _MIN_ONEDNN_GRADIENT[library]:
        return dout_RO.t() @ x_RI
    if output_width <= input_width:
        return multiply(dout_RO.t(), x_RI.t())
    return multiply(x_RI.t(), dout_RO.t()).t()


class _OneDNNLinear(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x_XI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:  # pyrefly: ignore[bad-override]
        needs_dx, needs_dweight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x_XI if needs_dweight else None, weight_OI if needs_dx else None)
        return multiply(x_XI, weight_OI, bias_O)

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_XI, weight_OI = ctx.saved_tensors
        dout_XO = grad_outputs[0]
        dout_RO = dout_XO.reshape(-1, dout_XO.shape[-1])
        dx_XI = dweight_OI = None
        is_differentiated = torch.is_grad_enabled()  # the gradient of this gradient is wanted, which oneDNN's has not
        if weight_OI is not None:
            dx_XI = dout_XO @ weight_OI if is_differentiated else multiply(dout_XO, weight_OI.t())
        if x_XI is not None:
            x_RI = x_XI.reshape(-1, x_XI.shape[-1])
            dweight_OI = dout_RO.t() @ x_RI if is_differentiated else multiply_weight_gradient(x_RI, dout_RO)
        return dx_XI, dweight_OI, dout_RO.sum(0) if ctx.needs_input_grad[2] else None


@dataclass(frozen=True)
class PackedWeights:
    """A matrix in the layout in which oneDNN's products read it, with its bias."""

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype


class PackedLinear(nn.Linear):
    """torch's Linear, whose weights can be packed for inference: they must not change as long as they are."""

    packed: PackedWeights | None = None

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return (..., O) for an input of shape (..., I)."""
        packed = self.packed
        if packed is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return linear(input, self.weight, self.bias)
        if product_dtype(input.dtype) != packed.dtype or not input.numel():
            return super().forward(input)
        return multiply(input.to(packed.dtype), packed.weight, packed.bias)

    def pack(self, dtype: torch.dtype) -> None:
        """Pack the weights as they are now for products of this dtype, if that makes them faster.

        Args:
            dtype: of the products: that of the weights, or that of autocast.
        """
        weight = self.weight
        is_plain = type(weight) is nn.Parameter and type(weight.data) is Tensor  # neither sharded nor quantized
        if not is_plain or not weight.is_cpu or weight.numel() < _MIN_WEIGHTS or not packs(dtype):
            return
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype).contiguous(), _ROWS)
        bias = None if self.bias is None else self.bias.detach().to(dtype, copy=True)
        self.packed = PackedWeights(packed, bias, dtype)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "packed"}


@contextmanager
def packed_weights(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within this context, in which its weights must not change, a module multiplies with packed weights.

    Args:
        module: a model that is trained, for validation.
        dtype: of the products.
    """
    linears = [part for part in module.modules() if isinstance(part, PackedLinear)]
    for part in linears:
        part.pack(dtype)
    try:
        yield
    finally:
        for part in linears:
            part.packed = None


class Int8Linear(nn.Linear):
    """torch's Linear with the 8-bit weights of torchao, whose products ignore the dtype of autocast."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return (..., O) for an input of shape (..., I)."""
        return super().forward(input).to(product_dtype(input.dtype, input.device.type))


def product_dtype(dtype: torch.dtype, device_type: str = "cpu") -> torch.dtype:
    """Return the dtype of products of inputs of this dtype, with autocast or not."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else dtype


@cache
def packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs weights of this dtype here."""
    if platform.machine().lower() not in ("x86_64", "amd64") or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    names = ("_linear_pointwise", "_reorder_linear_weight")  # private: another version of torch may lack them
    return dtype in (torch.float32, torch.bfloat16) and all(hasattr(torch.ops.mkldnn, name) for name in names)


@cache
def _product() -> Callable[..., Tensor]:
    """Return oneDNN's product, found once, as to find it takes as long as a small product."""
    return torch.ops.mkldnn._linear_pointwise.default
