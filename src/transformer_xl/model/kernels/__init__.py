"""Relative attention, several ways: all give the same numbers, and the fastest that fits is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.config import UserError, nearest
from transformer_xl.model.kernels import cpu, reference, sdpa, triton
from transformer_xl.model.kernels.reference import AttentionInputs, AttentionMask, AttentionTerms

__all__ = ["KERNELS", "Attend", "AttentionInputs", "AttentionMask", "AttentionTerms", "Kernel", "check", "choose"]

Attend = Callable[[AttentionInputs, AttentionMask, float], Tensor]
"""Computes attention (B, T, N, H) from its inputs, what is seen, and the dropout on the probabilities."""


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention."""

    name: str
    attend: Attend
    fits: Callable[[torch.device, torch.dtype], bool]
    """Whether it works there."""


_SDPA_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

KERNELS = {
    kernel.name: kernel
    for kernel in (  # fastest first
        Kernel("cpu", cpu.attend, lambda device, dtype: device.type in ("cpu", "meta") and dtype in _SDPA_DTYPES),
        Kernel("triton", triton.attend, triton.fits),
        Kernel("sdpa", sdpa.attend, lambda _, dtype: dtype in _SDPA_DTYPES),
        Kernel("reference", reference.attend, lambda _device, _dtype: True),
    )
}


def choose(name: str, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel of that name, or for `auto` the fastest that fits.

    Raises:
        UserError: there is no kernel of that name (the nearest is offered), or it does not work there.
    """
    check(name)
    if name == "auto":
        return next(kernel for kernel in KERNELS.values() if kernel.fits(device, dtype))
    if name == "triton" and not triton.installed():
        raise UserError("attention kernel 'triton' needs Triton: pip install 'transformer-xl[triton]', or use auto")
    if not KERNELS[name].fits(device, dtype):
        raise UserError(f"attention kernel '{name}' does not work with {dtype} on {device}; use auto")
    return KERNELS[name]


def check(name: str) -> None:
    """Whether there is a kernel of that name, or it is `auto`; whether it works somewhere is not asked.

    Raises:
        UserError: there is none; the nearest is offered.
    """
    names = ["auto", *KERNELS]
    if name not in names:
        raise UserError(f"no attention kernel '{name}'{nearest(name, names)}; there are {', '.join(names)}")
