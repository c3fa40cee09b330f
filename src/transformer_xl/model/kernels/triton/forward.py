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
    first_valid_key,
    is_attended,
    is_far,
    keep,
    load_rows,
    over_keys,
    plus_bias,
    product,
    program_position,
    store_rows,
)
from transformer_xl.model.kernels.triton.tiles import Rows


class Results(NamedTuple):
    """Where the kernel writes: attended values (B, T, N, H), and log2-sum-exp2 of each query's scores (B, N, T)."""

    out: Rows
    log_sum: Tensor


@triton.jit
def forward_kernel(inputs, valid_and_seed, results, sizes, config: tl.constexpr):
    """Attended values of W queries of one head."""
    tile, b, n = program_position(tl.cdiv(sizes.T, config.tile), sizes.N)
    memory = sizes.S - sizes.T
    first_query = tile * config.tile
    step = tl.arange(0, config.tile)
    query_I = first_query + step
    q_IH = load_rows(inputs.q, b, n, query_I, config)
    content_IH = plus_bias(q_IH, inputs.content_bias, n, config)
    position_IH = plus_bias(q_IH, inputs.position_bias, n, config)

    first_valid = first_valid_key(valid_and_seed, b, sizes)
    first = tl.maximum(first_valid, memory + first_query - sizes.P + 1) // config.tile * config.tile
    last = memory + tl.minimum(first_query + config.tile, sizes.T)
    near_D = sizes.P - (memory + first_query - first) + step  # where the near position keys stand
    far_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, near_D - config.tile, config)), config)
    top_I = tl.full([config.tile], float("-inf"), config.acc_dtype)
    total_I = tl.full([config.tile], 0.0, config.acc_dtype)
    out_IH = tl.full([config.tile, config.padded], 0.0, config.acc_dtype)
    for start in range(first, last, config.tile):
        key_J = start + step
        near_ID = product(position_IH, tl.trans(load_rows(inputs.r, 0, n, near_D, config)), config)
        score_IJ = product(content_IH, tl.trans(load_rows(inputs.k, b, n, key_J, config)), config)
        score_IJ += over_keys(tl.where(is_far(config), far_ID, near_ID), config)
        attended_IJ = is_attended(memory + query_I[:, None] - key_J[None, :], key_J[None, :], first_valid, sizes)
        score_IJ = tl.where(attended_IJ, score_IJ * config.scale_log2, float("-inf"))
        higher_I = tl.maximum(top_I, tl.max(score_IJ, 1))
        from_I = tl.where(higher_I == float("-inf"), 0.0, higher_I)  # a row may have seen nothing yet
        shrink_I = tl.exp2(top_I - from_I)
        weight_IJ = tl.exp2(score_IJ - from_I[:, None])
        total_I = total_I * shrink_I + tl.sum(weight_IJ, 1)
        if config.dropout > 0:
            weight_IJ = dropped(weight_IJ, keep(valid_and_seed, b * sizes.N + n, first_query, start, config), config)
        v_JH = load_rows(inputs.v, b, n, key_J, config)
        out_IH = out_IH * shrink_I[:, None] + product(weight_IJ.to(v_JH.dtype), v_JH, config)
        top_I = higher_I
        far_ID = near_ID
        near_D += config.tile

    saw_I = total_I > 0  # not so rows beyond T, and queries of padding
    total_I = tl.where(saw_I, total_I, 1.0)
    store_rows(results.out, b, n, query_I, out_IH / total_I[:, None], config)
    log_sum = results.log_sum + (b * sizes.N + n) * sizes.T
    # inf for those that saw nothing: their probabilities are 0 in the backward pass
    log_sum_I = tl.where(saw_I, top_I + tl.log2(total_I), float("inf"))
    tl.store(log_sum + query_I, log_sum_I, mask=query_I < sizes.T)
