"""Memory of tokens, for writing with a model that keeps nothing of earlier segments: they are read again every time.

    hidden_BTD, memory = model(tokens_BT, memory)        rows of [tokens kept ; new tokens], the last P of them

So each token follows from as many as fit a segment, all computed anew: the moving window of Al-Rfou et al. 2018.

Letters: B rows, T new tokens, M tokens kept, S = M + T, P = M + 1 tokens that a segment has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from transformer_xl.model.memory import ContextLimits, Memory, counts_on, without_padding


@dataclass(frozen=True, eq=False)
class TokenMemory(Memory):
    """The last M tokens of each row."""

    tokens_BM: Tensor
    """Valid ones stand last; 0 elsewhere."""

    @staticmethod
    def empty(batch_size: int, context_limits: ContextLimits, device: torch.device) -> TokenMemory:
        """A memory without tokens, for `reach.memory` of them."""
        counts_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        tokens_BM = torch.zeros(batch_size, context_limits.memory_length, dtype=torch.int64, device=device)
        return TokenMemory(
            tokens_BM, valid_B=counts_B, position_B=counts_B.clone(), context_limits=context_limits, least_valid=0
        )

    def with_new(self, tokens_BT: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor | None, TokenMemory]:
        """The last P tokens of each row, how many are its own (none: all), and the memory after them.

        Args:
            tokens_BT: P at most.
            lengths_B: how many of the T are the row's own; those before are padding.
        """
        num_new = tokens_BT.shape[1]
        assert num_new <= self.length + 1
        tokens_BS = torch.cat([self.tokens_BM, tokens_BT], dim=1)
        if lengths_B is not None:
            tokens_BS = without_padding(tokens_BS, num_new, lengths_B)
        all_own = lengths_B is None and self.least_valid + num_new > self.length
        read_B = self.valid_B + (num_new if lengths_B is None else lengths_B)
        own_B = None if all_own else read_B.clamp(max=self.length + 1)
        kept_BM = tokens_BS[:, num_new:].contiguous()
        after = replace(self._counted(num_new, lengths_B), tokens_BM=kept_BM)
        return tokens_BS[:, -(self.length + 1) :], own_B, after

    @override
    def _emptied(self, rows_B: Tensor) -> TokenMemory:
        return replace(self, tokens_BM=self.tokens_BM.masked_fill(rows_B[:, None], 0))

    @override
    def _taken(self, index_B: Tensor) -> TokenMemory:
        return replace(self, tokens_BM=self.tokens_BM[index_B])

    @override
    def _joined(self, memories: Sequence[TokenMemory]) -> TokenMemory:
        return replace(self, tokens_BM=torch.cat([memory.tokens_BM for memory in memories]))

    @override
    def resized(self, length: int) -> TokenMemory:
        kept = min(length, self.length)
        tokens_BM = F.pad(self.tokens_BM[:, self.length - kept :], (length - kept, 0))
        return replace(self._resized_counts(length), tokens_BM=tokens_BM)

    @override
    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> TokenMemory:
        return replace(self, tokens_BM=self.tokens_BM.to(device=device), **counts_on(self, device))

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"tokens": self.tokens_BM, "valid": self.valid_B, "position": self.position_B}

    @override
    def with_tensors(self, tensors: Mapping[str, Tensor]) -> TokenMemory:
        fitting = self._fitting(tensors)
        least = int(fitting["valid"].min()) if self.batch_size else 0
        counts = {"valid_B": fitting["valid"], "position_B": fitting["position"]}
        return replace(self, tokens_BM=fitting["tokens"], least_valid=least, **counts)
