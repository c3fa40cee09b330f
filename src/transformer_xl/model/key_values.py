"""Memory of keys and values, for weights that do not change: no row is ever projected twice.

Keys and values of a token follow from the hidden row that a layer had there, so keeping them in place of the row gives
the same numbers. Position keys are projected once for all that follows. In training weights change from step to step,
so there the hidden rows are kept (`memory.py`).

A memory stays a value, yet reading on does not copy it: rows are written behind those that are there, in storage that
later memories share, and no memory sees beyond its own end. Whoever reads on from an older memory, behind which rows
stand already, gets storage of their own; so does everybody when it is full.

Letters: B rows, T new tokens, M memory slots, S = M + T keys, C rows of storage, P distances, N heads, H head width,
X any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.model.memory import ContextLimits, Memory, counts_on, without_padding

_LEAST_ROOM = 64  # rows; new storage has room for half a memory more at least, so that copying is rare

KeyValueRows = tuple[Tensor, Tensor]
"""Keys and values of some rows: (B, N, X, H) each."""


class _Storage:
    """Keys and values of one layer, head by head; rows are only ever added."""

    def __init__(self, rows: KeyValueRows, *, room: int = 0) -> None:
        """Copies the rows to the front of a storage that has room for half as many more, and for `room` at least."""
        k_BNXH, v_BNXH = rows
        self.num_written = k_BNXH.shape[2]
        capacity = self.num_written + max(_LEAST_ROOM, self.num_written // 2, room)
        *outer, d_head = k_BNXH.shape[0], k_BNXH.shape[1], k_BNXH.shape[3]
        with torch.inference_mode(False):  # what is made in that mode cannot be written outside of it
            # zeros: the system clears pages anyway, and only those that are touched
            if k_BNXH.device.type == "cpu":  # a CPU multiplies one query with columns faster than with rows
                k_BNCH = k_BNXH.new_zeros(*outer, d_head, capacity).mT
            else:
                k_BNCH = k_BNXH.new_zeros(*outer, capacity, d_head)
            self.rows = k_BNCH, v_BNXH.new_zeros(*outer, capacity, d_head)
        self.write(0, rows)

    @property
    def capacity(self) -> int:
        """C."""
        return self.rows[0].shape[2]

    def write(self, start: int, rows: KeyValueRows) -> None:
        """Puts rows behind those that are there."""
        for kept_BNCH, new_BNXH in zip(self.rows, rows, strict=True):
            kept_BNCH[:, :, start : start + new_BNXH.shape[2]] = new_BNXH
        self.num_written = start + rows[0].shape[2]


@dataclass(frozen=True, eq=False)
class Span:
    """The rows of a layer's storage up to `end`."""

    storage: _Storage
    end: int

    @staticmethod
    def of(rows: KeyValueRows) -> Span:
        """A storage of their own for these rows."""
        return Span(_Storage(rows), rows[0].shape[2])

    def last(self, number: int) -> KeyValueRows:
        """The newest rows, as views."""
        k_BNXH, v_BNXH = (rows_BNCH[:, :, self.end - number : self.end] for rows_BNCH in self.storage.rows)
        return k_BNXH, v_BNXH

    def with_new(self, rows: KeyValueRows, *, num_kept: int) -> Span:
        """With new rows; of those before, the newest `num_kept` stay at least."""
        num_new, dtype, storage, start = rows[0].shape[2], rows[0].dtype, self.storage, self.end
        full = start + num_new > storage.capacity
        if full or storage.num_written != start or storage.rows[0].dtype != dtype:
            k_BNXH, v_BNXH = self.last(num_kept)
            storage, start = _Storage((k_BNXH.to(dtype), v_BNXH.to(dtype)), room=num_new), num_kept
        storage.write(start, rows)
        return Span(storage, start + num_new)


class PositionKeys:
    """The position keys of every layer, made when first asked for and again for more distances.

    They follow from the weights, so memories that come from one another share them. They lie as the products of one
    query want them (columns).
    """

    def __init__(self) -> None:
        self._layers_NHP: tuple[Tensor, ...] = ()

    def nearest(self, num_distances: int, make: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        """Each layer's keys of the distances P - 1, ..., 1, 0: views (P, N, H); `make` gives the same anew."""
        if not self._layers_NHP or self._layers_NHP[0].shape[-1] < num_distances:
            self._layers_NHP = tuple(keys_PNH.permute(1, 2, 0).contiguous() for keys_PNH in make())
        return [keys_NHP[..., keys_NHP.shape[-1] - num_distances :].permute(2, 0, 1) for keys_NHP in self._layers_NHP]


@dataclass(frozen=True, eq=False)
class KeyValueMemory(Memory):
    """The keys and values that every layer made of the last M tokens of each row."""

    spans: tuple[Span, ...]
    """One a layer, of M rows at least."""
    position_keys: PositionKeys
    attended_empty: bool
    """Whether the zeros of empty slots are attended."""

    @staticmethod
    def empty(
        layer_shape: tuple[int, int, int, int], context_limits: ContextLimits, like: Tensor, *, attended: bool
    ) -> KeyValueMemory:
        """A memory without valid slots, on the device and in the dtype of `like`.

        Args:
            layer_shape: L, B, N, H.
            reach: how far attention looks.
            like: some tensor.
            attended: whether empty slots are attended nevertheless, as rows of zeros.
        """
        num_layers, batch_size, *head_shape = layer_shape
        num_heads, d_head = head_shape
        counts_B = torch.zeros(batch_size, dtype=torch.int64, device=like.device)
        nothing_BNMH = like.new_zeros(()).expand(batch_size, num_heads, context_limits.memory_length, d_head)
        return KeyValueMemory(
            tuple(Span.of((nothing_BNMH, nothing_BNMH)) for _ in range(num_layers)),
            PositionKeys(),
            attended,
            valid_B=counts_B,
            position_B=counts_B.clone(),
            context_limits=context_limits,
            least_valid=0,
        )

    @property
    def layer_shape(self) -> tuple[int, int, int]:
        """L, N and H, which must be the model's."""
        _, num_heads, _, d_head = self.spans[0].storage.rows[0].shape
        return len(self.spans), num_heads, d_head

    def joined(
        self, layer: int, k_BTNH: Tensor, v_BTNH: Tensor, lengths_B: Tensor | None
    ) -> tuple[Span, Tensor, Tensor]:
        """A layer's rows with the new ones, and its S keys and values (B, S, N, H): memory, then new tokens.

        Raises:
            UserError: gradients are wanted.
        """
        if k_BTNH.requires_grad and torch.is_grad_enabled():
            raise UserError(
                "a memory of keys and values passes no gradient; use initial_memory to train, or torch.inference_mode()"
            )
        num_new = k_BTNH.shape[1]
        num_keys = self.length + num_new
        span = self.spans[layer].with_new((k_BTNH.transpose(1, 2), v_BTNH.transpose(1, 2)), num_kept=self.length)
        if lengths_B is not None:
            k_BNSH, v_BNSH = (
                without_padding(x_BNSH.transpose(1, 2), num_new, lengths_B).transpose(1, 2)
                for x_BNSH in span.last(num_keys)
            )
            span = Span.of((k_BNSH, v_BNSH))
        k_BNSH, v_BNSH = span.last(num_keys)
        return span, k_BNSH.transpose(1, 2), v_BNSH.transpose(1, 2)

    def after(self, spans: Sequence[Span], num_new: int, lengths_B: Tensor | None) -> KeyValueMemory:
        """The memory once each layer has joined its T new keys and values to its rows."""
        return replace(self._counted(num_new, lengths_B), spans=tuple(spans))

    def _rows(self) -> list[KeyValueRows]:
        return [span.last(self.length) for span in self.spans]

    def _with_rows(self, rows: Iterable[KeyValueRows]) -> KeyValueMemory:
        return replace(self, spans=tuple(Span.of(pair) for pair in rows))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> KeyValueMemory:
        return self._with_rows((change(k_BNMH), change(v_BNMH)) for k_BNMH, v_BNMH in self._rows())

    @override
    def _emptied(self, rows_B: Tensor) -> KeyValueMemory:
        if not self.attended_empty:
            return self  # what the slots hold is no longer looked at
        return self._changed(lambda rows_BNMH: rows_BNMH.masked_fill(rows_B[:, None, None, None], 0))

    @override
    def _taken(self, index_B: Tensor) -> KeyValueMemory:
        return self._changed(lambda rows_BNMH: rows_BNMH[index_B])

    @override
    def _joined(self, memories: Sequence[KeyValueMemory]) -> KeyValueMemory:
        layers = zip(*(memory._rows() for memory in memories), strict=True)
        pairs = (zip(*pairs, strict=True) for pairs in layers)
        return self._with_rows((torch.cat(keys), torch.cat(values)) for keys, values in pairs)

    @override
    def resized(self, length: int) -> KeyValueMemory:
        kept = min(length, self.length)
        newest = self._with_rows(span.last(kept) for span in self.spans)
        counted = replace(newest, context_limits=replace(self.context_limits, memory_length=kept))
        return counted._changed(lambda rows_BNMH: F.pad(rows_BNMH, (0, 0, length - kept, 0)))._resized_counts(length)

    @override
    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> KeyValueMemory:
        moved = replace(self, position_keys=PositionKeys(), **counts_on(self, device))
        return moved._changed(lambda rows_BNMH: rows_BNMH.to(device=device, dtype=dtype))

    @override
    def tensors(self) -> dict[str, Tensor]:
        named = {"valid": self.valid_B, "position": self.position_B}
        for layer, pair in enumerate(self._rows()):
            named |= zip(_names(layer), pair, strict=True)
        return named

    @override
    def with_tensors(self, tensors: Mapping[str, Tensor]) -> KeyValueMemory:
        fitting = self._fitting(tensors)
        least = int(fitting["valid"].min()) if self.batch_size else 0
        counted = replace(self, valid_B=fitting["valid"], position_B=fitting["position"], least_valid=least)
        names = (_names(layer) for layer in range(len(self.spans)))
        return counted._with_rows((fitting[keys], fitting[values]) for keys, values in names)


def _names(layer: int) -> tuple[str, str]:
    return f"keys_{layer}", f"values_{layer}"
