"""Relative attention for a CPU: scores exist for one block of queries at a time, in buffers that stay.

Both passes go through batch rows, heads and queries in blocks small enough for the processor's cache. The backward pass
computes scores and probabilities of a block again, so nothing but the inputs is kept between the passes. A block reads
only keys that one of its queries attends to: a fifth less work than all of T x S where T = M.

Within a block, position scores go into a buffer whose shifted view is bias and mask at once, as in `sdpa.py`; in the
backward pass the same view of another buffer moves score gradients back to their distances. Products run in the dtype
of the inputs, sums over blocks in float32. Probabilities come from softmax in both passes (inside which torch computes
in float32), because exp(score - logsumexp) of a score rounded to bfloat16 would not sum to one.

Letters: B batch rows, T queries, S = M + T keys, P distances, N heads, H head width, X any length. Of a part: C batch
rows, J heads, G = J x C. Of a block: I queries, K keys, R distances, A = C x I, W >= K + I - 1.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from transformer_xl.model.dropout import draw_mask, num_draws
from transformer_xl.model.kernels import decode
from transformer_xl.model.kernels.reference import AttentionInputs, AttentionMask, empty_slots, written_out

_QUERIES = 128  # of a block: large enough for fast matrix products, small enough to skip most of the future
_BUFFER_BYTES = 2**22  # of one buffer: a few of them fit into the last-level cache
_WORTHWHILE = 2**19  # scores of a call below which blocks cost more than they save
_LINE = 16  # numbers; products write faster where rows begin at a cache line


def attend(inputs: AttentionInputs, mask: AttentionMask, dropout: float) -> Tensor:
    """Compute relative attention; returns (B, T, N, H). A few scores without gradient need no blocks."""
    batch_size, num_queries, num_heads, _ = inputs.q_BTNH.shape
    num_scores = batch_size * num_heads * num_queries * inputs.k_BSNH.shape[1]
    differentiated, beyond = torch.is_grad_enabled(), mask.beyond
    counted_only = inputs.q_BTNH.device.type == "meta"
    if num_scores < _WORTHWHILE and not (differentiated or dropout or counted_only):
        return decode.attend(inputs, mask)
    if differentiated:  # the backward pass has a gradient for each distance
        inputs, beyond = written_out(inputs, mask), 0
    seed = torch.randint(2**62, ()) if dropout else None
    given = [getattr(inputs, field.name) for field in fields(inputs)]
    return _attention(given, mask.valid_B, seed, dropout, beyond)


# Each pass is an operator of its own, which torch.compile, torch's counters and its meta device take as one step. Both
# have the tensors of `AttentionInputs` as a list, in that order.


@torch.library.custom_op("transformer_xl::cpu_attention", mutates_args=())
def _attention(
    given: Sequence[Tensor], valid_B: Tensor | None, seed: Tensor | None, dropout: float, beyond: int
) -> Tensor:
    inputs = AttentionInputs(*given)
    dropped = _Dropped(seed, dropout)
    out_BTNH = given[0].new_empty(given[0].shape)
    for part in _parts(inputs, AttentionMask(valid_B, beyond)):
        out_GTH = _like("outputs", part.content_GTH)
        for block in part.blocks():
            p_GIK = _probabilities(part, block)
            torch.bmm(dropped.applied(p_GIK, part, block), part.v_GSH[:, block.keys], out=out_GTH[:, block.queries])
        part.put(out_GTH, out_BTNH)
    return out_BTNH.mul_(dropped.scale) if dropout else out_BTNH


@torch.library.custom_op("transformer_xl::cpu_attention_backward", mutates_args=())
def _attention_backward(
    dout_BTNH: Tensor, given: Sequence[Tensor], valid_B: Tensor | None, seed: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the given tensors."""
    inputs = AttentionInputs(*given)
    q_BTNH, k_BSNH, v_BSNH, position_key_PNH, content_bias_NH, position_bias_NH = given
    dropped, scale = _Dropped(seed, dropout), q_BTNH.shape[-1] ** -0.5
    dq_BTNH, dk_BSNH, dv_BSNH = (t.new_empty(t.shape) for t in (q_BTNH, k_BSNH, v_BSNH))
    dr_NPH = _sums(position_key_PNH.transpose(0, 1))
    du_NH, dw_NH = _sums(content_bias_NH), _sums(position_bias_NH)
    for part in _parts(inputs, AttentionMask(valid_B)):
        dout_GTH = part.take("output gradients", dout_BTNH).mul_(dropped.scale)
        grads = _PartGradients.zero(part, dr_NPH[part.heads])
        for block in part.blocks():
            _backward(part, block, dout_GTH[:, block.queries], dropped, grads)
        part.put(grads.dk_GSH, dk_BSNH)
        part.put(grads.dv_GSH, dv_BSNH)
        for bias_NH, dquery_GTH in ((du_NH, grads.dcontent_GTH), (dw_NH, grads.dposition_GTH)):
            by_head_JCTH = dquery_GTH.unflatten(0, (part.num_heads, -1))
            bias_NH[part.heads] += by_head_JCTH.sum((1, 2), dtype=bias_NH.dtype)
        part.put(grads.dcontent_GTH.add_(grads.dposition_GTH), dq_BTNH)
    dr_PNH = dr_NPH.transpose(0, 1).to(position_key_PNH.dtype).contiguous()
    biases = du_NH.mul_(scale).to(content_bias_NH.dtype), dw_NH.mul_(scale).to(position_bias_NH.dtype)
    return dq_BTNH.mul_(scale), dk_BSNH, dv_BSNH, dr_PNH, *biases


@_attention.register_fake
def _(given: Sequence[Tensor], *_: Any) -> Tensor:
    return given[0].new_empty(given[0].shape)


@_attention_backward.register_fake
def _(_dout_BTNH: Tensor, given: Sequence[Tensor], *_: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in given)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given, valid_B, seed, ctx.dropout, _ = inputs
    ctx.save_for_backward(*given, valid_B, seed)


def _differentiate(ctx: Any, dout_BTNH: Tensor) -> tuple[Any, ...]:
    *given, valid_B, seed = ctx.saved_tensors
    return list(_attention_backward(dout_BTNH, given, valid_B, seed, ctx.dropout)), None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_keep)


@dataclass(frozen=True)
class _Block:
    """Some queries of a part, the keys that at least one of them attends to, and the distances that occur."""

    number: int
    """Counted from the first queries."""
    queries: slice
    keys: slice
    distances: slice
    """Of the position keys, which stand farthest first."""
    num_beyond: int
    """Distances more that occur, which have the farthest position key."""

    def of_heads(self, x_GTH: Tensor, num_heads: int) -> Tensor:
        """These queries of all rows, head by head: a view (J, A, H)."""
        x_JCIH = x_GTH[:, self.queries].unflatten(0, (num_heads, -1))
        return x_JCIH.view(num_heads, -1, x_GTH.shape[-1])


@dataclass(frozen=True)
class _Part:
    """Some rows and heads, their inputs laid out for matrix products; queries have their biases and are scaled."""

    rows: slice
    heads: slice
    all_heads: int
    """N."""
    content_GTH: Tensor
    position_GTH: Tensor
    k_GSH: Tensor
    v_GSH: Tensor
    position_key_JPH: Tensor
    valid_C: Tensor | None
    beyond: int

    @property
    def num_heads(self) -> int:
        """J."""
        return self.heads.stop - self.heads.start

    def take(self, name: str, x_BXNH: Tensor) -> Tensor:
        """Its rows and heads, copied into a buffer: (G, X, H)."""
        return _taken(name, x_BXNH, self.rows, self.heads)

    def put(self, x_GXH: Tensor, out_BXNH: Tensor) -> None:
        """Writes into its rows and heads."""
        out_BXNH[self.rows, :, self.heads].permute(2, 0, 1, 3).copy_(x_GXH.unflatten(0, (self.num_heads, -1)))

    def blocks(self) -> Iterator[_Block]:
        """Its queries in order; keys that none of a block's queries attends to are left out."""
        (_, num_queries, _), (_, num_keys, _) = self.content_GTH.shape, self.k_GSH.shape
        num_memory, num_near = num_keys - num_queries, self.position_key_JPH.shape[1]
        num_distances = num_near + self.beyond
        empty = num_memory - (num_memory if self.valid_C is None else int(self.valid_C.max()))
        for number, start in enumerate(range(0, num_queries, _QUERIES)):
            stop = min(start + _QUERIES, num_queries)
            farthest = num_memory + start - num_distances + 1
            keys = slice(min(max(empty, farthest, 0), num_memory + start), num_memory + stop)
            occurring = min(num_distances, keys.stop - keys.start)
            near = min(num_near, occurring)
            yield _Block(number, slice(start, stop), keys, slice(num_near - near, num_near), occurring - near)


def _parts(inputs: AttentionInputs, mask: AttentionMask) -> Iterator[_Part]:
    """Rows and heads, as many at once as fit a buffer; of long texts one row, and a head for each thread at least."""
    batch_size, num_queries, num_heads, _ = inputs.q_BTNH.shape
    largest = min(num_queries, _QUERIES) * (inputs.k_BSNH.shape[1] + _QUERIES) * inputs.q_BTNH.element_size()
    fitting = max(1, _BUFFER_BYTES // largest)
    groups = -(-num_heads // max(fitting, min(num_heads, torch.get_num_threads())))
    heads_at_once = -(-num_heads // groups)
    few_queries = num_queries <= _QUERIES and not _by_head(inputs.k_BSNH)
    rows_at_once = min(batch_size, max(1, fitting // num_heads)) if few_queries else 1
    for row in range(0, batch_size, rows_at_once):
        rows = slice(row, min(row + rows_at_once, batch_size))
        valid_C = None if mask.valid_B is None else mask.valid_B[rows]
        for head in range(0, num_heads, heads_at_once):
            heads = slice(head, min(head + heads_at_once, num_heads))
            content_GTH, position_GTH = (
                _biased(_taken(name, inputs.q_BTNH, rows, heads), bias_NH[heads])
                for name, bias_NH in (
                    ("content queries", inputs.content_bias_NH),
                    ("position queries", inputs.position_bias_NH),
                )
            )
            k_GSH, v_GSH = _laid("keys", inputs.k_BSNH, rows, heads), _laid("values", inputs.v_BSNH, rows, heads)
            position_key_JPH = _laid("position keys", inputs.position_key_PNH[None], slice(0, 1), heads)
            queries = content_GTH, position_GTH
            yield _Part(rows, heads, num_heads, *queries, k_GSH, v_GSH, position_key_JPH, valid_C, mask.beyond)


def _biased(q_GTH: Tensor, bias_JH: Tensor) -> Tensor:
    """Queries with their head's bias added, scaled; in place."""
    q_GTH.unflatten(0, (len(bias_JH), -1)).add_(bias_JH[:, None, None])
    return q_GTH.mul_(q_GTH.shape[-1] ** -0.5)


def _taken(name: str, x_BXNH: Tensor, rows: slice, heads: slice) -> Tensor:
    """Those rows and heads copied into the buffer of that name: (G, X, H)."""
    x_JCXH = x_BXNH[rows, :, heads].permute(2, 0, 1, 3)
    return _BUFFERS.take(name, x_JCXH.shape, x_JCXH.dtype).copy_(x_JCXH).flatten(0, 1)


def _laid(name: str, x_BXNH: Tensor, rows: slice, heads: slice) -> Tensor:
    """As `_taken`, but without a copy where a row's numbers lie head by head already, as a memory keeps them."""
    if _length(rows) == 1 and _by_head(x_BXNH):
        return x_BXNH[rows.start, :, heads].transpose(0, 1)
    return _taken(name, x_BXNH, rows, heads)


def _by_head(x_BXNH: Tensor) -> bool:
    """Whether products can take each head's numbers as one matrix, one place behind the other."""
    _, stride, _, within = x_BXNH.stride()
    return (stride == x_BXNH.shape[-1] and within == 1) or stride == 1


def _probabilities(part: _Part, block: _Block) -> Tensor:
    """What each query of a block gives each of its keys (G, I, K); overwritten by the next call."""
    wide_GIW = _wide("scores by distance", part, block)
    num_keys, num_near = _length(block.keys), _length(block.distances)
    near, beyond = num_keys - num_near, num_keys - num_near - block.num_beyond
    wide_GIW[..., :beyond] = -torch.inf  # beyond the window
    wide_GIW[..., num_keys:] = -torch.inf  # the future
    by_distance_JAR = wide_GIW.view(part.num_heads, -1, wide_GIW.shape[-1])[..., near:num_keys]
    position_JAH = block.of_heads(part.position_GTH, part.num_heads)
    torch.bmm(position_JAH, part.position_key_JPH[:, block.distances].mT, out=by_distance_JAR)
    wide_GIW[..., beyond:near] = wide_GIW[..., near : near + 1]
    bias_GIK = _shifted(wide_GIW, num_keys)
    if part.valid_C is not None:
        empty_CS = empty_slots(part.valid_C, part.content_GTH.shape[1], part.k_GSH.shape[1])
        bias_JCIK = bias_GIK.unflatten(0, (part.num_heads, -1))
        # the lowest number, not -inf: a query of padding attends to nothing else, and would become nan
        bias_JCIK.masked_fill_(empty_CS[:, None, block.keys], torch.finfo(bias_JCIK.dtype).min)
    p_GIK = _BUFFERS.take("probabilities", bias_GIK.shape, bias_GIK.dtype)
    torch.baddbmm(bias_GIK, part.content_GTH[:, block.queries], part.k_GSH[:, block.keys].mT, out=p_GIK)
    return torch.softmax(p_GIK, -1, out=p_GIK)


@dataclass(frozen=True)
class _PartGradients:
    """Gradients of a part's inputs, added up block by block."""

    dcontent_GTH: Tensor
    dposition_GTH: Tensor
    dk_GSH: Tensor
    dv_GSH: Tensor
    dr_JPH: Tensor

    @staticmethod
    def zero(part: _Part, dr_JPH: Tensor) -> _PartGradients:
        """Nothing yet; gradients of position keys go straight into those of all parts."""
        dcontent_GTH, dposition_GTH = (_like(f"{name} gradients", part.content_GTH) for name in ("content", "position"))
        sums = torch.promote_types(part.k_GSH.dtype, torch.float32)
        dk_GSH, dv_GSH = (
            _BUFFERS.take(f"{name} gradients", part.k_GSH.shape, sums).zero_() for name in ("key", "value")
        )
        return _PartGradients(dcontent_GTH, dposition_GTH, dk_GSH, dv_GSH, dr_JPH)


def _backward(part: _Part, block: _Block, dout_GIH: Tensor, dropped: _Dropped, grads: _PartGradients) -> None:
    """Adds a block's share of all gradients."""
    keys, queries = block.keys, block.queries
    p_GIK = _probabilities(part, block)
    ds_GIK = _BUFFERS.take("gradients", p_GIK.shape, p_GIK.dtype)
    _add_product(grads.dv_GSH[:, keys], dropped.applied(p_GIK, part, block, in_place=False).mT, dout_GIH)
    torch.bmm(dout_GIH, part.v_GSH[:, keys].mT, out=ds_GIK)
    dropped.applied(ds_GIK, part, block)
    torch._softmax_backward_data(ds_GIK, p_GIK, -1, p_GIK.dtype, grad_input=ds_GIK)
    torch.bmm(ds_GIK, part.k_GSH[:, keys], out=grads.dcontent_GTH[:, queries])
    _add_product(grads.dk_GSH[:, keys], ds_GIK.mT, part.content_GTH[:, queries])

    wide_GIW = _wide("gradients by distance", part, block)
    num_keys, num_seen = _length(keys), _length(block.distances)
    wide_GIW[..., : _length(queries) - 1] = 0  # distances that the first queries do not have
    _shifted(wide_GIW, num_keys).copy_(ds_GIK)
    ds_JAR = wide_GIW.view(part.num_heads, -1, wide_GIW.shape[-1])[..., num_keys - num_seen : num_keys]
    position_JAH, dposition_JAH = (
        block.of_heads(x_GTH, part.num_heads) for x_GTH in (part.position_GTH, grads.dposition_GTH)
    )
    torch.bmm(ds_JAR, part.position_key_JPH[:, block.distances], out=dposition_JAH)
    _add_product(grads.dr_JPH[:, block.distances], ds_JAR.mT, position_JAH)


def _wide(name: str, part: _Part, block: _Block) -> Tensor:
    """A buffer (G, I, W) for scores by distance."""
    num_queries, num_keys = _length(block.queries), _length(block.keys)
    width = -(-(num_keys + num_queries - 1) // _LINE) * _LINE
    return _BUFFERS.take(name, torch.Size([len(part.k_GSH), num_queries, width]), part.k_GSH.dtype)


def _shifted(wide_GIW: Tensor, num_keys: int) -> Tensor:
    """The buffer seen as (G, I, K): row i moved left by I - 1 - i; no number is copied."""
    num_rows, num_queries, width = wide_GIW.shape
    strides = (num_queries * width, width - 1, 1)
    return wide_GIW.as_strided((num_rows, num_queries, num_keys), strides, wide_GIW.storage_offset() + num_queries - 1)


def _length(part: slice) -> int:
    return part.stop - part.start


def _like(name: str, like: Tensor) -> Tensor:
    """A buffer in the shape of another tensor."""
    return _BUFFERS.take(name, like.shape, like.dtype)


def _sums(like: Tensor) -> Tensor:
    """Zeros of that shape to add up in."""
    return torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32))


def _add_product(sum_GXH: Tensor, a_GXI: Tensor, b_GIH: Tensor) -> None:
    if sum_GXH.dtype == a_GXI.dtype:
        torch.baddbmm(sum_GXH, a_GXI, b_GIH, out=sum_GXH)
    else:
        sum_GXH += torch.bmm(a_GXI, b_GIH)


class _Dropped:
    """Which probabilities are dropped: drawn from a seed for each row, head and block of queries by itself.

    So both passes draw the same, however many threads there are and whatever fits a buffer.
    """

    def __init__(self, seed: Tensor | None, share: float) -> None:
        self._share, self.scale = share, 1 / (1 - share)
        self._seed = None if seed is None else int(seed)

    def applied(self, p_GIK: Tensor, part: _Part, block: _Block, *, in_place: bool = True) -> Tensor:
        """The numbers with dropped ones as 0; the others still wait for `scale`."""
        if self._seed is None:
            return p_GIK
        keep_GIK = _BUFFERS.take("kept", p_GIK.shape, torch.bool)
        draws = _BUFFERS.take("draws", torch.Size([num_draws(keep_GIK[0].numel())]), torch.int64)
        num_rows, num_blocks = _length(part.rows), -(-part.content_GTH.shape[1] // _QUERIES)
        for place, keep_IK in enumerate(keep_GIK):
            head, row = part.heads.start + place // num_rows, part.rows.start + place % num_rows
            number = (row * part.all_heads + head) * num_blocks + block.number
            draw_mask(keep_IK, self._share, draws, torch.Generator().manual_seed(self._seed + number))
        return torch.mul(p_GIK, keep_GIK, out=p_GIK if in_place else _like("dropped", p_GIK))


class _Buffers(threading.local):
    """Work space by name: giving it back to the system and asking for it again would cost more than using it."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Numbers of no meaning in this shape; what was taken under this name before is overwritten."""
        if (name, dtype) not in self._flat or self._flat[name, dtype].numel() < shape.numel():
            with torch.inference_mode(False):  # what is made in that mode cannot be written outside of it
                self._flat[name, dtype] = torch.empty(shape.numel(), dtype=dtype)
        return self._flat[name, dtype][: shape.numel()].view(shape)


_BUFFERS = _Buffers()
