"""Cross-entropy of a linear layer without its scores: a few places at a time, and again in the backward pass.

The plain way keeps K x V scores, and their float32 copy, for the backward pass: with a large vocabulary more than all
the rest of the model. Here each pass holds the scores of as many places as fit a small buffer; the price is one matrix
product more. Where all of them fit, the plain way is taken.

Letters: K places, E width, V scores of a place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

_SCORES_AT_ONCE = 2**22
_plainly = ContextVar("plainly", default=False)


@contextmanager
def plain_way() -> Iterator[None]:
    """Within it all scores are kept, however many: to count the operations of the model alone."""
    token = _plainly.set(True)
    try:
        yield
    finally:
        _plainly.reset(token)


def fits_at_once(num_places: int, num_scores: int) -> bool:
    """Whether the scores of all places may be kept."""
    return _plainly.get() or num_places * num_scores <= _SCORES_AT_ONCE


def cross_entropy(scores_KV: Tensor, target_K: Tensor) -> Tensor:
    """Nats (K,) of each target from its place's scores, float32 at least."""
    scores_KV = scores_KV.to(torch.promote_types(scores_KV.dtype, torch.float32))
    return F.cross_entropy(scores_KV, target_K, reduction="none")


def linear_cross_entropy(rows_KE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_K: Tensor) -> Tensor:
    """Nats (K,) of each target from scores rows @ weight.T + bias, float32 at least; autocast is heeded."""
    if fits_at_once(len(rows_KE), len(weight_VE)):
        return cross_entropy(F.linear(rows_KE, weight_VE, bias_V), target_K)
    kind = rows_KE.device.type
    if not torch.amp.is_autocast_available(kind):  # torch's meta device
        return _InPieces.apply(rows_KE, weight_VE, bias_V, target_K)
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows_KE, weight_VE, bias_V = (tensor.to(dtype) for tensor in (rows_KE, weight_VE, bias_V))
    with torch.autocast(kind, enabled=False):
        return _InPieces.apply(rows_KE, weight_VE, bias_V, target_K)


class _InPieces(torch.autograd.Function):
    @staticmethod
    @override
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, rows_KE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_K: Tensor
    ) -> Tensor:
        sums = torch.promote_types(rows_KE.dtype, torch.float32)
        total_K = torch.empty(len(rows_KE), dtype=sums, device=rows_KE.device)
        nats_K = torch.empty_like(total_K)
        for piece in _pieces(rows_KE, weight_VE):
            scores_KV = F.linear(rows_KE[piece], weight_VE, bias_V).to(sums)
            total_K[piece] = scores_KV.logsumexp(-1)
            nats_K[piece] = total_K[piece] - scores_KV.gather(-1, target_K[piece, None])[:, 0]
        ctx.save_for_backward(rows_KE, weight_VE, bias_V, target_K, total_K)
        return nats_K

    @staticmethod
    @override
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        rows_KE, weight_VE, bias_V, target_K, total_K = ctx.saved_tensors
        dnats_K = grad_outputs[0]
        drows_KE = torch.empty_like(rows_KE)
        dweight_VE, dbias_V = (torch.zeros_like(tensor, dtype=total_K.dtype) for tensor in (weight_VE, bias_V))
        for piece in _pieces(rows_KE, weight_VE):
            scores_KV = F.linear(rows_KE[piece], weight_VE, bias_V).to(total_K.dtype)
            dscores_KV = scores_KV.sub_(total_K[piece, None]).exp_()  # of the same scores as before: they sum to one
            dscores_KV.scatter_add_(-1, target_K[piece, None], dscores_KV.new_full((len(dscores_KV), 1), -1.0))
            dscores_KV.mul_(dnats_K[piece, None])
            dbias_V += dscores_KV.sum(0)
            dscores_KV = dscores_KV.to(rows_KE.dtype)
            drows_KE[piece] = dscores_KV @ weight_VE
            dweight_VE += dscores_KV.mT @ rows_KE[piece]
        return drows_KE, dweight_VE.to(weight_VE.dtype), dbias_V.to(bias_V.dtype), None


def _pieces(rows_KE: Tensor, weight_VE: Tensor) -> Iterator[slice]:
    at_once = max(1, _SCORES_AT_ONCE // len(weight_VE))
    for start in range(0, len(rows_KE), at_once):
        yield slice(start, start + at_once)
