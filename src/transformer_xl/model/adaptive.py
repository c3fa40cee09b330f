"""Adaptive embedding and softmax: the vocabulary is split into clusters of descending frequency (paper section 4.1;
Grave et al. 2017, Baevski & Auli 2018). Without cutoffs there is one cluster, and both are ordinary dense layers.

    head = cluster 0: ids 0 .. n0 - 1, where n0 is the first cutoff
    tail i = cluster i > 0: ids edges[i] .. edges[i + 1] - 1, where edges are 0, the cutoffs and V
    log p(token in head)   = its head logit - logsumexp(n0 head logits, one logit for each tail)
    log p(token in tail i) = (logit of tail i - the same logsumexp) + log softmax within the tail

The logit of tail i is column n0 + i - 1 of the head's logits (as in the authors' TensorFlow code; in their PyTorch code
the tails are in reverse order). The setting div_val is the factor by which the embeddings of each cluster are narrower
than those of the cluster before. Losses are returned in input order. Every parameter gets a gradient in every step,
even those of a tail without targets.

Shape suffixes: B batch size, T new tokens, K positions (B x T, or a subset; in `topk` the k tokens), D model width,
E embedding width, V tokens of the vocabulary (or of one cluster, or of the head with one logit for each tail).
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import BaseModelConfig
from transformer_xl.device import to_device
from transformer_xl.model.token_ids import assert_in_vocabulary
from transformer_xl.ops.cross_entropy import cross_entropy, fits_at_once, linear_cross_entropy
from transformer_xl.ops.linear import linear

_WEIGHT_STD, _PROJECTION_STD = 0.02, 0.01  # init_std and proj_init_std of the authors' code
_PART = 64  # positions whose logits of all clusters are computed at once
_PADDING_MULTIPLE = 8  # the number of targets in a tail is padded to a multiple of this, so that shapes vary less


class _ClusterTables(nn.Module):
    """The embedding tables of all clusters, and projections of embeddings to the model's width.

    With div_val 1 all clusters share one table; otherwise each cluster has its own table, in its own width.
    """

    def __init__(self, config: BaseModelConfig, projected_clusters: list[int], *, has_tables: bool = True) -> None:
        """Create the parameters, without values.

        Args:
            config: settings of the model.
            projected_clusters: indices of the clusters that get a projection.
            has_tables: false for a softmax that uses the tables of the embedding.
        """
        super().__init__()
        # cluster i has the ids edges[i] .. edges[i + 1] - 1; `shared`: whether all clusters use one table
        self.edges, self.shared = config.cluster_boundaries, config.div_val == 1
        widths, table_edges = config.cluster_widths, (0, self.edges[-1]) if self.shared else self.edges
        tables = (torch.empty(stop - start, widths[i]) for i, (start, stop) in enumerate(pairwise(table_edges)))
        self.tables = nn.ParameterList(tables if has_tables else ())
        self.projections = nn.ParameterDict(
            {str(i): torch.empty(config.d_model, widths[i]) for i in projected_clusters}
        )

    def init_weights(self) -> None:
        """Draw initial weights as in the authors' code: normal, standard deviation 0.02 (projections 0.01)."""
        for table in self.tables:
            nn.init.normal_(table, 0.0, _WEIGHT_STD)
        for projection in self.projections.values():
            nn.init.normal_(projection, 0.0, _PROJECTION_STD)

    @property
    def weight(self) -> Tensor:
        """The one table (V, D) of a dense model, as torch's modules have it; others have no such attribute."""
        if len(self.tables) != 1 or len(self.edges) != 2 or self.projections:
            raise AttributeError(f"{type(self).__name__} has no single weight: it has clusters or projections")
        return self.tables[0]

    def cluster_table(self, index: int) -> Tensor:
        """Return the embeddings of one cluster, (V, E)."""
        return self.tables[0][self.edges[index] : self.edges[index + 1]] if self.shared else self.tables[index]


class AdaptiveEmbedding(_ClusterTables):
    """Embeddings of token ids in the model's width, without the scaling by sqrt(D)."""

    def __init__(self, config: BaseModelConfig) -> None:
        projected = _projected_clusters(config)  # with div_val 1 all clusters also share one projection, or have none
        super().__init__(config, projected[:1] if config.div_val == 1 else projected)

    @override
    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the embeddings (B, T, D) of the tokens.

        With several tables, every token is looked up in every table and projected; the results of tables that do not
        contain the token are set to 0. So shapes do not depend on the tokens, the CPU need not wait for the device, and
        each parameter gets a gradient. This takes less than one percent of the time of a large model's step.
        """
        if len(self.tables) == 1:
            return self._projected(F.embedding(tokens_BT, self.tables[0]), 0)
        assert_in_vocabulary(tokens_BT, self.edges[-1])  # no table would refuse an id, because of the remainder below
        parts_BTD: list[Tensor] = []
        for index, (start, stop) in enumerate(pairwise(self.edges)):
            inside_BT = (tokens_BT >= start) & (tokens_BT < stop)
            # the remainder spreads the tokens of other clusters over the table; if they all used one row, their zero
            # gradients would all be added to that row, which is slow
            local_BT = torch.remainder(tokens_BT - start, stop - start)
            embedded_BTD = self._projected(F.embedding(local_BT, self.tables[index]), index)
            parts_BTD.append(embedded_BTD.masked_fill(~inside_BT[..., None], 0))
        return torch.stack(parts_BTD).sum(0)

    def projection(self, index: int) -> Tensor | None:
        """Return the projection (D, E) of one cluster, or None if it has none."""
        return self.projections.get("0" if self.shared else str(index))

    def _projected(self, embedded_BTE: Tensor, index: int) -> Tensor:
        projection_DE = self.projection(index)
        return embedded_BTE if projection_DE is None else linear(embedded_BTE, projection_DE)


def _projected_clusters(config: BaseModelConfig) -> list[int]:
    """Return the indices of the clusters whose embeddings are projected to the model's width.

    These are the clusters whose width is not d_model; with div_val, all clusters (as in the authors' code) unless
    `project_same_width` is false.
    """
    project_all = config.div_val > 1 and config.project_same_width
    return [index for index, width in enumerate(config.cluster_widths) if project_all or width != config.d_model]


class AdaptiveSoftmax(_ClusterTables):
    """Logits and losses from the model's hidden states; may share (tie) weights and projections with the embedding."""

    def __init__(self, config: BaseModelConfig, embedding: AdaptiveEmbedding) -> None:
        num_clusters = len(config.cluster_widths)
        # clusters from this one on use the projection of the embedding
        first_tied = {"all": 0, "all_but_first": 1, "none": num_clusters}[config.tie_projections]
        projected = [index for index in _projected_clusters(config) if index < first_tied]
        super().__init__(config, projected, has_tables=not config.tie_word_embeddings)
        # in a tuple, so that it is not registered as a submodule, which would save its parameters twice
        self._embedding = (embedding,)
        self.first_tied_projection, self.num_tails = first_tied, num_clusters - 1
        self.bias = nn.Parameter(torch.empty(self.edges[-1]))
        self.cluster_weight = self.cluster_bias = None
        if self.num_tails:
            self.cluster_weight = nn.Parameter(torch.empty(self.num_tails, config.cluster_widths[0]))
            self.cluster_bias = nn.Parameter(torch.empty(self.num_tails))

    @override
    def init_weights(self) -> None:
        """Draw weights as in the authors' code: normal, standard deviation 0.02 (projections 0.01); biases 0."""
        super().init_weights()
        nn.init.zeros_(self.bias)
        if self.cluster_weight is not None and self.cluster_bias is not None:
            nn.init.normal_(self.cluster_weight, 0.0, _WEIGHT_STD)
            nn.init.zeros_(self.cluster_bias)

    @property
    def embedding(self) -> AdaptiveEmbedding | None:
        """The embedding whose tables this softmax uses, or None if it has its own."""
        return None if self.tables else self._embedding[0]

    @property
    @override
    def weight(self) -> Tensor:
        if self.embedding is None or self.projections:
            return super().weight
        return self.embedding.weight

    @override
    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the logits (B, T, V), as a linear layer in its place would."""
        return self.logits(hidden_BTD)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the logits of all tokens in order of their ids, shape (B, T, V); with tails, log-probabilities."""
        if not self.num_tails:
            return self._cluster_logits(hidden_BTD, 0)
        head_BTV = _log_softmax(self._cluster_logits(hidden_BTD, 0))
        num_head = self.edges[1]
        parts_BTV = [head_BTV[..., :num_head]]
        for index in range(1, self.num_tails + 1):
            in_tail_BTV = _log_softmax(self._cluster_logits(hidden_BTD, index))
            parts_BTV.append(head_BTV[..., num_head + index - 1, None] + in_tail_BTV)
        return torch.cat(parts_BTV, -1)

    def nats(self, hidden_BTD: Tensor, targets_BT: Tensor, temperature: float = 1.0) -> Tensor:
        """Return the loss of each target in nats, shape (B, T), float32 or float64, in input order.

        What `logits` returns is divided by the temperature.

        The positions of each tail are selected on the CPU. If the targets are on the CPU, as in training and
        evaluation, this does not synchronize with the device; otherwise they are copied to the CPU first.
        """
        hidden_KD = hidden_BTD.flatten(0, 1)
        device = hidden_KD.device
        if not self.num_tails:
            target_K = to_device(targets_BT.flatten(), device)
            assert_in_vocabulary(targets_BT, self.edges[-1])  # the cross-entropy ignores the target -100
            return self._cluster_losses(hidden_KD, 0, target_K, temperature).view(targets_BT.shape)
        if temperature != 1:  # each loss depends on all tokens
            parts = zip(hidden_KD.split(_PART), to_device(targets_BT.flatten(), device).split(_PART), strict=True)
            nats = [cross_entropy(self.logits(hidden_KD) / temperature, target_K) for hidden_KD, target_K in parts]
            return torch.cat(nats).view(targets_BT.shape)
        target_K = targets_BT.flatten().cpu().contiguous()  # of one target a row, flatten returns a view with gaps
        cluster_K = torch.bucketize(target_K, torch.tensor(self.edges[1:-1]), right=True)
        head_K = torch.where(cluster_K == 0, target_K, self.edges[1] - 1 + cluster_K)
        losses_K = self._cluster_losses(hidden_KD, 0, to_device(head_K, device))
        for index in range(1, self.num_tails + 1):
            index_K, local_K, is_target_K = self._targets_of(index, cluster_K, target_K)
            index_K = to_device(index_K, device)
            in_tail_K = self._cluster_losses(hidden_KD.index_select(0, index_K), index, to_device(local_K, device))
            losses_K = losses_K.index_add(0, index_K, (in_tail_K * to_device(is_target_K, device)).to(losses_K.dtype))
        return losses_K.view(targets_BT.shape)

    def topk(self, hidden_BTD: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the logits of the k most likely tokens in descending order, and their ids, each of shape (B, T, K).

        No token can be more likely than its tail as a whole, so the logits of a tail are computed only if the tail is
        more likely than the k-th best token so far at some position. This check synchronizes with the device.
        """
        if not self.num_tails:
            return _topk(self._cluster_logits(hidden_BTD, 0), k)
        head_BTV = _log_softmax(self._cluster_logits(hidden_BTD, 0))
        num_head = self.edges[1]
        best_BTK, id_BTK = _topk(head_BTV[..., :num_head], k)
        for index in range(1, self.num_tails + 1):
            tail_BT1 = head_BTV[..., num_head + index - 1, None]
            if best_BTK.shape[-1] >= k and not bool((tail_BT1 > best_BTK[..., -1:]).any()):
                continue
            more_BTK, more_id_BTK = _topk(tail_BT1 + _log_softmax(self._cluster_logits(hidden_BTD, index)), k)
            both_BTK = torch.cat([best_BTK, more_BTK], -1)
            both_id_BTK = torch.cat([id_BTK, more_id_BTK + self.edges[index]], -1)
            best_BTK, order_BTK = _topk(both_BTK, k)
            id_BTK = both_id_BTK.gather(-1, order_BTK)
        return best_BTK, id_BTK

    def _targets_of(self, index: int, cluster_K: Tensor, target_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the targets in one tail, padded to a multiple of `_PADDING_MULTIPLE`.

        A tail without targets gets no positions. Its parameters then have zero gradients instead of None;
        data-parallel training would wait for a missing gradient.

        Returns:
            the positions of the targets, the targets' indices within the tail, and 1 for targets and 0 for padding.
        """
        index_K = (cluster_K == index).nonzero()[:, 0]
        num_padding = -len(index_K) % _PADDING_MULTIPLE
        is_target_K = torch.ones(len(index_K) + num_padding)
        is_target_K[len(index_K) :] = 0
        local_K = F.pad(target_K[index_K] - self.edges[index], (0, num_padding))
        return F.pad(index_K, (0, num_padding)), local_K, is_target_K

    def _cluster_losses(self, hidden_KD: Tensor, index: int, target_K: Tensor, temperature: float = 1.0) -> Tensor:
        """Return the losses of targets in a cluster; a target is the index of one of the cluster's logits."""
        num_logits = self.edges[index + 1] - self.edges[index] + (0 if index else self.num_tails)
        if fits_at_once(len(hidden_KD), num_logits):
            logits_KV = self._cluster_logits(hidden_KD, index)
            return cross_entropy(logits_KV if temperature == 1 else logits_KV / temperature, target_K)
        hidden_KE, (weight_VE, bias_V) = self._to_cluster_width(hidden_KD, index), self._cluster_weights(index)
        if temperature != 1:
            hidden_KE, bias_V = hidden_KE / temperature, bias_V / temperature
        return linear_cross_entropy(hidden_KE, weight_VE, bias_V, target_K)

    def _cluster_logits(self, hidden_KD: Tensor, index: int) -> Tensor:
        """Return the logits (K, V) of a cluster's tokens; for the head, those of the tails follow."""
        hidden_KE = self._to_cluster_width(hidden_KD, index)
        num_positions, width = hidden_KE.numel() // hidden_KE.shape[-1], hidden_KE.shape[-1]
        # fewer logits than weights to concatenate; an exported graph has one way for any number of positions
        is_short = torch.compiler.is_exporting() or num_positions < width
        if index == 0 and self.num_tails and is_short:
            assert self.cluster_weight is not None
            tails_KV = linear(hidden_KE, self.cluster_weight, self.cluster_bias)
            return torch.cat([linear(hidden_KE, *self._cluster_weights(0, with_tails=False)), tails_KV], -1)
        return linear(hidden_KE, *self._cluster_weights(index))

    def _cluster_weights(self, index: int, *, with_tails: bool = True) -> tuple[Tensor, Tensor]:
        """Return the weights (V, E) and biases (V,) of a cluster's tokens; for the head, those of the tails follow."""
        table = self.embedding or self
        weight_VE, bias_V = table.cluster_table(index), self.bias[self.edges[index] : self.edges[index + 1]]
        if index or not with_tails or self.cluster_weight is None or self.cluster_bias is None:
            return weight_VE, bias_V
        return torch.cat([weight_VE, self.cluster_weight]), torch.cat([bias_V, self.cluster_bias])

    def _to_cluster_width(self, hidden_KD: Tensor, index: int) -> Tensor:
        """Return the hidden states projected to the width of a cluster's embeddings, shape (K, E)."""
        if index < self.first_tied_projection:
            projection_DE = self.projections.get(str(index))
        else:
            projection_DE = self._embedding[0].projection(index)
        return hidden_KD if projection_DE is None else hidden_KD @ projection_DE


def _topk(logits_BTV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return logits_BTV.topk(min(k, logits_BTV.shape[-1]), dim=-1)


def _log_softmax(logits_KV: Tensor) -> Tensor:
    return F.log_softmax(logits_KV, -1, dtype=torch.promote_types(logits_KV.dtype, torch.float32))
