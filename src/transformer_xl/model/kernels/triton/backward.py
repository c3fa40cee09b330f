# pyrefly: ignore-errors
"""Gradients of relative attention, as Triton kernels: scores are made again, tile by tile, from what went in.

With probability p, gradient o of the output, and delta the product of output and its gradient, the gradient of a score
is p (o . v - delta). There are three ways through the same tiles:

`queries_kernel` walks along the keys as the forward pass does, and gives the gradients of queries and biases. If
`config.atomic`, it adds those of the position keys to one sum as well, in whatever order programs come.
`keys_kernel` holds a tile of keys, walks along the queries that see it, and gives the gradients of keys and values.
`distances_kernel` holds a block of distances, walks along its diagonal in one batch row after another, and gives the
gradients of position keys, summed in a fixed order; it has to make every score once more.

Shape suffixes: I queries, J keys, D distances of a tile, H padded head width.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from transformer_xl.model.kernels.triton.blocks import (
    dropped,
    first_valid_key,
    is_attended,
    is_far,
    keep,
    load_rows,
    over_distances,
    over_keys,
    plus_bias,
    probability,
    product,
    program_position,
    row_pointers,
    store_rows,
)
from transformer_xl.model.kernels.triton.tiles import Rows


class SavedForBackward(NamedTuple):
    """Output and its gradient (B, T, N, H), log2-sum-exp2 of scores and delta (B, N, T); delta is made here."""

    out: Rows
    dout: Rows
    log_sum: Tensor
    delta: Tensor


class Gradients(NamedTuple):
    """Where the kernels write; position keys and biases in partial sums."""

    q: Rows
    k: Rows
    v: Rows
    r: Rows
    """(groups, P, N, H), float32."""
    content_bias: Rows
    """(B, tiles of queries, N, H), float32."""
    position_bias: Rows


@triton.jit
def queries_kernel(inputs, valid_and_seed, saved, gradients, sizes, config: tl.constexpr):
    """Gradients of W queries of one head; also delta, which the other two kernels read."""
    tile, b, n = program_position(tl.cdiv(sizes.T, config.tile), sizes.N)
    memory = sizes.S - sizes.T
    first_query = tile * config.tile
    step = tl.arange(0, config.tile)
    query_I = first_query + step
    content_IH, position_IH, dout_IH = load_queries(inputs, saved, b, n, query_I, config)
    log_sum_I = load_numbers(saved.log_sum, b * sizes.N + n, query_I, sizes, float("inf"))
    delta_I = tl.sum(load_rows(saved.out, b, n, query_I, config).to(config.acc_dtype) * dout_IH.to(config.acc_dtype), 1)
    tl.store(saved.delta + (b * sizes.N + n) * sizes.T + query_I, delta_I, mask=query_I < sizes.T)

    first_valid = first_valid_key(valid_and_seed, b, sizes)
    first = tl.maximum(first_valid, memory + first_query - sizes.P + 1) // config.tile * config.tile
    last = memory + tl.minimum(first_query + config.tile, sizes.T)
    far_D = sizes.P - (memory + first_query - first) - config.tile + step  # where the far position keys stand
    far_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, far_D, config)), config)
    waiting_ID = tl.full(
        [config.tile, config.tile], 0.0, content_IH.dtype
    )  # score gradients of a block that is half known
    dcontent_IH = tl.full([config.tile, config.padded], 0.0, config.acc_dtype)
    dposition_IH = tl.full([config.tile, config.padded], 0.0, config.acc_dtype)
    for start in range(first, last, config.tile):
        key_J = start + step
        k_JH = load_rows(inputs.k, b, n, key_J, config)
        near_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, far_D + config.tile, config)), config)
        score_IJ = product(content_IH, tl.trans(k_JH), config)
        score_IJ += over_keys(tl.where(is_far(config), far_ID, near_ID), config)
        attended_IJ = is_attended(memory + query_I[:, None] - key_J[None, :], key_J[None, :], first_valid, sizes)
        dscore_IJ = product(dout_IH, tl.trans(load_rows(inputs.v, b, n, key_J, config)), config)
        if config.dropout > 0:
            dscore_IJ = dropped(dscore_IJ, keep(valid_and_seed, b * sizes.N + n, first_query, start, config), config)
        dscore_IJ = probability(score_IJ, log_sum_I, attended_IJ, config) * (dscore_IJ - delta_I[:, None])
        dcontent_IH += product(dscore_IJ.to(k_JH.dtype), k_JH, config)
        dscore_ID = over_distances(dscore_IJ, config).to(k_JH.dtype)
        whole_ID = tl.where(is_far(config), dscore_ID, waiting_ID)
        dposition_IH += product(whole_ID, load_rows(inputs.r, 0, n, far_D, config), config)
        if config.atomic:
            add_distances(gradients.r, n, far_D, whole_ID, position_IH, config)
        waiting_ID = dscore_ID
        far_ID = near_ID
        far_D += config.tile

    whole_ID = tl.where(is_far(config), 0.0, waiting_ID).to(content_IH.dtype)  # nothing is seen beyond the last tile
    dposition_IH += product(whole_ID, load_rows(inputs.r, 0, n, far_D, config), config)
    if config.atomic:
        add_distances(gradients.r, n, far_D, whole_ID, position_IH, config)
    store_rows(gradients.q, b, n, query_I, (dcontent_IH + dposition_IH) * config.scale, config)
    only = tl.full([1], 0, tl.int32) + tile
    store_rows(gradients.content_bias, b, n, only, tl.sum(dcontent_IH, 0, keep_dims=True) * config.scale, config)
    store_rows(gradients.position_bias, b, n, only, tl.sum(dposition_IH, 0, keep_dims=True) * config.scale, config)


@triton.jit
def keys_kernel(inputs, valid_and_seed, saved, gradients, sizes, config: tl.constexpr):
    """Gradients of W keys and their values, of one head."""
    tile, b, n = program_position(tl.cdiv(sizes.S, config.tile), sizes.N)
    memory = sizes.S - sizes.T
    first_key = tile * config.tile
    step = tl.arange(0, config.tile)
    key_J = first_key + step
    k_JH = load_rows(inputs.k, b, n, key_J, config)
    v_JH = load_rows(inputs.v, b, n, key_J, config)

    first_valid = first_valid_key(valid_and_seed, b, sizes)
    first = tl.maximum(first_key - memory, 0) // config.tile * config.tile
    last = tl.minimum(tl.minimum(first_key + config.tile, sizes.S) - 1 - memory + sizes.P, sizes.T)
    last = tl.where(first_key + config.tile <= first_valid, first, last)  # nobody sees empty slots
    dk_JH = tl.full([config.tile, config.padded], 0.0, config.acc_dtype)
    dv_JH = tl.full([config.tile, config.padded], 0.0, config.acc_dtype)
    for start in range(first, last, config.tile):
        query_I = start + step
        content_IH, position_IH, dout_IH = load_queries(inputs, saved, b, n, query_I, config)
        log_sum_I = load_numbers(saved.log_sum, b * sizes.N + n, query_I, sizes, float("inf"))
        delta_I = load_numbers(saved.delta, b * sizes.N + n, query_I, sizes, 0.0)
        near_D = sizes.P - (memory + start - first_key) + step
        far_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, near_D - config.tile, config)), config)
        near_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, near_D, config)), config)
        score_IJ = product(content_IH, tl.trans(k_JH), config)
        score_IJ += over_keys(tl.where(is_far(config), far_ID, near_ID), config)
        attended_IJ = is_attended(memory + query_I[:, None] - key_J[None, :], key_J[None, :], first_valid, sizes)
        probability_IJ = probability(score_IJ, log_sum_I, attended_IJ, config)
        weight_IJ = probability_IJ
        dscore_IJ = product(dout_IH, tl.trans(v_JH), config)
        if config.dropout > 0:
            kept_IJ = keep(valid_and_seed, b * sizes.N + n, start, first_key, config)
            weight_IJ = dropped(weight_IJ, kept_IJ, config)
            dscore_IJ = dropped(dscore_IJ, kept_IJ, config)
        dv_JH += product(tl.trans(weight_IJ.to(dout_IH.dtype)), dout_IH, config)
        dscore_IJ = probability_IJ * (dscore_IJ - delta_I[:, None])
        dk_JH += product(tl.trans(dscore_IJ.to(content_IH.dtype)), content_IH, config)
    store_rows(gradients.k, b, n, key_J, dk_JH * config.scale, config)
    store_rows(gradients.v, b, n, key_J, dv_JH, config)


@triton.jit
def distances_kernel(inputs, valid_and_seed, saved, gradients, sizes, config: tl.constexpr):
    """Gradients of the position keys of W distances, of one head, summed over one group of batch rows.

    Blocks begin where tiles of keys do. The pairs of W queries and a block lie in two tiles of keys: above the diagonal
    those of the tile before.
    """
    memory = sizes.S - sizes.T
    tile, group, n = program_position(num_blocks(sizes, config), sizes.N)
    nearest = memory % config.tile + (tile - 1) * config.tile
    step = tl.arange(0, config.tile)
    index_D = sizes.P - nearest - config.tile + step
    r_DH = load_rows(inputs.r, 0, n, index_D, config)
    later_IJ = step[:, None] >= step[None, :]
    dr_DH = tl.full([config.tile, config.padded], 0.0, config.acc_dtype)
    for b in range(group, sizes.B, sizes.groups):
        first_valid = first_valid_key(valid_and_seed, b, sizes)
        first = tl.maximum(nearest + first_valid - memory, 0) // config.tile * config.tile
        for start in range(first, sizes.T, config.tile):
            query_I = start + step
            content_IH, position_IH, dout_IH = load_queries(inputs, saved, b, n, query_I, config)
            log_sum_I = load_numbers(saved.log_sum, b * sizes.N + n, query_I, sizes, float("inf"))
            delta_I = load_numbers(saved.delta, b * sizes.N + n, query_I, sizes, 0.0)
            key = memory + start - nearest
            key_IJ = key + step[None, :] - tl.where(later_IJ, 0, config.tile)
            score_IJ = two_tiles(content_IH, inputs.k, b, n, key + step, config)
            score_IJ += over_keys(product(position_IH, tl.trans(r_DH), config), config)
            attended_IJ = is_attended(memory + query_I[:, None] - key_IJ, key_IJ, first_valid, sizes)
            dscore_IJ = two_tiles(dout_IH, inputs.v, b, n, key + step, config)
            if config.dropout > 0:
                late_IJ = keep(valid_and_seed, b * sizes.N + n, start, key, config)
                early_IJ = keep(valid_and_seed, b * sizes.N + n, start, key - config.tile, config)
                dscore_IJ = dropped(dscore_IJ, (late_IJ & later_IJ) | (early_IJ & ~later_IJ), config)
            dscore_IJ = probability(score_IJ, log_sum_I, attended_IJ, config) * (dscore_IJ - delta_I[:, None])
            dscore_ID = over_distances(dscore_IJ, config).to(content_IH.dtype)
            dr_DH += product(tl.trans(dscore_ID), position_IH, config)
    store_rows(gradients.r, group, n, index_D, dr_DH * config.scale, config)


@triton.jit
def num_blocks(sizes, config: tl.constexpr):
    """KernelConfig many blocks of distances there are."""
    return tl.cdiv(sizes.P + config.tile - (sizes.S - sizes.T) % config.tile, config.tile)


@triton.jit
def two_tiles(left_IH, rows, b, n, key_J, config: tl.constexpr):
    """Products with a tile of keys (or values), above the diagonal with the tile before."""
    late_IJ = product(left_IH, tl.trans(load_rows(rows, b, n, key_J, config)), config)
    early_IJ = product(left_IH, tl.trans(load_rows(rows, b, n, key_J - config.tile, config)), config)
    step = tl.arange(0, config.tile)
    return tl.where(step[:, None] >= step[None, :], late_IJ, early_IJ)


@triton.jit
def load_queries(inputs, saved, b, n, query_I, config: tl.constexpr):
    """Queries with each bias added, and the output's gradient."""
    q_IH = load_rows(inputs.q, b, n, query_I, config)
    content_IH = plus_bias(q_IH, inputs.content_bias, n, config)
    position_IH = plus_bias(q_IH, inputs.position_bias, n, config)
    return content_IH, position_IH, load_rows(saved.dout, b, n, query_I, config)


@triton.jit
def load_numbers(pointer, row_head, query_I, sizes, beyond):
    """A number of each query of one head, from (B, N, T); another one beyond the last query."""
    return tl.load(pointer + row_head * sizes.T + query_I, mask=query_I < sizes.T, other=beyond)


@triton.jit
def add_distances(rows, n, index_D, dscore_ID, position_IH, config: tl.constexpr):
    """Adds what one tile gives to the gradients of the position keys."""
    pointer_DH, exists_DH = row_pointers(rows, 0, n, index_D, config)
    share_DH = product(tl.trans(dscore_ID), position_IH, config) * config.scale
    tl.atomic_add(pointer_DH, share_DH, mask=exists_DH, sem="relaxed")
