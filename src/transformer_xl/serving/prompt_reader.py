"""Reading of a prompt in slices, so that a long prompt does not stall the sequences that are being generated.

A slice is a part of a segment. The memory also has slots for the tokens of the segment, and what a slice attends to is
limited to what it would see if its segment were read at once: the memory before the segment, and the segment.

Shape suffixes: B batch size (1), T new tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from transformer_xl.model.memory import Memory
from transformer_xl.serving.served_model import READING_SLICE, ServedModel


class PromptReader:
    """Reads token ids into a memory of batch size 1, a slice at a time."""

    def __init__(
        self, served: ServedModel, memory: Memory, token_ids: Sequence[int], bounds: Sequence[int], num_slots: int
    ) -> None:
        """Prepare to read.

        Args:
            served: the model.
            memory: the memory before the tokens.
            token_ids: what to read.
            bounds: positions where segments begin, and the number of tokens at the end.
            num_slots: number of memory slots that the first token of a segment sees.
        """
        self.memory = memory
        self.hidden_BTD: Tensor | None = None
        """The hidden states of the last slice; None before the first."""
        self._served, self._token_ids, self._num_slots = served, token_ids, num_slots
        self._slices = iter(self._slices_of(bounds))
        self._next = next(self._slices, None)

    @property
    def is_done(self) -> bool:
        """Whether all tokens are read."""
        return self._next is None

    def read_slice(self) -> tuple[int, int]:
        """Read one slice, and return the positions of its first token and after its last one."""
        assert self._next is not None
        start, stop, offset = self._next
        memory = self.memory.limited([self._num_slots + offset]) if self._served.is_trimmed else self.memory
        tokens_BT = torch.tensor([self._token_ids[start:stop]])
        self.hidden_BTD, self.memory = self._served.model(tokens_BT, memory)
        self._next = next(self._slices, None)
        return start, stop

    def _slices_of(self, bounds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield the first position of each slice, that after its last token, and its offset in its segment."""
        for begin, end in pairwise(bounds):
            # without empty slots that can be limited, the segment is read at once
            width = READING_SLICE if self._served.is_trimmed else max(1, end - begin)
            for start in range(begin, end, width):
                yield start, min(start + width, end), start - begin
