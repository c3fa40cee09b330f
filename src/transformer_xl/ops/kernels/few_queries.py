"""Relative attention for few queries on a CPU without gradients, as in decoding token by token.

Most of the time goes into reading keys and values, so those that no query attends to are not read: empty memory slots,
and keys beyond the window. Otherwise this is the computation of `sdpa.py`, without its overhead.

Shape suffixes: B batch size, T queries, S = M + T keys (M memory slots), P position keys, N heads, H head width, K
attended keys (the newest of the S keys), G = B x N, X = B x T, Y one for each query, or one for all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_xl.ops.kernels.reference import AttentionInputs, AttentionMask, keys_before, softmax
from transformer_xl.ops.kernels.sdpa import shifted


def attend(inputs: AttentionInputs, mask: AttentionMask) -> Tensor:
    """Compute relative attention; returns (B, T, N, H)."""
    batch_size, num_queries, num_heads, d_head = inputs.q_BTNH.shape
    num_keys = inputs.k_BSNH.shape[1]
    first_key_BY = mask.first_keys(num_queries, num_keys)
    num_attended = _num_attended(inputs, mask, first_key_BY)
    k_GKH, v_GKH = _by_head(inputs.k_BSNH, num_attended), _by_head(inputs.v_BSNH, num_attended)
    content_GTH = _by_head((inputs.q_BTNH + inputs.content_bias_NH) * d_head**-0.5, num_queries)
    r_PNH = inputs.position_key_PNH
    num_near = min(num_attended, len(r_PNH))  # number of attended distances that are not clamped
    # one product for each head: matmul would copy the position keys for each batch row
    position_NXH = ((inputs.q_BTNH + inputs.position_bias_NH) * d_head**-0.5).flatten(0, 1).transpose(0, 1)
    position_NXP = torch.bmm(position_NXH, r_PNH[len(r_PNH) - num_near :].permute(1, 2, 0))
    position_BNTP = position_NXP.view(num_heads, batch_size, num_queries, num_near).transpose(0, 1)
    num_clamped = min(mask.num_clamped, num_attended - num_near)
    bias_BNTK = shifted(position_BNTP, num_keys=num_attended, num_clamped=num_clamped)
    if first_key_BY is not None:
        before_BYK = keys_before(first_key_BY, num_keys)[..., -num_attended:]
        # the lowest number, not -inf, as in `sdpa.py`
        bias_BNTK = bias_BNTK.masked_fill(before_BYK[:, None], torch.finfo(bias_BNTK.dtype).min)
    p_GTK = torch.baddbmm(bias_BNTK.reshape(-1, num_queries, num_attended), content_GTH, k_GKH.mT)
    if inputs.sink_N is None:
        torch.softmax(p_GTK, -1, out=p_GTK)
    else:
        p_GTK = softmax(p_GTK.unflatten(0, (-1, num_heads)), inputs.sinks()).flatten(0, 1)
    return torch.bmm(p_GTK, v_GKH).view(batch_size, num_heads, num_queries, d_head).transpose(1, 2)


def _by_head(x_BXNH: Tensor, number: int) -> Tensor:
    """Return the last `number` rows along X in shape (G, X, H), without a copy if the tensor is stored head by head."""
    return x_BXNH[:, x_BXNH.shape[1] - number :].transpose(1, 2).flatten(0, 1)


def _num_attended(inputs: AttentionInputs, mask: AttentionMask, first_key_BY: Tensor | None) -> int:
    """Return the number of newest keys that are read: all that a query attends to are among them."""
    num_queries, num_keys = inputs.q_BTNH.shape[1], inputs.k_BSNH.shape[1]
    within_window = inputs.position_key_PNH.shape[0] + mask.num_clamped + num_queries - 1
    first = 0 if first_key_BY is None else min(int(first_key_BY.min()), num_keys - num_queries)
    return min(num_keys, within_window, num_keys - first)
