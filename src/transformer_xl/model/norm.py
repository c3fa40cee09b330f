"""RMSNorm, with a gradient of few passes over the tensor.

torch computes RMSNorm on a CPU from single operators, and their gradients one by one. The native operators need one
pass each way. Where they are not, it is written as one function, with only the input and a number for each row kept for
the backward pass; then both passes together take half of torch's time.

Shape suffixes: X any number of rows, H width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from transformer_xl.ops import native
from transformer_xl.ops.linear import is_transformed


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, computed in the dtype of its weight and returned in that of its input.

    Under autocast the first is float32 and the second bfloat16.
    """

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape and dtype of x, whose last dimension is normalized."""
        # torch has a kernel, or makes one, or knows its own operations alone
        if x.device.type != "cpu" or torch.compiler.is_compiling() or is_transformed():
            return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(x.dtype)
        is_native = (
            self.weight.dtype == torch.promote_types(x.dtype, torch.float32)
            and x.dtype in native.DTYPES
            and native.takes("norm")
        )
        normalized = native.operators().rms_norm if is_native else _normalized
        if torch.is_grad_enabled():
            return _RMSNormFunction.apply(x, self.weight, self.eps, normalized)
        return normalized(x, self.weight, self.eps)[0]


def _normalized(x_XH: Tensor, weight_H: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    """Return the result, and the factor (X, 1) of each row."""
    float_XH = x_XH.to(weight_H.dtype)
    norm_X1 = torch.linalg.vector_norm(float_XH, dim=-1, keepdim=True)
    scale_X1 = norm_X1.square_().div_(x_XH.shape[-1]).add_(eps).rsqrt_()
    return (float_XH * scale_X1).mul_(weight_H).to(x_XH.dtype), scale_X1


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x_XH: Tensor, weight_H: Tensor, eps: float, normalized: Any) -> Tensor:  # pyrefly: ignore[bad-override]
        out_XH, scale = normalized(x_XH, weight_H, eps)
        ctx.save_for_backward(x_XH, scale, weight_H)
        ctx.is_native = normalized is not _normalized
        return out_XH

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, dout_XH: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyrefly: ignore[bad-override]
        x_XH, scale_X1, weight_H = ctx.saved_tensors
        if ctx.is_native:
            return *native.operators().rms_norm_backward(dout_XH, x_XH, weight_H, scale_X1), None, None
        dout_XH = dout_XH.to(weight_H.dtype)
        normalized_XH = x_XH.to(weight_H.dtype) * scale_X1
        dweight_H = (dout_XH * normalized_XH).reshape(-1, len(weight_H)).sum(0)
        dnormalized_XH = dout_XH * weight_H
        inner_X1 = (dnormalized_XH * normalized_XH).mean(-1, keepdim=True)
        dx_XH = dnormalized_XH.sub_(normalized_XH.mul_(inner_X1)).mul_(scale_X1)
        return dx_XH.to(x_XH.dtype), dweight_H, None, None
