"""The memory of a model: an immutable value that holds what is cached of earlier segments.

    hidden_BTD, memory = model(tokens_BT, memory)      a Memory holds one LayerCache for each layer
    x_BTD, cache = layer(x_BTD, cache, context, biases)        a layer takes its own cache and returns the next one

A memory has its full length from the first step: slots that are not filled yet contain zeros, are not valid, and are
not attended (with the setting attend_empty_memory they are, as in the authors' code). So shapes stay the same from the
first segment to the last. A token sees the M slots directly, and what is before them through the layers: a remembered
input of layer n > 1 has itself seen M slots of layer n - 1 (paper, section 3.2).

A memory contains hidden states in training (in this file), keys and values in inference (`key_values.py`, for the
prepared model that is its `owner`), the states of a recurrent network (`baselines/recurrent.py`), or token ids
(`baselines/token_memory.py`); all share one interface.

Shape suffixes: B batch size, T new tokens, M memory slots, S = M + T, L layers, D model width, R recent tokens, X any
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, ClassVar, Generic, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import TypeVar, override

from transformer_xl.config import INT32_MAX, UserError, check_type
from transformer_xl.display import Displayed


@dataclass(frozen=True)
class ContextLimits:
    """How far back attention can look; the limits of evaluation may be much larger than those of training.

    Raises:
        UserError: a length is too small or too large.
    """

    memory_length: int
    """M: number of memory slots."""
    attention_window: int | None = None
    """Number of keys that a query attends to, including its own position, or None for all keys."""
    clamp_length: int | None = None
    """Distances above this one use the position encoding of this one; None means no limit."""

    def __post_init__(self) -> None:
        for name, minimum in (("memory_length", 0), ("attention_window", 1), ("clamp_length", 1)):
            value = getattr(self, name)
            check_type(value, int if name == "memory_length" else (int, type(None)), name, "give an integer")
            if value is not None and value < minimum:
                raise UserError(f"{name} {value} is too small; give {minimum} or more")
            if value is not None and value > INT32_MAX:
                raise UserError(f"{name} {value:,} is too large; give {INT32_MAX:,} at most")


@dataclass(frozen=True, eq=False, repr=False)
class LayerCache:
    """The tensors that one layer caches of earlier tokens: batch first, without gradient, never changed in place.

    The fields of a subclass are its tensors, unless it overrides `tensors` and `with_tensors`.
    """

    slot_dim: ClassVar[int] = 1
    """Dimension of each tensor that contains the memory slots."""

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of what the cache holds of one token; a model uses it to check that a cache fits its layers."""
        return next(iter(self.tensors().values())).shape[2:]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the cache by name; their first dimension is the batch."""
        return {_without_suffix(field.name): getattr(self, field.name) for field in fields(self)}

    def views(self) -> dict[str, Tensor]:
        """Return the tensors as they are stored, to copy a part of them or to write into them."""
        return self.tensors()

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Return a cache of the same class with these tensors, named as in the result of `tensors`."""
        return replace(self, **{field.name: tensors[_without_suffix(field.name)] for field in fields(self)})

    def resized(self, length: int, num_more: int) -> Self:
        """Return the cache with `length` slots, so many more than now: zeros in front, or without the oldest slots."""
        return self.map(lambda tensor: F.pad(tensor, [0, 0] * (tensor.ndim - 1 - self.slot_dim) + [num_more, 0]))

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the cache with a function applied to each of its tensors."""
        return self.with_tensors({name: change(tensor) for name, tensor in self.tensors().items()})

    def reset(self, reset_B: Tensor) -> Self:
        """Return the cache with zeros in the batch rows where the mask is true."""
        return self.map(lambda tensor: tensor.masked_fill(reset_B.view(-1, *[1] * (tensor.ndim - 1)), 0))

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Self:
        """Return the cache on another device, with its floating-point tensors in another dtype."""
        return self.map(lambda tensor: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None))


Cache = TypeVar("Cache", bound=LayerCache, default=LayerCache, covariant=True)
AnyMemory = TypeVar("AnyMemory", bound="Memory")


@dataclass(frozen=True, eq=False, repr=False)
class Memory(Displayed, Generic[Cache]):
    """The caches of all layers and their number of filled slots; methods return a new memory, and change nothing."""

    layers: tuple[Cache, ...]
    """One cache for each layer."""
    _: KW_ONLY
    valid_B: Tensor
    """Number of filled slots of each batch row (int64); they are the last slots, with the newest token at M - 1."""
    position_B: Tensor
    """Number of tokens each batch row has read since its last reset (int64)."""
    context_limits: ContextLimits
    min_valid: int
    """A lower bound of all numbers in valid_B, known on the CPU: shows that a memory is full without waiting for the
    device."""
    recent_BR: Tensor | None = None
    """The newest R tokens, as token id + 1 and 0 where there is none (int64), for n-gram embeddings (`ngrams.py`);
    between `embed` and `advance` also the new ones, for layers that need ids; None for a model without both."""
    owner: int | None = None
    """Number of the prepared model that made the caches and alone continues them (a KV cache); None: any model of the
    same settings."""

    @classmethod
    def empty(
        cls,
        layers: Iterable[LayerCache],
        batch_size: int,
        context_limits: ContextLimits,
        device: torch.device,
        *,
        num_recent: int = 0,
        owner: int | None = None,
    ) -> Self:
        """Return a memory without valid slots, made of empty caches.

        Args:
            layers: the caches.
            batch_size: B.
            context_limits: how far back attention can look.
            device: device of the memory.
            num_recent: R.
            owner: the model's, for caches that depend on its weights.
        """
        zeros_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        return cls(
            tuple(layers),
            valid_B=zeros_B,
            position_B=zeros_B.clone(),
            context_limits=context_limits,
            min_valid=0,
            recent_BR=zeros_B[:, None].repeat(1, num_recent) if num_recent else None,
            owner=owner,
        )

    @override
    def summary(self) -> dict[str, Any]:
        limits = {name: limit for name, limit in vars(self.context_limits).items() if limit is not None}
        return {
            "batch_size": self.batch_size,
            **limits,
            "filled": self.valid_B.tolist(),
            "tokens_read": self.position_B.tolist(),
            "layers": len(self.layers),
            **(self.layers[0].tensors() if self.layers else {}),
            "device": str(self.valid_B.device),
        }

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.valid_B)

    @property
    def length(self) -> int:
        """M, empty slots included."""
        return self.context_limits.memory_length

    @property
    def all_valid(self) -> bool:
        """Whether every slot is known to be filled."""
        return self.min_valid >= self.length

    @property
    def seen_ids(self) -> Tensor | None:
        """`recent_BR` with only as many tokens as there are slots, and 0 for those before them."""
        recent_BR, num_hidden = self.recent_BR, 0 if self.recent_BR is None else self.recent_BR.shape[1] - self.length
        if recent_BR is None or num_hidden <= 0:
            return recent_BR
        return torch.cat([torch.zeros_like(recent_BR[:, :num_hidden]), recent_BR[:, num_hidden:]], dim=1)

    def newest_ids(self, num_new: int) -> Tensor:
        """Return the ids of the T new tokens (B, T), as in `recent_BR`; of the memory that `embed` returned."""
        assert self.recent_BR is not None
        return self.recent_BR[:, self.recent_BR.shape[1] - num_new :].clone()

    def advance(
        self,
        layers: Iterable[LayerCache],
        num_new: int,
        lengths_B: Tensor | None = None,
        last_start_B: Tensor | None = None,
    ) -> Self:
        """Return the memory after T more tokens, which are the last of `recent_BR` by now.

        Args:
            layers: the caches that the layers returned.
            num_new: T.
            lengths_B: number of tokens of each batch row that are not padding, or None if there is no padding.
            last_start_B: index of the last of the T tokens of each batch row that starts an episode, below 0 if none
                does; the tokens before it are not valid in the next memory. None if no episode starts.
        """
        num_read_B = num_new if lengths_B is None else lengths_B
        valid_B, position_B = self.valid_B + num_read_B, self.position_B + num_read_B
        if last_start_B is not None:
            is_started_B, since_start_B = last_start_B >= 0, num_new - last_start_B
            valid_B, position_B = (torch.where(is_started_B, since_start_B, count) for count in (valid_B, position_B))
        # lengths_B and last_start_B are on the device, and reading their values would synchronize
        min_valid = 0 if last_start_B is not None else self.min_valid + (num_new if lengths_B is None else 0)
        return replace(
            self,
            layers=tuple(layers),
            valid_B=valid_B.clamp(max=self.length),
            position_B=position_B,
            min_valid=min(min_valid, self.length),
            recent_BR=None if self.recent_BR is None else self.recent_BR[:, num_new:].contiguous(),
        )

    def reset(self, rows: Sequence[int] | Tensor) -> Self:
        """Return the memory with some batch rows empty again.

        Args:
            rows: indices, or a boolean mask of shape (B,).
        """
        index = torch.as_tensor(rows, device=self.valid_B.device)
        keep_B = torch.ones_like(self.valid_B)
        keep_B[index if index.dtype == torch.bool else index.long()] = 0
        return replace(
            self,
            layers=tuple(cache.reset(keep_B == 0) for cache in self.layers),
            valid_B=self.valid_B * keep_B,
            position_B=self.position_B * keep_B,
            min_valid=0,
            recent_BR=None if self.recent_BR is None else self.recent_BR * keep_B[:, None],
        )

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """Return the memory of the given batch rows, in that order; a row may occur several times (beam search).

        Args:
            rows: indices, or a boolean mask of shape (B,).
        """
        index = torch.as_tensor(rows, device=self.valid_B.device)
        index = index if index.dtype == torch.bool else index.long()
        selected = self.map(lambda tensor: tensor[index])
        return replace(selected, valid_B=self.valid_B[index], position_B=self.position_B[index])

    @staticmethod
    def concatenate(memories: Sequence[AnyMemory]) -> AnyMemory:
        """Return the batch rows of several memories of the same model, weights and limits as one memory.

        Raises:
            UserError: they differ in one of these, or there is none.
        """
        if len({(memory.context_limits, memory.owner) for memory in memories}) != 1:
            raise UserError("these memories cannot be one; give one or more of the same model, weights and limits")
        parts = [memory.tensors() for memory in memories]
        joined = {name: torch.cat([tensors[name] for tensors in parts]) for name in parts[0]}
        return memories[0]._replaced(joined, min_valid=min(memory.min_valid for memory in memories))

    def resized(self, length: int) -> Self:
        """Return the memory with `length` slots: empty ones are added in front, or the oldest are dropped."""
        layers = self.layers
        if length > self.length == 0:  # what is left of tokens that no later one was to see
            layers = tuple(cache.map(torch.zeros_like) for cache in layers)
        return replace(
            self,
            layers=tuple(cache.resized(length, length - self.length) for cache in layers),
            valid_B=self.valid_B.clamp(max=length),
            context_limits=replace(self.context_limits, memory_length=length),
            min_valid=min(self.min_valid, length),
            recent_BR=self.seen_ids,
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return the memory on another device, or with its floating-point tensors in another dtype."""
        return replace(
            self,
            layers=tuple(cache.to(device, dtype) for cache in self.layers),
            valid_B=self.valid_B.to(device=device),
            position_B=self.position_B.to(device=device),
            recent_BR=None if self.recent_BR is None else self.recent_BR.to(device=device),
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the memory with a function applied to each tensor of its caches, and to the recent tokens."""
        return replace(
            self,
            layers=tuple(cache.map(change) for cache in self.layers),
            recent_BR=None if self.recent_BR is None else change(self.recent_BR),
        )

    def cache_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the caches, named `NAME_LAYER`."""
        return {f"{name}_{i}": value for i, cache in enumerate(self.layers) for name, value in cache.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return by name all tensors that a checkpoint contains: those of the caches, and the counts of tokens.

        A model with n-gram or value embeddings or key_offset also has `recent`, and a layer with one of the last two
        `ids_LAYER` in training.
        """
        recent = {} if self.recent_BR is None else {"recent": self.recent_BR}
        return {**self.cache_tensors(), "valid": self.valid_B, "position": self.position_B, **recent}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Return a memory with these tensors, named as in the result of `tensors`, converted to its device and dtypes.

        Raises:
            UserError: the names or shapes differ from those of this memory.
        """
        current = self.tensors()
        if current.keys() != tensors.keys() or any(current[name].shape != tensors[name].shape for name in current):
            raise UserError("the saved memory has another shape than this model, batch size and memory length need")
        # clone: tensors read from a file may be unaligned, which can change the last bit of matrix products
        new = {name: tensors[name].to(current[name].device, current[name].dtype).clone() for name in current}
        # an exported graph cannot depend on a number in a tensor; 0 is a lower bound of any
        is_known = self.batch_size and not torch.compiler.is_exporting()
        return self._replaced(new, min_valid=int(new["valid"].min()) if is_known else 0)

    def _replaced(self, tensors: Mapping[str, Tensor], *, min_valid: int) -> Self:
        """Return a memory with these tensors, named as in the result of `tensors`."""
        layers = tuple(
            cache.with_tensors({name: tensors[f"{name}_{i}"] for name in cache.tensors()})
            for i, cache in enumerate(self.layers)
        )
        return replace(
            self,
            layers=layers,
            valid_B=tensors["valid"],
            position_B=tensors["position"],
            recent_BR=tensors.get("recent"),
            min_valid=min_valid,
        )


@dataclass(frozen=True, eq=False, repr=False)
class HiddenCache(LayerCache):
    """The inputs of a layer at the last M tokens of each batch row (paper section 3.2), with key_offset at M + 1."""

    hidden_BMD: Tensor
    ids_BM: Tensor | None = None
    """The ids of these tokens + 1, and 0 where there is no token, in a layer that needs them; with key_offset times -1
    where a token saw none before it."""

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"hidden": self.hidden_BMD} | ({} if self.ids_BM is None else {"ids": self.ids_BM})

    @override
    def with_tensors(self, tensors: Mapping[str, Tensor]) -> HiddenCache:
        return HiddenCache(tensors["hidden"], tensors.get("ids"))

    def append(self, x_BTD: Tensor, ids_BT: Tensor | None = None, lengths_B: Tensor | None = None) -> HiddenCache:
        """Return the cache after T more inputs: the last M of [cache ; inputs], detached.

        Args:
            x_BTD: the layer's new inputs.
            ids_BT: the ids of their tokens + 1, for a layer that needs them.
            lengths_B: number of inputs of each batch row that are not padding; padding comes first and is not cached.
        """
        hidden_BMD = _newest(self.hidden_BMD, x_BTD.detach(), lengths_B)
        if self.ids_BM is None or ids_BT is None:
            return HiddenCache(hidden_BMD)
        return HiddenCache(hidden_BMD, _newest(self.ids_BM, ids_BT, lengths_B))


def _newest(old_BMX: Tensor, new_BTX: Tensor, lengths_B: Tensor | None) -> Tensor:
    """Return the last M rows of [old ; new], `new` itself if it has M; `lengths_B` as for `HiddenCache.append`."""
    num_old, num_new = old_BMX.shape[1], new_BTX.shape[1]
    if lengths_B is not None:
        joined_BSX = torch.cat([old_BMX, new_BTX.to(old_BMX.dtype)], dim=1)
        return padding_first(joined_BSX, num_new, lengths_B)[:, num_new:].contiguous()
    if torch.compiler.is_exporting():  # one expression for any T
        return torch.cat([old_BMX, new_BTX.to(old_BMX.dtype)], dim=1)[:, num_new:]
    if num_new >= num_old:
        # a copy, because a view would keep the tensor of the whole segment allocated
        newest_BMX = new_BTX[:, num_new - num_old :]
        return newest_BMX.clone(memory_format=torch.contiguous_format) if num_new > num_old else new_BTX
    return torch.cat([old_BMX[:, num_new:], new_BTX.to(old_BMX.dtype)], dim=1)


class HiddenMemory(Memory[HiddenCache]):
    """Cached hidden states, used in training: keys and values must be recomputed because the weights change."""

    def stacked(self) -> dict[str, Tensor]:
        """Return the memory as tensors, such as a replay buffer stores.

        Returns:
            `hidden`, the hidden states of all layers (B, L, M, D), with key_offset of M + 1 tokens; `valid`, the number
            of filled slots (B,), which are the last ones; `position`, the number of tokens read since the last reset or
            start of an episode (B,); and with n-gram or value embeddings or key_offset `recent`, the newest tokens
            (B, R); and with one of the last two `ids`, the tokens of the hidden states, once for each layer that has
            them (B, layers, M).
        """
        hidden_BLMD = torch.stack([cache.hidden_BMD for cache in self.layers], dim=1)
        recent = {} if self.recent_BR is None else {"recent": self.recent_BR}
        ids_BM = [cache.ids_BM for cache in self.layers if cache.ids_BM is not None]
        ids = {"ids": torch.stack(ids_BM, dim=1)} if ids_BM else {}
        return {"hidden": hidden_BLMD, "valid": self.valid_B, "position": self.position_B, **recent, **ids}

    def with_stacked(self, tensors: Mapping[str, Tensor]) -> Self:
        """Return a memory with these tensors, which `stacked` returned, converted to its device and dtypes.

        Args:
            tensors: the tensors by name; their batch size, layers, slots and width are those of this memory.

        Raises:
            UserError: a tensor is missing or has another shape.
        """
        others = {name: tensor for name, tensor in tensors.items() if name not in ("hidden", "ids")}
        hidden, ids = (tensors[name].unbind(1) if name in tensors else () for name in ("hidden", "ids"))
        with_ids = [i for i, cache in enumerate(self.layers) if cache.ids_BM is not None]
        others |= {f"ids_{i}": ids_BM for i, ids_BM in zip(with_ids, ids, strict=False)}
        return self.with_tensors({f"hidden_{i}": hidden_BMD for i, hidden_BMD in enumerate(hidden)} | others)


def last_starts(starts_BT: Tensor) -> Tensor:
    """Return for each token the index of the last token, itself included, that starts an episode; -1 if none does."""
    index_T = torch.arange(starts_BT.shape[1], device=starts_BT.device)
    return torch.where(starts_BT, index_T, -1).cummax(dim=1).values


def padding_first(x_BSX: Tensor, num_new: int, lengths_B: Tensor) -> Tensor:
    """Reorder [memory ; padding ; new] to [padding ; memory ; new], so that no padding is between memory and tokens.

    Args:
        x_BSX: memory, then `num_new` new tokens (or their hidden states, keys, values) that begin with padding.
        num_new: T.
        lengths_B: number of new tokens of each batch row that are not padding.

    Returns:
        a tensor of the same shape.
    """
    length = x_BSX.shape[1]
    padding_B1 = (num_new - lengths_B)[:, None]
    index_S = torch.arange(length, device=x_BSX.device)
    is_new_BS = index_S >= length - num_new + padding_B1
    source_BS = torch.where(is_new_BS, index_S, (index_S - padding_B1).clamp(min=0))
    return x_BSX[torch.arange(len(x_BSX), device=x_BSX.device)[:, None], source_BS]


def _without_suffix(name: str) -> str:
    """Return the name of a tensor without its shape suffix: hidden for hidden_BMD."""
    return name.rpartition("_")[0]
