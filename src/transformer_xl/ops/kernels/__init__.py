"""The kernels (implementations) of relative attention: all compute the same function, and `choose` selects one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.config import UserError, nearest
from transformer_xl.config.extras import install_command
from transformer_xl.ops.kernels import cpu, native, reference, sdpa, triton
from transformer_xl.ops.kernels.reference import AttentionInputs, AttentionMask, AttentionTerms
from transformer_xl.ops.linear import is_transformed
from transformer_xl.ops.native import operators, status

__all__ = ["KERNELS", "Attend", "AttentionInputs", "AttentionMask", "AttentionTerms", "Kernel", "check", "choose"]

Attend = Callable[[AttentionInputs, AttentionMask, float], Tensor]
"""Computes attention (B, T, N, H) from its inputs, the mask, and the dropout rate of the attention probabilities."""


@dataclass(frozen=True)
class Kernel:
    """An implementation of relative attention."""

    name: str
    attend: Attend
    fits: Callable[[torch.device, torch.dtype], bool]
    """Whether the kernel works with a device and dtype (on torch's meta device, only shapes are computed)."""


# those of torch's scaled-dot-product attention, and also those of the CPU kernel
_SDPA_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

KERNELS = {
    kernel.name: kernel
    for kernel in (  # `auto` uses the first that works with the device and dtype, so faster kernels come first
        Kernel("native", native.attend, native.fits),
        Kernel("cpu", cpu.attend, lambda device, dtype: device.type in ("cpu", "meta") and dtype in _SDPA_DTYPES),
        Kernel("triton", triton.attend, triton.fits),
        Kernel("sdpa", sdpa.attend, lambda _, dtype: dtype in _SDPA_DTYPES),
        Kernel("reference", reference.attend, lambda _device, _dtype: True),
    )
}


def choose(name: str, device: torch.device, dtype: torch.dtype) -> Kernel:
    """Return the kernel of that name, or for `auto` the fastest for the device and dtype.

    Under torch.func and forward-mode differentiation, for which only torch's own operations have rules, it is
    `reference` in place of `native`, `cpu` and `triton`.

    Raises:
        UserError: there is no kernel of that name, or it does not work with the device and dtype.
    """
    check(name)
    if is_transformed() and name != "sdpa":
        return KERNELS["reference"]
    if name == "auto":
        return next(kernel for kernel in KERNELS.values() if _is_fastest(kernel, device, dtype))
    if name == "triton" and not triton.installed():
        raise UserError(f"attention kernel 'triton' needs Triton: {install_command('triton')}, or use auto")
    if name == "native" and operators() is None:
        raise UserError(f"attention kernel 'native' is not available ({status().text}), or use auto")
    if not KERNELS[name].fits(device, dtype):
        raise UserError(f"attention kernel '{name}' does not work with {dtype} on {device}; use auto")
    return KERNELS[name]


def _is_fastest(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `auto` takes the kernel, if none of those before it."""
    # tensor cores round float32, so triton's exact products take four times as long as those of sdpa
    is_slow = kernel.name == "triton" and dtype == torch.float32 and device.type == "cuda"
    return not is_slow and kernel.fits(device, dtype)


def check(name: str) -> None:
    """Check that a kernel's name exists, or is `auto`; whether the kernel works depends on the device.

    Raises:
        UserError: there is no kernel of that name.
    """
    names = ["auto", *KERNELS]
    if name not in names:
        raise UserError(f"no attention kernel '{name}'{nearest(name, names)}; choose one of {', '.join(names)}")
