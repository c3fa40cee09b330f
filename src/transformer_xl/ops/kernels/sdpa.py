"""Relative attention through torch's scaled-dot-product attention, with the position terms as its additive mask.

Terms (a) + (c) of the paper's section 3.3 are (q + u) . k, with the content bias u; torch computes them. Terms (b) +
(d) are (q + w) . r[d], with the position bias w (the paper's v) and the position key r[d] of each distance: one matrix
product for all P distances, whose row i must be shifted left by T - 1 - i to be aligned with the keys (the relative
shift of the paper's appendix B). The shift is a view: in a buffer with rows of length S + T - 1, reading with a row
stride one smaller shifts each row by one more than the row before. The buffer is -inf where a key is in the future or
beyond the window, so the shifted view is the mask as well.

Shape suffixes: B batch size, T queries, S = M + T keys (M memory slots), P position keys, C clamped distances,
N heads, H head width, W = S + T - 1 columns of the padded buffer, X = T (W - 1) elements of its shifted view, Y one for
each query, or one for all of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.ops.kernels.reference import AttentionInputs, AttentionMask


def attend(inputs: AttentionInputs, mask: AttentionMask, dropout: float) -> Tensor:
    """Compute relative attention; returns (B, T, N, H)."""
    scale = inputs.q_BTNH.shape[-1] ** -0.5
    content_BNTH = (inputs.q_BTNH + inputs.content_bias_NH).transpose(1, 2)
    position_BNTH = ((inputs.q_BTNH + inputs.position_bias_NH) * scale).transpose(1, 2)
    position_BNTP = position_BNTH @ inputs.position_key_PNH.permute(1, 2, 0)
    num_keys = inputs.k_BSNH.shape[1]
    bias_BNTS = shifted(position_BNTP, num_keys=num_keys, num_clamped=mask.num_clamped, num_later=mask.num_later)
    if mask.added_BNTS is not None:
        bias_BNTS = bias_BNTS + mask.added_BNTS
    excluded_BYS = mask.excluded(inputs.q_BTNH.shape[1], num_keys)
    if excluded_BYS is not None:
        # the lowest number, not -inf: a padding query attends to nothing else, and its output would be NaN
        bias_BNTS = bias_BNTS.masked_fill(excluded_BYS[:, None], torch.finfo(bias_BNTS.dtype).min)
    if bias_BNTS.device.type != "cpu":
        bias_BNTS = bias_BNTS.contiguous()  # torch's fused GPU kernels need aligned rows
    keys_BNSH, values_BNSH = inputs.k_BSNH.transpose(1, 2), inputs.v_BSNH.transpose(1, 2)
    if inputs.sink_N is not None:  # the score of a key and a value of zeros
        sink_BNT1 = inputs.sink_N.to(bias_BNTS.dtype)[:, None, None].expand(*content_BNTH.shape[:-1], 1)
        bias_BNTS = torch.cat([bias_BNTS.expand(*content_BNTH.shape[:-1], num_keys), sink_BNT1], -1)
        keys_BNSH, values_BNSH = (F.pad(states, (0, 0, 0, 1)) for states in (keys_BNSH, values_BNSH))
    out_BNTH = F.scaled_dot_product_attention(
        content_BNTH, keys_BNSH, values_BNSH, attn_mask=bias_BNTS, dropout_p=dropout, scale=scale
    )
    return out_BNTH.transpose(1, 2)


def shifted(position_BNTP: Tensor, *, num_keys: int, num_clamped: int = 0, num_later: int = 0) -> Tensor:
    """Align position scores with keys (relative shift).

    Args:
        position_BNTP: scores by distance, in descending order of distance.
        num_keys: S.
        num_clamped: number of further attended distances, which have the score of the largest.
        num_later: number of the distances that are below 0.

    Returns:
        scores by key (B, N, T, S), -inf where a query does not attend to the key.
    """
    num_queries, num_distances = position_BNTP.shape[-2:]
    if num_clamped:
        clamped_BNTC = position_BNTP[..., :1].expand(*position_BNTP.shape[:-1], num_clamped)
        position_BNTP = torch.cat([clamped_BNTC, position_BNTP], dim=-1)
    num_masked = num_keys + num_later - num_distances - num_clamped  # columns of distances beyond the window
    if num_queries == 1 and not num_masked:
        return position_BNTP
    wide_BNTW = F.pad(position_BNTP, (num_masked, num_queries - 1 - num_later), value=-torch.inf)
    if num_queries == 1:
        return wide_BNTW
    # slices, not as_strided: torch.compile does not support the storage offset that this needs
    start, width = num_queries - 1, wide_BNTW.shape[-1]
    rows_BNX = wide_BNTW.flatten(-2)[..., start : start + num_queries * (width - 1)]
    return rows_BNX.unflatten(-1, (num_queries, width - 1))[..., :num_keys]
