"""Relative attention written out term by term (paper section 3.3); the one to read, and right for any dtype.

    score[i, j] = ( q_i . k_j          (a) content addressing
                  + q_i . r[d]         (b) content-dependent position bias
                  + u   . k_j          (c) global content bias
                  + w   . r[d] )       (d) global position bias
                  / sqrt(H)            with distance d = M + i - j, and r[d] the position key of that distance

Letters: B rows, T queries, S = M + T keys, P distances, N heads, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class AttentionInputs:
    """Queries, keys, values, position keys and biases: what attention is computed from."""

    q_BTNH: Tensor
    k_BSNH: Tensor
    v_BSNH: Tensor
    position_key_PNH: Tensor
    """Keys of the distances P - 1, ..., 1, 0: the largest first, as the oldest keys come first."""
    content_bias_NH: Tensor
    """The paper's u."""
    position_bias_NH: Tensor
    """The paper's v (here w)."""


@dataclass(frozen=True)
class AttentionMask:
    """Keys that a query attends to: at distances 0 to P - 1 and `beyond` more, and in no empty memory slot."""

    valid_B: Tensor | None
    """Number of valid memory slots of each batch row, the last ones; none: all. Negative where new tokens are padding:
    the first -valid of the T. The output for a query of padding means nothing, but is finite."""
    beyond: int = 0
    """Number of further distances that are attended, which all have the position key of distance P - 1 (clamping)."""


def written_out(inputs: AttentionInputs, mask: AttentionMask) -> AttentionInputs:
    """Return the inputs with a position key of its own for each distance that is attended."""
    if not mask.beyond:
        return inputs
    r_PNH = inputs.position_key_PNH
    return replace(inputs, position_key_PNH=torch.cat([r_PNH[:1].expand(mask.beyond, -1, -1), r_PNH]))


@dataclass(frozen=True)
class AttentionTerms:
    """The four terms, each divided by sqrt(H), and the probabilities they give. 0 where a query does not attend."""

    content_BNTS: Tensor
    position_BNTS: Tensor
    content_bias_BNTS: Tensor
    position_bias_BNTS: Tensor
    probabilities_BNTS: Tensor


def distances(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return the distance from query i back to key j, int64 (T, S); negative where the key is in the future."""
    num_memory = num_keys - num_queries
    query_T = torch.arange(num_queries, device=device)
    key_S = torch.arange(num_keys, device=device)
    return num_memory + query_T[:, None] - key_S[None, :]


def seen_keys(inputs: AttentionInputs, mask: AttentionMask) -> Tensor:
    """Return which key each query attends to, bool (B or 1, T, S)."""
    num_queries, num_keys = inputs.q_BTNH.shape[1], inputs.k_BSNH.shape[1]
    distance_TS = distances(num_queries, num_keys, inputs.q_BTNH.device)
    seen_BTS = ((distance_TS >= 0) & (distance_TS < len(inputs.position_key_PNH) + mask.beyond))[None]
    if mask.valid_B is not None:
        seen_BTS = seen_BTS & ~empty_slots(mask.valid_B, num_queries, num_keys)[:, None, :]
    return seen_BTS


def empty_slots(valid_B: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """Return which keys are in an empty memory slot, bool (B, S); valid slots are the last of the memory."""
    first_valid_B = num_keys - num_queries - valid_B
    return torch.arange(num_keys, device=valid_B.device) < first_valid_B[:, None]


def attention_terms(inputs: AttentionInputs, mask: AttentionMask) -> AttentionTerms:
    """Compute every term by itself; B x N x T x S numbers each."""
    seen_B1TS = seen_keys(inputs, mask)[:, None]
    inputs = written_out(inputs, mask)
    num_distances = len(inputs.position_key_PNH)
    scale = inputs.q_BTNH.shape[-1] ** -0.5
    distance_TS = distances(inputs.q_BTNH.shape[1], inputs.k_BSNH.shape[1], inputs.q_BTNH.device)
    position_key_TSNH = inputs.position_key_PNH[(num_distances - 1 - distance_TS).clamp(0, num_distances - 1)]

    content_BNTS = torch.einsum("btnh,bsnh->bnts", inputs.q_BTNH, inputs.k_BSNH)
    position_BNTS = torch.einsum("btnh,tsnh->bnts", inputs.q_BTNH, position_key_TSNH)
    content_bias_BNS = torch.einsum("nh,bsnh->bns", inputs.content_bias_NH, inputs.k_BSNH)
    position_bias_NTS = torch.einsum("nh,tsnh->nts", inputs.position_bias_NH, position_key_TSNH)

    content, position, content_bias, position_bias = (
        (term * scale).expand_as(content_BNTS).masked_fill(~seen_B1TS, 0)
        for term in (content_BNTS, position_BNTS, content_bias_BNS[:, :, None], position_bias_NTS[None])
    )
    score_BNTS = content + position + content_bias + position_bias
    # the lowest number, not -inf: a query of padding attends to nothing, and its probabilities would be nan
    score_BNTS = score_BNTS.masked_fill(~seen_B1TS, torch.finfo(score_BNTS.dtype).min)
    probabilities_BNTS = score_BNTS.softmax(-1, dtype=torch.promote_types(score_BNTS.dtype, torch.float32))
    probabilities_BNTS = probabilities_BNTS.masked_fill(~seen_B1TS, 0).to(score_BNTS.dtype)
    return AttentionTerms(content, position, content_bias, position_bias, probabilities_BNTS)


def weighted_values(terms: AttentionTerms, v_BSNH: Tensor, dropout: float = 0.0) -> Tensor:
    """Return the attended values (B, T, N, H), with dropout on the probabilities."""
    kept_BNTS = F.dropout(terms.probabilities_BNTS, dropout)
    return torch.einsum("bnts,bsnh->btnh", kept_BNTS, v_BSNH)


def attend(inputs: AttentionInputs, mask: AttentionMask, dropout: float) -> Tensor:
    """Compute relative attention; returns (B, T, N, H)."""
    return weighted_values(attention_terms(inputs, mask), inputs.v_BSNH, dropout)
