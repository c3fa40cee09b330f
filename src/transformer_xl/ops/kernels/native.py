"""Relative attention by the native operators (`ops/native`), where they are built.

A block of scores is computed, shifted, normalized, dropped and used while it is in cache, with sums in float32; the
backward pass computes it again. Dropout comes from a counter and one seed from torch's random state, so it depends
neither on the number of threads nor on blocks. Left to `cpu.py`: float16, and inputs of different dtypes.

Shape suffixes: B batch size, T queries, S = M + T keys (M memory slots), P distances, N heads, H head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_xl.ops import native
from transformer_xl.ops.kernels import cpu
from transformer_xl.ops.kernels.reference import AttentionInputs, AttentionMask

_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
_DECODE_QUERIES = 4  # with so few queries and no gradient, keys and values are read where they are stored


def fits(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the operators are built, and work with a device and dtype."""
    return device.type in ("cpu", "meta") and dtype in _DTYPES and native.operators() is not None


def attend(inputs: AttentionInputs, mask: AttentionMask, dropout: float) -> Tensor:
    """Compute relative attention; returns (B, T, N, H)."""
    tensors, dtype = inputs.tensors(), inputs.q_BTNH.dtype
    if dtype not in _DTYPES or any(tensor.dtype != dtype for tensor in tensors):
        return cpu.attend(inputs, mask, dropout)  # under another autocast than that to bfloat16
    masks = (mask.valid_B, mask.first_key_BT, mask.stop_key_BT)
    *first_keys, stop_key_BT = (None if tensor is None else tensor.contiguous() for tensor in masks)
    limits = (inputs.sinks(), *first_keys)
    operators, is_causal = torch.ops.transformer_xl_native, not mask.num_later and stop_key_BT is None
    needs_blocks = torch.is_grad_enabled() or dropout or not is_causal  # decoding has no keys after the query
    if inputs.q_BTNH.shape[1] <= _DECODE_QUERIES and not needs_blocks and _is_stored_in_order(inputs):
        return operators.attention_decode(tensors, *limits, mask.num_clamped)
    seed = torch.randint(2**62, (), device=inputs.q_BTNH.device) if dropout else None
    return operators.attention(tensors, *limits, stop_key_BT, seed, dropout, mask.num_clamped, mask.num_later)[0]


def _is_stored_in_order(inputs: AttentionInputs) -> bool:
    """Return whether keys and position keys are stored by rows or by columns, and values by rows."""
    keys = (inputs.k_BSNH, inputs.position_key_PNH)
    return inputs.v_BSNH.stride(-1) == 1 and all(1 in (tensor.stride(-1), tensor.stride(-3)) for tensor in keys)
