"""Memory of tokens, for generating text with a model that has no memory: it processes earlier tokens again each time.

    hidden_BTD, memory = model(tokens_BT, memory)        the model processes the last P of [cached tokens ; new tokens]

So each new token is predicted from the longest context that fits a segment, all of it recomputed: the sliding window of
Al-Rfou et al. 2018.

Shape suffixes: B batch size, T new tokens, M cached tokens, S = M + T, P = M + 1 tokens of a segment (the longest),
D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.model.memory import LayerCache, Memory, padding_first


@dataclass(frozen=True, eq=False, repr=False)
class TokenCache(LayerCache):
    """The last M tokens of each batch row; 0 where there are fewer."""

    tokens_BM: Tensor


class TokenMemory(Memory[TokenCache]):
    """The last M tokens of each batch row, in a single cache."""

    def append(self, tokens_BT: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor | None, TokenMemory]:
        """Append new tokens.

        Args:
            tokens_BT: P tokens at most.
            lengths_B: number of tokens of each batch row that are not padding, or None if there is no padding. Padding
                comes first.

        Returns:
            the last P tokens of each batch row; the number of them that are not padding, or None without padding; and
            the next memory.
        """
        num_new, segment_length = tokens_BT.shape[1], self.length + 1
        assert num_new <= segment_length
        tokens_BS = torch.cat([self.layers[0].tokens_BM, tokens_BT], dim=1)
        if lengths_B is not None:
            tokens_BS = padding_first(tokens_BS, num_new, lengths_B)
        is_full = lengths_B is None and self.min_valid + num_new >= segment_length
        num_tokens_B = self.valid_B + (num_new if lengths_B is None else lengths_B)
        segment_lengths_B = None if is_full else num_tokens_B.clamp(max=segment_length)
        cache = TokenCache(tokens_BS[:, num_new:].contiguous())
        return tokens_BS[:, -segment_length:], segment_lengths_B, self.advance([cache], num_new, lengths_B)
