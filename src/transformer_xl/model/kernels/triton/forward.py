# pyrefly: ignore-errors
"""Relative attention forward, as one Triton kernel: nothing of size T x S leaves the chip.

Each program takes W queries of one head and walks along the keys they see, with the running maximum and sum of the
softmax (Milakov and Gimelshein 2018, Dao et al. 2022). Terms (a) + (c) of the paper's section 3.3 are one product of
queries and keys; terms (b) + (d) one product of queries and the next block of position keys, turned over the keys
inside the tile (`blocks.py`). Scores are float32 throughout: the backward pass takes probabilities from scores and
their kept log-sum-exp, and of rounded scores they would not sum to one.

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
    over_keys,
    place,
    plus_bias,
    product,
    seen,
    store_rows,
)
from transformer_xl.model.kernels.triton.tiles import Rows


class Results(NamedTuple):
    """Where the kernel writes: attended values (B, T, N, H), and log2-sum-exp2 of each query's scores (B, N, T)."""

    out: Rows
    log_sum: Tensor


@triton.jit
def forward_kernel(inputs, side, results, sizes, how: tl.constexpr):
    """Attended values of W queries of one head."""
    tile, b, n = place(tl.cdiv(sizes.T, how.tile), sizes.N)
    memory = sizes.S - sizes.T
    first_query = tile * how.tile
    step = tl.arange(0, how.tile)
    query_I = first_query + step
    q_IH = load_rows(inputs.q, b, n, query_I, how)
    content_IH = plus_bias(q_IH, inputs.content_bias, n, how)
    position_IH = plus_bias(q_IH, inputs.position_bias, n, how)

    oldest = oldest_key(side, b, sizes)
    first = tl.maximum(oldest, memory + first_query - sizes.P + 1) // how.tile * how.tile
    last = memory + tl.minimum(first_query + how.tile, sizes.T)
    near_D = sizes.P - (memory + first_query - first) + step  # where the near position keys stand
    far_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, near_D - how.tile, how)), how)
    top_I = tl.full([how.tile], float("-inf"), how.number)
    total_I = tl.full([how.tile], 0.0, how.number)
    out_IH = tl.full([how.tile, how.padded], 0.0, how.number)
    for start in range(first, last, how.tile):
        key_J = start + step
        near_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, near_D, how)), how)
        score_IJ = product(content_IH, tl.trans(load_rows(inputs.k, b, n, key_J, how)), how)
        score_IJ += over_keys(tl.where(is_far(how), far_ID, near_ID), how)
        seen_IJ = seen(memory + query_I[:, None] - key_J[None, :], key_J[None, :], oldest, sizes)
        score_IJ = tl.where(seen_IJ, score_IJ * how.scale_log2, float("-inf"))
        higher_I = tl.maximum(top_I, tl.max(score_IJ, 1))
        from_I = tl.where(higher_I == float("-inf"), 0.0, higher_I)  # a row may have seen nothing yet
        shrink_I = tl.exp2(top_I - from_I)
        weight_IJ = tl.exp2(score_IJ - from_I[:, None])
        total_I = total_I * shrink_I + tl.sum(weight_IJ, 1)
        if how.dropout > 0:
            weight_IJ = dropped(weight_IJ, keep(side, b * sizes.N + n, first_query, start, how), how)
        v_JH = load_rows(inputs.v, b, n, key_J, how)
        out_IH = out_IH * shrink_I[:, None] + product(weight_IJ.to(v_JH.dtype), v_JH, how)
        top_I = higher_I
        far_ID = near_ID
        near_D += how.tile

    saw_I = total_I > 0  # not so rows beyond T, and queries of padding
    total_I = tl.where(saw_I, total_I, 1.0)
    store_rows(results.out, b, n, query_I, out_IH / total_I[:, None], how)
    log_sum = results.log_sum + (b * sizes.N + n) * sizes.T
    # inf for those that saw nothing: their probabilities are 0 in the backward pass
    log_sum_I = tl.where(saw_I, top_I + tl.log2(total_I), float("inf"))
    tl.store(log_sum + query_I, log_sum_I, mask=query_I < sizes.T)
