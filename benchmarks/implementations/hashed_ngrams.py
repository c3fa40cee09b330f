"""This package's n-gram embeddings (`model.ngrams`) for models of others, whose environment does not have this package.

Shape suffixes: B batch rows, T tokens of a segment, R tokens before it, D width of the model, E width of a table.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override


class EmbeddingWithNgrams(nn.Module):
    """A token embedding that adds those of the n-grams which end at each token."""

    def __init__(self, embedding: nn.Embedding, *, max_ngram: int, ngram_buckets: int, d_ngram: int) -> None:
        super().__init__()
        self.embedding, self.max_ngram = embedding, max_ngram
        width = embedding.embedding_dim
        self.tables = nn.ParameterList(0.02 * torch.randn(ngram_buckets, d_ngram) for _ in range(max_ngram - 1))
        self.projections = nn.ParameterList(0.02 * torch.randn(width, d_ngram) for _ in range(max_ngram - 1))
        self.before_BR: Tensor | None = None
        """Token ids before the next segment, for a model with memory; None where a text begins."""

    @property
    def weight(self) -> nn.Parameter:
        """The token embedding, which output layers share."""
        return self.embedding.weight

    @override
    def forward(self, ids_BT: Tensor) -> Tensor:
        num_rows, num_new = ids_BT.shape
        none_BR = ids_BT.new_full((num_rows, self.max_ngram - 1), -1)
        before_BR = none_BR if self.before_BR is None else torch.cat([none_BR, self.before_BR], 1)
        ids_BS = torch.cat([before_BR[:, 1 - self.max_ngram :], ids_BT], 1) + 1  # 0: there is no token
        out_BTD, hash_BT = self.embedding(ids_BT), ids_BT + 1
        for index, (table, projection_DE) in enumerate(zip(self.tables, self.projections, strict=True)):
            end = ids_BS.shape[1] - 1 - index
            hash_BT = (hash_BT * 1_000_003 + ids_BS[:, end - num_new : end]) % (2**31 - 1)
            embedded_BTE = F.embedding(hash_BT % len(table), table) * table.shape[1] ** 0.5
            out_BTD = out_BTD + F.linear(embedded_BTE, projection_DE)
        return out_BTD


def with_ngrams(embedding: nn.Embedding, settings: dict[str, Any]) -> nn.Module:
    """Return the embedding with the n-grams of the settings, or itself where they have none."""
    return EmbeddingWithNgrams(embedding, **settings["ngrams"]) if settings.get("ngrams") else embedding
