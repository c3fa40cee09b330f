"""Batch rows that read their own texts: the one way in which anything is read segment by segment with memory.

    reader = Reader.begin(model, batch_size, context_limits, segment_length=128)
    for hidden_BTD, lengths in reader.read(token_ids): ...       # one list of token ids for each row
    reader.memory, reader.last_hidden_B1D                        # after the last token of each row

A text is cut into segments from its first token. What a token sees counts from there: the M tokens before its segment
and its segment up to itself (paper, section 3.2), whoever reads it. How much is computed at once is another matter:
with a limit for each query (`visible`), several segments or a part of one are computed, with the same results up to
rounding. Rows may differ in length and in their position; padding comes first. A reader that continues a memory counts
from its own first token, which begins a segment.

Shape suffixes: B batch rows, T new tokens, D model width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from transformer_xl.inference import TokenModel
from transformer_xl.model.memory import ContextLimits, Memory

STRIDE = 512
"""Tokens of a row that are computed at once, unless a segment is longer. It bounds the memory of activations."""


class Reader:
    """Reads tokens into a memory, and counts how far each row is in its text."""

    def __init__(self, model: TokenModel, memory: Memory, *, segment_length: int, partial: bool = False) -> None:
        """Prepare to read after `memory`; the next token of each row begins a segment.

        Args:
            model: a prepared model, or any language model.
            memory: the memory before the tokens, of M slots. It is not changed.
            segment_length: tokens of a segment.
            partial: whether a read may end inside a segment and the next one go on there. The memory then also has
                slots for the tokens of a segment.
        """
        limits = memory.context_limits
        if partial and model.limits_visible and segment_length > 1:
            memory = memory.resized(memory.length + segment_length - 1)
        self._set_up(model, memory, limits, segment_length, is_new=False)

    def _set_up(
        self, model: TokenModel, memory: Memory, limits: ContextLimits, segment_length: int, *, is_new: bool
    ) -> None:
        self.model, self.segment_length, self._is_new = model, segment_length, is_new
        self.num_read = [0] * memory.batch_size
        """Number of tokens that each row has read."""
        self.last_hidden_B1D: Tensor | None = None
        """The hidden state of each row's last token; meaningless for a row that has read none, None before any step."""
        self._limits = limits
        if model.limits_visible:  # nothing sees more, so no more distances need an encoding
            window = limits.memory_length + segment_length
            window = min(window, limits.attention_window or window)
            memory = replace(memory, context_limits=replace(memory.context_limits, attention_window=window))
        self._memory = memory

    @classmethod
    def begin(
        cls,
        model: TokenModel,
        batch_size: int,
        context_limits: ContextLimits,
        *,
        segment_length: int,
        partial: bool = False,
        max_tokens: int | None = None,
    ) -> Self:
        """Return rows that have read nothing.

        Args:
            model: as for a Reader.
            batch_size: B.
            context_limits: M, and how far back attention can look.
            segment_length: as for a Reader.
            partial: as for a Reader.
            max_tokens: number of tokens that no row's text exceeds, or None if unknown; the memory has no more slots.

        Raises:
            UserError: the model does not support these limits.
        """
        num_slots = context_limits.memory_length
        if model.limits_visible:
            num_slots += segment_length - 1 if partial else 0
            num_slots = num_slots if max_tokens is None else min(num_slots, max_tokens)
        reader = cls.__new__(cls)
        memory = model.initial_memory(batch_size, replace(context_limits, memory_length=num_slots))
        reader._set_up(model, memory, context_limits, segment_length, is_new=True)
        return reader

    @property
    def memory(self) -> Memory:
        """The memory after all tokens that were read, of M slots."""
        length = self._limits.memory_length
        memory = self._memory if self._memory.length == length else self._memory.resized(length)
        return replace(memory, context_limits=self._limits)

    @property
    def held_memory(self) -> Memory:
        """The same memory as the reader holds it, with more or fewer than M slots, so that nothing is copied."""
        return replace(self._memory, context_limits=replace(self._limits, memory_length=self._memory.length))

    def select(self, rows: Sequence[int]) -> Self:
        """Return these rows as they are now; a row may occur several times."""
        selected = copy.copy(self)
        selected._memory = self._memory.select(rows)
        selected.num_read = [self.num_read[row] for row in rows]
        selected.last_hidden_B1D = None if self.last_hidden_B1D is None else self.last_hidden_B1D[list(rows)]
        return selected

    def read(self, tokens: Sequence[Sequence[int]], *, stride: int | None = None) -> Iterator[tuple[Tensor, list[int]]]:
        """Read tokens, in as many steps as they need; each step is done when it is asked for.

        Args:
            tokens: token ids for each row.
            stride: tokens of a row that are computed at once, or None for as many whole segments as fit `STRIDE`, at
                least one.

        Yields:
            the hidden states of a step (B, T, D), and how many of them are of new tokens of each row: the last ones.
        """
        if stride is None:
            stride = max(1, STRIDE // self.segment_length) * self.segment_length
        sizes = [self._step_sizes(row, len(ids), stride) for row, ids in enumerate(tokens)]
        num_steps, done = max(map(len, sizes)), [0] * len(tokens)
        # rows that attend end together: until a row begins, its padding attends to nothing, which costs little
        rests = [[0] * (num_steps - len(row)) for row in sizes]
        ends_together = self.model.limits_visible
        steps = [rest + row if ends_together else row + rest for rest, row in zip(rests, sizes, strict=True)]
        for lengths in zip(*steps, strict=True):
            width = max(lengths)
            padded = [
                [0] * (width - length) + list(ids[start : start + length])
                for length, ids, start in zip(lengths, tokens, done, strict=True)
            ]
            yield self.step(torch.tensor(padded), lengths), list(lengths)
            done = [start + length for start, length in zip(done, lengths, strict=True)]

    def _step_sizes(self, row: int, num_tokens: int, stride: int) -> list[int]:
        """Return how many of a row's next tokens each step reads."""
        sizes, read = list[int](), 0
        while read < num_tokens:
            room = stride if self.model.limits_visible else min(stride, self._left(row, read))
            sizes.append(min(room, num_tokens - read))
            read += sizes[-1]
        return sizes

    def step(self, tokens: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Read T tokens of each row at once, and return their hidden states (B, T, D).

        Args:
            tokens: token ids (B, T), or inputs of the first layer (B, T, D).
            lengths: number of tokens of each row that are not padding, which comes first; None if there is no padding.
        """
        num_new, device = tokens.shape[1], self.model.device
        counts = [num_new] * len(self.num_read) if lengths is None else list(lengths)
        ids_BT, arguments = tokens.to(device), dict[str, Tensor]()
        if tokens.is_floating_point():
            ids_BT, arguments = None, {"inputs": ids_BT}
        is_padded = min(counts) < num_new
        if is_padded:
            arguments["lengths"] = torch.tensor(counts, device=device)
        if self._must_limit(counts):
            arguments["visible"] = self._visible(counts, num_new).to(device)
        hidden_BTD, self._memory = self.model(ids_BT, self._memory, **arguments)
        last_B1D = hidden_BTD[:, -1:]
        if self.last_hidden_B1D is not None and not all(counts):
            is_new_B11 = torch.tensor([count > 0 for count in counts], device=device)[:, None, None]
            last_B1D = torch.where(is_new_B11, last_B1D, self.last_hidden_B1D)
        self.last_hidden_B1D = last_B1D
        self.num_read = [read + count for read, count in zip(self.num_read, counts, strict=True)]
        return hidden_BTD

    def _left(self, row: int, ahead: int = 0) -> int:
        """Return the number of tokens until the end of the segment of a row, `ahead` tokens after what it has read."""
        return self.segment_length - (self.num_read[row] + ahead) % self.segment_length

    def _must_limit(self, counts: Sequence[int]) -> bool:
        """Return whether a token of the next step sees less than all of memory and step."""
        if not self.model.limits_visible:
            return False
        slots, ends = self._memory.length, [read + count for read, count in zip(self.num_read, counts, strict=True)]
        if self._is_new and self._last_start(ends) <= self._limits.memory_length:
            return False  # the memory of a new text has nothing before its first token
        is_wide = slots > self._limits.memory_length
        assert is_wide or all(
            not count or not read % self.segment_length or read <= slots
            for read, count in zip(self.num_read, counts, strict=True)
        ), "to go on inside a segment, a reader must be partial"
        crosses = any(count > self._left(row) for row, count in enumerate(counts))
        # in the memory of a new text, slots are filled as tokens are read; one that goes on has them all
        return crosses or (is_wide and max(self.num_read) > (self._limits.memory_length if self._is_new else 0))

    def _last_start(self, ends: Sequence[int]) -> int:
        """Return the position in its text of the last segment that begins before these ends."""
        return max((end - 1) // self.segment_length * self.segment_length for end in ends)

    def _visible(self, counts: Sequence[int], num_new: int) -> Tensor:
        """Return how many keys each token of the next step sees, itself included, (B, T)."""
        first_B1 = (torch.tensor(self.num_read) - (num_new - torch.tensor(counts)))[:, None]
        position_BT = first_B1 + torch.arange(num_new)  # of each token in its text; below 0 for padding
        return self._limits.memory_length + position_BT % self.segment_length + 1
