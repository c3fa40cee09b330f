# pyrefly: ignore-errors
"""The parts all Triton kernels share: loading tiles, lining distances up with keys, masks, dropout.

A tile of W queries and W keys spans 2 W - 1 distances. Let `base` be the distance from its first query to its first
key; the distance from query i to key j of the tile is base + i - j. Distances from base up make the tile's `far` block
(W of them), those below base its `near` block. The product of queries and a block's position keys is a matrix
[query, distance], whose row i must be turned by i places to stand over the keys:

    key j stands over column (j - i - 1) mod W: of the far block where i >= j, of the near block elsewhere

Position keys come farthest first, so columns are counted from the farthest distance of a block. Three things follow.
Far and near halves never meet in one column, so one gather turns both. The near block of a tile of keys is the far
block of the next, so a program that walks along the keys multiplies each block once. And turned back, the gradients of
two neighbouring tiles make one whole block again.

Shape suffixes: I queries, J keys, D distances of a tile (W of each), H head width padded to a power of two; X, Y any of
these.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def program_position(tiles, num_heads):
    """Tile, batch row and head that this program works on; tiles of one head are neighbours."""
    program = tl.program_id(0)
    row_head = program // tiles
    return program % tiles, (row_head // num_heads).to(tl.int64), row_head % num_heads


@triton.jit
def row_pointers(rows, b, n, index_X, config: tl.constexpr):
    """Pointers to rows of one head, (X, H), and which of them are inside the tensor."""
    lane_H = tl.arange(0, config.padded)
    inside_X = (index_X >= 0) & (index_X < rows.count_plus_one - 1)
    offset_XH = index_X.to(tl.int64)[:, None] * rows.stride_row + lane_H[None, :]
    start = rows.pointer + b * rows.stride_b + n * rows.stride_n
    return start + offset_XH, inside_X[:, None] & (lane_H < config.width)[None, :]


@triton.jit
def load_rows(rows, b, n, index_X, config: tl.constexpr):
    """Rows of one head, (X, H); 0 outside the tensor."""
    pointer_XH, exists_XH = row_pointers(rows, b, n, index_X, config)
    return tl.load(pointer_XH, mask=exists_XH, other=0.0)


@triton.jit
def store_rows(rows, b, n, index_X, value_XH, config: tl.constexpr):
    """Stores rows of one head in the dtype of the tensor."""
    pointer_XH, exists_XH = row_pointers(rows, b, n, index_X, config)
    tl.store(pointer_XH, value_XH.to(rows.pointer.dtype.element_ty), mask=exists_XH)


@triton.jit
def plus_bias(q_IH, bias, n, config: tl.constexpr):
    """Queries with one of the biases added, rounded to the queries' dtype."""
    lane_H = tl.arange(0, config.padded)
    bias_H = tl.load(bias + n * config.width + lane_H, mask=lane_H < config.width, other=0.0)
    return (q_IH.to(config.acc_dtype) + bias_H.to(config.acc_dtype)[None, :]).to(q_IH.dtype)


@triton.jit
def product(left_XY, right_YX, config: tl.constexpr):
    """Matrix product in the accumulator dtype."""
    if config.interpreted:  # the interpreter would multiply the bits of bfloat16
        left_XY = left_XY.to(config.acc_dtype)
        right_YX = right_YX.to(config.acc_dtype)
    return tl.dot(left_XY, right_YX, input_precision=config.input_precision, out_dtype=config.acc_dtype)


@triton.jit
def step(config: tl.constexpr):
    """0, 1, ..., W - 1, made anew at each call.

    Were it known to be the same in each turn of a loop, the compiler would keep all that follows from it in registers
    from turn to turn, and spill others for it.
    """
    zero = 0
    if not config.interpreted:
        zero = tl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    return zero + tl.arange(0, config.tile)


@triton.jit
def is_far(config: tl.constexpr):
    """Where in (I, D) the far block is meant; elsewhere the near block."""
    return step(config)[:, None] + step(config)[None, :] >= config.tile - 1


@triton.jit
def over_keys(score_ID, config: tl.constexpr):
    """Turns what stands by distance, far and near as `is_far` says, over its keys: (I, J)."""
    return tl.gather(score_ID, (step(config)[None, :] - step(config)[:, None] - 1) & (config.tile - 1), 1)


@triton.jit
def over_distances(score_IJ, config: tl.constexpr):
    """Turns what stands over keys back to its distance: (I, D)."""
    return tl.gather(score_IJ, (step(config)[None, :] + step(config)[:, None] + 1) & (config.tile - 1), 1)


@triton.jit
def first_valid_key(valid_and_seed, b, sizes):
    """The first key of this batch row that is in no empty memory slot."""
    return (
        0
        if valid_and_seed.valid is None
        else tl.maximum(sizes.S - sizes.T - tl.load(valid_and_seed.valid + b).to(tl.int32), 0)
    )


@triton.jit
def is_attended(distance, key, first_valid, sizes):
    """Whether a query attends to a key: not in the future, not beyond the window, not in an empty slot."""
    return (distance >= 0) & (distance < sizes.P) & (key >= first_valid)


@triton.jit
def keep(valid_and_seed, row_head, first_query, first_key, config: tl.constexpr):
    """Which probabilities of a tile dropout leaves, (I, J): Philox counters of row and head, query, and four keys.

    Depends on the indices alone, so every kernel draws the same; first_key is a multiple of four.
    """
    quarter: tl.constexpr = config.tile // 4
    query_IJ = first_query + tl.arange(0, config.tile)[:, None] + tl.full([config.tile, quarter], 0, tl.int32)
    four_IJ = first_key // 4 + tl.arange(0, quarter)[None, :] + tl.full([config.tile, quarter], 0, tl.int32)
    row_head_IJ = row_head.to(tl.int32) + tl.full([config.tile, quarter], 0, tl.int32)
    one, two, three, four = tl.philox(
        tl.load(valid_and_seed.seed), four_IJ, query_IJ, row_head_IJ, tl.zeros_like(query_IJ)
    )
    even = tl.interleave(_survives(one, config), _survives(three, config))
    odd = tl.interleave(_survives(two, config), _survives(four, config))
    return tl.interleave(even, odd) != 0


@triton.jit
def _survives(bits, config: tl.constexpr):
    return ((bits >> 1).to(tl.int32) >= config.threshold).to(tl.int8)


@triton.jit
def probability(score_IJ, log_sum_I, attended_IJ, config: tl.constexpr):
    """Probabilities from scores and their log2-sum-exp2."""
    return tl.exp2(tl.where(attended_IJ, score_IJ * config.scale_log2, float("-inf")) - log_sum_I[:, None])


@triton.jit
def dropped(values, kept, config: tl.constexpr):
    """Values after dropout: 0, or larger by 1 / (1 - dropout)."""
    return tl.where(kept, values * (1 / (1 - config.dropout)), 0.0)
