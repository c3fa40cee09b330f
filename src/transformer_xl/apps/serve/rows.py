"""The batch of sequences that are generated together; sequences join and leave between steps.

A row that joins is written over one that has left, or after the last one; the last row is moved into a place that
nothing fills. So a step computes no row without a sequence, and joining or leaving copies one row, never the batch.

This batch is the one place that writes into a memory. No one else holds its memory: what joins is copied in, and
`row_state` copies out. Keys and values are in storage for the largest batch, of which a batch is the first rows; pages
of it that no row has reached take no memory. Only filled slots are copied. What is left of an earlier sequence is
cleared before another one gets its row: masked slots must be finite numbers, and empty slots that are attended must be
zeros.

Shape suffixes: B batch rows, R rows of the largest batch, T tokens, D model width, N heads, C columns of storage (M and
free ones), H head width, M memory slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Annotated, Generic, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from transformer_xl.inference import TokenModel
from transformer_xl.model.key_values import KeyValueCache
from transformer_xl.model.memory import LayerCache, Memory

_MIN_FREE_COLUMNS = 64  # at least as many steps are between two moves of the slots to the front of the storage

Occupant = TypeVar("Occupant")
Count = Annotated[int, Field(ge=0, lt=2**62)]


@dataclass(frozen=True, eq=False)
class MemoryState:
    """A memory of one sequence without its empty slots, and the newest token, which it has not read yet."""

    newest: Count
    """Id of the newest token."""
    num_valid: Count
    """Number of filled slots."""
    num_read: Count
    """Number of tokens that the memory has read; the newest token is not among them."""
    memory_length: Count
    """Number of slots of the memory that it was taken from."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The caches by name, of batch size 1, on the CPU."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def row_state(memory: Memory, row: int, newest: int, memory_length: int, *, drop_empty: bool) -> MemoryState:
    """Return a copy of one row of a memory.

    Args:
        memory: the memory.
        row: index of the batch row.
        newest: the token after those of the memory.
        memory_length: M of the memory that the row will continue in; `memory` may have fewer slots.
        drop_empty: whether empty slots are left out.
    """
    num_valid, tensors = min(int(memory.valid_B[row]), memory_length), dict[str, Tensor]()
    for index, cache in enumerate(memory.layers):
        for name, tensor in cache.views().items():
            part = tensor[row : row + 1]
            if drop_empty:
                start = memory.length - num_valid
                part = part.narrow(cache.slot_dim, start, part.shape[cache.slot_dim] - start)
            tensors[f"{name}_{index}"] = part.to("cpu").clone(memory_format=torch.contiguous_format)
    if memory.recent_BR is not None:
        tensors["recent"] = memory.recent_BR[row : row + 1].to("cpu").clone()
    return MemoryState(newest, num_valid, int(memory.position_B[row]), memory_length, tensors)


class RowBatch(Generic[Occupant]):
    """Sequences of one model and one memory length, a batch row each."""

    def __init__(self, memory: Memory, max_rows: int) -> None:
        """Make room for sequences.

        Args:
            memory: an empty memory of batch size 1, like those of the sequences.
            max_rows: number of rows of the largest batch.
        """
        self.occupants: list[Occupant | None] = []
        """Who has each row, in order; None for a row that has left since the last step."""
        self._joining: list[tuple[Occupant, Memory, int]] = []
        self._num_read: list[int] = []  # by each row; kept on the host, so that nothing waits for the device
        self._storage: list[tuple[Tensor, Tensor]] = []  # keys and values (R, N, C, H) of each layer
        self._num_zeros = [0] * max_rows  # by each row of the storage: how many of the first columns are zeros
        layers = [self._with_room(cache, max_rows) for cache in memory.layers]
        self.memory = replace(memory, layers=tuple(layers))
        """The memory of all rows."""
        self._resize(0)

    def __len__(self) -> int:
        return sum(occupant is not None for occupant in self.occupants) + len(self._joining)

    def join(self, occupant: Occupant, memory: Memory, num_read: int) -> None:
        """Let a sequence join before the next step.

        Args:
            occupant: stands for the sequence.
            memory: its memory, of batch size 1; it is copied then. It may have more or fewer slots than the batch.
            num_read: number of tokens that it has read.
        """
        self._joining.append((occupant, memory, num_read))

    def leave(self, occupant: Occupant) -> None:
        """Remove a sequence, whose row is filled before the next step."""
        self._joining = [entry for entry in self._joining if entry[0] is not occupant]
        self.occupants = [None if other is occupant else other for other in self.occupants]

    def take(self, occupant: Occupant) -> Memory:
        """Remove a sequence, and return a copy of its memory, with which it can join again."""
        memory, row = self.memory_of(occupant)
        self.leave(occupant)
        return memory.select([row])

    def all(self) -> list[Occupant]:
        """Return all sequences, also those that join before the next step."""
        return [one for one in self.occupants if one is not None] + [entry[0] for entry in self._joining]

    def memory_of(self, occupant: Occupant) -> tuple[Memory, int]:
        """Return the memory that has the row of a sequence, and the index of that row."""
        for other, memory, _ in self._joining:
            if other is occupant:
                return memory, 0
        return self.memory, self.occupants.index(occupant)

    def step(self, model: TokenModel, token_of: Callable[[Occupant], int]) -> tuple[list[Occupant], Tensor]:
        """Read one token of each sequence.

        Args:
            model: the model.
            token_of: returns the token of a sequence.

        Returns:
            the sequences in the order of the rows, and the hidden states (B, 1, D).
        """
        self._settle()
        self._move_to_front(num_new=1)
        rows = [occupant for occupant in self.occupants if occupant is not None]
        device = self.memory.valid_B.device
        tokens_B1 = torch.tensor([[token_of(occupant)] for occupant in rows], device=device)
        hidden_B1D, self.memory = model(tokens_B1, self.memory)
        self._num_read = [number + 1 for number in self._num_read]
        return rows, hidden_B1D

    def _settle(self) -> None:
        """Fill the rows of those that have left, and let the others join at the end."""
        for row in self._holes()[: len(self._joining)]:
            self._join_at(row, *self._joining.pop(0))
        for row in reversed(self._holes()):  # from the last, after which every row has a sequence
            self._fill_from_end(row)
        if not self.occupants and not self._joining:
            return  # the memory stays for those that join later: its pages are slow to get from the system
        num_old = len(self.occupants)
        if self.memory.batch_size != num_old + len(self._joining):
            self._resize(num_old + len(self._joining))
        for row, entry in enumerate(self._joining, start=num_old):
            self.occupants.append(None)
            self._num_read.append(0)
            self._join_at(row, *entry)
        self._joining = []
        self.memory = replace(self.memory, min_valid=min(*self._num_read, self.memory.length))

    def _holes(self) -> list[int]:
        return [row for row, occupant in enumerate(self.occupants) if occupant is None]

    def _join_at(self, row: int, occupant: Occupant, memory: Memory, num_read: int) -> None:
        """Copy a memory of batch size 1 into a row."""
        self._write(row, occupant, {name: tensor[0] for name, tensor in memory.tensors().items()}, num_read)

    def _fill_from_end(self, row: int) -> None:
        """Move the last row into a place without a sequence, so that the batch can end before it."""
        last = len(self.occupants) - 1
        occupant = self.occupants[last]
        if occupant is not None and row != last:
            tensors = {name: tensor[last] for name, tensor in _views(self.memory).items()}
            self._write(row, occupant, tensors, self._num_read[last])
        del self.occupants[last], self._num_read[last]

    def _write(self, row: int, occupant: Occupant, source: Mapping[str, Tensor], num_read: int) -> None:
        """Copy the tensors of a sequence, without their batch dimension, into a row, with empty slots in front."""
        self.occupants[row], self._num_read[row] = occupant, num_read
        num_filled, slot_dims = self._num_filled(num_read), _slot_dims(self.memory)
        self._clear(row, num_filled)
        for name, tensor in _views(self.memory).items():
            given, place = source[name], tensor[row]
            if name in slot_dims and (self._storage or given.shape != place.shape):
                dim = slot_dims[name] - 1
                num_more = place.shape[dim] - self.memory.length  # besides the slots
                num_slots = min(given.shape[dim], num_filled + num_more)
                if not self._storage:
                    place.narrow(dim, 0, place.shape[dim] - num_slots).zero_()
                given, place = (one.narrow(dim, one.shape[dim] - num_slots, num_slots) for one in (given, place))
            place.copy_(given)
        self.memory.valid_B[row].clamp_(max=self.memory.length)

    def _num_filled(self, num_read: int) -> int:
        """Return how many of the newest slots have a meaning: all of them if empty ones are attended."""
        cache = self.memory.layers[0]
        is_masked = isinstance(cache, KeyValueCache) and not cache.attend_empty
        return min(num_read, self.memory.length) if is_masked else self.memory.length

    def _clear(self, row: int, num_filled: int) -> None:
        """Write zeros over what an earlier sequence left in a row, in front of the slots that will be filled.

        What comes after those slots is written before it is attended.
        """
        cache = self.memory.layers[0]
        if not isinstance(cache, KeyValueCache):
            return
        start = cache.end - num_filled
        for k_RNCH, v_RNCH in self._storage if self._num_zeros[row] < start else ():
            k_RNCH[row, :, self._num_zeros[row] : start].zero_()
            v_RNCH[row, :, self._num_zeros[row] : start].zero_()
        self._num_zeros[row] = start

    def _with_room(self, cache: LayerCache, max_rows: int) -> LayerCache:
        """Return the cache of a layer with storage for the largest batch, if it holds keys and values."""
        if not isinstance(cache, KeyValueCache):
            return cache
        like = cache.storage.v_BNCH
        _, num_heads, _, d_head = like.shape
        num_columns = cache.length + cache.storage.num_begun + max(_MIN_FREE_COLUMNS, cache.length // 4)
        # not zeros: what is never written takes no memory
        v_RNCH = like.new_empty(max_rows, num_heads, num_columns, d_head)
        if like.device.type == "cpu":  # keys are stored as in `key_values.py`
            k_RNCH = like.new_empty(max_rows, num_heads, d_head, num_columns).mT
        else:
            k_RNCH = torch.empty_like(v_RNCH)
        self._storage.append((k_RNCH, v_RNCH))
        storage = copy(cache.storage)
        storage.k_BNCH, storage.v_BNCH, storage.num_written = k_RNCH, v_RNCH, cache.length
        return replace(cache, storage=storage, end=cache.length)

    def _resize(self, num_rows: int) -> None:
        """Let the memory have its first `num_rows` rows; rows that are new have no contents yet."""
        memory = self.memory
        layers: list[LayerCache] = []
        for index, cache in enumerate(memory.layers):
            if isinstance(cache, KeyValueCache):
                storage = copy(cache.storage)
                k_RNCH, v_RNCH = self._storage[index]
                storage.k_BNCH, storage.v_BNCH = k_RNCH[:num_rows], v_RNCH[:num_rows]
                layers.append(replace(cache, storage=storage))
            else:
                layers.append(cache.map(lambda tensor: _with_rows(tensor, num_rows)))
        self.memory = replace(
            memory,
            layers=tuple(layers),
            valid_B=_with_rows(memory.valid_B, num_rows),
            position_B=_with_rows(memory.position_B, num_rows),
            recent_BR=None if memory.recent_BR is None else _with_rows(memory.recent_BR, num_rows),
            min_valid=0,
        )

    def _move_to_front(self, num_new: int) -> None:
        """Move the slots to the first columns of the storage if it has no free columns for the new tokens.

        Appending would copy them to new storage, which would double the memory and have room for these rows only.
        """
        first, layers = self.memory.layers[0], list[LayerCache]()
        if not isinstance(first, KeyValueCache):
            return
        if first.end + num_new + first.storage.num_begun <= first.storage.capacity:
            return  # all layers have the same columns
        num_filled = max(map(self._num_filled, self._num_read))
        start = self.memory.length - num_filled
        for cache in self.memory.layers:
            assert isinstance(cache, KeyValueCache)
            storage = copy(cache.storage)
            storage.write(start, *(tensor.clone() for tensor in cache.newest(num_filled)))
            layers.append(replace(cache, storage=storage, end=cache.length))
        self.memory = replace(self.memory, layers=tuple(layers))
        for row in range(self.memory.batch_size):
            self._num_zeros[row] = min(self._num_zeros[row], start)


def _slot_dims(memory: Memory) -> dict[str, int]:
    """Return the dimension of the slots in each tensor of the caches, named as in `Memory.tensors`."""
    return {f"{name}_{i}": cache.slot_dim for i, cache in enumerate(memory.layers) for name in cache.views()}


def _views(memory: Memory) -> dict[str, Tensor]:
    """Return the tensors of `Memory.tensors` as they are stored, so that a row can be written."""
    caches = {f"{name}_{i}": view for i, cache in enumerate(memory.layers) for name, view in cache.views().items()}
    counts = {"valid": memory.valid_B, "position": memory.position_B}
    return caches | counts | ({} if memory.recent_BR is None else {"recent": memory.recent_BR})


def _with_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """Return the first `num_rows` rows; rows that are new are zeros."""
    if num_rows <= len(tensor):
        return tensor[:num_rows].clone()
    return torch.cat([tensor, tensor.new_zeros(num_rows - len(tensor), *tensor.shape[1:])])
