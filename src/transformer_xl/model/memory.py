"""Memory is a value: what a model keeps of earlier segments, handed in and handed back, never changed.

It has its full length from the first step: empty slots are zeros, counted as not valid, and never attended. So shapes
stay the same from the first token to the last. There are several kinds with one interface: hidden rows, for training
(here), and keys and values, for weights that do not change (`key_values.py`).

Letters: B rows, T new tokens, M memory slots, S = M + T, D model width, L layers, X any shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from transformer_xl.config import INT32_MAX, UserError

Kind = TypeVar("Kind", bound="Memory")


@dataclass(frozen=True)
class ContextLimits:
    """How far attention looks back; evaluation may look much further than training did."""

    memory_length: int
    """M: memory slots."""
    attention_window: int | None = None
    """Number of keys a query sees, itself included; none: all there are."""
    clamp_length: int | None = None
    """Distances above this count as this one in the position encoding; none: no limit."""

    def __post_init__(self) -> None:
        for name, least in (("memory_length", 0), ("attention_window", 1), ("clamp_length", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} {value} is too small; give {least} or more")
            if value is not None and value > INT32_MAX:
                raise UserError(f"{name} {value:,} is too large; give {INT32_MAX:,} at most")


@dataclass(frozen=True, eq=False)
class Memory(ABC):
    """What any kind of memory knows and can do; none of it changes a memory that is there."""

    _: KW_ONLY
    valid_B: Tensor
    """How many slots of each row hold something (int64); they stand last, so the newest token is always at M - 1."""
    position_B: Tensor
    """How many tokens each row has read since its last reset (int64)."""
    context_limits: ContextLimits
    least_valid: int
    """A lower bound of valid_B known without asking the device, so that a full memory needs no mask."""

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.valid_B)

    @property
    def length(self) -> int:
        """M, counting empty slots."""
        return self.context_limits.memory_length

    @property
    def all_valid(self) -> bool:
        """Whether every slot is known to hold something."""
        return self.least_valid >= self.length

    def reset(self, rows: Sequence[int] | Tensor) -> Self:
        """The memory with the given rows (indices, or a mask of B truth values) empty again."""
        index = torch.as_tensor(rows, device=self.valid_B.device)
        keep_B = torch.ones_like(self.valid_B)
        keep_B[index if index.dtype == torch.bool else index.long()] = 0
        counted = replace(self, valid_B=self.valid_B * keep_B, position_B=self.position_B * keep_B, least_valid=0)
        return counted._emptied(keep_B == 0)

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """The memory of the given rows, in that order; a row may be taken several times (samples, beams)."""
        index_B = torch.as_tensor(rows, device=self.valid_B.device).long()
        counted = replace(self, valid_B=self.valid_B[index_B], position_B=self.position_B[index_B])
        return counted._taken(index_B)

    @abstractmethod
    def _emptied(self, rows_B: Tensor) -> Self:
        """With zeros in the slots of these rows (a mask), where that matters; their counts are 0 already."""

    @abstractmethod
    def _taken(self, index_B: Tensor) -> Self:
        """With what these rows hold; their counts are there already."""

    @staticmethod
    def concatenate(memories: Sequence[Kind]) -> Kind:
        """The rows of several memories of one model and reach, one after the other."""
        assert len({memory.context_limits for memory in memories}) == 1
        counted = replace(
            memories[0],
            valid_B=torch.cat([memory.valid_B for memory in memories]),
            position_B=torch.cat([memory.position_B for memory in memories]),
            least_valid=min(memory.least_valid for memory in memories),
        )
        return counted._joined(memories)

    @abstractmethod
    def _joined(self, memories: Sequence[Self]) -> Self:
        """With what these memories hold, row after row; its counts are there already."""

    @abstractmethod
    def resized(self, length: int) -> Self:
        """The memory with so many slots: empty ones come in front, or the oldest go."""

    @abstractmethod
    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The memory on another device, or with what it holds in another dtype."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What is needed to keep it in a file, by name."""

    @abstractmethod
    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """A memory of this one's shape and device holding what `tensors()` gave.

        Raises:
            UserError: names or shapes are not this memory's.
        """

    def _fitting(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those tensors on the device and in the dtype of this memory's own, whose names and shapes they must have."""
        own = self.tensors()
        if own.keys() != tensors.keys() or any(own[name].shape != tensors[name].shape for name in own):
            raise UserError("the kept memory has another shape than this model, row count and memory length need")
        # clone: tensors read from a file may lie at odd addresses, which can change the last bit of matrix products
        return {name: tensors[name].to(own[name].device, own[name].dtype).clone() for name in own}

    def _resized_counts(self, length: int) -> Self:
        return replace(
            self,
            valid_B=self.valid_B.clamp(max=length),
            context_limits=replace(self.context_limits, memory_length=length),
            least_valid=min(self.least_valid, length),
        )

    def _counted(self, num_new: int, lengths_B: Tensor | None) -> Self:
        """With the counts it has after so many tokens more; of each row as many as `lengths_B` says, where given."""
        read_B = num_new if lengths_B is None else lengths_B
        return replace(
            self,
            valid_B=(self.valid_B + read_B).clamp(max=self.length),
            position_B=self.position_B + read_B,
            # of padded rows nobody knows how much was read without asking the device
            least_valid=min(self.least_valid + (num_new if lengths_B is None else 0), self.length),
        )


@dataclass(frozen=True, eq=False)
class HiddenMemory(Memory):
    """The inputs every layer had at the last M tokens of each row, without gradient (paper section 3.2)."""

    layers_BMD: tuple[Tensor, ...]
    """One tensor a layer."""

    @property
    def layer_shape(self) -> tuple[int, int]:
        """L and D, which must be the model's."""
        return len(self.layers_BMD), self.layers_BMD[0].shape[-1]

    @staticmethod
    def empty(
        num_layers: int, batch_size: int, width: int, context_limits: ContextLimits, like: Tensor
    ) -> HiddenMemory:
        """A memory without valid slots, on the device and in the dtype of `like`."""
        counts_B = torch.zeros(batch_size, dtype=torch.int64, device=like.device)
        shape = (batch_size, context_limits.memory_length, width)
        layers = tuple(torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(num_layers))
        return HiddenMemory(
            layers, valid_B=counts_B, position_B=counts_B.clone(), context_limits=context_limits, least_valid=0
        )

    def after(self, inputs_BTD: Sequence[Tensor], lengths_B: Tensor | None = None) -> HiddenMemory:
        """The memory once each layer has read its T new inputs: the last M rows of [memory ; inputs], detached.

        Args:
            inputs_BTD: of each layer.
            lengths_B: how many of the T are the row's own; those before are padding, which is not kept.
        """
        layers = tuple(
            _last_rows(old, new.detach(), lengths_B) for old, new in zip(self.layers_BMD, inputs_BTD, strict=True)
        )
        return replace(self._counted(inputs_BTD[0].shape[1], lengths_B), layers_BMD=layers)

    @override
    def _emptied(self, rows_B: Tensor) -> HiddenMemory:
        return replace(self, layers_BMD=tuple(layer.masked_fill(rows_B[:, None, None], 0) for layer in self.layers_BMD))

    @override
    def _taken(self, index_B: Tensor) -> HiddenMemory:
        return replace(self, layers_BMD=tuple(layer[index_B] for layer in self.layers_BMD))

    @override
    def _joined(self, memories: Sequence[HiddenMemory]) -> HiddenMemory:
        layers = zip(*(memory.layers_BMD for memory in memories), strict=True)
        return replace(self, layers_BMD=tuple(torch.cat(parts) for parts in layers))

    @override
    def resized(self, length: int) -> HiddenMemory:
        kept = min(length, self.length)
        layers = tuple(F.pad(layer[:, self.length - kept :], (0, 0, length - kept, 0)) for layer in self.layers_BMD)
        return replace(self._resized_counts(length), layers_BMD=layers)

    @override
    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> HiddenMemory:
        layers = tuple(layer.to(device=device, dtype=dtype) for layer in self.layers_BMD)
        return replace(self, layers_BMD=layers, **counts_on(self, device))

    @override
    def tensors(self) -> dict[str, Tensor]:
        named = {f"layer_{index}": layer for index, layer in enumerate(self.layers_BMD)}
        return {**named, "valid": self.valid_B, "position": self.position_B}

    @override
    def with_tensors(self, tensors: Mapping[str, Tensor]) -> HiddenMemory:
        fitting = self._fitting(tensors)
        layers = tuple(fitting[f"layer_{index}"] for index in range(len(self.layers_BMD)))
        least = int(fitting["valid"].min()) if self.batch_size else 0
        return replace(
            self, layers_BMD=layers, valid_B=fitting["valid"], position_B=fitting["position"], least_valid=least
        )


def without_padding(rows_BSX: Tensor, num_new: int, lengths_B: Tensor) -> Tensor:
    """Rows [memory ; padding ; new] as [padding ; memory ; new], so that nothing stands between what was read.

    Args:
        rows_BSX: S rows of any kind, of which the last `num_new` are new or padding.
        num_new: T.
        lengths_B: how many of the T are new; the others, before them, are padding.
    """
    num_rows = rows_BSX.shape[1]
    padding_B1 = (num_new - lengths_B)[:, None]
    place_S = torch.arange(num_rows, device=rows_BSX.device)
    is_new_BS = place_S >= num_rows - num_new + padding_B1
    from_BS = torch.where(is_new_BS, place_S, (place_S - padding_B1).clamp(min=0))
    return rows_BSX[torch.arange(len(rows_BSX), device=rows_BSX.device)[:, None], from_BS]


def counts_on(memory: Memory, device: torch.device | str | None) -> dict[str, Tensor]:
    """The counts of a memory on another device, by name."""
    return {"valid_B": memory.valid_B.to(device=device), "position_B": memory.position_B.to(device=device)}


def _last_rows(old_BMD: Tensor, new_BTD: Tensor, lengths_B: Tensor | None) -> Tensor:
    num_old, num_new = old_BMD.shape[1], new_BTD.shape[1]
    if lengths_B is not None:
        rows_BSD = torch.cat([old_BMD, new_BTD.to(old_BMD.dtype)], dim=1)
        return without_padding(rows_BSD, num_new, lengths_B)[:, num_new:].contiguous()
    if num_new >= num_old:
        # contiguous: a view would keep the whole segment alive
        return new_BTD[:, num_new - num_old :].contiguous()
    return torch.cat([old_BMD[:, num_new:], new_BTD.to(old_BMD.dtype)], dim=1)
