"""Embedding and softmax over a vocabulary cut into clusters of falling frequency (paper section 4.1; Grave et al. 2017,
Baevski & Auli 2018). Without cutoffs there is one cluster, and both are the ordinary dense ones.

    cluster 0, the head: ids 0 .. n0 - 1        tail i: ids from cutoff i - 1 up to cutoff i
    log p(token in head)   = its head logit - logsumexp(n0 head logits, one logit for each tail)
    log p(token in tail i) = (logit of tail i in the head, normalised as above) + log softmax within the tail

Tail i is column n0 + i - 1 of the head (as in the authors' TensorFlow code; their PyTorch code counts from the end).
Losses are returned in input order. Every parameter has a gradient in every step, also that of a tail without targets.

Letters: B batch rows, T new tokens, K positions (B x T, or some of them; most likely tokens in `topk`), D model width,
E embedding width, V tokens of the vocabulary (or of one cluster, or of the head with the logits of its tails).
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import BaseModelConfig
from transformer_xl.device import to_device
from transformer_xl.model.cross_entropy import cross_entropy, fits_at_once, linear_cross_entropy

_WEIGHT_STD, _PROJECTION_STD = 0.02, 0.01  # the authors' init_std and proj_init_std
_ROUND = 8  # positions of a tail are padded to a multiple, so that shapes vary less


class AdaptiveEmbedding(nn.Module):
    """Embeddings of the model's width for token ids, not yet scaled.

    With div_val 1 one table serves all clusters; otherwise each cluster has a table of its own width.
    """

    def __init__(self, config: BaseModelConfig) -> None:
        super().__init__()
        edges, widths = config.cluster_boundaries, config.cluster_widths
        self.edges = edges
        self.shared = config.div_val == 1
        sizes = [edges[-1]] if self.shared else [stop - start for start, stop in pairwise(edges)]
        self.tables = nn.ParameterList(
            torch.empty(size, width) for size, width in zip(sizes, widths, strict=not self.shared)
        )
        self.projections = nn.ParameterDict(
            {
                str(index): torch.empty(config.d_model, widths[index])
                for index in projected_clusters(config)[: len(sizes)]
            }
        )

    def init_weights(self) -> None:
        """Draws initial weights as the authors' code does: tables N(0, 0.02), projections N(0, 0.01)."""
        for table in self.tables:
            nn.init.normal_(table, 0.0, _WEIGHT_STD)
        for projection in self.projections.values():
            nn.init.normal_(projection, 0.0, _PROJECTION_STD)

    @override
    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the embeddings (B, T, D) of the tokens.

        Every table is looked up and projected for every token, and the results of other clusters are masked: so shapes
        do not depend on the tokens, nothing waits for the device, and each parameter has a gradient. It costs less than
        one percent of a large model's step.
        """
        if len(self.tables) == 1:
            return self._projected(F.embedding(tokens_BT, self.tables[0]), 0)
        parts_BTD: list[Tensor] = []
        for index, (start, stop) in enumerate(pairwise(self.edges)):
            inside_BT = (tokens_BT >= start) & (tokens_BT < stop)
            # the remainder spreads the tokens of other clusters over the table, so that their zero gradients are not
            # all added to a single row
            local_BT = torch.remainder(tokens_BT - start, stop - start)
            embedded_BTD = self._projected(F.embedding(local_BT, self.tables[index]), index)
            parts_BTD.append(embedded_BTD.masked_fill(~inside_BT[..., None], 0))
        return torch.stack(parts_BTD).sum(0)

    def cluster_table(self, index: int) -> Tensor:
        """Return the embeddings of one cluster, (V, E)."""
        return self.tables[0][self.edges[index] : self.edges[index + 1]] if self.shared else self.tables[index]

    def projection(self, index: int) -> Tensor | None:
        """Return the projection (D, E) of one cluster; none where it has none."""
        name = "0" if self.shared else str(index)
        return self.projections.get(name)

    def _projected(self, embedded_BTE: Tensor, index: int) -> Tensor:
        projection_DE = self.projection(index)
        return embedded_BTE if projection_DE is None else F.linear(embedded_BTE, projection_DE)


def projected_clusters(config: BaseModelConfig) -> list[int]:
    """Return the clusters whose embeddings are projected: those of another width than the model, and with div_val all
    of them (as in the authors' code) unless `project_same_width` is off."""
    always = config.div_val > 1 and config.project_same_width
    return [index for index, width in enumerate(config.cluster_widths) if always or width != config.d_model]


class AdaptiveSoftmax(nn.Module):
    """Logits and losses from the model's hidden states; weights and projections may be those of the embedding."""

    def __init__(self, config: BaseModelConfig, embedding: AdaptiveEmbedding) -> None:
        super().__init__()
        # in a tuple, so that it is no submodule: its parameters would be saved and counted twice
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
            {
                str(index): torch.empty(config.d_model, widths[index])
                for index in projected_clusters(config)
                if index < tied
            }
        )
        self.bias = nn.Parameter(torch.empty(self.edges[-1]))
        self.cluster_weight = nn.Parameter(torch.empty(self.num_tails, widths[0])) if self.num_tails else None
        self.cluster_bias = nn.Parameter(torch.empty(self.num_tails)) if self.num_tails else None

    def init_weights(self) -> None:
        """Draws initial weights as the authors' code does: weights N(0, 0.02), projections N(0, 0.01), biases 0."""
        for table in self.tables:
            nn.init.normal_(table, 0.0, _WEIGHT_STD)
        for projection in self.projections.values():
            nn.init.normal_(projection, 0.0, _PROJECTION_STD)
        nn.init.zeros_(self.bias)
        if self.cluster_weight is not None and self.cluster_bias is not None:
            nn.init.normal_(self.cluster_weight, 0.0, _WEIGHT_STD)
            nn.init.zeros_(self.cluster_bias)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the logits (B, T, V) of all tokens in the order of their ids; with tails, log-probabilities."""
        if not self.num_tails:
            return self._logits_within(hidden_BTD, 0)
        head_BTV = _log_softmax(self._head(hidden_BTD))
        num_head = self.edges[1]
        parts_BTV = [head_BTV[..., :num_head]]
        for index in range(1, self.num_tails + 1):
            in_tail_BTV = _log_softmax(self._logits_within(hidden_BTD, index))
            parts_BTV.append(head_BTV[..., num_head + index - 1, None] + in_tail_BTV)
        return torch.cat(parts_BTV, -1)

    def nats(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the loss of each target in nats, float32 or float64 (B, T), in input order.

        The positions of each tail are selected on the CPU. Where the targets are there too, as in training and
        evaluation, nothing waits for the device; targets on another device are copied to the CPU first.
        """
        hidden_KD = hidden_BTD.flatten(0, 1)
        device = hidden_KD.device
        if not self.num_tails:
            target_K = to_device(targets_BT.flatten(), device)
            return self._nats_within(0, hidden_KD, target_K).view(targets_BT.shape)
        target_K = targets_BT.flatten().cpu()
        cluster_K = torch.bucketize(target_K, torch.tensor(self.edges[1:-1]), right=True)
        head_K = torch.where(cluster_K == 0, target_K, self.edges[1] - 1 + cluster_K)
        nats_K = self._nats_of_head(hidden_KD, to_device(head_K, device))
        for index in range(1, self.num_tails + 1):
            index_K, local_K, counted_K = self._targets_of(index, cluster_K, target_K)
            index_K = to_device(index_K, device)
            in_tail_K = self._nats_within(index, hidden_KD.index_select(0, index_K), to_device(local_K, device))
            nats_K = nats_K.index_add(0, index_K, (in_tail_K * to_device(counted_K, device)).to(nats_K.dtype))
        return nats_K.view(targets_BT.shape)

    def topk(self, hidden_BTD: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k most likely tokens: their logits in falling order, and their ids; each (B, T, K).

        The logits of a tail are computed only if at some position the tail as a whole is more likely than the least
        likely token found so far: no token can be more likely than its tail. Asking that waits for the device.
        """
        if not self.num_tails:
            return _topk(self._logits_within(hidden_BTD, 0), k)
        head_BTV = _log_softmax(self._head(hidden_BTD))
        num_head = self.edges[1]
        best_BTK, id_BTK = _topk(head_BTV[..., :num_head], k)
        for index in range(1, self.num_tails + 1):
            tail_BT1 = head_BTV[..., num_head + index - 1, None]
            if best_BTK.shape[-1] >= k and not bool((tail_BT1 > best_BTK[..., -1:]).any()):
                continue
            more_BTK, more_id_BTK = _topk(tail_BT1 + _log_softmax(self._logits_within(hidden_BTD, index)), k)
            both_BTK = torch.cat([best_BTK, more_BTK], -1)
            both_id_BTK = torch.cat([id_BTK, more_id_BTK + self.edges[index]], -1)
            best_BTK, order_BTK = _topk(both_BTK, k)
            id_BTK = both_id_BTK.gather(-1, order_BTK)
        return best_BTK, id_BTK

    def _targets_of(self, index: int, cluster_K: Tensor, target_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of one tail: the positions whose target is in it, the targets counted from its first token, and 1 where a
        position is no padding.

        A tail without targets gets no positions: its parameters then have gradients of zeros, not none, which would
        stall data-parallel training.
        """
        index_K = (cluster_K == index).nonzero()[:, 0]
        missing = -len(index_K) % _ROUND
        counted_K = torch.ones(len(index_K) + missing)
        counted_K[len(index_K) :] = 0
        local_K = F.pad(target_K[index_K] - self.edges[index], (0, missing))
        return F.pad(index_K, (0, missing)), local_K, counted_K

    def _head(self, hidden_KD: Tensor) -> Tensor:
        """Logits of the head's tokens and then of the tails: (K, V)."""
        assert self.cluster_weight is not None
        assert self.cluster_bias is not None
        hidden_KE = self._to_cluster_width(hidden_KD, 0)
        if (
            hidden_KE.numel() // hidden_KE.shape[-1] < hidden_KE.shape[-1]
        ):  # concatenates the smaller of logits and weights
            tails_KV = F.linear(hidden_KE, self.cluster_weight, self.cluster_bias)
            return torch.cat([F.linear(hidden_KE, self._cluster_table(0), self._cluster_bias(0)), tails_KV], -1)
        return F.linear(hidden_KE, *self._head_weights())

    def _head_weights(self) -> tuple[Tensor, Tensor]:
        assert self.cluster_weight is not None
        assert self.cluster_bias is not None
        weight_VE = torch.cat([self._cluster_table(0), self.cluster_weight])
        return weight_VE, torch.cat([self._cluster_bias(0), self.cluster_bias])

    def _nats_of_head(self, hidden_KD: Tensor, target_K: Tensor) -> Tensor:
        if fits_at_once(len(hidden_KD), self.edges[1] + self.num_tails):
            return cross_entropy(self._head(hidden_KD), target_K)
        return linear_cross_entropy(self._to_cluster_width(hidden_KD, 0), *self._head_weights(), target_K)

    def _nats_within(self, index: int, hidden_KD: Tensor, target_K: Tensor) -> Tensor:
        """Losses within a cluster, of targets counted from its first token."""
        weights = self._cluster_table(index), self._cluster_bias(index)
        return linear_cross_entropy(self._to_cluster_width(hidden_KD, index), *weights, target_K)

    def _logits_within(self, hidden_KD: Tensor, index: int) -> Tensor:
        return F.linear(self._to_cluster_width(hidden_KD, index), self._cluster_table(index), self._cluster_bias(index))

    def _cluster_bias(self, index: int) -> Tensor:
        return self.bias[self.edges[index] : self.edges[index + 1]]

    def _to_cluster_width(self, hidden_KD: Tensor, index: int) -> Tensor:
        """Hidden states in the width of a cluster's embeddings: (K, E)."""
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


def _topk(logits_BTV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return logits_BTV.topk(min(k, logits_BTV.shape[-1]), dim=-1)


def _log_softmax(logits_KV: Tensor) -> Tensor:
    return F.log_softmax(logits_KV, -1, dtype=torch.promote_types(logits_KV.dtype, torch.float32))
