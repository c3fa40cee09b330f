"""Relative attention for a CPU: scores are computed for one block of queries at a time, in reused buffers.

Both passes iterate over batch rows, heads and queries in blocks small enough for the processor's cache. The backward
pass recomputes scores and probabilities of a block, so nothing but the inputs is saved between the passes. A block uses
only keys that one of its queries attends to. With T = M, all memory slots filled and no attention window, that is a
fifth less work than all of T x S at T = 640, nothing less up to T = 128, and a quarter less at most.

Within a block, position scores are written to a buffer whose shifted view is both the position terms and the mask, as
in `sdpa.py`; in the backward pass the same view of another buffer moves score gradients back to their distances.
Products are computed in the dtype of the inputs, sums over blocks in float32. Both passes compute probabilities by
softmax (in which torch computes in float32), because exp(score - logsumexp) of scores rounded to bfloat16 would not sum
to 1.

Shape suffixes: B batch size, T queries, S = M + T keys (M memory slots), P distances, N heads, H head width, X any
length, Y one for each query, or one for all of them. Of a part (some batch rows and heads): C batch rows, J heads, G =
J x C. Of a block (some queries of a part): I queries, K keys, R distances, A = C x I, W >= K + I - 1 columns of a
buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_xl.ops.dropout import draw_mask, num_draws
from transformer_xl.ops.kernels import few_queries as decode
from transformer_xl.ops.kernels.reference import AttentionInputs, AttentionMask, expand_distances, keys_before

_BLOCK_QUERIES = 128  # queries of a block: enough for fast matrix products, few enough to skip most future keys
_BUFFER_BYTES = 2**22  # intended size of one buffer, 4 MiB: a few of them fit into the last-level cache
_MIN_BLOCK_SCORES = 2**19  # with fewer scores in a call, blocks cost more than they save
_CACHE_LINE = 16  # elements: 64 bytes of float32; matrix products write faster if rows start at a cache line


def attend(inputs: AttentionInputs, mask: AttentionMask, dropout: float) -> Tensor:
    """Compute relative attention; returns (B, T, N, H).

    If there are few scores and no gradient is needed, they are computed without blocks (`decode.py`).
    """
    batch_size, num_queries, num_heads, _ = inputs.q_BTNH.shape
    num_scores = batch_size * num_heads * num_queries * inputs.k_BSNH.shape[1]
    needs_gradient, num_clamped = torch.is_grad_enabled(), mask.num_clamped
    is_meta, is_causal = inputs.q_BTNH.device.type == "meta", not mask.num_later and mask.stop_key_BT is None
    if num_scores < _MIN_BLOCK_SCORES and is_causal and not (needs_gradient or dropout or is_meta):
        return decode.attend(inputs, mask)
    if needs_gradient or not is_causal:  # the backward pass computes a gradient for each distance, also clamped ones
        inputs, num_clamped = expand_distances(inputs, mask), 0
    seed = torch.randint(2**62, ()) if dropout else None
    first_key_BY = mask.first_keys(num_queries, inputs.k_BSNH.shape[1])
    limits = (first_key_BY, mask.stop_key_BT)
    return _attention(inputs.tensors(), inputs.sinks(), *limits, seed, dropout, mask.num_later, num_clamped)


# Each pass is a custom operator, which torch.compile, torch's FLOP counter and its meta device handle as one step. Both
# take the tensors of `AttentionInputs` as a list, in that order, and of the mask the result of its `first_keys`, and
# `stop_key_BT`.


@torch.library.custom_op("transformer_xl::cpu_attention", mutates_args=())
def _attention(
    tensors: Sequence[Tensor],
    sink_N: Tensor | None,
    first_key_BY: Tensor | None,
    stop_key_BT: Tensor | None,
    seed: Tensor | None,
    dropout: float,
    num_later: int,
    num_clamped: int,
) -> Tensor:
    block_dropout = _BlockDropout(seed, dropout)
    out_BTNH = tensors[0].new_empty(tensors[0].shape)
    for part in _parts(AttentionInputs(*tensors, sink_N=sink_N), (first_key_BY, stop_key_BT), num_later, num_clamped):
        out_GTH = _BUFFERS.like("outputs", part.content_GTH)
        for block in part.blocks():
            p_GIK = block_dropout.drop(_probabilities(part, block)[0], part, block)
            torch.bmm(p_GIK, part.v_GSH[:, block.keys], out=out_GTH[:, block.queries])
        part.put(out_GTH, out_BTNH)
    return out_BTNH.mul_(block_dropout.scale) if dropout else out_BTNH


@torch.library.custom_op("transformer_xl::cpu_attention_backward", mutates_args=())
def _attention_backward(
    dout_BTNH: Tensor,
    tensors: Sequence[Tensor],
    sink_N: Tensor | None,
    first_key_BY: Tensor | None,
    stop_key_BT: Tensor | None,
    seed: Tensor | None,
    dropout: float,
    num_later: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the input tensors and of sinks, which has no elements without them."""
    block_dropout, scale = _BlockDropout(seed, dropout), dout_BTNH.shape[-1] ** -0.5
    dq_BTNH, dk_BSNH, dv_BSNH = (tensor.new_empty(tensor.shape) for tensor in tensors[:3])
    sum_dtype = torch.promote_types(dout_BTNH.dtype, torch.float32)
    dr_PNH, *dbiases_NH = (torch.zeros(tensor.shape, dtype=sum_dtype) for tensor in tensors[3:])
    dr_NPH = torch.zeros_like(dr_PNH.transpose(0, 1), memory_format=torch.contiguous_format)
    dsink_N = torch.zeros(0 if sink_N is None else len(sink_N), dtype=sum_dtype)
    for part in _parts(AttentionInputs(*tensors, sink_N=sink_N), (first_key_BY, stop_key_BT), num_later, num_clamped=0):
        dout_GTH = _gather("output gradients", dout_BTNH, part.rows, part.heads).mul_(block_dropout.scale)
        dqueries_GTH = [_BUFFERS.like(f"{name} gradients", part.content_GTH) for name in ("content", "position")]
        dk_GSH, dv_GSH = (
            _BUFFERS.take(f"{name} gradients", part.k_GSH.shape, sum_dtype).zero_() for name in ("key", "value")
        )
        for block in part.blocks():
            (p_GIK, sink_JCI), dout_GIH = _probabilities(part, block), dout_GTH[:, block.queries]
            dropped_GIK = block_dropout.drop(p_GIK, part, block, in_place=False)
            _add_product(dv_GSH[:, block.keys], dropped_GIK.mT, dout_GIH)
            ds_GIK = _BUFFERS.like("score gradients", p_GIK)
            torch.bmm(dout_GIH, part.v_GSH[:, block.keys].mT, out=ds_GIK)
            block_dropout.drop(ds_GIK, part, block)
            if sink_JCI is not None:
                delta_GI = (p_GIK * ds_GIK).sum(-1, dtype=sum_dtype)
                dsink_N[part.heads] -= (delta_GI.view_as(sink_JCI) * sink_JCI).sum((1, 2))
            torch._softmax_backward_data(ds_GIK, p_GIK, -1, p_GIK.dtype, grad_input=ds_GIK)
            torch.bmm(ds_GIK, part.k_GSH[:, block.keys], out=dqueries_GTH[0][:, block.queries])
            _add_product(dk_GSH[:, block.keys], ds_GIK.mT, part.content_GTH[:, block.queries])
            _add_position_gradients(part, block, ds_GIK, dqueries_GTH[1], dr_NPH[part.heads])
        part.put(dk_GSH, dk_BSNH)
        part.put(dv_GSH, dv_BSNH)
        for dbias_NH, dquery_GTH in zip(dbiases_NH, dqueries_GTH, strict=True):
            dbias_NH[part.heads] += dquery_GTH.unflatten(0, (part.num_heads, -1)).sum((1, 2), dtype=sum_dtype)
        part.put(dqueries_GTH[0].add_(dqueries_GTH[1]), dq_BTNH)
    dr_PNH = dr_NPH.transpose(0, 1).to(tensors[3].dtype).contiguous()
    dcontent_bias_NH, dposition_bias_NH = (dbias_NH.mul_(scale).to(dq_BTNH.dtype) for dbias_NH in dbiases_NH)
    return dq_BTNH.mul_(scale), dk_BSNH, dv_BSNH, dr_PNH, dcontent_bias_NH, dposition_bias_NH, dsink_N


@_attention.register_fake
def _(tensors: Sequence[Tensor], *_: Any) -> Tensor:
    return tensors[0].new_empty(tensors[0].shape)


@_attention_backward.register_fake
def _(_dout_BTNH: Tensor, tensors: Sequence[Tensor], sink_N: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    none = tensors[0].new_empty(0, dtype=torch.promote_types(tensors[0].dtype, torch.float32))
    return tuple(tensor.new_empty(tensor.shape) for tensor in (*tensors, none if sink_N is None else sink_N))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, *masks_and_seed, ctx.dropout, ctx.num_later, _ = inputs
    ctx.save_for_backward(*tensors, *masks_and_seed)


def _backward(ctx: Any, dout_BTNH: Tensor) -> tuple[Any, ...]:
    *tensors, sink_N, first_key_BY, stop_key_BT, seed = ctx.saved_tensors
    masks_and_seed = (sink_N, first_key_BY, stop_key_BT, seed)
    *gradients, dsink_N = _attention_backward(dout_BTNH, tensors, *masks_and_seed, ctx.dropout, ctx.num_later)
    return gradients, None if sink_N is None else dsink_N, *[None] * 6


_attention.register_autograd(_backward, setup_context=_save)


@dataclass(frozen=True)
class _Block:
    """Consecutive queries of a part, the keys that at least one of them attends to, and the distances between them."""

    index: int
    """Index of the block within its part, in order of the queries."""
    queries: slice
    keys: slice
    distances: slice
    """Indices of the position keys that occur; position keys are in descending order of distance."""
    columns: slice
    """Columns of the scores by distance that they multiply."""
    first_column: int
    """First column that any query attends to; from there to `columns` distances are clamped to the largest."""

    def of_heads(self, x_GTH: Tensor, num_heads: int) -> Tensor:
        """Return these queries of all batch rows, head by head: a view (J, A, H)."""
        x_JCIH = x_GTH[:, self.queries].unflatten(0, (num_heads, -1))
        return x_JCIH.view(num_heads, -1, x_GTH.shape[-1])


@dataclass(frozen=True)
class _Part:
    """Some batch rows and heads that are computed together, with their inputs stored head by head."""

    rows: slice
    heads: slice
    num_all_heads: int
    """N."""
    content_GTH: Tensor
    """Queries plus content bias, divided by sqrt(H)."""
    position_GTH: Tensor
    """Queries plus position bias, divided by sqrt(H)."""
    k_GSH: Tensor
    v_GSH: Tensor
    position_key_JPH: Tensor
    sink_J: Tensor | None
    first_key_CY: Tensor | None
    """Index of the first attended key, without regard to distances, as in `AttentionMask.first_keys`."""
    stop_key_CT: Tensor | None
    num_later: int
    num_clamped: int
    """These three as in `AttentionMask`."""

    @property
    def num_heads(self) -> int:
        """J."""
        return _length(self.heads)

    def put(self, x_GXH: Tensor, out_BXNH: Tensor) -> None:
        """Copy the results of this part, (G, X, H), to its batch rows and heads of `out_BXNH`."""
        out_BXNH[self.rows, :, self.heads].permute(2, 0, 1, 3).copy_(x_GXH.unflatten(0, (self.num_heads, -1)))

    def first_and_stop_keys(self, queries: slice) -> list[Tensor | None]:
        """Return `first_key_CY` and `stop_key_CT` of these queries."""
        limits = (self.first_key_CY, self.stop_key_CT)
        return [limit if limit is None or limit.shape[1] == 1 else limit[:, queries] for limit in limits]

    def blocks(self) -> Iterator[_Block]:
        """Yield the blocks in order of the queries; keys that none of a block's queries attends to are left out."""
        num_queries, num_keys, num_near = self.content_GTH.shape[1], self.k_GSH.shape[1], self.position_key_JPH.shape[1]
        num_memory, num_distances = num_keys - num_queries, num_near + self.num_clamped
        for index, start in enumerate(range(0, num_queries, _BLOCK_QUERIES)):
            stop = min(start + _BLOCK_QUERIES, num_queries)
            place = num_memory + self.num_later + start  # of the key at the first query's least distance
            first_key_CY, stop_key_CI = self.first_and_stop_keys(slice(start, stop))
            first = 0 if first_key_CY is None else int(first_key_CY.min())
            end = min(place + stop - start, num_keys)
            end = end if stop_key_CI is None else max(min(end, int(stop_key_CI.max())), 1)
            # where no query attends to anything, some keys remain: the output is finite
            keys = slice(max(min(max(first, place - num_distances + 1), end - (stop - start)), 0), end)
            # column c has distance number `c + shift`; from number `num_clamped` on, they have position keys
            shift = num_distances - 1 - (place + stop - start - 1) + keys.start
            end_column = min(num_distances - shift, _length(keys) + stop - start - 1)
            first_column = min(max(-shift, 0), end_column)
            columns = slice(min(max(self.num_clamped - shift, first_column), end_column), end_column)
            near = shift - self.num_clamped
            distances = slice(columns.start + near, columns.stop + near)
            yield _Block(index, slice(start, stop), keys, distances, columns, first_column)


def _parts(
    inputs: AttentionInputs, first_and_stop_keys: Sequence[Tensor | None], num_later: int, num_clamped: int
) -> Iterator[_Part]:
    """Yield parts that together contain all batch rows and heads; each is as large as a buffer can hold.

    For long segments, and in a KV cache, a part has one batch row, and at least one head for each thread.
    """
    batch_size, num_queries, num_heads, _ = inputs.q_BTNH.shape
    num_columns = inputs.k_BSNH.shape[1] + _BLOCK_QUERIES
    fitting = max(1, _BUFFER_BYTES // (min(num_queries, _BLOCK_QUERIES) * num_columns * inputs.q_BTNH.element_size()))
    # `fitting` is the number of pairs of batch row and head whose blocks fit a buffer; heads are split evenly
    num_groups = -(-num_heads // max(fitting, min(num_heads, torch.get_num_threads())))
    heads_at_once = -(-num_heads // num_groups)
    few_queries = num_queries <= _BLOCK_QUERIES and not _is_by_head(inputs.k_BSNH)
    rows_at_once = min(batch_size, max(1, fitting // num_heads)) if few_queries else 1
    for row in range(0, batch_size, rows_at_once):
        rows = slice(row, min(row + rows_at_once, batch_size))
        for head in range(0, num_heads, heads_at_once):
            heads = slice(head, min(head + heads_at_once, num_heads))
            content_GTH, position_GTH = (
                _add_bias(_gather(name, inputs.q_BTNH, rows, heads), bias_NH[heads])
                for name, bias_NH in (("content", inputs.content_bias_NH), ("position", inputs.position_bias_NH))
            )
            first_key_CY, stop_key_CT = (None if limit is None else limit[rows] for limit in first_and_stop_keys)
            yield _Part(
                rows,
                heads,
                num_heads,
                content_GTH,
                position_GTH,
                k_GSH=_view_or_gather("keys", inputs.k_BSNH, rows, heads),
                v_GSH=_view_or_gather("values", inputs.v_BSNH, rows, heads),
                position_key_JPH=_view_or_gather("position keys", inputs.position_key_PNH[None], slice(0, 1), heads),
                sink_J=None if inputs.sink_N is None else inputs.sink_N[heads],
                first_key_CY=first_key_CY,
                stop_key_CT=stop_key_CT,
                num_later=num_later,
                num_clamped=num_clamped,
            )


def _add_bias(q_GTH: Tensor, bias_JH: Tensor) -> Tensor:
    """Return (query + bias of its head) / sqrt(H), in place."""
    q_GTH.unflatten(0, (len(bias_JH), -1)).add_(bias_JH[:, None, None])
    return q_GTH.mul_(q_GTH.shape[-1] ** -0.5)


def _gather(name: str, x_BXNH: Tensor, rows: slice, heads: slice) -> Tensor:
    """Copy batch rows and heads into the buffer of that name: (G, X, H)."""
    x_JCXH = x_BXNH[rows, :, heads].permute(2, 0, 1, 3)
    return _BUFFERS.like(name, x_JCXH).copy_(x_JCXH).flatten(0, 1)


def _view_or_gather(name: str, x_BXNH: Tensor, rows: slice, heads: slice) -> Tensor:
    """Return the same as `_gather`, but without a copy for a single batch row that is stored head by head."""
    if _length(rows) == 1 and _is_by_head(x_BXNH):
        return x_BXNH[rows.start, :, heads].transpose(0, 1)
    return _gather(name, x_BXNH, rows, heads)


def _is_by_head(x_BXNH: Tensor) -> bool:
    """Return whether each head is stored as one matrix, by rows or by columns, as in a KV cache."""
    _, stride_x, _, stride_h = x_BXNH.stride()
    return (stride_x == x_BXNH.shape[-1] and stride_h == 1) or stride_x == 1


def _probabilities(part: _Part, block: _Block) -> tuple[Tensor, Tensor | None]:
    """Return a block's probabilities (G, I, K), which the next call overwrites, and those of sinks (J, C, I)."""
    wide_GIW = _wide_buffer("scores by distance", part, block)
    num_keys, columns, lowest = _length(block.keys), block.columns, torch.finfo(wide_GIW.dtype).min
    first_key_CY, stop_key_CI = part.first_and_stop_keys(block.queries)
    # -inf, or a finite number where a query may attend to none of these keys; half of the lowest, as scores are added
    outside = -torch.inf if stop_key_CI is None else lowest / 2
    wide_GIW[..., : block.first_column] = outside  # beyond the window
    wide_GIW[..., columns.stop :] = outside  # the future
    by_distance_JAR = wide_GIW.view(part.num_heads, -1, wide_GIW.shape[-1])[..., columns]
    position_JAH = block.of_heads(part.position_GTH, part.num_heads)
    torch.bmm(position_JAH, part.position_key_JPH[:, block.distances].mT, out=by_distance_JAR)
    wide_GIW[..., block.first_column : columns.start] = wide_GIW[..., columns.start : columns.start + 1]
    mask_GIK = _shifted(wide_GIW, num_keys)
    # the lowest number, not -inf: a padding query attends to nothing else, and its output would be NaN
    if first_key_CY is not None:
        mask_JCIK = mask_GIK.unflatten(0, (part.num_heads, -1))
        mask_JCIK.masked_fill_(keys_before(first_key_CY - block.keys.start, num_keys), lowest)
    if stop_key_CI is not None:
        mask_JCIK = mask_GIK.unflatten(0, (part.num_heads, -1))
        mask_JCIK.masked_fill_(~keys_before(stop_key_CI - block.keys.start, num_keys), outside)
    p_GIK = _BUFFERS.like("probabilities", mask_GIK)
    torch.baddbmm(mask_GIK, part.content_GTH[:, block.queries], part.k_GSH[:, block.keys].mT, out=p_GIK)
    if part.sink_J is None:
        return torch.softmax(p_GIK, -1, out=p_GIK), None
    score_GIK = p_GIK.to(part.sink_J.dtype)
    lse_JCI = score_GIK.logsumexp(-1).unflatten(0, (part.num_heads, -1))
    lse_JCI = torch.logaddexp(lse_JCI, part.sink_J[:, None, None])
    p_GIK.copy_((score_GIK - lse_JCI.flatten(0, 1)[..., None]).exp_())
    return p_GIK, (part.sink_J[:, None, None] - lse_JCI).exp_()


def _add_position_gradients(
    part: _Part, block: _Block, ds_GIK: Tensor, dposition_GTH: Tensor, dposition_key_JPH: Tensor
) -> None:
    """Write the gradients of a block's position queries, and add those of its position keys."""
    wide_GIW = _wide_buffer("gradients by distance", part, block)
    num_keys = _length(block.keys)
    wide_GIW[..., : _length(block.queries) - 1] = 0  # columns that the shifted view of the first queries does not cover
    if block.columns.stop > num_keys:
        wide_GIW[..., num_keys : block.columns.stop] = 0  # that of the last queries
    _shifted(wide_GIW, num_keys).copy_(ds_GIK)
    ds_JAR = wide_GIW.view(part.num_heads, -1, wide_GIW.shape[-1])[..., block.columns]
    position_JAH, dposition_JAH = (
        block.of_heads(x_GTH, part.num_heads) for x_GTH in (part.position_GTH, dposition_GTH)
    )
    torch.bmm(ds_JAR, part.position_key_JPH[:, block.distances], out=dposition_JAH)
    _add_product(dposition_key_JPH[:, block.distances], ds_JAR.mT, position_JAH)


def _wide_buffer(name: str, part: _Part, block: _Block) -> Tensor:
    """Return a buffer (G, I, W) for scores by distance; its rows are padded to whole cache lines."""
    num_queries, num_keys = _length(block.queries), _length(block.keys)
    width = -(-(num_keys + num_queries - 1) // _CACHE_LINE) * _CACHE_LINE
    return _BUFFERS.take(name, torch.Size([len(part.k_GSH), num_queries, width]), part.k_GSH.dtype)


def _shifted(wide_GIW: Tensor, num_keys: int) -> Tensor:
    """Return a view (G, I, K) of the buffer, with row i shifted left by I - 1 - i."""
    num_rows, num_queries, width = wide_GIW.shape
    strides = (num_queries * width, width - 1, 1)
    return wide_GIW.as_strided((num_rows, num_queries, num_keys), strides, wide_GIW.storage_offset() + num_queries - 1)


def _length(indices: slice) -> int:
    return indices.stop - indices.start


def _add_product(sum_GXH: Tensor, a_GXI: Tensor, b_GIH: Tensor) -> None:
    """Add the matrix products of a and b to the sums, in place."""
    if sum_GXH.dtype == a_GXI.dtype:
        torch.baddbmm(sum_GXH, a_GXI, b_GIH, out=sum_GXH)
    else:
        sum_GXH += torch.bmm(a_GXI, b_GIH)


class _BlockDropout:
    """Draws which probabilities are dropped, from a separate seed for each batch row, head and block of queries.

    So both passes draw the same mask, and it does not depend on the number of threads or the size of the parts.
    """

    def __init__(self, seed: Tensor | None, p: float) -> None:
        self.seed, self.p, self.scale = None if seed is None else int(seed), p, 1 / (1 - p)

    def drop(self, x_GIK: Tensor, part: _Part, block: _Block, *, in_place: bool = True) -> Tensor:
        """Return a block's elements with those of dropped probabilities set to 0; the caller multiplies by `scale`."""
        if self.seed is None:
            return x_GIK
        keep_GIK = _BUFFERS.take("keep", x_GIK.shape, torch.bool)
        draws = _BUFFERS.take("draws", torch.Size([num_draws(keep_GIK[0].numel())]), torch.int64)
        num_rows, num_blocks = _length(part.rows), -(-part.content_GTH.shape[1] // _BLOCK_QUERIES)
        for index, keep_IK in enumerate(keep_GIK):
            head, row = part.heads.start + index // num_rows, part.rows.start + index % num_rows
            seed = self.seed + (row * part.num_all_heads + head) * num_blocks + block.index
            draw_mask(keep_IK, self.p, draws, torch.Generator().manual_seed(seed))
        return torch.mul(x_GIK, keep_GIK, out=x_GIK if in_place else _BUFFERS.like("dropped", x_GIK))


class _Buffers(threading.local):
    """Buffers by name, reused because allocating them anew would take longer than computing their contents."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor; it overwrites the tensor returned before for the same name and dtype."""
        if (name, dtype) not in self._flat or self._flat[name, dtype].numel() < shape.numel():
            with torch.inference_mode(False):  # inference tensors cannot be modified outside inference mode
                self._flat[name, dtype] = torch.empty(shape.numel(), dtype=dtype)
        return self._flat[name, dtype][: shape.numel()].view(shape)

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor as `take` does, in the shape and dtype of another."""
        return self.take(name, tensor.shape, tensor.dtype)


_BUFFERS = _Buffers()
