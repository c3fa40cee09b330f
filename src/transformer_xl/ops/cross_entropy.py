"""Cross-entropy of a linear layer without saving its logits: in chunks of positions, recomputed in the backward pass.

The standard computation saves K x V logits, and a float32 copy, for the backward pass; with a large vocabulary that is
more than the rest of the model. With chunks, each pass holds the logits of only as many positions as `_MAX_LOGITS`
allows, at the cost of one more matrix product. If that is all positions, the standard computation is used.

Shape suffixes: K positions, E embedding width, V logits of a position (vocabulary or cluster size).
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

from transformer_xl.ops.linear import is_transformed, linear, multiply, multiply_weight_gradient, takes_onednn

_MAX_LOGITS = 2**22  # maximum number of logits in memory: 16 MiB in float32
_unchunked = ContextVar("unchunked", default=False)


@contextmanager
def without_chunks() -> Iterator[None]:
    """Within this context, use the standard computation for any size, so that FLOPs exclude recomputation."""
    token = _unchunked.set(True)
    try:
        yield
    finally:
        _unchunked.reset(token)


def fits_at_once(num_positions: int, num_logits: int) -> bool:
    """Return whether the logits of all positions are computed at once, not in chunks."""
    return _unchunked.get() or num_positions * num_logits <= _MAX_LOGITS or is_transformed()


def cross_entropy(logits_KV: Tensor, target_K: Tensor) -> Tensor:
    """Return the loss of each target in nats, shape (K,), in float32 or float64."""
    logits_KV = logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32))
    return F.cross_entropy(logits_KV, target_K, reduction="none")


def linear_cross_entropy(hidden_KE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_K: Tensor) -> Tensor:
    """Return the loss of each target in nats, shape (K,), for the logits hidden @ weight.T + bias; honors autocast."""
    if fits_at_once(len(hidden_KE), len(weight_VE)):
        return cross_entropy(linear(hidden_KE, weight_VE, bias_V), target_K)
    device_type = hidden_KE.device.type
    if not torch.amp.is_autocast_available(device_type):  # torch's meta device
        return _ChunkedCrossEntropy.apply(hidden_KE, weight_VE, bias_V, target_K, False)
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden_KE, weight_VE, bias_V = (tensor.to(dtype) for tensor in (hidden_KE, weight_VE, bias_V))
    with torch.autocast(device_type, enabled=False):
        onednn = takes_onednn(hidden_KE, weight_VE, bias_V)  # not within the function, where no gradients are computed
        return _ChunkedCrossEntropy.apply(hidden_KE, weight_VE, bias_V, target_K, onednn)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    @override
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, hidden_KE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_K: Tensor, onednn: bool
    ) -> Tensor:
        ctx.onednn, product = onednn, multiply if onednn else F.linear
        sum_dtype = torch.promote_types(hidden_KE.dtype, torch.float32)
        logsumexp_K = torch.empty(len(hidden_KE), dtype=sum_dtype, device=hidden_KE.device)
        losses_K = torch.empty_like(logsumexp_K)
        for chunk in _chunks(hidden_KE, weight_VE):
            logits_KV = product(hidden_KE[chunk], weight_VE, bias_V).to(sum_dtype)
            logsumexp_K[chunk] = logits_KV.logsumexp(-1)
            losses_K[chunk] = logsumexp_K[chunk] - logits_KV.gather(-1, target_K[chunk, None])[:, 0]
        ctx.save_for_backward(hidden_KE, weight_VE, bias_V, target_K, logsumexp_K)
        return losses_K

    @staticmethod
    @override
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        hidden_KE, weight_VE, bias_V, target_K, logsumexp_K = ctx.saved_tensors
        dlosses_K, product = grad_outputs[0], multiply if ctx.onednn else F.linear
        dhidden_KE = torch.empty_like(hidden_KE)
        dweight_VE, dbias_V = (  # None of weights that are not trained, as with an adapter
            torch.zeros_like(tensor, dtype=logsumexp_K.dtype) if is_needed else None
            for tensor, is_needed in zip((weight_VE, bias_V), ctx.needs_input_grad[1:3], strict=True)
        )
        for chunk in _chunks(hidden_KE, weight_VE):
            logits_KV = product(hidden_KE[chunk], weight_VE, bias_V).to(logsumexp_K.dtype)
            dlogits_KV = logits_KV.sub_(logsumexp_K[chunk, None]).exp_()  # the softmax probabilities
            dlogits_KV.scatter_add_(-1, target_K[chunk, None], dlogits_KV.new_full((len(dlogits_KV), 1), -1.0))
            dlogits_KV.mul_(dlosses_K[chunk, None])
            if dbias_V is not None:
                dbias_V += dlogits_KV.sum(0)
            dlogits_KV = dlogits_KV.to(hidden_KE.dtype)
            dhidden_KE[chunk] = product(dlogits_KV, weight_VE.t())
            if dweight_VE is not None:
                dweight_VE += (
                    multiply_weight_gradient(hidden_KE[chunk], dlogits_KV)
                    if ctx.onednn
                    else dlogits_KV.mT @ hidden_KE[chunk]
                )
        dweight_VE = None if dweight_VE is None else dweight_VE.to(weight_VE.dtype)
        return dhidden_KE, dweight_VE, None if dbias_V is None else dbias_V.to(bias_V.dtype), None, None


def _chunks(hidden_KE: Tensor, weight_VE: Tensor) -> Iterator[slice]:
    chunk_size = max(1, _MAX_LOGITS // len(weight_VE))
    for start in range(0, len(hidden_KE), chunk_size):
        yield slice(start, start + chunk_size)
