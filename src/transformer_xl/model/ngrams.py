"""Embeddings of the last few tokens together: hash n-gram embeddings (Pagnoni et al. 2024, section 3.2.1).

Each position adds to its token's embedding one vector for the bigram that ends there, one for the trigram, and so on up
to `max_ngram` tokens. An n-gram's vector is a row of a table, chosen by a hash of its token ids, so different n-grams
may share a row. docs/log.md has what this gains and costs in short trainings on bytes.

It differs from the paper, whose n-grams have 3 to 8 bytes and vectors as wide as the model: ours begin with the bigram,
their tables are narrower than the model and projected to its width, and the sum is not divided by the number of its
terms.

The n-grams of a segment's first tokens reach into the previous segment, so a memory also contains the newest
`max_ngram - 1` token ids (`Memory.recent_BR`).

Shape suffixes: B batch size, T new tokens, R recent tokens (max_ngram - 1), S = R + T, D model width, E table width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import BaseModelConfig
from transformer_xl.ops import native
from transformer_xl.ops.linear import is_transformed, linear

_STD = 0.02  # of the initial tables and projections
_MULTIPLIER, _MODULUS = 1_000_003, 2**31 - 1  # primes of the polynomial hash, whose products fit into int64


class NgramEmbedding(nn.Module):
    """The tables of bigrams, trigrams and so on, each with a projection to the model's width."""

    def __init__(self, config: BaseModelConfig) -> None:
        super().__init__()
        num_tables = config.max_ngram - 1
        self.scale = config.d_ngram**0.5  # as token embeddings are scaled by sqrt(D)
        self._sparse = False  # see `sparse_gradients`
        self.tables = nn.ParameterList(torch.empty(config.ngram_buckets, config.d_ngram) for _ in range(num_tables))
        self.projections = nn.ParameterList(torch.empty(config.d_model, config.d_ngram) for _ in range(num_tables))

    def init_weights(self) -> None:
        """Draw normal initial weights with standard deviation 0.02."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.0, _STD)

    @contextmanager
    def sparse_gradients(self) -> Iterator[None]:
        """Within this context gradients of the tables are sparse tensors, of the rows that were looked up.

        Most optimizers refuse them.
        """
        self._sparse = True
        try:
            yield
        finally:
            self._sparse = False

    @override
    def forward(self, ids_BS: Tensor, num_new: int, visible_BT: Tensor | None = None) -> Tensor:
        """Return the sum of the embeddings of all n-grams that end at each new token, (B, T, D).

        Args:
            ids_BS: recent tokens and new tokens, as token id + 1; 0 where there is no token.
            num_new: T.
            visible_BT: number of tokens up to each that its n-grams may have, or None for all.
        """
        if visible_BT is None and self._is_native():
            rows_BTE = native.operators().ngram_rows(ids_BS, num_new, _listed(self.tables), self.scale)
            return linear(rows_BTE, torch.cat(_listed(self.projections), dim=1))
        parts_BTD: list[Tensor] = []
        hash_BT = ids_BS[:, ids_BS.shape[1] - num_new :]
        for index, (table, projection_DE) in enumerate(zip(self.tables, self.projections, strict=True)):
            end = ids_BS.shape[1] - 1 - index
            earlier_BT = ids_BS[:, end - num_new : end]
            if visible_BT is not None:
                earlier_BT = earlier_BT.masked_fill(visible_BT.to(earlier_BT.device) < index + 2, 0)
            hash_BT = (hash_BT * _MULTIPLIER + earlier_BT) % _MODULUS
            embedded_BTE = F.embedding(hash_BT % len(table), table, sparse=self._sparse) * self.scale
            parts_BTD.append(linear(embedded_BTE, projection_DE))
        return torch.stack(parts_BTD).sum(0)

    def _is_native(self) -> bool:
        """Return whether two operators compute this: for few tokens, calling thirty takes longer than what they do."""
        table = self.tables._parameters["0"]
        return (
            not torch.is_grad_enabled()
            and type(table) is nn.Parameter  # not sharded
            and table.is_cpu
            and table.dtype in (torch.float32, torch.float64)
            and not torch.compiler.is_compiling()
            and native.takes("ngrams")
            and not is_transformed()
        )


def _listed(parameters: nn.ParameterList) -> list[Tensor]:
    """Return the parameters of a list, in a tenth of the time that its own lookups take."""
    return [one for one in parameters._parameters.values() if one is not None]
