"""Memory is a value: what each layer read in earlier segments, handed in and handed back, never written in place.

It has its full length from the first step: empty slots are zeros, counted as not valid, and never attended. So shapes
stay the same from the first token to the last.

Letters: B rows, T new tokens, M memory slots, D model width, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.config import MOST, UserError


@dataclass(frozen=True)
class Reach:
    """How far attention looks back; evaluation may look much further than training did."""

    memory: int
    """M: memory slots."""
    window: int | None = None
    """Number of keys a query sees, itself included; none: all there are."""
    clamp_length: int | None = None
    """Distances above this count as this one in the position encoding; none: no limit."""

    def __post_init__(self) -> None:
        for name, least in (("memory", 0), ("window", 1), ("clamp_length", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} {value} is too small; give {least} or more")
            if value is not None and value > MOST:
                raise UserError(f"{name} {value:,} is too large; give {MOST:,} at most")


@dataclass(frozen=True, eq=False)
class Memory:
    """The inputs every layer had at the last M tokens of each row, without gradient (paper section 3.2)."""

    layers_BMD: tuple[Tensor, ...]
    """One tensor a layer. Valid slots stand last, so that the newest token is always at M - 1."""
    valid_B: Tensor
    """How many slots of each row hold something (int64)."""
    position_B: Tensor
    """How many tokens each row has read since its last reset (int64)."""
    reach: Reach
    least_valid: int
    """A lower bound of valid_B known without asking the device, so that a full memory needs no mask."""

    @staticmethod
    def empty(num_layers: int, batch_size: int, width: int, reach: Reach, like: Tensor) -> Memory:
        """A memory without valid slots, on the device and in the dtype of `like`."""
        counts_B = torch.zeros(batch_size, dtype=torch.int64, device=like.device)
        shape = (batch_size, reach.memory, width)
        layers = tuple(torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(num_layers))
        return Memory(layers, counts_B, counts_B.clone(), reach, 0)

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.valid_B)

    @property
    def length(self) -> int:
        """M, counting empty slots."""
        return self.reach.memory

    @property
    def all_valid(self) -> bool:
        """Whether every slot is known to hold something."""
        return self.least_valid >= self.length

    def after(self, inputs_BTD: Sequence[Tensor]) -> Memory:
        """The memory once each layer has read its T new inputs: the last M rows of [memory ; inputs], detached."""
        num_new = inputs_BTD[0].shape[1]
        return Memory(
            tuple(_last_rows(old, new.detach()) for old, new in zip(self.layers_BMD, inputs_BTD, strict=True)),
            (self.valid_B + num_new).clamp(max=self.length),
            self.position_B + num_new,
            self.reach,
            min(self.least_valid + num_new, self.length),
        )

    def reset(self, rows: Sequence[int] | Tensor) -> Memory:
        """The memory with the given rows (indices, or a mask of B truth values) empty again."""
        index = torch.as_tensor(rows, device=self.valid_B.device)
        keep_B = torch.ones_like(self.valid_B)
        keep_B[index if index.dtype == torch.bool else index.long()] = 0
        layers = tuple(layer.masked_fill(keep_B[:, None, None] == 0, 0) for layer in self.layers_BMD)
        return replace(
            self, layers_BMD=layers, valid_B=self.valid_B * keep_B, position_B=self.position_B * keep_B, least_valid=0
        )

    def select(self, rows: Sequence[int] | Tensor) -> Memory:
        """The memory of the given rows, in that order; a row may be taken several times (samples, beams)."""
        index = torch.as_tensor(rows, device=self.valid_B.device).long()
        layers = tuple(layer[index] for layer in self.layers_BMD)
        return replace(self, layers_BMD=layers, valid_B=self.valid_B[index], position_B=self.position_B[index])

    @staticmethod
    def concatenate(memories: Sequence[Memory]) -> Memory:
        """The rows of several memories of one model and reach, one after the other."""
        assert len({memory.reach for memory in memories}) == 1
        layers = zip(*(memory.layers_BMD for memory in memories), strict=True)
        return replace(
            memories[0],
            layers_BMD=tuple(torch.cat(parts) for parts in layers),
            valid_B=torch.cat([memory.valid_B for memory in memories]),
            position_B=torch.cat([memory.position_B for memory in memories]),
            least_valid=min(memory.least_valid for memory in memories),
        )

    def resized(self, length: int) -> Memory:
        """The memory with so many slots: empty ones come in front, or the oldest go."""
        kept = min(length, self.length)
        layers = tuple(F.pad(layer[:, self.length - kept :], (0, 0, length - kept, 0)) for layer in self.layers_BMD)
        return replace(
            self,
            layers_BMD=layers,
            valid_B=self.valid_B.clamp(max=length),
            reach=replace(self.reach, memory=length),
            least_valid=min(self.least_valid, length),
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Memory:
        """The memory on another device or with its rows in another dtype."""
        layers = tuple(layer.to(device=device, dtype=dtype) for layer in self.layers_BMD)
        return replace(
            self,
            layers_BMD=layers,
            valid_B=self.valid_B.to(device=device),
            position_B=self.position_B.to(device=device),
        )

    def tensors(self) -> dict[str, Tensor]:
        """What is needed to keep it in a file, by name."""
        named = {f"layer_{index}": layer for index, layer in enumerate(self.layers_BMD)}
        return {**named, "valid": self.valid_B, "position": self.position_B}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Memory:
        """A memory of this one's shape and device holding what `tensors()` gave.

        Raises:
            UserError: names or shapes are not this memory's.
        """
        own = self.tensors()
        if own.keys() != tensors.keys() or any(own[name].shape != tensors[name].shape for name in own):
            raise UserError("the kept memory has another shape than this model, row count and memory length need")
        # clone: tensors read from a file may lie at odd addresses, which can change the last bit of matrix products
        moved = {name: tensors[name].to(own[name].device, own[name].dtype).clone() for name in own}
        layers = tuple(moved[f"layer_{index}"] for index in range(len(self.layers_BMD)))
        least = int(moved["valid"].min()) if self.batch_size else 0
        return replace(self, layers_BMD=layers, valid_B=moved["valid"], position_B=moved["position"], least_valid=least)


def _last_rows(old_BMD: Tensor, new_BTD: Tensor) -> Tensor:
    num_old, num_new = old_BMD.shape[1], new_BTD.shape[1]
    if num_new >= num_old:
        # contiguous: a view would keep the whole segment alive
        return new_BTD[:, num_new - num_old :].contiguous()
    return torch.cat([old_BMD[:, num_new:], new_BTD.to(old_BMD.dtype)], dim=1)
