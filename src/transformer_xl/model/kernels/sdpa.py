"""Relative attention through torch's scaled-dot-product attention, with the position terms as its additive bias.

Terms (a) + (c) are (q + u) . k, which torch computes. Terms (b) + (d) are (q + w) . r[d]: one matrix product for all
P distances, whose row i must be shifted left by T - 1 - i to stand over the keys (paper appendix B). The shift is a
view: in a buffer whose rows are S + T - 1 wide, reading with a row stride one shorter moves each row one further. The
buffer is -inf where a key is in the future or beyond the window, so the shifted view is the mask as well.

Letters: B rows, T queries, S = M + T keys, P position keys, N heads, H head width, W = S + T - 1,
X = T (W - 1).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.model.kernels.reference import AttentionInputs, AttentionMask, empty_slots


def attend(inputs: AttentionInputs, mask: AttentionMask, dropout: float) -> Tensor:
    """Compute relative attention; returns (B, T, N, H)."""
    scale = inputs.q_BTNH.shape[-1] ** -0.5
    content_BNTH = (inputs.q_BTNH + inputs.content_bias_NH).transpose(1, 2)
    position_BNTH = ((inputs.q_BTNH + inputs.position_bias_NH) * scale).transpose(1, 2)
    position_BNTP = position_BNTH @ inputs.position_key_PNH.permute(1, 2, 0)
    bias_BNTS = shifted(position_BNTP, num_keys=inputs.k_BSNH.shape[1], beyond=mask.beyond)
    if mask.valid_B is not None:
        empty_BS = empty_slots(mask.valid_B, inputs.q_BTNH.shape[1], inputs.k_BSNH.shape[1])
        # the lowest number, not -inf: a query of padding attends to nothing else, and would become nan
        bias_BNTS = bias_BNTS.masked_fill(empty_BS[:, None, None, :], torch.finfo(bias_BNTS.dtype).min)
    if bias_BNTS.device.type != "cpu":
        bias_BNTS = bias_BNTS.contiguous()  # torch's fused GPU kernels want rows at aligned addresses
    keys_BNSH, values_BNSH = inputs.k_BSNH.transpose(1, 2), inputs.v_BSNH.transpose(1, 2)
    out_BNTH = F.scaled_dot_product_attention(
        content_BNTH, keys_BNSH, values_BNSH, attn_mask=bias_BNTS, dropout_p=dropout, scale=scale
    )
    return out_BNTH.transpose(1, 2)


def shifted(position_BNTP: Tensor, *, num_keys: int, beyond: int = 0) -> Tensor:
    """Move scores by distance (largest first) to the keys they belong to; -inf where a key is not attended.

    The `beyond` next distances have the score of the largest.
    """
    num_queries, num_distances = position_BNTP.shape[-2:]
    if beyond:
        farthest_BNT1 = position_BNTP[..., :1]
        position_BNTP = torch.cat([farthest_BNT1.expand(*position_BNTP.shape[:-1], beyond), position_BNTP], dim=-1)
    unseen = num_keys - num_distances - beyond
    if num_queries == 1 and not unseen:
        return position_BNTP
    wide_BNTW = F.pad(position_BNTP, (unseen, num_queries - 1), value=-torch.inf)
    return shifted_view(wide_BNTW, num_keys)


def shifted_view(wide_BNTW: Tensor, num_keys: int) -> Tensor:
    """View a contiguous buffer as (B, N, T, S) with row i moved left by T - 1 - i; nothing is copied."""
    num_queries, width = wide_BNTW.shape[-2:]
    if num_queries == 1:
        return wide_BNTW
    # slices, not as_strided: torch.compile does not take the storage offset it needs
    rows_BNX = wide_BNTW.flatten(-2)[..., num_queries - 1 : num_queries - 1 + num_queries * (width - 1)]
    return rows_BNX.unflatten(-1, (num_queries, width - 1))[..., :num_keys]
