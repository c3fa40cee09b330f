"""Relative attention for training on a CPU: torch's fused attention forward, and a backward that recomputes.

The plain way keeps B x N x T x S probabilities for the backward pass, and torch's fused CPU attention gives no gradient
to an additive bias. Here the forward pass keeps nothing of that size; the backward pass makes scores and probabilities
again, a few rows of the batch at a time.

Both passes write position scores into a buffer W = S + T - 1 wide whose shifted view is bias and mask at once, as in
`sdpa.py`; in the backward pass the same view of another buffer moves score gradients back to their distances.

Letters: B rows, C rows worked on at once, T queries, S = M + T keys, P distances, N heads, H head width, W as above;
G = C x N.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from transformer_xl.model.kernels import sdpa
from transformer_xl.model.kernels.reference import AttentionInputs, Sight, empty_slots

_BUFFER_NUMBERS = 2**21  # most numbers in one buffer: bounds the work space, whatever the batch


def attend(inputs: AttentionInputs, sight: Sight, dropout: float) -> Tensor:
    """Relative attention; returns (B, T, N, H). Dropout on probabilities goes the plain way, through `sdpa`."""
    if dropout or not torch.is_grad_enabled():
        return sdpa.attend(inputs, sight, dropout)
    scale = inputs.q_BTNH.shape[-1] ** -0.5
    out_BNTH = _Recomputed.apply(
        ((inputs.q_BTNH + inputs.content_bias_NH) * scale).transpose(1, 2).contiguous(),
        ((inputs.q_BTNH + inputs.position_bias_NH) * scale).transpose(1, 2).contiguous(),
        inputs.k_BSNH.transpose(1, 2).contiguous(),
        inputs.v_BSNH.transpose(1, 2).contiguous(),
        inputs.position_key_PNH.transpose(0, 1).contiguous(),
        sight.valid_B,
    )
    return out_BNTH.transpose(1, 2)


class _Recomputed(torch.autograd.Function):
    """Attention of scaled queries (content and position, each with its bias added) over keys, values and distances."""

    @staticmethod
    @override
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, c_BNTH: Tensor, p_BNTH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, r_NPH: Tensor, valid_B: Tensor | None
    ) -> Tensor:
        out_BNTH = torch.empty_like(c_BNTH)
        bias = _Bias(p_BNTH, k_BNSH, r_NPH, valid_B)
        for rows in bias.chunks():
            out_BNTH[rows] = F.scaled_dot_product_attention(
                c_BNTH[rows], k_BNSH[rows], v_BNSH[rows], attn_mask=bias.over_keys(rows), scale=1.0
            )
        ctx.save_for_backward(c_BNTH, p_BNTH, k_BNSH, v_BNSH, r_NPH, valid_B)
        return out_BNTH

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        c_BNTH, p_BNTH, k_BNSH, v_BNSH, r_NPH, valid_B = ctx.saved_tensors
        dout_BNTH = grad_outputs[0].contiguous()
        dc_BNTH, dp_BNTH, dk_BNSH, dv_BNSH = (torch.empty_like(t) for t in (c_BNTH, p_BNTH, k_BNSH, v_BNSH))
        dr_NPH = torch.zeros_like(r_NPH, dtype=torch.promote_types(r_NPH.dtype, torch.float32))
        bias = _Bias(p_BNTH, k_BNSH, r_NPH, valid_B)
        dwide_CNTW = torch.zeros_like(bias.wide_CNTW)
        for rows in bias.chunks():
            c_GTH, k_GSH, v_GSH, dout_GTH = (t[rows].flatten(0, 1) for t in (c_BNTH, k_BNSH, v_BNSH, dout_BNTH))
            # torch's own softmax and its gradient: exp(score - logsumexp) in bfloat16 would not sum to one
            a_GTS = torch.baddbmm(bias.over_keys(rows).flatten(0, 1), c_GTH, k_GSH.mT).softmax(-1)
            torch.bmm(a_GTS.mT, dout_GTH, out=dv_BNSH[rows].flatten(0, 1))
            ds_GTS = torch._softmax_backward_data(torch.bmm(dout_GTH, v_GSH.mT), a_GTS, -1, a_GTS.dtype)
            torch.bmm(ds_GTS, k_GSH, out=dc_BNTH[rows].flatten(0, 1))
            torch.bmm(ds_GTS.mT, c_GTH, out=dk_BNSH[rows].flatten(0, 1))
            dscore_CNTP = bias.by_distance(ds_GTS.unflatten(0, (-1, bias.num_heads)), dwide_CNTW[: len(k_BNSH[rows])])
            torch.matmul(dscore_CNTP, r_NPH, out=dp_BNTH[rows])
            dr_NPH += torch.matmul(dscore_CNTP.mT, p_BNTH[rows]).sum(0, dtype=dr_NPH.dtype)
        return dc_BNTH, dp_BNTH, dk_BNSH, dv_BNSH, dr_NPH.to(r_NPH.dtype), None


class _Bias:
    """Position scores and mask of some rows at a time, in one buffer."""

    def __init__(self, p_BNTH: Tensor, k_BNSH: Tensor, r_NPH: Tensor, valid_B: Tensor | None) -> None:
        self.p_BNTH, self.r_NPH, self.valid_B = p_BNTH, r_NPH, valid_B
        self.batch_size, self.num_heads, self.num_queries = p_BNTH.shape[:3]
        self.num_keys, self.num_distances = k_BNSH.shape[2], r_NPH.shape[1]
        self.width = self.num_keys + self.num_queries - 1
        self.at_once = max(1, min(self.batch_size, _BUFFER_NUMBERS // (self.num_heads * self.num_queries * self.width)))
        shape = (self.at_once, self.num_heads, self.num_queries, self.width)
        self.wide_CNTW = p_BNTH.new_full(shape, -torch.inf)

    def chunks(self) -> Iterator[slice]:
        for start in range(0, self.batch_size, self.at_once):
            yield slice(start, min(start + self.at_once, self.batch_size))

    def over_keys(self, rows: slice) -> Tensor:
        """Bias (C, N, T, S) of these rows; overwritten by the next call."""
        wide_CNTW = self.wide_CNTW[: rows.stop - rows.start]
        first = self.num_keys - self.num_distances
        wide_CNTW[..., first : self.num_keys] = self.p_BNTH[rows] @ self.r_NPH.mT
        bias_CNTS = sdpa.shifted_view(wide_CNTW, self.num_keys)
        if self.valid_B is not None:
            empty_CS = empty_slots(self.valid_B[rows], self.num_queries, self.num_keys)
            bias_CNTS.masked_fill_(empty_CS[:, None, None, :], -torch.inf)
        return bias_CNTS

    def by_distance(self, score_CNTS: Tensor, wide_CNTW: Tensor) -> Tensor:
        """Scores over keys moved back to their distances (C, N, T, P), through a buffer that holds zeros elsewhere."""
        sdpa.shifted_view(wide_CNTW, self.num_keys).copy_(score_CNTS)
        return wide_CNTW[..., self.num_keys - self.num_distances : self.num_keys]
