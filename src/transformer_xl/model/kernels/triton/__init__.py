"""Relative attention as fused Triton kernels, forward and backward, for CUDA: no T x S matrix is ever stored.

Begin with `blocks.py`, which says how position keys get to stand over keys inside a tile, then `forward.py`. Triton
itself is imported only when a kernel runs, so this can be imported where it is not installed.

Letters: B rows, T queries, S = M + T keys, P distances, N heads, H head width.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from transformer_xl.model.kernels.reference import AttentionInputs, AttentionMask, written_out
from transformer_xl.model.kernels.triton.ops import relative_attention

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_CAPABILITY = 8  # Ampere: the first with bfloat16 and tf32, and the oldest that Triton promises to work on


def installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def fits(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels work there: on CUDA (compute capability 8.0 or more, or no GPU to ask) with Triton.

    On a CPU they do only where Triton interprets them; on torch's meta device operations can be counted.
    """
    if not installed():
        return False
    if device.type == "cpu":  # the interpreter is for tests, and knows float64 too
        return os.environ.get("TRITON_INTERPRET") == "1" and dtype in (*_DTYPES, torch.float64)
    if device.type not in ("cuda", "meta") or torch.version.hip is not None or dtype not in _DTYPES:
        return False
    if device.type == "meta" or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_properties(device).major >= _LEAST_CAPABILITY


def attend(inputs: AttentionInputs, mask: AttentionMask, dropout: float) -> Tensor:
    """Compute relative attention; returns (B, T, N, H).

    The backward pass keeps the inputs, the output and one number for each query and head. Which probabilities are
    dropped follows from a seed drawn here. Gradients of position keys are summed in a fixed order only if
    `torch.use_deterministic_algorithms` asks for it.
    """
    inputs, dtype = written_out(inputs, mask), inputs.q_BTNH.dtype
    given = [
        inputs.q_BTNH,
        inputs.k_BSNH.to(dtype),
        inputs.v_BSNH.to(dtype),
        inputs.position_key_PNH.to(dtype),
        inputs.content_bias_NH.to(dtype),
        inputs.position_bias_NH.to(dtype),
    ]
    seed = torch.randint(2**62, (1,), device=inputs.q_BTNH.device) if dropout else None
    return relative_attention(given, mask.valid_B, seed, dropout)[0]
