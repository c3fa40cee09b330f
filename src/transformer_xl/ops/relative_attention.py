"""Relative attention on plain tensors, for any model: causal or to both sides, of bands, chunks, padded batches, masks.

    score[i, j] = ((q_i + u) . k_j + (q_i + w) . r[M + i - j] + (q_i + s) . e[segments of i and j]) scale

The first two terms are those of the paper (section 3.3), with its v written w; the last is XLNet's (Yang et al. 2019,
section 2.5), computed where segments are given. Query i stands at the place of key M + i, and keys after it have
distances below 0.

Shape suffixes: B batch size, T queries, S = M + T keys (M memory slots), P distances, N heads, H head width, X one for
each query, or one for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from numbers import Integral

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from transformer_xl.config import UserError
from transformer_xl.ops.kernels import KERNELS, AttentionInputs, AttentionMask, Kernel, choose
from transformer_xl.progress import note


@dataclass(frozen=True)
class SegmentTerm:
    """XLNet's term of the score: whether query and key are in the same segment of the text."""

    query_BT: Tensor
    """Segment of each query: any integers."""
    key_BS: Tensor
    """Segment of each key."""
    embedding_2NH: Tensor
    """What the query multiplies for a key of its own segment, and for one of another."""
    bias_NH: Tensor
    """Added to the query: s."""


def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    content_bias: Tensor,
    position_bias: Tensor,
    *,
    causal: bool = True,
    lengths: Tensor | Sequence[int] | None = None,
    key_lengths: Tensor | Sequence[int] | None = None,
    window: tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    mask: Tensor | None = None,
    segments: SegmentTerm | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Attend from T queries to S = M + T keys, with the position terms of Transformer-XL.

        # position keys of the distances T - 1, ..., 0, ..., -(T - 1)
        r = layer.r_proj(encoding).unflatten(-1, (num_heads, -1))
        out = relative_attention(q, k, v, r, u, w, causal=False, lengths=lengths, window=(128, 16))

    Args:
        q: queries (B, T, N, H), whose places are those of the last T keys.
        k: keys (B, S, N, H).
        v: values (B, S, N, H).
        r: position keys (P, N, H) of all distances, the largest first: S - 1, ..., 0 if causal (P = S), else S - 1,
            ..., -(T - 1) (P = S + T - 1). With `window`, those of other distances may be left out.
        content_bias: the paper's u (N, H), added to the query that multiplies keys.
        position_bias: the paper's v (N, H), added to the query that multiplies position keys.
        causal: whether a query attends to no key after its own place.
        lengths: number of tokens of each row (B) that are not padding, which stands behind them; None for T. Padding is
            not attended, and its output is 0; its inputs must be finite, as a weight of 0 times NaN or inf is NaN.
        key_lengths: as lengths, but queries behind them attend to the keys before them like others: for models where
            something is computed from the outputs of padding.
        window: the numbers of keys before and after its own place that a query attends to at most; None for all.
        chunk_size: if given, places count from this size of chunk: a query attends to all of its chunk of the T tokens
            (if causal, up to itself), and `window` counts keys before and after the chunk.
        mask: bool, which keys a query may attend to besides, in a shape that expands to (B, N, T, S). The output of a
            query that may attend to nothing is 0.
        segments: the segments of queries and keys, and their term.
        dropout: probability that an attention probability is 0; the others are divided by 1 - dropout.
        scale: factor of the scores, or None for 1 / sqrt(H).
        implementation: name of a kernel, or auto for the fastest that does what is asked on the device. `native`,
            `cpu` and `triton` need memory proportional to T + S; `sdpa` and `reference` make matrices of T x S, and
            alone take `mask`, `segments`, second derivatives and the transforms of `torch.func`.

    Returns:
        The attended values (B, T, N, H), in the dtype of q.

    Raises:
        UserError: shapes, dtypes or numbers do not fit.
    """
    batch_size, num_queries, num_heads, width = _shape(q, "q", "(B, T, N, H)", 4)
    num_keys = _shape(k, "k", "(B, S, N, H)", 4)[1]
    num_memory = num_keys - num_queries
    if num_memory < 0:
        raise UserError(f"k has {num_keys} keys for {num_queries} queries; give a key for each query at least")
    per_head = (num_heads, width)
    for name, tensor, shape in (
        ("k", k, (batch_size, num_keys, *per_head)),
        ("v", v, (batch_size, num_keys, *per_head)),
        ("content_bias", content_bias, per_head),
        ("position_bias", position_bias, per_head),
    ):
        _check_shape(name, tensor, shape)
    for name, tensor in (
        ("k", k),
        ("v", v),
        ("r", r),
        ("content_bias", content_bias),
        ("position_bias", position_bias),
    ):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise UserError(f"{name} is {tensor.dtype} on {tensor.device}, but q {q.dtype} on {q.device}; convert one")
    if not 0 <= dropout < 1:
        raise UserError(f"dropout={dropout:g}: give a probability from 0 to below 1")
    if scale is not None and not math.isfinite(scale):
        raise UserError(f"scale={scale}: give a finite number, or None for 1 / sqrt(H)")
    if chunk_size is not None:
        if not _is_integer(chunk_size) or chunk_size < 1:
            raise UserError(f"chunk_size={chunk_size}: must be an integer, 1 or more")
        chunk_size = int(chunk_size)
    all_after = 0 if causal else num_queries - 1
    window_before, window_after = _window(window, num_keys - 1, num_queries - 1)
    in_chunk = (chunk_size or 1) - 1
    before, after = min(window_before + in_chunk, num_keys - 1), min(window_after + in_chunk, all_after)
    num_distances = {num_keys + all_after, before + after + 1}
    if _shape(r, "r", "(P, N, H)", 3)[1:] != per_head or len(r) not in num_distances:
        wanted = " or ".join(f"{number:,}" for number in sorted(num_distances, reverse=True))
        raise UserError(
            f"r has shape {tuple(r.shape)}; give (P, {num_heads}, {width}) with P = {wanted}: a position key for each "
            f"distance from {num_keys - 1:,} down to {-all_after} (or, within the window, from {before:,} to {-after})"
        )
    if len(r) == num_keys + all_after:
        r = r[num_keys - 1 - before : num_keys + after]
    query_T = torch.arange(num_queries, device=q.device)
    start_T = query_T if chunk_size is None else query_T - query_T % chunk_size
    first_T = (num_memory + start_T - window_before).clamp(min=0)
    first_key_BT = stop_key_BT = outside_BT = None
    if chunk_size is not None:
        first_key_BT = first_T.expand(batch_size, -1)
        stop_key_BT = (num_memory + start_T + chunk_size + window_after).clamp(max=num_keys).expand(batch_size, -1)
    name, given = ("lengths", lengths) if key_lengths is None else ("key_lengths", key_lengths)
    if given is not None:
        if lengths is not None and key_lengths is not None:
            raise UserError("there are lengths and key_lengths: give one of them")
        end_B1 = (num_memory + _lengths(name, given, batch_size, num_queries, q.device))[:, None]
        # padding, or what reaches nothing but padding
        outside_BT = (num_memory + query_T if key_lengths is None else first_T) >= end_B1
        end_BT = end_B1.masked_fill(outside_BT, 0)  # so that kernels do less for padding
        stop_key_BT = end_BT if stop_key_BT is None else torch.minimum(stop_key_BT, end_BT)
    if scale is not None:  # kernels divide by sqrt(H)
        factor = scale * width**0.5
        q, content_bias, position_bias = q * factor, content_bias * factor, position_bias * factor
        segments = segments and replace(segments, bias_NH=segments.bias_NH * factor)
    inputs = AttentionInputs(q, k, v, r, content_bias, position_bias)
    ranges = AttentionMask(None, first_key_BT=first_key_BT, num_later=after, stop_key_BT=stop_key_BT)
    added, empty = _added_scores(inputs, ranges, mask, segments)
    kernel = _kernel(implementation, q, needs_matrix=added is not None)
    out = kernel.attend(inputs, replace(ranges, added_BNTS=added), dropout).to(q.dtype)  # autocast lowers some kernels'
    out = out if outside_BT is None else out.masked_fill(outside_BT[..., None, None], 0)
    return out if empty is None else out.masked_fill(empty.transpose(1, 2)[..., None], 0)


def _shape(tensor: Tensor, name: str, letters: str, num_dimensions: int) -> tuple[int, ...]:
    if not isinstance(tensor, Tensor) or tensor.ndim != num_dimensions or 0 in tensor.shape:
        given = tuple(tensor.shape) if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise UserError(f"{name} is {given}; give a tensor {letters} without empty dimensions")
    return tuple(tensor.shape)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if _shape(tensor, name, str(shape), len(shape)) != shape:
        raise UserError(f"{name} has shape {tuple(tensor.shape)}; q and k need {shape}")


def _window(window: tuple[int | None, int | None] | None, most: int, most_after: int) -> tuple[int, int]:
    """Return how many keys before and after its own place a query attends to."""
    sides = (None, None) if window is None else window
    if not isinstance(sides, Sequence) or [side is None or _is_integer(side) for side in sides] != [True, True]:
        raise UserError(f"window={window}: give two integers, keys before and after a query, or None for all of a side")
    before, after = (None if side is None else int(side) for side in sides)
    for side, number in (("before", before), ("after", after)):
        if number is not None and number < 0:
            raise UserError(
                f"window={window}: {number} keys {side} a query would leave it nothing, not even its own; give 0 or "
                "more, or None for all"
            )
    return (
        most if before is None else min(before, most),
        most_after if after is None else min(after, most_after),
    )


def _is_integer(value: object) -> bool:
    """Return whether it is an integer, also one of NumPy, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _lengths(
    name: str, lengths: Tensor | Sequence[int], batch_size: int, num_queries: int, device: torch.device
) -> Tensor:
    try:
        lengths_B = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{name}={lengths!r}: give an integer for each batch row") from None
    if lengths_B.shape != (batch_size,) or lengths_B.is_floating_point() or lengths_B.dtype == torch.bool:
        raise UserError(f"{name} are {lengths_B.dtype} {tuple(lengths_B.shape)}; give an integer for each batch row")
    lengths_B = lengths_B.long()  # no kernel of torch compares uint16
    is_known = not (lengths_B.is_meta or is_fake(lengths_B) or torch.compiler.is_compiling())
    if is_known and ((lengths_B < 0) | (lengths_B > num_queries)).any():
        raise UserError(f"{name}={lengths_B.tolist()}: must be from 0 to the number of queries, {num_queries}")
    return lengths_B.to(device)


def _added_scores(
    inputs: AttentionInputs, ranges: AttentionMask, mask: Tensor | None, segments: SegmentTerm | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return what is added to the scores (B, N, T, S), and which queries (B, N, T) attend to nothing; each or None."""
    batch_size, num_queries, num_heads, width = inputs.q_BTNH.shape
    num_keys = inputs.k_BSNH.shape[1]
    added: Tensor | None = None
    empty: Tensor | None = None
    if segments is not None:
        _check_shape("segments.query_BT", segments.query_BT, (batch_size, num_queries))
        _check_shape("segments.key_BS", segments.key_BS, (batch_size, num_keys))
        _check_shape("segments.embedding_2NH", segments.embedding_2NH, (2, num_heads, width))
        _check_shape("segments.bias_NH", segments.bias_NH, (num_heads, width))
        query_BTNH = (inputs.q_BTNH + segments.bias_NH) * width**-0.5
        same_BNT, other_BNT = ((query_BTNH * key_NH).sum(-1).transpose(1, 2) for key_NH in segments.embedding_2NH)
        is_same_BTS = segments.query_BT[..., None] == segments.key_BS[:, None]
        added = torch.where(is_same_BTS[:, None], same_BNT[..., None], other_BNT[..., None])
    if mask is not None:
        shape = (batch_size, num_heads, num_queries, num_keys)
        is_bool = isinstance(mask, Tensor) and mask.dtype == torch.bool
        try:
            fits = is_bool and torch.broadcast_shapes(mask.shape, shape) == shape
        except RuntimeError:
            fits = False
        if not fits:
            what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
            raise UserError(
                f"mask is {what}; give a bool tensor, true where a query may attend, that expands to (B, N, T, S) = "
                f"{shape}, such as (B, 1, T, S)"
            )
        num_distances, device = len(inputs.position_key_PNH), inputs.q_BTNH.device
        allowed = mask & ranges.attended(num_queries, num_keys, num_distances, device)[:, None]
        empty = ~allowed.any(-1)
        # such a query attends to anything, as its output is not used
        allowed = allowed | empty[..., None]
        added = inputs.q_BTNH.new_zeros(()) if added is None else added
        added = added.masked_fill(~allowed, torch.finfo(inputs.q_BTNH.dtype).min)
        empty = empty.expand(shape[:-1])
    return added, empty


def _kernel(implementation: str, q: Tensor, *, needs_matrix: bool) -> Kernel:
    kernel = choose(implementation, q.device, q.dtype)
    if not needs_matrix or kernel.name in ("sdpa", "reference"):
        return kernel
    if implementation != "auto":
        _say_fallback(kernel.name)
    return KERNELS["sdpa"]


@cache
def _say_fallback(name: str) -> None:
    note(f"attention kernel '{name}' has no masks and segments of any kind; sdpa computes such calls")
