"""Memory of tokens, for generating with a model that keeps nothing of earlier segments: they are read again every time.

    hidden_BTD, memory = model(tokens_BT, memory)        reads the last P of [tokens kept ; new tokens]

So each token follows from as many as fit a segment, all computed anew: the sliding window of Al-Rfou et al. 2018.

Letters: B batch rows, T new tokens, M tokens kept, S = M + T, P = M + 1 tokens of a segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from transformer_xl.model.memory import ContextLimits, LayerCache, Memory, padding_first, resized_slots


@dataclass(frozen=True, eq=False)
class TokenCache(LayerCache):
    """The last M tokens of each batch row; 0 where there are fewer."""

    tokens_BM: Tensor

    @override
    def resized(self, length: int) -> TokenCache:
        return TokenCache(resized_slots(self.tokens_BM, length, dim=1))


class TokenMemory(Memory[TokenCache]):
    """The last M tokens of each batch row, in a single cache."""

    @staticmethod
    def empty(batch_size: int, context_limits: ContextLimits, device: torch.device) -> TokenMemory:
        """Return a memory without tokens, with room for `context_limits.memory_length` of them."""
        tokens_BM = torch.zeros(batch_size, context_limits.memory_length, dtype=torch.int64, device=device)
        return TokenMemory.of_layers([TokenCache(tokens_BM)], batch_size, context_limits, device)

    def append(self, tokens_BT: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor | None, TokenMemory]:
        """Append new tokens.

        Args:
            tokens_BT: P at most.
            lengths_B: how many of the T tokens belong to each batch row; those before are padding. None: all.

        Returns:
            the last P tokens of each batch row; how many of them belong to it (none: all); and the next memory.
        """
        num_new, segment_length = tokens_BT.shape[1], self.length + 1
        assert num_new <= segment_length
        tokens_BS = torch.cat([self.layers[0].tokens_BM, tokens_BT], dim=1)
        if lengths_B is not None:
            tokens_BS = padding_first(tokens_BS, num_new, lengths_B)
        is_full = lengths_B is None and self.min_valid + num_new >= segment_length
        read_B = self.valid_B + (num_new if lengths_B is None else lengths_B)
        own_B = None if is_full else read_B.clamp(max=segment_length)
        cache = TokenCache(tokens_BS[:, num_new:].contiguous())
        return tokens_BS[:, -segment_length:], own_B, self.advance([cache], num_new, lengths_B)
