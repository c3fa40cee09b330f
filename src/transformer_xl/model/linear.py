"""A linear layer that multiplies with packed weights on a CPU where no gradients are computed.

oneDNN, torch's CPU library, packs a matrix once into the layout in which its products read it. `F.linear` on x86 gives
float32 to MKL instead, and packs bfloat16 in each call; `benchmarks/linear.py` compares both. A row of a result
does not depend on the other rows, nor on the number of threads. For training nothing is packed, as weights change in
each step.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from transformer_xl.model.weights_version import count_optimizer_steps

_MIN_WEIGHTS = 2**18  # below, the product takes less time than is saved
_ROWS = 512  # for which oneDNN chooses the layout; of 1, 16, 64 and 512 it was fastest for nearly all numbers of rows


@dataclass(frozen=True)
class _Packed:
    """Packed weights, and what they were made from."""

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    source: Sequence[Tensor]
    """The parameters themselves: others may get their addresses later."""
    versions: list[tuple[int, int]]
    """Of each parameter, the number of changes that torch has counted, and its address."""
    memory: list[StorageWeakRef]
    """The memory of the parameters: once it is freed, other weights may get the same address."""


class PackedLinear(nn.Linear):
    """torch's Linear, which without gradients multiplies with weights that are packed, on an x86 processor."""

    _packed: _Packed | None = None

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return (..., O) for an input of shape (..., I)."""
        if self.in_features * self.out_features < _MIN_WEIGHTS or torch.compiler.is_compiling():
            return super().forward(input)
        if torch.is_grad_enabled():
            self.unpack()  # the weights may change next
            return super().forward(input)
        dtype = product_dtype(input.dtype)
        packed = self._packed
        # not self.weight, which takes Python longer
        source = [parameter for parameter in self._parameters.values() if parameter is not None]
        if (
            packed is None
            or packed.dtype != dtype
            or not all(map(is_, source, packed.source))
            or [(parameter._version, parameter.data_ptr()) for parameter in source] != packed.versions
            or any(memory.expired() for memory in packed.memory)
            or type(input) is not Tensor
            or not input.is_cpu
        ):
            if not self._can_pack(input, dtype):
                return super().forward(input)
            packed = self._packed = self._pack(source, dtype)
        return _multiply()(input.to(dtype), packed.weight, packed.bias, "none", [], "")

    def unpack(self) -> None:
        """Drop the packed weights; the next product without gradients packs them anew."""
        self._packed = None

    def _can_pack(self, input: Tensor, dtype: torch.dtype) -> bool:
        weight = self.weight
        return (
            type(input) is Tensor
            and type(weight) is nn.Parameter
            and input.is_cpu
            and weight.is_cpu
            and (dtype == weight.dtype or torch.is_autocast_enabled("cpu"))
            and input.numel() > 0
            and not weight.is_inference()  # torch does not count its changes
            and packs(dtype)
        )

    def _pack(self, source: Sequence[Tensor], dtype: torch.dtype) -> _Packed:
        count_optimizer_steps()
        weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach().to(dtype).contiguous(), _ROWS)
        bias = None if self.bias is None else self.bias.detach().to(dtype, copy=True)
        versions = [(parameter._version, parameter.data_ptr()) for parameter in source]
        memory = [StorageWeakRef(parameter.untyped_storage()) for parameter in source]
        return _Packed(weight, bias, dtype, source, versions, memory)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}


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
def _multiply() -> Callable[..., Tensor]:
    """Return oneDNN's product, found once, as to find it takes as long as a small product."""
    return torch.ops.mkldnn._linear_pointwise.default
