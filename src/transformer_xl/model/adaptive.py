"""Embedding and softmax over a vocabulary cut into clusters of falling frequency (paper section 4.1; Grave et al. 2017,
Baevski & Auli 2018). Without cutoffs there is one cluster, and both are the ordinary dense ones.

    cluster 0, the head: ids 0 .. n0 - 1        tail i: ids from cutoff i - 1 up to cutoff i
    log p(token in head)   = its head score - logsumexp(n0 head scores, one score for each tail)
    log p(token in tail i) = (score of tail i in the head, normalised as above) + log softmax within the tail

Tail i stands in column n0 + i - 1 of the head (as in the authors' TensorFlow code; their PyTorch code counts from the
end). Losses come back in input order. Every parameter takes part in every step, also that of a tail nobody aimed at.

Shape suffixes: B rows, T new tokens, K places (B x T, or some of them), D model width, E embedding width, V tokens of
the vocabulary (or of one cluster, or of the head with its tails' scores), R candidates.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import BaseModelConfig
from transformer_xl.model.cross_entropy import cross_entropy, fits_at_once, linear_cross_entropy

_WEIGHT_STD, _PROJECTION_STD = 0.02, 0.01  # the authors' init_std and proj_init_std
_ROUND = 8  # the places of a tail are filled up to a multiple, so that shapes vary less


class AdaptiveEmbedding(nn.Module):
    """Token ids to rows of the model's width, not yet scaled.

    With div_val 1 one table serves all clusters; else each cluster has a table of its own width.
    """

    def __init__(self, config: BaseModelConfig) -> None:
        super().__init__()
        edges, widths = config.cluster_boundaries, config.cluster_widths
        self.edges, self.width = edges, config.d_model
        self.shared = config.div_val == 1
        sizes = [edges[-1]] if self.shared else [stop - start for start, stop in pairwise(edges)]
        self.tables = nn.ParameterList(
            torch.empty(size, width) for size, width in zip(sizes, widths, strict=not self.shared)
        )
        self.projections = nn.ParameterDict(
            {str(index): torch.empty(config.d_model, widths[index]) for index in projected(config)[: len(sizes)]}
        )

    def init_weights(self) -> None:
        """Draws first weights as the authors' code does: tables N(0, 0.02), projections N(0, 0.01)."""
        for table in self.tables:
            nn.init.normal_(table, 0.0, _WEIGHT_STD)
        for projection in self.projections.values():
            nn.init.normal_(projection, 0.0, _PROJECTION_STD)

    @override
    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Rows (B, T, D) of the tokens.

        Every table is looked up and projected for every token, and what belongs to other clusters is masked: shapes
        depend on nothing, the device is never waited for, and each parameter has a gradient. It costs less than one
        percent of a large model's step.
        """
        if len(self.tables) == 1:
            return self._projected(F.embedding(tokens_BT, self.tables[0]), 0)
        parts_BTD: list[Tensor] = []
        for index, (start, stop) in enumerate(pairwise(self.edges)):
            inside_BT = (tokens_BT >= start) & (tokens_BT < stop)
            # the remainder spreads the tokens of other clusters over the table: their zero gradients then do not
            # queue up at a single row
            local_BT = torch.remainder(tokens_BT - start, stop - start)
            rows_BTD = self._projected(F.embedding(local_BT, self.tables[index]), index)
            parts_BTD.append(rows_BTD.masked_fill(~inside_BT[..., None], 0))
        return torch.stack(parts_BTD).sum(0)

    def cluster_table(self, index: int) -> Tensor:
        """Embeddings of one cluster, (V, E)."""
        return self.tables[0][self.edges[index] : self.edges[index + 1]] if self.shared else self.tables[index]

    def projection(self, index: int) -> Tensor | None:
        """Projection (D, E) of one cluster; none where it is as wide as the model."""
        name = "0" if self.shared else str(index)
        return self.projections.get(name)

    def _projected(self, rows_BTE: Tensor, index: int) -> Tensor:
        projection_DE = self.projection(index)
        return rows_BTE if projection_DE is None else F.linear(rows_BTE, projection_DE)


def projected(config: BaseModelConfig) -> list[int]:
    """The clusters whose embeddings are projected: those of another width than the model, and with div_val all of them
    (the authors' code) unless `project_equal_width` is off."""
    always = config.div_val > 1 and config.project_same_width
    return [index for index, width in enumerate(config.cluster_widths) if always or width != config.d_model]


class AdaptiveSoftmax(nn.Module):
    """Scores of the vocabulary from the model's hidden rows; weights and projections may be the embedding's."""

    def __init__(self, config: BaseModelConfig, embedding: AdaptiveEmbedding) -> None:
        super().__init__()
        # in a tuple: it is not a part of this module, so its parameters are neither saved nor counted twice
        self._embedding = (embedding,)
        self.edges = config.cluster_boundaries
        self.num_tails = len(self.edges) - 2
        widths = config.cluster_widths
        self.tie_word_embeddings = config.tie_word_embeddings
        self.tables = nn.ParameterList(
            [] if config.tie_word_embeddings else [torch.empty_like(t) for t in embedding.tables]
        )
        tied = {"all": 0, "all_but_first": 1, "none": len(widths)}[config.tie_projections]
        self.first_tied_projection = tied
        self.projections = nn.ParameterDict(
            {str(index): torch.empty(config.d_model, widths[index]) for index in projected(config) if index < tied}
        )
        self.bias = nn.Parameter(torch.empty(self.edges[-1]))
        self.cluster_weight = nn.Parameter(torch.empty(self.num_tails, widths[0])) if self.num_tails else None
        self.cluster_bias = nn.Parameter(torch.empty(self.num_tails)) if self.num_tails else None

    def init_weights(self) -> None:
        """Draws first weights as the authors' code does: weights N(0, 0.02), projections N(0, 0.01), biases 0."""
        for table in self.tables:
            nn.init.normal_(table, 0.0, _WEIGHT_STD)
        for projection in self.projections.values():
            nn.init.normal_(projection, 0.0, _PROJECTION_STD)
        nn.init.zeros_(self.bias)
        if self.cluster_weight is not None and self.cluster_bias is not None:
            nn.init.normal_(self.cluster_weight, 0.0, _WEIGHT_STD)
            nn.init.zeros_(self.cluster_bias)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Scores (B, T, V) of all tokens, in the order of their ids; with tails they are log-probabilities."""
        if not self.num_tails:
            return self._scores(hidden_BTD, 0)
        head_BTV = _log_softmax(self._head(hidden_BTD))
        num_head = self.edges[1]
        parts_BTV = [head_BTV[..., :num_head]]
        for index in range(1, self.num_tails + 1):
            in_tail_BTV = _log_softmax(self._scores(hidden_BTD, index))
            parts_BTV.append(head_BTV[..., num_head + index - 1, None] + in_tail_BTV)
        return torch.cat(parts_BTV, -1)

    def nats(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Loss of each target in nats, float32 or float64 (B, T), in input order.

        The places of each tail are picked out on the host. Where the targets lie on the CPU (training and scoring hand
        them in so) the device is not waited for; targets on another device are fetched first.
        """
        hidden_KD = hidden_BTD.flatten(0, 1)
        device = hidden_KD.device
        if not self.num_tails:
            target_K = _send(targets_BT.flatten(), device)
            return self._nats_within(0, hidden_KD, target_K).view(targets_BT.shape)
        target_K = targets_BT.flatten().cpu()
        cluster_K = torch.bucketize(target_K, torch.tensor(self.edges[1:-1]), right=True)
        head_K = torch.where(cluster_K == 0, target_K, self.edges[1] - 1 + cluster_K)
        nats_K = self._nats_of_head(hidden_KD, _send(head_K, device))
        for index in range(1, self.num_tails + 1):
            place_K, local_K, counted_K = self._aimed_at(index, cluster_K, target_K)
            place_K = _send(place_K, device)
            in_tail_K = self._nats_within(index, hidden_KD.index_select(0, place_K), _send(local_K, device))
            nats_K = nats_K.index_add(0, place_K, (in_tail_K * _send(counted_K, device)).to(nats_K.dtype))
        return nats_K.view(targets_BT.shape)

    def top(self, hidden_BTD: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` likeliest tokens: their scores, falling, and their ids; each (B, T, R).

        A tail is scored only if some place gives the tail as a whole more probability than its worst candidate has:
        no token can have more than its tail. Asking that waits for the device.
        """
        if not self.num_tails:
            return _top(self._scores(hidden_BTD, 0), count)
        head_BTV = _log_softmax(self._head(hidden_BTD))
        num_head = self.edges[1]
        best_BTR, id_BTR = _top(head_BTV[..., :num_head], count)
        for index in range(1, self.num_tails + 1):
            tail_BT1 = head_BTV[..., num_head + index - 1, None]
            if best_BTR.shape[-1] >= count and not bool((tail_BT1 > best_BTR[..., -1:]).any()):
                continue
            more_BTR, more_id_BTR = _top(tail_BT1 + _log_softmax(self._scores(hidden_BTD, index)), count)
            both_BTR = torch.cat([best_BTR, more_BTR], -1)
            both_id_BTR = torch.cat([id_BTR, more_id_BTR + self.edges[index]], -1)
            best_BTR, order_BTR = _top(both_BTR, count)
            id_BTR = both_id_BTR.gather(-1, order_BTR)
        return best_BTR, id_BTR

    def _aimed_at(self, index: int, cluster_K: Tensor, target_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of one tail: the places aimed at it, the targets within it, and 1 where a place counts.

        A tail that nobody aimed at is gone through with no places: its parameters then have gradients of zeros, not
        none, which would stall data-parallel training.
        """
        place_K = (cluster_K == index).nonzero()[:, 0]
        missing = -len(place_K) % _ROUND
        counted_K = torch.ones(len(place_K) + missing)
        counted_K[len(place_K) :] = 0
        local_K = F.pad(target_K[place_K] - self.edges[index], (0, missing))
        return F.pad(place_K, (0, missing)), local_K, counted_K

    def _head(self, hidden_KD: Tensor) -> Tensor:
        """Scores of the head's tokens and then of the tails: (K, V)."""
        assert self.cluster_weight is not None
        assert self.cluster_bias is not None
        rows_KE = self._narrowed(hidden_KD, 0)
        if rows_KE.numel() // rows_KE.shape[-1] < rows_KE.shape[-1]:  # the smaller thing is copied
            tails_KV = F.linear(rows_KE, self.cluster_weight, self.cluster_bias)
            return torch.cat([F.linear(rows_KE, self._cluster_table(0), self._cluster_bias(0)), tails_KV], -1)
        return F.linear(rows_KE, *self._head_weights())

    def _head_weights(self) -> tuple[Tensor, Tensor]:
        assert self.cluster_weight is not None
        assert self.cluster_bias is not None
        weight_VE = torch.cat([self._cluster_table(0), self.cluster_weight])
        return weight_VE, torch.cat([self._cluster_bias(0), self.cluster_bias])

    def _nats_of_head(self, hidden_KD: Tensor, target_K: Tensor) -> Tensor:
        if fits_at_once(len(hidden_KD), self.edges[1] + self.num_tails):
            return cross_entropy(self._head(hidden_KD), target_K)
        return linear_cross_entropy(self._narrowed(hidden_KD, 0), *self._head_weights(), target_K)

    def _nats_within(self, index: int, hidden_KD: Tensor, target_K: Tensor) -> Tensor:
        """Of targets counted from the first token of a cluster, among that cluster."""
        weights = self._cluster_table(index), self._cluster_bias(index)
        return linear_cross_entropy(self._narrowed(hidden_KD, index), *weights, target_K)

    def _scores(self, hidden_KD: Tensor, index: int) -> Tensor:
        return F.linear(self._narrowed(hidden_KD, index), self._cluster_table(index), self._cluster_bias(index))

    def _cluster_bias(self, index: int) -> Tensor:
        return self.bias[self.edges[index] : self.edges[index + 1]]

    def _narrowed(self, hidden_KD: Tensor, index: int) -> Tensor:
        """Hidden rows in the width of a cluster's embeddings: (K, E)."""
        if index < self.first_tied_projection:
            projection_DE = self.projections.get(str(index))
        else:
            projection_DE = self._embedding[0].projection(index)
        return hidden_KD if projection_DE is None else hidden_KD @ projection_DE

    def _cluster_table(self, index: int) -> Tensor:
        embedding = self._embedding[0]
        if self.tie_word_embeddings:
            return embedding.cluster_table(index)
        start, stop = self.edges[index], self.edges[index + 1]
        return self.tables[0][start:stop] if embedding.shared else self.tables[index]


def _top(scores_BTV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores, falling, and their places."""
    return scores_BTV.topk(min(count, scores_BTV.shape[-1]), dim=-1)


def _log_softmax(scores_KV: Tensor) -> Tensor:
    return F.log_softmax(scores_KV, -1, dtype=torch.promote_types(scores_KV.dtype, torch.float32))


def _send(values_K: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it: only a copy from pinned memory does not."""
    if device.type == "cuda" and values_K.device.type == "cpu":
        values_K = values_K.pin_memory()
    return values_K.to(device, non_blocking=True)
