"""The Triton kernels as two operations of torch, which autograd, autocast and torch.compile know how to treat.

Both take the tensors of `AttentionInputs` as a list, in that order.

Letters: B rows, T queries, S = M + T keys, P distances, N heads, H head width, G groups of rows, Y tiles of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_PROGRAMS = 512  # about as many as a large GPU runs at once; bounds the partial sums of position keys


@torch.library.custom_op(
    "transformer_xl::relative_attention",
    mutates_args=(),
    schema="(Tensor[] given, Tensor? valid, Tensor? seed, float dropout) -> (Tensor, Tensor)",
)
def relative_attention(
    given: Sequence[Tensor], valid_B: Tensor | None, seed: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """Attended values (B, T, N, H), and log2-sum-exp2 of the scores of each query (B, N, T)."""
    from transformer_xl.model.kernels.triton.forward import Results, forward_kernel
    from transformer_xl.model.kernels.triton.tiles import ValidAndSeed, choose_config, launch, rows_of

    out_BTNH, log_sum_BNT = _empty_results(given)
    inputs, sizes = _inputs_and_sizes(given)
    launch_config = choose_config("forward", out_BTNH.shape[-1], out_BTNH.dtype, dropout, device=out_BTNH.device)
    with _on(out_BTNH):
        programs = _tiles(sizes.T, launch_config.kernel.tile) * sizes.B * sizes.N
        results = Results(rows_of(out_BTNH), log_sum_BNT)
        launch(forward_kernel, programs, launch_config, inputs, ValidAndSeed(valid_B, seed), results, sizes)
    return out_BTNH, log_sum_BNT


@torch.library.custom_op(
    "transformer_xl::relative_attention_backward",
    mutates_args=(),
    schema=(
        "(Tensor dout, Tensor[] given, Tensor? valid, Tensor? seed, Tensor[] kept, float dropout)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def relative_attention_backward(
    dout_BTNH: Tensor,
    given: Sequence[Tensor],
    valid_B: Tensor | None,
    seed: Tensor | None,
    kept: Sequence[Tensor],
    dropout: float,
) -> tuple[Tensor, ...]:
    """Gradients of the given tensors, from that of the output and what the forward pass gave."""
    from transformer_xl.model.kernels.triton import backward
    from transformer_xl.model.kernels.triton.tiles import ValidAndSeed, choose_config, launch, rows_of

    dq_BTNH, dk_BSNH, dv_BSNH = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in given[:3])
    out_BTNH, log_sum_BNT = kept
    width, dtype, device = out_BTNH.shape[-1], out_BTNH.dtype, out_BTNH.device
    atomic = not torch.are_deterministic_algorithms_enabled()
    by_queries = choose_config("queries", width, dtype, dropout, atomic=atomic, device=device)
    by_keys, by_distances = (
        choose_config(name, width, dtype, dropout, device=device) for name in ("keys", "distances")
    )
    inputs, sizes = _inputs_and_sizes(given)
    num_tiles = _tiles(sizes.T, by_queries.kernel.tile)
    num_blocks = _tiles(sizes.P + by_distances.kernel.tile - (sizes.S - sizes.T) % by_distances.kernel.tile,
                        by_distances.kernel.tile)  # fmt: skip
    groups = 1 if atomic else max(1, min(sizes.B, _PROGRAMS // (num_blocks * sizes.N)))
    sizes = sizes._replace(groups=groups)
    new = torch.zeros if atomic else torch.empty
    partial_GPNH = new(groups, *given[3].shape, dtype=log_sum_BNT.dtype, device=dout_BTNH.device)
    partial_2BYNH = log_sum_BNT.new_empty(2, sizes.B, num_tiles, sizes.N, width)
    valid_and_seed = ValidAndSeed(valid_B, seed)
    rest = backward.SavedForBackward(rows_of(out_BTNH), rows_of(dout_BTNH), log_sum_BNT, torch.empty_like(log_sum_BNT))
    written = (dq_BTNH, dk_BSNH, dv_BSNH, partial_GPNH, partial_2BYNH[0], partial_2BYNH[1])
    gradients = backward.Gradients(*(rows_of(tensor) for tensor in written))
    arguments = inputs, valid_and_seed, rest, gradients, sizes
    with _on(out_BTNH):
        launch(backward.queries_kernel, num_tiles * sizes.B * sizes.N, by_queries, *arguments)
        launch(backward.keys_kernel, _tiles(sizes.S, by_keys.kernel.tile) * sizes.B * sizes.N, by_keys, *arguments)
        if not atomic:
            launch(backward.distances_kernel, num_blocks * groups * sizes.N, by_distances, *arguments)
    dbias_2NH = partial_2BYNH.sum((1, 2)).to(dtype)
    return dq_BTNH, dk_BSNH, dv_BSNH, partial_GPNH.sum(0).to(dtype), dbias_2NH[0].clone(), dbias_2NH[1].clone()


@relative_attention.register_fake
def _empty_results(given: Sequence[Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    q_BTNH = given[0]
    statistics = torch.float64 if q_BTNH.dtype == torch.float64 else torch.float32
    batch_size, num_queries, num_heads = q_BTNH.shape[:3]
    log_sum_BNT = q_BTNH.new_empty(batch_size, num_heads, num_queries, dtype=statistics)
    return q_BTNH.new_empty(q_BTNH.shape), log_sum_BNT


@relative_attention_backward.register_fake
def _empty_gradients(_dout_BTNH: Tensor, given: Sequence[Tensor], *_: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in given)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given, valid_B, seed, ctx.dropout = inputs
    ctx.save_for_backward(*given, valid_B, seed, *output)


def _backward(ctx: Any, dout_BTNH: Tensor, _: Tensor) -> tuple[Any, ...]:
    *given, valid_B, seed, out_BTNH, log_sum_BNT = ctx.saved_tensors
    gradients = relative_attention_backward(dout_BTNH, given, valid_B, seed, [out_BTNH, log_sum_BNT], ctx.dropout)
    return list(gradients), None, None, None


relative_attention.register_autograd(_backward, setup_context=_keep)


def _inputs_and_sizes(given: Sequence[Tensor]) -> tuple[Any, Any]:
    """What every kernel reads."""
    from transformer_xl.model.kernels.triton.tiles import Inputs, Sizes, rows_of

    q_BTNH, k_BSNH, v_BSNH, position_key_PNH, content_bias_NH, position_bias_NH = given
    q, k, v, r = (rows_of(tensor) for tensor in (q_BTNH, k_BSNH, v_BSNH, position_key_PNH))
    batch_size, num_queries, num_heads = q_BTNH.shape[:3]
    sizes = Sizes(batch_size, num_queries, k_BSNH.shape[1], len(position_key_PNH), num_heads, groups=1)
    return Inputs(q, k, v, r, content_bias_NH.contiguous(), position_bias_NH.contiguous()), sizes


def _tiles(rows: int, tile: int) -> int:
    return -(-rows // tile)


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device; this makes it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
