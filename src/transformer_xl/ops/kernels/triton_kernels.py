# pyrefly: ignore-errors
"""The Triton kernels of relative attention; `triton.py` launches them, and imports this file only to do so.

No matrix of T x S elements is written to the GPU's memory. Terms (a) + (c) of the paper's section 3.3 are one product
of queries and keys, (q + u) . k; terms (b) + (d) are one product of queries and position keys, (q + w) . r, with u the
content bias and w the position bias (the paper's v; in this file v is the values). Scores are float32: the backward
pass recomputes probabilities from scores and their saved log-sum-exp, and probabilities of rounded scores would not sum
to 1.

How position keys are aligned with keys (the relative shift of the paper's appendix B, within a tile): a tile of W
queries and W keys has 2 W - 1 distances. Let `base` be the distance from its first query to its first key; the
distance from query i to key j of the tile is base + i - j. The W distances from base up are the tile's `far` block,
those below base its `near` block. The product of queries and a block's position keys is a matrix [query, distance],
whose row i must be rotated by i columns to be aligned with the keys:

    key j is in column (j - i - 1) mod W: of the far block where i >= j, of the near block elsewhere

Position keys are in descending order of distance, so a block's column 0 is its largest distance. It follows that:

- Far and near halves never share a column, so one gather rotates both.
- The near block of a tile is the far block of the next tile of keys, so a program (an instance of a kernel) that
  iterates over the keys multiplies each block once. This is why tiles are square: two neighbouring tiles of keys then
  share one block.
- Rotated back, the score gradients of two neighbouring tiles form one complete block again.

Everywhere here distances are counted from the least one that has a position key, which is 0 in causal attention and
below 0 where queries attend to later keys: `first_place` is that distance of query 0 to key 0.

The forward kernel keeps a running maximum and sum of the softmax (Milakov and Gimelshein 2018, Dao et al. 2022). In the
backward pass, with probability p, output gradient do, and delta the scalar product of output and its gradient, the
gradient of a score is p (do . v - delta). Three kernels compute it tile by tile:

- `queries_kernel` iterates over the keys as the forward pass does, and computes the gradients of queries and biases. If
  `config.atomic`, it also adds those of the position keys to one sum, in whatever order programs run.
- `keys_kernel` has one tile of keys, iterates over the queries that attend to it, and computes the gradients of keys
  and values.
- `distances_kernel` has one block of distances, iterates over the pairs of query and key at these distances in one
  batch row after the other, and computes the gradients of position keys, summed in a fixed order; it recomputes every
  score once more.

Shape suffixes: B batch size, T queries, S = M + T keys (M memory slots), P distances, N heads, H head width (inside
kernels padded to a power of two). Of a tile, W of each: I queries, J keys, D distances; X, Y any of these letters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets the kernels in Python, on the CPU; decided when they are imported, as Triton does."""


class Rows(NamedTuple):
    """A tensor (B, rows, N, H), or (rows, N, H) with stride_b 0; the elements of a head are contiguous."""

    pointer: Tensor
    count_plus_one: int
    """Number of rows plus one, so that it is never 1: Triton makes an argument of 1 a constant, and version 3.6 loses
    such a constant inside a tuple."""
    stride_b: int
    stride_row: int
    stride_n: int


class Inputs(NamedTuple):
    """Queries, keys, values, position keys (in descending order of distance), and the two biases (N, H)."""

    q: Rows
    k: Rows
    v: Rows
    r: Rows
    content_bias: Tensor
    position_bias: Tensor


class MaskAndSeed(NamedTuple):
    """Which probabilities are zero: those of keys outside of these ranges, and those that dropout zeroes."""

    valid: Tensor | None
    """Number of valid memory slots of each batch row, or None if all are valid."""
    first_key: Tensor | None
    """Index of the first key of each query's episode or chunk (B, T), or None if none starts among the queries."""
    stop: Tensor | None
    """Index after the last key that each query may attend to (B, T), or None if distances alone decide."""
    seed: Tensor | None
    """Seed of dropout, or None without dropout."""


class Sizes(NamedTuple):
    """Numbers of batch rows (B), queries (T), keys (S), distances (P) and heads (N), and two others."""

    B: int
    T: int
    S: int
    P: int
    N: int
    groups: int
    """Number of groups of batch rows, each of which has its own sum of the gradients of position keys."""
    later: int | None = None
    """Number of distances below 0, or None, for which a kernel is compiled without them, if there are none."""


class KernelConfig(NamedTuple):
    """The compile-time constants of a kernel, and how it is launched."""

    width: int
    """Head width H."""
    padded: int
    """H rounded up to a power of two, at least 16."""
    tile: int
    """W: number of queries, keys and distances of a tile; a power of two."""
    num_warps: int
    """Warps (groups of 32 threads) of a program."""
    num_stages: int
    """Stages of software pipelining: how many iterations ahead a loop loads."""
    scale: float
    """1 / sqrt(H)."""
    scale_log2: float
    """log2(e) / sqrt(H): kernels compute exp(score) as 2 to the power of log2(e) score."""
    dropout: float
    """Probability that dropout zeroes an attention probability."""
    threshold: int
    """Probabilities are dropped whose random number, uniform from 0 to 2^31 - 1, is below this one."""
    input_precision: str
    """Precision of float32 products: ieee or tf32."""
    acc_dtype: tl.dtype
    """Dtype of scores, sums and statistics."""
    interpreted: bool
    """Whether Triton interprets the kernel."""
    atomic: bool
    """Whether gradients of position keys are added atomically, in whatever order the programs run."""


class Results(NamedTuple):
    """The outputs of the forward kernel."""

    out: Rows
    """Attended values (B, T, N, H)."""
    log_sum: Tensor
    """log2(sum(exp(score))) over each query's keys (B, N, T); inf for a query without keys."""


class SavedForBackward(NamedTuple):
    """What the backward kernels need besides the inputs."""

    out: Rows
    """Attended values (B, T, N, H)."""
    dout: Rows
    """Gradient of the attended values."""
    log_sum: Tensor
    """log2(sum(exp(score))) over each query's keys and sink (B, N, T); without both inf."""
    delta: Tensor
    """Sum over H of out * dout (B, N, T), written by `queries_kernel` for the other two backward kernels."""


class Gradients(NamedTuple):
    """The outputs of the backward kernels; those of position keys and biases are partial sums that the caller adds."""

    q: Rows
    k: Rows
    v: Rows
    r: Rows
    """(groups, P, N, H), float32."""
    content_bias: Rows
    """(B, tiles of queries, N, H), float32."""
    position_bias: Rows
    """As content_bias."""


def rows_of(tensor: Tensor) -> Rows:
    """Return a tensor (B, rows, N, H) or (rows, N, H) as a kernel argument; copied only if heads are not contiguous."""
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    stride_b = tensor.stride(0) if tensor.dim() == 4 else 0
    return Rows(tensor, tensor.shape[-3] + 1, stride_b, tensor.stride(-3), tensor.stride(-2))


def kernel_inputs(tensors: Sequence[Tensor], num_later: int) -> tuple[Inputs, Sizes]:
    """Return the arguments `inputs` and `sizes` of every kernel, from the tensors of `AttentionInputs` in order."""
    *rows, content_bias_NH, position_bias_NH = tensors
    q_BTNH, k_BSNH, _, r_PNH = rows
    batch_size, num_queries, num_heads = q_BTNH.shape[:3]
    sizes = Sizes(batch_size, num_queries, k_BSNH.shape[1], len(r_PNH), num_heads, 1, num_later or None)
    return Inputs(*map(rows_of, rows), content_bias_NH.contiguous(), position_bias_NH.contiguous()), sizes


def choose_config(
    kernel: str,
    width: int,
    dtype: torch.dtype,
    dropout: float,
    *,
    atomic: bool = False,
    device: torch.device | None = None,
    capability: int | None = None,
) -> KernelConfig:
    """Return how a kernel is compiled and launched.

    Args:
        kernel: `forward`, `queries`, `keys` or `distances`.
        width: H.
        dtype: dtype of queries, keys and values.
        dropout: probability that dropout zeroes an attention probability.
        atomic: add the gradients of position keys atomically (`queries` only).
        device: where the kernel will run, or None for the current device.
        capability: major compute capability, or None for that of the device, or of Hopper if there is no GPU.
    """
    padded = max(16, 1 << (width - 1).bit_length())
    if capability is None:
        capability = torch.cuda.get_device_properties(device).major if torch.cuda.is_available() else 9
    tile, num_warps, num_stages = _tile_and_warps(kernel, padded, dtype, capability)
    # not `allow_tf32`, which cannot be read if the user set the newer `fp32_precision`
    rounds_to_tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return KernelConfig(
        width=width,
        padded=padded,
        tile=tile,
        num_warps=num_warps,
        num_stages=num_stages,
        scale=1 / math.sqrt(width),
        scale_log2=math.log2(math.e) / math.sqrt(width),
        dropout=dropout,
        threshold=int(dropout * 2**31),
        input_precision="tf32" if rounds_to_tf32 else "ieee",
        acc_dtype=tl.float64 if dtype == torch.float64 else tl.float32,
        interpreted=INTERPRETED,
        atomic=atomic,
    )


def _tile_and_warps(kernel: str, padded: int, dtype: torch.dtype, capability: int) -> tuple[int, int, int]:
    """Return the tile W, warps and pipeline stages: the largest tile whose values fit, or nearly fit, into registers.

    The numbers were chosen by the compiler's report of registers, spills and shared memory for compute capability 9.0.
    """
    if INTERPRETED:
        return 16, 1, 1
    if dtype == torch.float32 or padded > 128:
        return (32, 8, 1) if padded <= 64 else (16, 8, 1)
    if capability not in (9, 10):  # these have 227 KiB of shared memory
        return 32, 8, 1
    # for 10.0 Triton 3.7 compiles no pipeline with inline assembly (`new_range`)
    is_pipelined = capability == 9 and not (kernel == "distances" and padded > 64)
    return 64, (4 if kernel == "forward" and padded <= 64 else 8), (2 if is_pipelined else 1)


def launch(kernel: Any, num_programs: int, config: KernelConfig, *arguments: Any) -> None:
    """Run a kernel in that many programs (instances of it, each of which computes one tile or block)."""
    kernel[(num_programs,)](*arguments, config, num_warps=config.num_warps, num_stages=config.num_stages)


@triton.jit
def forward_kernel(inputs, mask_and_seed, results, sizes, config: tl.constexpr):
    """Compute the attended values of W queries of one head."""
    tile, b, n = program_position(tl.cdiv(sizes.T, config.tile), sizes.N)
    place = first_place(sizes)
    first_query = tile * config.tile
    step = tl.arange(0, config.tile)
    query_I = first_query + step
    q_IH = load_rows(inputs.q, b, n, query_I, config)
    content_IH = plus_bias(q_IH, inputs.content_bias, n, config)
    position_IH = plus_bias(q_IH, inputs.position_bias, n, config)

    first_valid = first_valid_key(mask_and_seed, b, sizes)
    first_key = first_attended(mask_and_seed, b, query_I, first_valid, sizes)
    stop_key = stop_attended(mask_and_seed, b, query_I, sizes)
    first, last = key_range(place, first_query, first_key, stop_key, mask_and_seed, sizes, config)
    near_D = sizes.P - (place + first_query - first) + step  # indices of the near block's position keys
    far_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, near_D - config.tile, config)), config)
    max_I = tl.full([config.tile], float("-inf"), config.acc_dtype)
    sum_I = tl.full([config.tile], 0.0, config.acc_dtype)
    out_IH = tl.full([config.tile, config.padded], 0.0, config.acc_dtype)
    for start in range(first, last, config.tile):
        key_J = start + step
        near_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, near_D, config)), config)
        score_IJ = product(content_IH, tl.trans(load_rows(inputs.k, b, n, key_J, config)), config)
        score_IJ += over_keys(tl.where(is_far(config), far_ID, near_ID), config)
        distance_IJ = place + query_I[:, None] - key_J[None, :]
        attended_IJ = is_attended(distance_IJ, key_J[None, :], first_key, stop_key, sizes)
        score_IJ = tl.where(attended_IJ, score_IJ * config.scale_log2, float("-inf"))
        new_max_I = tl.maximum(max_I, tl.max(score_IJ, 1))
        offset_I = tl.where(new_max_I == float("-inf"), 0.0, new_max_I)  # no attended key so far
        rescale_I = tl.exp2(max_I - offset_I)
        weight_IJ = tl.exp2(score_IJ - offset_I[:, None])
        sum_I = sum_I * rescale_I + tl.sum(weight_IJ, 1)
        if config.dropout > 0:
            weight_IJ = dropped(weight_IJ, keep(mask_and_seed, b * sizes.N + n, first_query, start, config), config)
        v_JH = load_rows(inputs.v, b, n, key_J, config)
        out_IH = out_IH * rescale_I[:, None] + product(weight_IJ.to(v_JH.dtype), v_JH, config)
        max_I = new_max_I
        far_ID = near_ID
        near_D += config.tile

    has_keys_I = sum_I > 0  # false for padding queries, and for indices from T on, which have no query
    sum_I = tl.where(has_keys_I, sum_I, 1.0)
    store_rows(results.out, b, n, query_I, out_IH / sum_I[:, None], config)
    log_sum = results.log_sum + (b * sizes.N + n) * sizes.T
    # inf for queries without keys, whose probabilities are then 0 in the backward pass
    log_sum_I = tl.where(has_keys_I, max_I + tl.log2(sum_I), float("inf"))
    tl.store(log_sum + query_I, log_sum_I, mask=query_I < sizes.T)


@triton.jit
def queries_kernel(inputs, mask_and_seed, saved, gradients, sizes, config: tl.constexpr):
    """Compute the gradients of W queries of one head, and delta, which the other two kernels read."""
    tile, b, n = program_position(tl.cdiv(sizes.T, config.tile), sizes.N)
    place = first_place(sizes)
    first_query = tile * config.tile
    step = tl.arange(0, config.tile)
    query_I = first_query + step
    content_IH, position_IH, dout_IH = load_queries(inputs, saved, b, n, query_I, config)
    log_sum_I = load_statistic(saved.log_sum, b * sizes.N + n, query_I, sizes, float("inf"))
    delta_I = tl.sum(load_rows(saved.out, b, n, query_I, config).to(config.acc_dtype) * dout_IH.to(config.acc_dtype), 1)
    tl.store(saved.delta + (b * sizes.N + n) * sizes.T + query_I, delta_I, mask=query_I < sizes.T)

    first_valid = first_valid_key(mask_and_seed, b, sizes)
    first_key = first_attended(mask_and_seed, b, query_I, first_valid, sizes)
    stop_key = stop_attended(mask_and_seed, b, query_I, sizes)
    first, last = key_range(place, first_query, first_key, stop_key, mask_and_seed, sizes, config)
    far_D = sizes.P - (place + first_query - first) - config.tile + step  # indices of the far block's position keys
    far_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, far_D, config)), config)
    # score gradients by distance of the tile before, whose near block is the far block of the current tile
    previous_ID = tl.full([config.tile, config.tile], 0.0, content_IH.dtype)
    dcontent_IH = tl.full([config.tile, config.padded], 0.0, config.acc_dtype)
    dposition_IH = tl.full([config.tile, config.padded], 0.0, config.acc_dtype)
    for start in range(first, last, config.tile):
        key_J = start + step
        k_JH = load_rows(inputs.k, b, n, key_J, config)
        near_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, far_D + config.tile, config)), config)
        score_IJ = product(content_IH, tl.trans(k_JH), config)
        score_IJ += over_keys(tl.where(is_far(config), far_ID, near_ID), config)
        distance_IJ = place + query_I[:, None] - key_J[None, :]
        attended_IJ = is_attended(distance_IJ, key_J[None, :], first_key, stop_key, sizes)
        dscore_IJ = product(dout_IH, tl.trans(load_rows(inputs.v, b, n, key_J, config)), config)
        if config.dropout > 0:
            dscore_IJ = dropped(dscore_IJ, keep(mask_and_seed, b * sizes.N + n, first_query, start, config), config)
        dscore_IJ = probability(score_IJ, log_sum_I, attended_IJ, config) * (dscore_IJ - delta_I[:, None])
        dcontent_IH += product(dscore_IJ.to(k_JH.dtype), k_JH, config)
        dscore_ID = over_distances(dscore_IJ, config).to(k_JH.dtype)
        complete_ID = tl.where(is_far(config), dscore_ID, previous_ID)
        dposition_IH += product(complete_ID, load_rows(inputs.r, 0, n, far_D, config), config)
        if config.atomic:
            add_distances(gradients.r, n, far_D, complete_ID, position_IH, config)
        previous_ID = dscore_ID
        far_ID = near_ID
        far_D += config.tile

    # no query attends to keys after the last tile, so the far half of the block has gradients of 0
    complete_ID = tl.where(is_far(config), 0.0, previous_ID).to(content_IH.dtype)
    dposition_IH += product(complete_ID, load_rows(inputs.r, 0, n, far_D, config), config)
    if config.atomic:
        add_distances(gradients.r, n, far_D, complete_ID, position_IH, config)
    store_rows(gradients.q, b, n, query_I, (dcontent_IH + dposition_IH) * config.scale, config)
    tile_index = tl.full([1], 0, tl.int32) + tile
    store_rows(gradients.content_bias, b, n, tile_index, tl.sum(dcontent_IH, 0, keep_dims=True) * config.scale, config)
    store_rows(
        gradients.position_bias, b, n, tile_index, tl.sum(dposition_IH, 0, keep_dims=True) * config.scale, config
    )


@triton.jit
def keys_kernel(inputs, mask_and_seed, saved, gradients, sizes, config: tl.constexpr):
    """Compute the gradients of W keys and their values, of one head."""
    tile, b, n = program_position(tl.cdiv(sizes.S, config.tile), sizes.N)
    place = first_place(sizes)
    tile_start = tile * config.tile
    step = tl.arange(0, config.tile)
    key_J = tile_start + step
    k_JH = load_rows(inputs.k, b, n, key_J, config)
    v_JH = load_rows(inputs.v, b, n, key_J, config)

    first_valid = first_valid_key(mask_and_seed, b, sizes)
    # range of the queries that attend to these keys, from the start of a tile; `last` is exclusive
    first = tl.maximum(tile_start - place, 0) // config.tile * config.tile
    last = tl.minimum(tl.minimum(tile_start + config.tile, sizes.S) - 1 - place + sizes.P, sizes.T)
    last = tl.where(tile_start + config.tile <= first_valid, first, last)  # no queries if all these slots are empty
    if mask_and_seed.stop is not None:  # less the tiles of other chunks, and of queries whose row has only padding here
        last = tl.cdiv(last, config.tile) * config.tile
        stop = tile_start + config.tile
        while (first < last) & ~has_range_in(mask_and_seed, b, first, first_valid, tile_start, stop, sizes, config):
            first += config.tile
        end = last - config.tile
        while (first <= end) & ~has_range_in(mask_and_seed, b, end, first_valid, tile_start, stop, sizes, config):
            end -= config.tile
        last = end + config.tile
    dk_JH = tl.full([config.tile, config.padded], 0.0, config.acc_dtype)
    dv_JH = tl.full([config.tile, config.padded], 0.0, config.acc_dtype)
    for start in range(first, last, config.tile):
        query_I = start + step
        content_IH, position_IH, dout_IH = load_queries(inputs, saved, b, n, query_I, config)
        log_sum_I = load_statistic(saved.log_sum, b * sizes.N + n, query_I, sizes, float("inf"))
        delta_I = load_statistic(saved.delta, b * sizes.N + n, query_I, sizes, 0.0)
        near_D = sizes.P - (place + start - tile_start) + step
        far_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, near_D - config.tile, config)), config)
        near_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, near_D, config)), config)
        score_IJ = product(content_IH, tl.trans(k_JH), config)
        score_IJ += over_keys(tl.where(is_far(config), far_ID, near_ID), config)
        first_key = first_attended(mask_and_seed, b, query_I, first_valid, sizes)
        stop_key = stop_attended(mask_and_seed, b, query_I, sizes)
        distance_IJ = place + query_I[:, None] - key_J[None, :]
        attended_IJ = is_attended(distance_IJ, key_J[None, :], first_key, stop_key, sizes)
        probability_IJ = probability(score_IJ, log_sum_I, attended_IJ, config)
        weight_IJ = probability_IJ
        dscore_IJ = product(dout_IH, tl.trans(v_JH), config)
        if config.dropout > 0:
            keep_IJ = keep(mask_and_seed, b * sizes.N + n, start, tile_start, config)
            weight_IJ = dropped(weight_IJ, keep_IJ, config)
            dscore_IJ = dropped(dscore_IJ, keep_IJ, config)
        dv_JH += product(tl.trans(weight_IJ.to(dout_IH.dtype)), dout_IH, config)
        dscore_IJ = probability_IJ * (dscore_IJ - delta_I[:, None])
        dk_JH += product(tl.trans(dscore_IJ.to(content_IH.dtype)), content_IH, config)
    store_rows(gradients.k, b, n, key_J, dk_JH * config.scale, config)
    store_rows(gradients.v, b, n, key_J, dv_JH, config)


@triton.jit
def distances_kernel(inputs, mask_and_seed, saved, gradients, sizes, config: tl.constexpr):
    """Compute the gradients of the position keys of W distances, of one head, summed over one group of batch rows.

    Blocks of distances are aligned so that the keys at these distances from W queries are in two neighbouring tiles:
    in the earlier one for pairs above the diagonal of the block, in the later one for the others.
    """
    place = first_place(sizes)
    tile, group, n = program_position(tl.cdiv(sizes.P + config.tile - place % config.tile, config.tile), sizes.N)
    nearest = place % config.tile + (tile - 1) * config.tile  # smallest distance of the block; may be negative
    step = tl.arange(0, config.tile)
    index_D = sizes.P - nearest - config.tile + step
    r_DH = load_rows(inputs.r, 0, n, index_D, config)
    is_late_IJ = step[:, None] >= step[None, :]  # pairs whose key is in the later tile
    dr_DH = tl.full([config.tile, config.padded], 0.0, config.acc_dtype)
    for b in range(group, sizes.B, sizes.groups):
        first_valid = first_valid_key(mask_and_seed, b, sizes)
        first = tl.maximum(nearest + first_valid - place, 0) // config.tile * config.tile
        last = sizes.T
        if sizes.later is not None:  # from the queries after these, such distances lead beyond the last key
            last = tl.minimum(last, sizes.S + nearest + config.tile - place)
        for start in range(first, last, config.tile):
            key = place + start - nearest  # first key of the later tile
            # queries of another chunk or padding have nothing at these distances; without them there is no branch
            if mask_and_seed.stop is None or (
                has_range_in(mask_and_seed, b, start, first_valid, key - config.tile, key + config.tile, sizes, config)
            ):
                query_I = start + step
                content_IH, position_IH, dout_IH = load_queries(inputs, saved, b, n, query_I, config)
                log_sum_I = load_statistic(saved.log_sum, b * sizes.N + n, query_I, sizes, float("inf"))
                delta_I = load_statistic(saved.delta, b * sizes.N + n, query_I, sizes, 0.0)
                key_IJ = key + step[None, :] - tl.where(is_late_IJ, 0, config.tile)
                score_IJ = two_tiles(content_IH, inputs.k, b, n, key + step, config)
                score_IJ += over_keys(product(position_IH, tl.trans(r_DH), config), config)
                first_key = first_attended(mask_and_seed, b, query_I, first_valid, sizes)
                stop_key = stop_attended(mask_and_seed, b, query_I, sizes)
                attended_IJ = is_attended(place + query_I[:, None] - key_IJ, key_IJ, first_key, stop_key, sizes)
                dscore_IJ = two_tiles(dout_IH, inputs.v, b, n, key + step, config)
                if config.dropout > 0:
                    late_IJ = keep(mask_and_seed, b * sizes.N + n, start, key, config)
                    early_IJ = keep(mask_and_seed, b * sizes.N + n, start, key - config.tile, config)
                    dscore_IJ = dropped(dscore_IJ, (late_IJ & is_late_IJ) | (early_IJ & ~is_late_IJ), config)
                dscore_IJ = probability(score_IJ, log_sum_I, attended_IJ, config) * (dscore_IJ - delta_I[:, None])
                dscore_ID = over_distances(dscore_IJ, config).to(content_IH.dtype)
                dr_DH += product(tl.trans(dscore_ID), position_IH, config)
    store_rows(gradients.r, group, n, index_D, dr_DH * config.scale, config)


@triton.jit
def two_tiles(left_IH, rows, b, n, key_J, config: tl.constexpr):
    """Return products with a tile of keys (or values); above the diagonal, with the tile before it."""
    late_IJ = product(left_IH, tl.trans(load_rows(rows, b, n, key_J, config)), config)
    early_IJ = product(left_IH, tl.trans(load_rows(rows, b, n, key_J - config.tile, config)), config)
    step = tl.arange(0, config.tile)
    return tl.where(step[:, None] >= step[None, :], late_IJ, early_IJ)


@triton.jit
def load_queries(inputs, saved, b, n, query_I, config: tl.constexpr):
    """Return the queries plus content bias, the queries plus position bias, and the output's gradient."""
    q_IH = load_rows(inputs.q, b, n, query_I, config)
    content_IH = plus_bias(q_IH, inputs.content_bias, n, config)
    position_IH = plus_bias(q_IH, inputs.position_bias, n, config)
    return content_IH, position_IH, load_rows(saved.dout, b, n, query_I, config)


@triton.jit
def load_statistic(pointer, row_head, query_I, sizes, default):
    """Return a tile's values of a tensor (B, N, T), and `default` after the last query.

    `row_head` is the index of batch row and head together, b N + n.
    """
    return tl.load(pointer + row_head * sizes.T + query_I, mask=query_I < sizes.T, other=default)


@triton.jit
def add_distances(rows, n, index_D, dscore_ID, position_IH, config: tl.constexpr):
    """Add one tile's contribution to the gradients of the position keys."""
    pointer_DH, exists_DH = row_pointers(rows, 0, n, index_D, config)
    dr_DH = product(tl.trans(dscore_ID), position_IH, config) * config.scale
    tl.atomic_add(pointer_DH, dr_DH, mask=exists_DH, sem="relaxed")


@triton.jit
def program_position(tiles, num_heads):
    """Return the tile, batch row and head of this program; programs with successive ids have tiles of the same head."""
    program = tl.program_id(0)
    row_head = program // tiles
    return program % tiles, (row_head // num_heads).to(tl.int64), row_head % num_heads


@triton.jit
def row_pointers(rows, b, n, index_X, config: tl.constexpr):
    """Return pointers to rows of one head, (X, H), and whether each is inside the tensor."""
    lane_H = tl.arange(0, config.padded)
    inside_X = (index_X >= 0) & (index_X < rows.count_plus_one - 1)
    offset_XH = index_X.to(tl.int64)[:, None] * rows.stride_row + lane_H[None, :]
    start = rows.pointer + b * rows.stride_b + n * rows.stride_n
    return start + offset_XH, inside_X[:, None] & (lane_H < config.width)[None, :]


@triton.jit
def load_rows(rows, b, n, index_X, config: tl.constexpr):
    """Load rows of one head, (X, H); 0 outside the tensor."""
    pointer_XH, exists_XH = row_pointers(rows, b, n, index_X, config)
    return tl.load(pointer_XH, mask=exists_XH, other=0.0)


@triton.jit
def store_rows(rows, b, n, index_X, value_XH, config: tl.constexpr):
    """Store rows of one head in the dtype of the tensor."""
    pointer_XH, exists_XH = row_pointers(rows, b, n, index_X, config)
    tl.store(pointer_XH, value_XH.to(rows.pointer.dtype.element_ty), mask=exists_XH)


@triton.jit
def plus_bias(q_IH, bias, n, config: tl.constexpr):
    """Return queries plus one of the biases, rounded to the queries' dtype."""
    lane_H = tl.arange(0, config.padded)
    bias_H = tl.load(bias + n * config.width + lane_H, mask=lane_H < config.width, other=0.0)
    return (q_IH.to(config.acc_dtype) + bias_H.to(config.acc_dtype)[None, :]).to(q_IH.dtype)


@triton.jit
def product(left_XY, right_YX, config: tl.constexpr):
    """Return a matrix product in the accumulator dtype."""
    if config.interpreted:  # the interpreter would multiply the bit patterns of bfloat16
        left_XY = left_XY.to(config.acc_dtype)
        right_YX = right_YX.to(config.acc_dtype)
    return tl.dot(left_XY, right_YX, input_precision=config.input_precision, out_dtype=config.acc_dtype)


@triton.jit
def new_range(config: tl.constexpr):
    """Return 0, 1, ..., W - 1, opaque to the compiler.

    If the compiler could see that these are the same in each iteration of a loop, it would keep everything computed
    from them in registers between iterations, and spill other values.
    """
    zero = 0
    if not config.interpreted:
        zero = tl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    return zero + tl.arange(0, config.tile)


@triton.jit
def is_far(config: tl.constexpr):
    """Return whether an element of (I, D) belongs to the far block rather than the near block."""
    return new_range(config)[:, None] + new_range(config)[None, :] >= config.tile - 1


@triton.jit
def over_keys(score_ID, config: tl.constexpr):
    """Rotate scores by distance (I, D), with far and near blocks merged by `is_far`, to scores by key (I, J)."""
    return tl.gather(score_ID, (new_range(config)[None, :] - new_range(config)[:, None] - 1) & (config.tile - 1), 1)


@triton.jit
def over_distances(score_IJ, config: tl.constexpr):
    """Rotate values by key (I, J) back to values by distance (I, D)."""
    return tl.gather(score_IJ, (new_range(config)[None, :] + new_range(config)[:, None] + 1) & (config.tile - 1), 1)


@triton.jit
def first_valid_key(mask_and_seed, b, sizes):
    """Return the index of the first key of this batch row that is not in an empty memory slot."""
    return (
        0
        if mask_and_seed.valid is None
        else tl.maximum(sizes.S - sizes.T - tl.load(mask_and_seed.valid + b).to(tl.int32), 0)
    )


@triton.jit
def first_place(sizes):
    """Return the distance of query 0 to key 0, counted from the least distance that has a position key."""
    return sizes.S - sizes.T if sizes.later is None else sizes.S - sizes.T + sizes.later


@triton.jit
def load_limit(pointer, b, query_I, sizes, default):
    """Return a tile's values of a tensor of key indices (B, T) as (I, 1), and `default` where there is no query."""
    is_query_I = (query_I >= 0) & (query_I < sizes.T)
    return tl.load(pointer + b * sizes.T + query_I, mask=is_query_I, other=default).to(tl.int32)[:, None]


@triton.jit
def first_attended(mask_and_seed, b, query_I, first_valid, sizes):
    """Return the index of the first key of a tile's queries that is neither in an empty slot nor of an earlier episode.

    It is a number, or (I, 1) where episodes or chunks start among the queries.
    """
    return (
        first_valid
        if mask_and_seed.first_key is None
        else tl.maximum(load_limit(mask_and_seed.first_key, b, query_I, sizes, sizes.S), first_valid)
    )


@triton.jit
def stop_attended(mask_and_seed, b, query_I, sizes):
    """Return the index after the last key of a tile's queries, a number or (I, 1); None where distances decide it."""
    return (
        (None if sizes.later is None else sizes.S)
        if mask_and_seed.stop is None
        else tl.minimum(load_limit(mask_and_seed.stop, b, query_I, sizes, 0), sizes.S)
    )


@triton.jit
def key_range(place, first_query, first_key, stop_key, mask_and_seed, sizes, config: tl.constexpr):
    """Return the range of keys that a tile of queries attends to, from the start of a tile; its end is exclusive."""
    first = first_key if mask_and_seed.first_key is None else tl.min(first_key)
    first = tl.maximum(first, place + first_query - sizes.P + 1) // config.tile * config.tile
    last = place + tl.minimum(first_query + config.tile, sizes.T)
    if stop_key is not None:
        last = tl.minimum(last, sizes.S if mask_and_seed.stop is None else tl.max(stop_key))
    return first, last


@triton.jit
def has_range_in(mask_and_seed, b, first_query, first_valid, first, stop, sizes, config: tl.constexpr):
    """Return whether the range of any query of a tile, from first to stop key, has keys in another range."""
    query_I = first_query + tl.arange(0, config.tile)
    first_key = first_attended(mask_and_seed, b, query_I, first_valid, sizes)
    stop_key = stop_attended(mask_and_seed, b, query_I, sizes)
    return tl.max(((first_key < stop) & (stop_key > tl.maximum(first, 0))).to(tl.int32)) > 0


@triton.jit
def is_attended(distance, key, first_key, stop_key, sizes):
    """Return whether a query attends to a key: one at a distance that has a position key, and within its range."""
    attended = (distance >= 0) & (distance < sizes.P) & (key >= first_key)
    return attended if stop_key is None else attended & (key < stop_key)


@triton.jit
def keep(mask_and_seed, row_head, first_query, first_key, config: tl.constexpr):
    """Return whether dropout keeps each probability of a tile, (I, J); `row_head` is as in `load_statistic`.

    The random numbers of Philox (a counter-based generator) depend only on the indices of batch row and head, query,
    and group of four keys, so every kernel draws the same; first_key is a multiple of four.
    """
    quarter: tl.constexpr = config.tile // 4
    query_IJ = first_query + tl.arange(0, config.tile)[:, None] + tl.full([config.tile, quarter], 0, tl.int32)
    four_IJ = first_key // 4 + tl.arange(0, quarter)[None, :] + tl.full([config.tile, quarter], 0, tl.int32)
    row_head_IJ = row_head.to(tl.int32) + tl.full([config.tile, quarter], 0, tl.int32)
    one, two, three, four = tl.philox(
        tl.load(mask_and_seed.seed), four_IJ, query_IJ, row_head_IJ, tl.zeros_like(query_IJ)
    )
    even = tl.interleave(_survives(one, config), _survives(three, config))
    odd = tl.interleave(_survives(two, config), _survives(four, config))
    return tl.interleave(even, odd) != 0


@triton.jit
def _survives(bits, config: tl.constexpr):
    """Return 1 where a random number (32 bits) means that the probability is kept, else 0."""
    return ((bits >> 1).to(tl.int32) >= config.threshold).to(tl.int8)


@triton.jit
def probability(score_IJ, log_sum_I, attended_IJ, config: tl.constexpr):
    """Return probabilities from scores and log2(sum(exp(score))), 0 where a query does not attend to the key."""
    return tl.exp2(tl.where(attended_IJ, score_IJ * config.scale_log2, float("-inf")) - log_sum_I[:, None])


@triton.jit
def dropped(values, is_kept, config: tl.constexpr):
    """Return values after dropout: 0, or scaled by 1 / (1 - dropout)."""
    return tl.where(is_kept, values * (1 / (1 - config.dropout)), 0.0)
