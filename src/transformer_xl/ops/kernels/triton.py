"""Relative attention as fused Triton kernels for CUDA (`triton_kernels.py`), which store no T x S matrix.

Forward and backward pass are custom operators of torch, so that autograd, autocast and torch.compile can handle them.
Both take the tensors of `AttentionInputs` as a list, in that order. Triton is imported only when a kernel runs, so this
file can be imported where Triton is not installed.

Shape suffixes: B batch size, T queries, S = M + T keys (M memory slots), P distances between query and key (once
`expand_distances` was applied, all S of them), N heads, H head width, G groups of batch rows, Y tiles of queries.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from transformer_xl.ops import native
from transformer_xl.ops.kernels import sdpa
from transformer_xl.ops.kernels.reference import AttentionInputs, AttentionMask, expand_distances

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_CAPABILITY = 8  # Ampere: the first with bfloat16 and tf32, and the oldest that Triton supports
# programs (instances) of `distances_kernel`: about as many as a large GPU runs at once; with more, each would only have
# fewer batch rows to sum over, and more partial sums would have to be added
_MAX_PROGRAMS = 512


def installed() -> bool:
    """Return whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def fits(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels work with a device and dtype.

    They need Triton, and CUDA with compute capability 8.0 or more (assumed if no GPU is present). On a CPU they work
    only under Triton's interpreter. On torch's meta device only the shapes of the results are computed.
    """
    if not installed():
        return False
    if device.type == "cpu":  # the interpreter is for tests, and supports float64 too
        return os.environ.get("TRITON_INTERPRET") == "1" and dtype in (*_DTYPES, torch.float64)
    if device.type not in ("cuda", "meta") or torch.version.hip is not None or dtype not in _DTYPES:
        return False
    if device.type == "meta" or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_properties(device).major >= _MIN_CAPABILITY


def attend(inputs: AttentionInputs, mask: AttentionMask, dropout: float) -> Tensor:
    """Compute relative attention; returns (B, T, N, H).

    Saved for the backward pass are the inputs, the output and, for each query and head, the log-sum-exp of its scores.
    A seed drawn from torch's global random state determines which probabilities are dropped. Gradients of position keys
    are summed in a fixed order only after `torch.use_deterministic_algorithms(True)`.
    """
    if inputs.q_BTNH.shape[-1] == 1:  # Triton 3.6 loses arguments of 1, here strides, inside nested tuples
        return sdpa.attend(inputs, mask, dropout)
    # the kernels do not clamp distances: the key of the largest position stands for all longer distances, repeated
    tensors = [tensor.to(inputs.q_BTNH.dtype) for tensor in expand_distances(inputs, mask).tensors()]
    seed = torch.randint(2**62, (1,), device=inputs.q_BTNH.device) if dropout else None
    ranges = mask.valid_B, mask.first_key_BT, mask.stop_key_BT
    return relative_attention(tensors, inputs.sinks(), *ranges, seed, mask.num_later, dropout)[0]


@torch.library.custom_op("transformer_xl::relative_attention", mutates_args=())
def relative_attention(
    inputs: Sequence[Tensor],
    sink_N: Tensor | None,
    valid_B: Tensor | None,
    first_key_BT: Tensor | None,
    stop_key_BT: Tensor | None,
    seed: Tensor | None,
    num_later: int,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return attended values (B, T, N, H), and for each query (B, N, T) log2(sum(exp(score))) over its keys.

    `valid_B` is the number of filled memory slots of each batch row, or None if all slots may be attended to;
    `first_key_BT`, `stop_key_BT` and `num_later` are those of `AttentionMask`.
    `kernels.rows_of` adds to a tensor the strides by which a kernel finds its vectors of H values.
    """
    from transformer_xl.ops.kernels import triton_kernels as kernels

    out_BTNH, log_sum_BNT = _empty_results(inputs)
    operands, sizes = kernels.kernel_inputs(inputs, num_later)
    config = kernels.choose_config("forward", out_BTNH.shape[-1], out_BTNH.dtype, dropout, device=out_BTNH.device)
    results = kernels.Results(kernels.rows_of(out_BTNH), log_sum_BNT)
    with _current_device(out_BTNH):
        num_programs = _ceil_div(sizes.T, config.tile) * sizes.B * sizes.N
        mask = kernels.MaskAndSeed(valid_B, _contiguous(first_key_BT), _contiguous(stop_key_BT), seed)
        kernels.launch(kernels.forward_kernel, num_programs, config, operands, mask, results, sizes)
    if sink_N is not None:
        of_keys_BNT = log_sum_BNT.masked_fill(log_sum_BNT == math.inf, -math.inf)  # of queries without keys
        torch.logaddexp2(of_keys_BNT, sink_N[:, None] / math.log(2), out=log_sum_BNT)
        out_BTNH.mul_((of_keys_BNT - log_sum_BNT).exp2().transpose(1, 2)[..., None])
    return out_BTNH, log_sum_BNT


@torch.library.custom_op("transformer_xl::relative_attention_backward", mutates_args=())
def relative_attention_backward(
    dout_BTNH: Tensor,
    inputs: Sequence[Tensor],
    valid_B: Tensor | None,
    first_key_BT: Tensor | None,
    stop_key_BT: Tensor | None,
    seed: Tensor | None,
    results: Sequence[Tensor],
    num_later: int,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the inputs, from the gradient of the output and the results of the forward pass."""
    from transformer_xl.ops.kernels import triton_kernels as kernels

    out_BTNH, log_sum_BNT = results
    width, dtype, device = out_BTNH.shape[-1], out_BTNH.dtype, out_BTNH.device
    atomic = not torch.are_deterministic_algorithms_enabled()
    queries_config, keys_config, distances_config = (
        kernels.choose_config(name, width, dtype, dropout, atomic=atomic and name == "queries", device=device)
        for name in ("queries", "keys", "distances")
    )
    operands, sizes = kernels.kernel_inputs(inputs, num_later)
    # blocks of `tile` distances are counted from that of query 0 to key 0, so the first may be partial
    num_tiles, tile = _ceil_div(sizes.T, queries_config.tile), distances_config.tile
    num_blocks = _ceil_div(sizes.P + tile - (sizes.S - sizes.T + num_later) % tile, tile)
    num_groups = 1 if atomic else max(1, min(sizes.B, _MAX_PROGRAMS // (num_blocks * sizes.N)))
    sizes = sizes._replace(groups=num_groups)

    dq_BTNH, dk_BSNH, dv_BSNH = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs[:3]
    )
    new = torch.zeros if atomic else torch.empty  # atomic additions need a tensor of zeros to add to
    partial_GPNH = new(num_groups, *inputs[3].shape, dtype=log_sum_BNT.dtype, device=device)
    partial_2BYNH = log_sum_BNT.new_empty(2, sizes.B, num_tiles, sizes.N, width)  # of content and position bias
    written = (dq_BTNH, dk_BSNH, dv_BSNH, partial_GPNH, *partial_2BYNH)
    gradients = kernels.Gradients(*(kernels.rows_of(tensor) for tensor in written))
    saved = kernels.SavedForBackward(
        kernels.rows_of(out_BTNH), kernels.rows_of(dout_BTNH), log_sum_BNT, torch.empty_like(log_sum_BNT)
    )
    mask = kernels.MaskAndSeed(valid_B, _contiguous(first_key_BT), _contiguous(stop_key_BT), seed)
    arguments = (operands, mask, saved, gradients, sizes)
    with _current_device(out_BTNH):
        kernels.launch(kernels.queries_kernel, num_tiles * sizes.B * sizes.N, queries_config, *arguments)
        num_key_tiles = _ceil_div(sizes.S, keys_config.tile)
        kernels.launch(kernels.keys_kernel, num_key_tiles * sizes.B * sizes.N, keys_config, *arguments)
        if not atomic:
            kernels.launch(kernels.distances_kernel, num_blocks * num_groups * sizes.N, distances_config, *arguments)
    dbias_2NH = partial_2BYNH.sum((1, 2)).to(dtype)
    # clones, because the outputs of an operator must not share memory
    return dq_BTNH, dk_BSNH, dv_BSNH, partial_GPNH.sum(0).to(dtype), dbias_2NH[0].clone(), dbias_2NH[1].clone()


@relative_attention.register_fake
def _empty_results(inputs: Sequence[Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    q_BTNH = inputs[0]
    batch_size, num_queries, num_heads = q_BTNH.shape[:3]
    log_sum_dtype = torch.float64 if q_BTNH.dtype == torch.float64 else torch.float32
    log_sum_BNT = q_BTNH.new_empty(batch_size, num_heads, num_queries, dtype=log_sum_dtype)
    return q_BTNH.new_empty(q_BTNH.shape), log_sum_BNT


@relative_attention_backward.register_fake
def _empty_gradients(_dout_BTNH: Tensor, inputs: Sequence[Tensor], *_: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, *sinks_and_mask, ctx.num_later, ctx.dropout = inputs
    ctx.save_for_backward(*tensors, *sinks_and_mask, *output)


def _backward(ctx: Any, dout_BTNH: Tensor, _: Tensor) -> tuple[Any, ...]:
    *inputs, sink_N, valid_B, first_key_BT, stop_key_BT, seed, out_BTNH, log_sum_BNT = ctx.saved_tensors
    mask_and_seed, results = (valid_B, first_key_BT, stop_key_BT, seed), [out_BTNH, log_sum_BNT]
    gradients = relative_attention_backward(dout_BTNH, inputs, *mask_and_seed, results, ctx.num_later, ctx.dropout)
    dsink_N = None
    if sink_N is not None:
        dsink_N = native.sink_gradient(sink_N, log_sum_BNT * math.log(2), out_BTNH, dout_BTNH)
    return list(gradients), dsink_N, *[None] * 6


relative_attention.register_autograd(_backward, setup_context=_save)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _current_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one, on which Triton launches its kernels."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
