"""Arguments of the Triton kernels: tensors with their strides, sizes, and the configuration of each kernel.

A tile is W queries, W keys or W distances. It is square because the W distances that two neighbouring tiles of keys
share are then exactly one tile of distances (see `blocks.py`).

Shape suffixes: B rows, T queries, S keys, P distances, N heads, H head width.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton runs its kernels in Python, on the CPU; as Triton does, decided when the kernels are imported."""


class Rows(NamedTuple):
    """A tensor (B, rows, N, H), or (rows, N, H) with stride_b 0; heads are contiguous inside."""

    pointer: Tensor
    count_plus_one: int
    """One more than there are rows: of a 1 Triton makes a constant, which 3.6 loses inside tuples."""
    stride_b: int
    stride_row: int
    stride_n: int


class Inputs(NamedTuple):
    """Queries, keys, values, position keys (farthest first), and the two biases (N, H)."""

    q: Rows
    k: Rows
    v: Rows
    r: Rows
    content_bias: Tensor
    position_bias: Tensor


class ValidAndSeed(NamedTuple):
    """Valid memory slots of each batch row (none: all), and the seed of dropout (none: no dropout)."""

    valid: Tensor | None
    seed: Tensor | None


class Sizes(NamedTuple):
    """Batch rows, queries, keys, distances, heads; groups of batch rows that are summed apart."""

    B: int
    T: int
    S: int
    P: int
    N: int
    groups: int


class KernelConfig(NamedTuple):
    """The compile-time constants of a kernel."""

    width: int
    """Head width H."""
    padded: int
    """H up to the next power of two, 16 at least."""
    tile: int
    """W."""
    scale: float
    """1 / sqrt(H)."""
    scale_log2: float
    """1 / sqrt(H), for exponents of two in place of e."""
    dropout: float
    threshold: int
    """Of 2^31 draws, how many are dropped."""
    input_precision: str
    """Precision of float32 products: ieee or tf32."""
    acc_dtype: tl.dtype
    """Dtype of scores, sums and statistics."""
    interpreted: bool
    atomic: bool
    """Whether gradients of position keys are added atomically, in whatever order the programs come."""


@dataclass(frozen=True)
class LaunchConfig:
    """How one kernel is compiled and launched."""

    kernel: KernelConfig
    num_warps: int
    num_stages: int


def rows_of(tensor: Tensor) -> Rows:
    """Return (B, rows, N, H) or (rows, N, H) as the kernels take it; copied only if heads are not contiguous."""
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    stride_b = tensor.stride(0) if tensor.dim() == 4 else 0
    return Rows(tensor, tensor.shape[-3] + 1, stride_b, tensor.stride(-3), tensor.stride(-2))


def choose_config(
    kernel: str,
    width: int,
    dtype: torch.dtype,
    dropout: float,
    *,
    atomic: bool = False,
    device: torch.device | None = None,
) -> LaunchConfig:
    """Return how a kernel is compiled and launched.

    Args:
        kernel: `forward`, `queries`, `keys` or `distances`.
        width: H.
        dtype: of queries, keys and values.
        dropout: probability that dropout zeroes an attention probability.
        atomic: add the gradients of position keys atomically (`queries` only).
        device: where it will run; none: the current one.
    """
    padded = max(16, 1 << (width - 1).bit_length())
    tile, num_warps, num_stages = _tile_and_warps(kernel, padded, dtype, device)
    return LaunchConfig(
        KernelConfig(
            width=width,
            padded=padded,
            tile=tile,
            scale=1 / math.sqrt(width),
            scale_log2=math.log2(math.e) / math.sqrt(width),
            dropout=dropout,
            threshold=int(dropout * 2**31),
            input_precision="tf32" if dtype == torch.float32 and _rounds_to_tf32() else "ieee",
            acc_dtype=tl.float64 if dtype == torch.float64 else tl.float32,
            interpreted=INTERPRETED,
            atomic=atomic,
        ),
        num_warps,
        num_stages,
    )


def _tile_and_warps(kernel: str, padded: int, dtype: torch.dtype, device: torch.device | None) -> tuple[int, int, int]:
    """Tile valid_and_seed, warps and pipeline stages: the largest tiles whose numbers stay in registers, or nearly.

    Chosen by what the compiler says of registers, spills and shared memory for compute capability 9.0.
    """
    if INTERPRETED:
        return 16, 1, 1
    if dtype == torch.float32 or padded > 128:
        return (32, 8, 1) if padded <= 64 else (16, 8, 1)
    if not _much_shared_memory(device):
        return 32, 8, 1
    if kernel == "forward" and padded <= 64:
        return 64, 4, 2
    return 64, 8, (1 if kernel == "distances" and padded > 64 else 2)


def _rounds_to_tf32() -> bool:
    """Whether torch may round the factors of float32 products to 10 bits of mantissa."""
    # not `allow_tf32`: reading that fails where the user chose by the newer name
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _much_shared_memory(device: torch.device | None) -> bool:
    """Whether a program may use 227 KiB of shared memory, as on Hopper; also where there is no GPU to ask."""
    return not torch.cuda.is_available() or torch.cuda.get_device_properties(device).major in (9, 10)


def launch(kernel: Any, programs: int, config: LaunchConfig, *arguments: Any) -> None:
    """Run a kernel in that many programs."""
    kernel[(programs,)](*arguments, config.kernel, num_warps=config.num_warps, num_stages=config.num_stages)
