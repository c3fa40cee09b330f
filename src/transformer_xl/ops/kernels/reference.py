"""Relative attention term by term, as in the paper (section 3.3): the simplest kernel, for any dtype, but slow.

    score[i, j] = ( q_i . k_j          (a) content
                  + q_i . r[d]         (b) position
                  + u   . k_j          (c) content bias: how much the key's content matters to any query
                  + w   . r[d] )       (d) position bias: how much the distance matters to any query
                  / sqrt(H)            with distance d = M + i - j

r[d] is the position key of distance d: W_{k,R} R[d] in the paper. u and w are learned vectors; the paper calls the
second one v, which in the code always means the values. In attention to both sides
distances of later keys are negative.

Shape suffixes: B batch size, T queries, S = M + T keys (M memory slots), P distances, N heads, H head width, X one for
each query, or one for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class AttentionInputs:
    """The tensors that attention is computed from."""

    q_BTNH: Tensor
    k_BSNH: Tensor
    v_BSNH: Tensor
    position_key_PNH: Tensor
    """Position keys of the distances P - 1, ..., 1, 0: the largest first, as the oldest keys come first. With the
    `num_later` of the mask, of P - 1 - num_later, ..., -num_later."""
    content_bias_NH: Tensor
    """The paper's u."""
    position_bias_NH: Tensor
    """The paper's v."""
    sink_N: Tensor | None = None
    """Attention sinks (Xiao et al. 2023; learned, as in gpt-oss): a further score of each head, whose value is 0. With
    them a query may attend to nothing. None for none."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors without sinks, in the order of the fields."""
        return [getattr(self, field.name) for field in fields(self) if field.name != "sink_N"]

    def sinks(self) -> Tensor | None:
        """Return sinks in the dtype of sums: float32, or float64 for inputs of float64."""
        dtype = torch.promote_types(self.q_BTNH.dtype, torch.float32)
        return None if self.sink_N is None else self.sink_N.to(dtype).contiguous()


@dataclass(frozen=True)
class AttentionMask:
    """The keys that a query attends to: those at distances that have a position key or are clamped, except empty memory
    slots, keys before the start of the query's episode, and keys from `stop_key_BT` on."""

    valid_B: Tensor | None
    """Number of keys of each batch row before its last T that are attended, which are the last ones, or None for all:
    valid memory slots, less the padding, which stands before them. A negative number -n means that also the first n of
    the last T are masked. The output of padding is finite but meaningless."""
    num_clamped: int = 0
    """Number of attended distances above P - 1, which all use the position key of P - 1.

    It is above 0 if the setting clamp_length limits the distances with a position key of their own."""
    first_key_BT: Tensor | None = None
    """Index of the first key of each query's episode in memory and new tokens, 0 if it started before them; None if no
    episode starts among the new tokens."""
    num_later: int = 0
    """Number of distances below 0, of keys after the query, that have a position key."""
    stop_key_BT: Tensor | None = None
    """Index after the last key that each query may attend to, such as that of padding behind a text; None for all."""
    added_BNTS: Tensor | None = None
    """Added to the scores, or None: any mask (with the lowest number of its dtype), any further term. Only the kernels
    `sdpa` and `reference` do this."""

    def first_keys(self, num_queries: int, num_keys: int) -> Tensor | None:
        """Return the index of the first attended key, without regard to distances, or None if it is 0 for all queries.

        Its shape is (B, T), or (B, 1) where it is the same for all queries of a batch row.
        """
        if self.valid_B is None:
            return self.first_key_BT
        first_valid_B1 = (num_keys - num_queries - self.valid_B)[:, None]
        return first_valid_B1 if self.first_key_BT is None else torch.maximum(self.first_key_BT, first_valid_B1)

    def excluded(self, num_queries: int, num_keys: int) -> Tensor | None:
        """Return which keys are before the first or after the last attended one, whatever their distances.

        It is bool (B, T, S), or (B, 1, S) where it is the same for all queries of a batch row, or None for none.
        """
        first_key_BX, excluded_BXS = self.first_keys(num_queries, num_keys), None
        if first_key_BX is not None:
            excluded_BXS = keys_before(first_key_BX, num_keys)
        if self.stop_key_BT is not None:
            after_BTS = ~keys_before(self.stop_key_BT, num_keys)
            excluded_BXS = after_BTS if excluded_BXS is None else excluded_BXS | after_BTS
        return excluded_BXS

    def position_indices(self, num_queries: int, num_keys: int, num_distances: int, device: torch.device) -> Tensor:
        """Return for each query and key the index of their position key (T, S); outside of 0 to P - 1 there is none."""
        query_T, key_S = (torch.arange(number, device=device) for number in (num_queries, num_keys))
        least = num_distances - 1 - self.num_later - (num_keys - num_queries)
        return least - query_T[:, None] + key_S

    def attended(self, num_queries: int, num_keys: int, num_distances: int, device: torch.device) -> Tensor:
        """Return which keys each query attends to, without regard to `added_BNTS`, bool (B, T, S) or (1, T, S)."""
        position_TS = self.position_indices(num_queries, num_keys, num_distances, device)
        attended_BTS = ((position_TS >= 0) & (position_TS < num_distances))[None]
        excluded_BXS = self.excluded(num_queries, num_keys)
        return attended_BTS if excluded_BXS is None else attended_BTS & ~excluded_BXS


def expand_distances(inputs: AttentionInputs, mask: AttentionMask) -> AttentionInputs:
    """Return the inputs with one position key for each attended distance, which repeats that of clamped distances."""
    if not mask.num_clamped:
        return inputs
    r_PNH = inputs.position_key_PNH
    return replace(inputs, position_key_PNH=torch.cat([r_PNH[:1].expand(mask.num_clamped, -1, -1), r_PNH]))


@dataclass(frozen=True)
class AttentionTerms:
    """The four terms of the score, each divided by sqrt(H), and the attention probabilities.

    All are 0 where a query does not attend to a key.
    """

    content_BNTS: Tensor
    position_BNTS: Tensor
    content_bias_BNTS: Tensor
    position_bias_BNTS: Tensor
    probabilities_BNTS: Tensor


def keys_before(first_key_BX: Tensor, num_keys: int) -> Tensor:
    """Return whether each key is before the first attended one, bool (B, X, S)."""
    return torch.arange(num_keys, device=first_key_BX.device) < first_key_BX[..., None]


def attention_terms(inputs: AttentionInputs, mask: AttentionMask, *, by_distance: bool = False) -> AttentionTerms:
    """Compute every term separately; each has B x N x T x S elements.

    Position keys are repeated for each pair of query and key, in T x S x N x H elements. With `by_distance` each is
    multiplied once, which is faster, and equal up to rounding.
    """
    inputs = expand_distances(inputs, mask)
    num_queries, num_keys = inputs.q_BTNH.shape[1], inputs.k_BSNH.shape[1]
    num_distances, scale = inputs.position_key_PNH.shape[0], inputs.q_BTNH.shape[-1] ** -0.5
    position_TS = mask.position_indices(num_queries, num_keys, num_distances, inputs.q_BTNH.device)
    attended_B1TS = mask.attended(num_queries, num_keys, num_distances, inputs.q_BTNH.device)[:, None]
    index_TS = position_TS.clamp(0, num_distances - 1)

    content_BNTS = torch.einsum("btnh,bsnh->bnts", inputs.q_BTNH, inputs.k_BSNH)
    content_bias_BNS = torch.einsum("nh,bsnh->bns", inputs.content_bias_NH, inputs.k_BSNH)
    if by_distance:
        position_BNTP = torch.einsum("btnh,pnh->bntp", inputs.q_BTNH, inputs.position_key_PNH)
        position_BNTS = position_BNTP.gather(-1, index_TS.expand(*position_BNTP.shape[:2], -1, -1))
        position_bias_NTS = torch.einsum("nh,pnh->np", inputs.position_bias_NH, inputs.position_key_PNH)[:, index_TS]
    else:  # the kernel's own: resumed runs keep its rounding
        position_key_TSNH = inputs.position_key_PNH[index_TS]
        position_BNTS = torch.einsum("btnh,tsnh->bnts", inputs.q_BTNH, position_key_TSNH)
        position_bias_NTS = torch.einsum("nh,tsnh->nts", inputs.position_bias_NH, position_key_TSNH)

    content, position, content_bias, position_bias = (
        (term * scale).expand_as(content_BNTS).masked_fill(~attended_B1TS, 0)
        for term in (content_BNTS, position_BNTS, content_bias_BNS[:, :, None], position_bias_NTS[None])
    )
    score_BNTS = content + position + content_bias + position_bias
    score_BNTS = score_BNTS if mask.added_BNTS is None else score_BNTS + mask.added_BNTS
    # the lowest number, not -inf: a padding query attends to nothing, and its probabilities would be NaN
    score_BNTS = score_BNTS.masked_fill(~attended_B1TS, torch.finfo(score_BNTS.dtype).min)
    dtype = torch.promote_types(score_BNTS.dtype, torch.float32)
    probabilities_BNTS = softmax(score_BNTS.to(dtype), inputs.sinks())
    probabilities_BNTS = probabilities_BNTS.masked_fill(~attended_B1TS, 0).to(score_BNTS.dtype)
    return AttentionTerms(content, position, content_bias, position_bias, probabilities_BNTS)


def softmax(score_BNTS: Tensor, sink_N: Tensor | None) -> Tensor:
    """Return the probabilities of keys, which sum to less than 1 where there are sinks."""
    if sink_N is None:
        return score_BNTS.softmax(-1)
    sink_BNT1 = sink_N.to(score_BNTS.dtype)[:, None, None].expand(*score_BNTS.shape[:-1], 1)
    return torch.cat([score_BNTS, sink_BNT1], -1).softmax(-1)[..., :-1]


def weighted_values(terms: AttentionTerms, v_BSNH: Tensor, dropout: float = 0.0) -> Tensor:
    """Return the attended values (B, T, N, H), with dropout on the probabilities."""
    weight_BNTS = F.dropout(terms.probabilities_BNTS, dropout)
    return torch.einsum("bnts,bsnh->btnh", weight_BNTS, v_BSNH)


def attend(inputs: AttentionInputs, mask: AttentionMask, dropout: float) -> Tensor:
    """Compute relative attention; returns (B, T, N, H)."""
    return weighted_values(attention_terms(inputs, mask), inputs.v_BSNH, dropout)
