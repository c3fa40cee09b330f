"""Memory of keys and values, for weights that do not change: no row is ever projected twice.

Keys and values of a token follow from the hidden row that a layer had there, so keeping them in place of the row gives
the same numbers. Position keys are projected once for all that follows. In training weights change from step to step,
so there the hidden rows are kept (`memory.py`).

A memory stays a value, yet reading on does not copy it: rows are written behind those that are there, in storage that
later memories share, and no memory sees beyond its own end. Whoever reads on from an older memory, behind which rows
stand already, gets storage of their own; so does everybody when it is full.

Letters: B rows, T new tokens, M memory slots, S = M + T keys, C rows of storage, P distances, N heads, H head width,
Z = 2, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.model.memory import Memory, Reach, counts_on, without_padding

_LEAST_ROOM = 64  # rows; new storage has room for half a memory more at least, so that copying is rare


class _Storage:
    """Keys and values of one layer; rows are only ever added."""

    def __init__(self, rows_ZBNCH: Tensor, *, room: int = 0) -> None:
        """Copies the rows to the front of a storage that has room for half as many more, and for `room` at least."""
        *outer, self.num_written, head_width = rows_ZBNCH.shape
        capacity = self.num_written + max(_LEAST_ROOM, self.num_written // 2, room)
        with torch.inference_mode(False):  # what is made in that mode cannot be written outside of it
            # zeros: the system clears pages anyway, and only those that are touched
            self.kv_ZBNCH = rows_ZBNCH.new_zeros(*outer, capacity, head_width)
        self.kv_ZBNCH[..., : self.num_written, :] = rows_ZBNCH


@dataclass(frozen=True, eq=False)
class Span:
    """The rows of a layer's storage up to `end`."""

    storage: _Storage
    end: int

    @staticmethod
    def of(rows_ZBNSH: Tensor) -> Span:
        """A storage of their own for these rows."""
        return Span(_Storage(rows_ZBNSH), rows_ZBNSH.shape[-2])

    def last(self, number: int) -> Tensor:
        """The newest rows: a view (Z, B, N, number, H)."""
        return self.storage.kv_ZBNCH[..., self.end - number : self.end, :]

    def with_new(self, k_BTNH: Tensor, v_BTNH: Tensor, *, num_kept: int) -> Span:
        """The rows with T more; of those before, the newest `num_kept` stay at least."""
        num_new, storage, start = k_BTNH.shape[1], self.storage, self.end
        full = start + num_new > storage.kv_ZBNCH.shape[-2]
        if full or storage.num_written != start or storage.kv_ZBNCH.dtype != k_BTNH.dtype:
            storage, start = _Storage(self.last(num_kept).to(k_BTNH.dtype), room=num_new), num_kept
        end = start + num_new
        for place, new_BTNH in enumerate((k_BTNH, v_BTNH)):
            storage.kv_ZBNCH[place, :, :, start:end] = new_BTNH.transpose(1, 2)
        storage.num_written = end
        return Span(storage, end)

    def without_padding(self, num_rows: int, num_new: int, lengths_B: Tensor) -> Span:
        """The newest rows in a storage of their own, padding in front of everything else."""
        rows_BSZNH = self.last(num_rows).permute(1, 3, 0, 2, 4)
        return Span.of(without_padding(rows_BSZNH, num_new, lengths_B).permute(2, 0, 3, 1, 4))


class PositionKeys:
    """The position keys of every layer, made when first asked for and again for more distances.

    They follow from the weights, so memories that come from one another share them.
    """

    def __init__(self) -> None:
        self._layers_NPH: tuple[Tensor, ...] = ()

    def nearest(self, num_distances: int, make: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        """Each layer's keys of the distances P - 1, ..., 1, 0: views (P, N, H); `make` gives the same anew."""
        if not self._layers_NPH or self._layers_NPH[0].shape[1] < num_distances:
            # head by head, as they are multiplied
            self._layers_NPH = tuple(keys_PNH.transpose(0, 1).contiguous() for keys_PNH in make())
        return [keys_NPH[:, keys_NPH.shape[1] - num_distances :].transpose(0, 1) for keys_NPH in self._layers_NPH]


@dataclass(frozen=True, eq=False)
class KeyValueMemory(Memory):
    """The keys and values that every layer made of the last M tokens of each row."""

    spans: tuple[Span, ...]
    """One a layer, of M rows at least."""
    position_keys: PositionKeys
    attended_empty: bool
    """Whether the zeros of empty slots are attended."""

    @staticmethod
    def empty(layer_shape: tuple[int, int, int, int], reach: Reach, like: Tensor, *, attended: bool) -> KeyValueMemory:
        """A memory without valid slots, on the device and in the dtype of `like`.

        Args:
            layer_shape: L, B, N, H.
            reach: how far attention looks.
            like: some tensor.
            attended: whether empty slots are attended nevertheless, as rows of zeros.
        """
        num_layers, batch_size, *head_shape = layer_shape
        num_heads, head_width = head_shape
        counts_B = torch.zeros(batch_size, dtype=torch.int64, device=like.device)
        nothing_ZBNMH = like.new_zeros(()).expand(2, batch_size, num_heads, reach.memory, head_width)
        return KeyValueMemory(
            tuple(Span.of(nothing_ZBNMH) for _ in range(num_layers)),
            PositionKeys(),
            attended,
            valid_B=counts_B,
            position_B=counts_B.clone(),
            reach=reach,
            least_valid=0,
        )

    @property
    def layer_shape(self) -> tuple[int, int, int]:
        """L, N and H, which must be the model's."""
        _, _, num_heads, _, head_width = self.spans[0].storage.kv_ZBNCH.shape
        return len(self.spans), num_heads, head_width

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
        span = self.spans[layer].with_new(k_BTNH, v_BTNH, num_kept=self.length)
        if lengths_B is not None:
            span = span.without_padding(num_keys, num_new, lengths_B)
        k_BNSH, v_BNSH = span.last(num_keys)
        return span, k_BNSH.transpose(1, 2), v_BNSH.transpose(1, 2)

    def after(self, spans: Sequence[Span], num_new: int, lengths_B: Tensor | None) -> KeyValueMemory:
        """The memory once each layer has joined its T new keys and values to its rows."""
        return replace(self._counted(num_new, lengths_B), spans=tuple(spans))

    def _with_rows(self, rows_ZBNMH: Sequence[Tensor]) -> KeyValueMemory:
        return replace(self, spans=tuple(Span.of(rows) for rows in rows_ZBNMH))

    def _rows(self) -> list[Tensor]:
        return [span.last(self.length) for span in self.spans]

    @override
    def _emptied(self, rows_B: Tensor) -> KeyValueMemory:
        if not self.attended_empty:
            return self  # what the slots hold is no longer looked at
        return self._with_rows([rows.masked_fill(rows_B[:, None, None, None], 0) for rows in self._rows()])

    @override
    def _taken(self, index_B: Tensor) -> KeyValueMemory:
        return self._with_rows([rows[:, index_B] for rows in self._rows()])

    @override
    def _joined(self, memories: Sequence[KeyValueMemory]) -> KeyValueMemory:
        layers = zip(*(memory._rows() for memory in memories), strict=True)
        return self._with_rows([torch.cat(parts, dim=1) for parts in layers])

    @override
    def resized(self, length: int) -> KeyValueMemory:
        kept = min(length, self.length)
        padded = [torch.nn.functional.pad(span.last(kept), (0, 0, length - kept, 0)) for span in self.spans]
        return self._resized_counts(length)._with_rows(padded)

    @override
    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> KeyValueMemory:
        moved = replace(self, position_keys=PositionKeys(), **counts_on(self, device))
        return moved._with_rows([rows.to(device=device, dtype=dtype) for rows in self._rows()])

    @override
    def tensors(self) -> dict[str, Tensor]:
        named = {f"layer_{index}": rows for index, rows in enumerate(self._rows())}
        return {**named, "valid": self.valid_B, "position": self.position_B}

    @override
    def with_tensors(self, tensors: Mapping[str, Tensor]) -> KeyValueMemory:
        fitting = self._fitting(tensors)
        least = int(fitting["valid"].min()) if self.batch_size else 0
        counted = replace(self, valid_B=fitting["valid"], position_B=fitting["position"], least_valid=least)
        return counted._with_rows([fitting[f"layer_{index}"] for index in range(len(self.spans))])
