# pyrefly: ignore-errors
"""Gradients of relative attention, as Triton kernels: scores are made again, tile by tile, from what went in.

With probability p, gradient o of the output, and delta the product of output and its gradient, the gradient of a score
is p (o . v - delta). There are three ways through the same tiles:

`queries_kernel` walks along the keys as the forward pass does, and gives the gradients of queries and biases. If
`how.atomic`, it adds those of the position keys to one sum as well, in whatever order programs come.
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
    is_far,
    keep,
    load_rows,
    oldest_key,
    over_distances,
    over_keys,
    place,
    plus_bias,
    probability,
    product,
    rows_at,
    seen,
    store_rows,
)
from transformer_xl.model.kernels.triton.tiles import Rows


class Kept(NamedTuple):
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
def queries_kernel(inputs, side, kept, gradients, sizes, how: tl.constexpr):
    """Gradients of W queries of one head; also delta, which the other two kernels read."""
    tile, b, n = place(tl.cdiv(sizes.T, how.tile), sizes.N)
    memory = sizes.S - sizes.T
    first_query = tile * how.tile
    step = tl.arange(0, how.tile)
    query_I = first_query + step
    content_IH, position_IH, dout_IH = load_queries(inputs, kept, b, n, query_I, how)
    log_sum_I = load_numbers(kept.log_sum, b * sizes.N + n, query_I, sizes, float("inf"))
    delta_I = tl.sum(load_rows(kept.out, b, n, query_I, how).to(how.number) * dout_IH.to(how.number), 1)
    tl.store(kept.delta + (b * sizes.N + n) * sizes.T + query_I, delta_I, mask=query_I < sizes.T)

    oldest = oldest_key(side, b, sizes)
    first = tl.maximum(oldest, memory + first_query - sizes.P + 1) // how.tile * how.tile
    last = memory + tl.minimum(first_query + how.tile, sizes.T)
    far_D = sizes.P - (memory + first_query - first) - how.tile + step  # where the far position keys stand
    far_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, far_D, how)), how)
    waiting_ID = tl.full([how.tile, how.tile], 0.0, content_IH.dtype)  # score gradients of a block that is half known
    dcontent_IH = tl.full([how.tile, how.padded], 0.0, how.number)
    dposition_IH = tl.full([how.tile, how.padded], 0.0, how.number)
    for start in range(first, last, how.tile):
        key_J = start + step
        k_JH = load_rows(inputs.k, b, n, key_J, how)
        near_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, far_D + how.tile, how)), how)
        score_IJ = product(content_IH, tl.trans(k_JH), how)
        score_IJ += over_keys(tl.where(is_far(how), far_ID, near_ID), how)
        seen_IJ = seen(memory + query_I[:, None] - key_J[None, :], key_J[None, :], oldest, sizes)
        dscore_IJ = product(dout_IH, tl.trans(load_rows(inputs.v, b, n, key_J, how)), how)
        if how.dropout > 0:
            dscore_IJ = dropped(dscore_IJ, keep(side, b * sizes.N + n, first_query, start, how), how)
        dscore_IJ = probability(score_IJ, log_sum_I, seen_IJ, how) * (dscore_IJ - delta_I[:, None])
        dcontent_IH += product(dscore_IJ.to(k_JH.dtype), k_JH, how)
        dscore_ID = over_distances(dscore_IJ, how).to(k_JH.dtype)
        whole_ID = tl.where(is_far(how), dscore_ID, waiting_ID)
        dposition_IH += product(whole_ID, load_rows(inputs.r, 0, n, far_D, how), how)
        if how.atomic:
            add_distances(gradients.r, n, far_D, whole_ID, position_IH, how)
        waiting_ID = dscore_ID
        far_ID = near_ID
        far_D += how.tile

    whole_ID = tl.where(is_far(how), 0.0, waiting_ID).to(content_IH.dtype)  # nothing is seen beyond the last tile
    dposition_IH += product(whole_ID, load_rows(inputs.r, 0, n, far_D, how), how)
    if how.atomic:
        add_distances(gradients.r, n, far_D, whole_ID, position_IH, how)
    store_rows(gradients.q, b, n, query_I, (dcontent_IH + dposition_IH) * how.scale, how)
    only = tl.full([1], 0, tl.int32) + tile
    store_rows(gradients.content_bias, b, n, only, tl.sum(dcontent_IH, 0, keep_dims=True) * how.scale, how)
    store_rows(gradients.position_bias, b, n, only, tl.sum(dposition_IH, 0, keep_dims=True) * how.scale, how)


@triton.jit
def keys_kernel(inputs, side, kept, gradients, sizes, how: tl.constexpr):
    """Gradients of W keys and their values, of one head."""
    tile, b, n = place(tl.cdiv(sizes.S, how.tile), sizes.N)
    memory = sizes.S - sizes.T
    first_key = tile * how.tile
    step = tl.arange(0, how.tile)
    key_J = first_key + step
    k_JH = load_rows(inputs.k, b, n, key_J, how)
    v_JH = load_rows(inputs.v, b, n, key_J, how)

    oldest = oldest_key(side, b, sizes)
    first = tl.maximum(first_key - memory, 0) // how.tile * how.tile
    last = tl.minimum(tl.minimum(first_key + how.tile, sizes.S) - 1 - memory + sizes.P, sizes.T)
    last = tl.where(first_key + how.tile <= oldest, first, last)  # nobody sees empty slots
    dk_JH = tl.full([how.tile, how.padded], 0.0, how.number)
    dv_JH = tl.full([how.tile, how.padded], 0.0, how.number)
    for start in range(first, last, how.tile):
        query_I = start + step
        content_IH, position_IH, dout_IH = load_queries(inputs, kept, b, n, query_I, how)
        log_sum_I = load_numbers(kept.log_sum, b * sizes.N + n, query_I, sizes, float("inf"))
        delta_I = load_numbers(kept.delta, b * sizes.N + n, query_I, sizes, 0.0)
        near_D = sizes.P - (memory + start - first_key) + step
        far_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, near_D - how.tile, how)), how)
        near_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, near_D, how)), how)
        score_IJ = product(content_IH, tl.trans(k_JH), how)
        score_IJ += over_keys(tl.where(is_far(how), far_ID, near_ID), how)
        seen_IJ = seen(memory + query_I[:, None] - key_J[None, :], key_J[None, :], oldest, sizes)
        probability_IJ = probability(score_IJ, log_sum_I, seen_IJ, how)
        weight_IJ = probability_IJ
        dscore_IJ = product(dout_IH, tl.trans(v_JH), how)
        if how.dropout > 0:
            kept_IJ = keep(side, b * sizes.N + n, start, first_key, how)
            weight_IJ = dropped(weight_IJ, kept_IJ, how)
            dscore_IJ = dropped(dscore_IJ, kept_IJ, how)
        dv_JH += product(tl.trans(weight_IJ.to(dout_IH.dtype)), dout_IH, how)
        dscore_IJ = probability_IJ * (dscore_IJ - delta_I[:, None])
        dk_JH += product(tl.trans(dscore_IJ.to(content_IH.dtype)), content_IH, how)
    store_rows(gradients.k, b, n, key_J, dk_JH * how.scale, how)
    store_rows(gradients.v, b, n, key_J, dv_JH, how)


@triton.jit
def distances_kernel(inputs, side, kept, gradients, sizes, how: tl.constexpr):
    """Gradients of the position keys of W distances, of one head, summed over one group of batch rows.

    Blocks begin where tiles of keys do. The pairs of W queries and a block lie in two tiles of keys: above the diagonal
    those of the tile before.
    """
    memory = sizes.S - sizes.T
    tile, group, n = place(num_blocks(sizes, how), sizes.N)
    nearest = memory % how.tile + (tile - 1) * how.tile
    step = tl.arange(0, how.tile)
    index_D = sizes.P - nearest - how.tile + step
    r_DH = load_rows(inputs.r, 0, n, index_D, how)
    later_IJ = step[:, None] >= step[None, :]
    dr_DH = tl.full([how.tile, how.padded], 0.0, how.number)
    for b in range(group, sizes.B, sizes.groups):
        oldest = oldest_key(side, b, sizes)
        first = tl.maximum(nearest + oldest - memory, 0) // how.tile * how.tile
        for start in range(first, sizes.T, how.tile):
            query_I = start + step
            content_IH, position_IH, dout_IH = load_queries(inputs, kept, b, n, query_I, how)
            log_sum_I = load_numbers(kept.log_sum, b * sizes.N + n, query_I, sizes, float("inf"))
            delta_I = load_numbers(kept.delta, b * sizes.N + n, query_I, sizes, 0.0)
            key = memory + start - nearest
            key_IJ = key + step[None, :] - tl.where(later_IJ, 0, how.tile)
            score_IJ = two_tiles(content_IH, inputs.k, b, n, key + step, how)
            score_IJ += over_keys(product(position_IH, tl.trans(r_DH), how), how)
            seen_IJ = seen(memory + query_I[:, None] - key_IJ, key_IJ, oldest, sizes)
            dscore_IJ = two_tiles(dout_IH, inputs.v, b, n, key + step, how)
            if how.dropout > 0:
                late_IJ = keep(side, b * sizes.N + n, start, key, how)
                early_IJ = keep(side, b * sizes.N + n, start, key - how.tile, how)
                dscore_IJ = dropped(dscore_IJ, (late_IJ & later_IJ) | (early_IJ & ~later_IJ), how)
            dscore_IJ = probability(score_IJ, log_sum_I, seen_IJ, how) * (dscore_IJ - delta_I[:, None])
            dscore_ID = over_distances(dscore_IJ, how).to(content_IH.dtype)
            dr_DH += product(tl.trans(dscore_ID), position_IH, how)
    store_rows(gradients.r, group, n, index_D, dr_DH * how.scale, how)


@triton.jit
def num_blocks(sizes, how: tl.constexpr):
    """How many blocks of distances there are."""
    return tl.cdiv(sizes.P + how.tile - (sizes.S - sizes.T) % how.tile, how.tile)


@triton.jit
def two_tiles(left_IH, rows, b, n, key_J, how: tl.constexpr):
    """Products with a tile of keys (or values), above the diagonal with the tile before."""
    late_IJ = product(left_IH, tl.trans(load_rows(rows, b, n, key_J, how)), how)
    early_IJ = product(left_IH, tl.trans(load_rows(rows, b, n, key_J - how.tile, how)), how)
    step = tl.arange(0, how.tile)
    return tl.where(step[:, None] >= step[None, :], late_IJ, early_IJ)


@triton.jit
def load_queries(inputs, kept, b, n, query_I, how: tl.constexpr):
    """Queries with each bias added, and the output's gradient."""
    q_IH = load_rows(inputs.q, b, n, query_I, how)
    content_IH = plus_bias(q_IH, inputs.content_bias, n, how)
    position_IH = plus_bias(q_IH, inputs.position_bias, n, how)
    return content_IH, position_IH, load_rows(kept.dout, b, n, query_I, how)


@triton.jit
def load_numbers(pointer, row_head, query_I, sizes, beyond):
    """A number of each query of one head, from (B, N, T); another one beyond the last query."""
    return tl.load(pointer + row_head * sizes.T + query_I, mask=query_I < sizes.T, other=beyond)


@triton.jit
def add_distances(rows, n, index_D, dscore_ID, position_IH, how: tl.constexpr):
    """Adds what one tile gives to the gradients of the position keys."""
    place_DH, there_DH = rows_at(rows, 0, n, index_D, how)
    share_DH = product(tl.trans(dscore_ID), position_IH, how) * how.scale
    tl.atomic_add(place_DH, share_DH, mask=there_DH, sem="relaxed")
