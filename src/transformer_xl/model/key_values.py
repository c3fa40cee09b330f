"""KV cache: the memory used in inference, where weights do not change and no token needs to be projected twice.

The keys and values of a token are functions of the layer's hidden state and weights, so caching them instead of the
hidden state gives the same results. Position keys are also projected only once. In training, weights change from step
to step, so hidden states are cached instead (`memory.py`).

A memory is immutable, yet appending to it does not copy it: new rows are written after its last row, into storage that
later memories share, and each memory reads only up to its own end. Appending copies to new storage only if the storage
is full, if another memory has already written rows after this one's end, or if new tokens have padding or another
dtype.

With the setting key_offset half of a token's key is written into the row of the next token. So keys have a row more
than there are tokens, of which that half is known.

Shape suffixes: B batch size, T new tokens, M memory slots, S = M + T keys, C rows of storage (one for each token), P
distances, N heads, H head width, X any number of rows, Y = X + 1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.model.memory import LayerCache, Memory, padding_first

_MIN_FREE_ROWS = 64  # minimum number of free rows in new storage, so that short memories are rarely copied


class _Storage:
    """Preallocated tensors of the keys and values of one layer, to which rows (one for each token) are appended."""

    def __init__(self, k_BNXH: Tensor, v_BNXH: Tensor, *, num_free: int = 0) -> None:
        """Copy the rows to new storage that has room for half as many more, and for at least `num_free` more."""
        self.num_written = v_BNXH.shape[2]
        self.num_begun = k_BNXH.shape[2] - self.num_written  # rows of keys after it: 1 with key_offset
        capacity = k_BNXH.shape[2] + max(_MIN_FREE_ROWS, self.num_written // 2, num_free)
        *outer, d_head = k_BNXH.shape[0], k_BNXH.shape[1], k_BNXH.shape[3]
        with torch.inference_mode(False):  # inference tensors cannot be modified outside inference mode
            # zeros cost nothing extra: the operating system clears pages when they are first touched
            if k_BNXH.device.type == "cpu":  # transposed keys make the products of a single query faster on a CPU
                self.k_BNCH = k_BNXH.new_zeros(*outer, d_head, capacity).mT
            else:
                self.k_BNCH = k_BNXH.new_zeros(*outer, capacity, d_head)
            self.v_BNCH = v_BNXH.new_zeros(*outer, capacity, d_head)
        self.write(0, k_BNXH, v_BNXH)

    @property
    def capacity(self) -> int:
        """C: number of rows."""
        return self.v_BNCH.shape[2]

    def write(self, start: int, k_BNXH: Tensor, v_BNXH: Tensor) -> None:
        """Write rows from index `start` on, which become the last; keys may have one more, of which half is known."""
        self.num_written = start + v_BNXH.shape[2]
        self.k_BNCH[:, :, start : start + k_BNXH.shape[2]] = k_BNXH
        self.v_BNCH[:, :, start : self.num_written] = v_BNXH


class _PositionKeys:
    """The position keys of one layer, projected when first needed and again when more distances are needed.

    They depend only on the weights, so a memory shares them with all memories derived from it. They are stored
    transposed, which makes the products of a single query faster.
    """

    r_NHP: Tensor | None = None

    @property
    def num_distances(self) -> int:
        """P: number of distances with a position key; 0 before the first projection."""
        return 0 if self.r_NHP is None else self.r_NHP.shape[-1]


class KeyValues(LayerCache):
    """A cache of keys and values; `KeyValueCache` is the one of this package, where no gradient is wanted."""

    @abstractmethod
    def append(
        self, k_BTNH: Tensor, v_BTNH: Tensor, lengths_B: Tensor | None = None, starts_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor, KeyValues]:
        """Append the keys and values of T new tokens.

        Args:
            k_BTNH: keys.
            v_BTNH: values.
            lengths_B: number of tokens of each batch row that are not padding; padding comes first and is not cached.
            starts_BT: with key_offset, the new tokens that see none before them; None if all see one.

        Returns:
            keys and values (B, S, N, H) of memory and new tokens, in that order, and the next cache.
        """

    @abstractmethod
    def keys_of_positions(self, num_distances: int, project: Callable[[], Tensor]) -> Tensor:
        """Return the position keys (P, N, H) of the distances P - 1, ..., 1, 0.

        Args:
            num_distances: P.
            project: computes the keys (P, N, H) from the weights.
        """


@dataclass(frozen=True, eq=False, repr=False)
class KeyValueCache(KeyValues):
    """The keys and values of a layer for the last M tokens of each batch row: the rows of its storage up to `end`."""

    slot_dim = 2

    storage: _Storage
    end: int
    """Index after the last row of this cache; later rows belong to other caches."""
    length: int
    """M: number of memory slots."""
    attend_empty: bool
    """Whether empty slots, which contain zeros, are attended (the setting attend_empty_memory)."""
    position_keys: _PositionKeys = field(default_factory=_PositionKeys)

    @staticmethod
    def of(k_BNMH: Tensor, v_BNMH: Tensor, attend_empty: bool) -> KeyValueCache:
        """Return a cache of these rows in new storage, without position keys."""
        length = v_BNMH.shape[2]
        return KeyValueCache(_Storage(k_BNMH, v_BNMH), length, length, attend_empty)

    @property
    @override
    def token_shape(self) -> tuple[int, ...]:
        return self.storage.v_BNCH.shape[1], self.storage.v_BNCH.shape[3]

    def newest(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the newest keys and values as views, each of shape (B, N, `number`, H), with key_offset a key more."""
        start, end = self.end - number, self.end + self.storage.num_begun
        return self.storage.k_BNCH[:, :, start:end], self.storage.v_BNCH[:, :, start : self.end]

    @override
    def append(
        self, k_BTNH: Tensor, v_BTNH: Tensor, lengths_B: Tensor | None = None, starts_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor, KeyValueCache]:
        """Append the keys and values of T new tokens to the storage.

        Raises:
            UserError: gradients are required.
        """
        if k_BTNH.requires_grad and torch.is_grad_enabled():
            raise UserError("a KV cache passes no gradient; train the model itself, or use torch.inference_mode()")
        num_new, num_keys = k_BTNH.shape[1], self.length + k_BTNH.shape[1]
        has_offset, cache = bool(self.storage.num_begun), self
        if has_offset and self.length and starts_BT is not None and (not starts_BT.is_cpu or starts_BT[:, 0].any()):
            cache = super().map(Tensor.clone)  # clears the half that is known, which other memories share
        cache = cache.reserve(num_new, k_BTNH.dtype)
        start = cache.end - num_new
        if has_offset:
            begun_B1NH = cache.storage.k_BNCH[:, :, start : start + 1].transpose(1, 2)
            unpadded_BT = starts_BT if lengths_B is None else None  # padding would clear the half that is known
            k_BTNH = offset_halves(k_BTNH, torch.cat([begun_B1NH, k_BTNH], dim=1), num_new, None, unpadded_BT)
        cache.storage.write(start, k_BTNH.transpose(1, 2), v_BTNH.transpose(1, 2))
        k_BSNH, v_BSNH = (rows_BNSH.transpose(1, 2) for rows_BNSH in cache.newest(num_keys))
        if lengths_B is not None:
            if has_offset:
                starts_BS = None if starts_BT is None else F.pad(starts_BT, (self.length, 0))
                k_BSNH = offset_halves(k_BSNH[:, :-1], k_BSNH, num_new, lengths_B, starts_BS)
            else:
                k_BSNH = padding_first(k_BSNH, num_new, lengths_B)
            v_BSNH = padding_first(v_BSNH, num_new, lengths_B)
            storage = _Storage(k_BSNH.transpose(1, 2), v_BSNH.transpose(1, 2))
            cache = replace(self, storage=storage, end=num_keys)
            k_BSNH, v_BSNH = (rows_BNSH.transpose(1, 2) for rows_BNSH in cache.newest(num_keys))
        return k_BSNH[:, :num_keys], v_BSNH, cache

    def reserve(self, num_new: int, dtype: torch.dtype) -> KeyValueCache:
        """Return the next cache, into whose last T rows the caller writes the new keys and values at once.

        Args:
            num_new: T.
            dtype: the dtype of the new keys and values.
        """
        storage, start = self.storage, self.end
        is_full = start + num_new + storage.num_begun > storage.capacity
        if is_full or storage.num_written != start or storage.k_BNCH.dtype != dtype:
            k_BNMH, v_BNMH = self.newest(self.length)
            storage, start = _Storage(k_BNMH.to(dtype), v_BNMH.to(dtype), num_free=num_new), self.length
        storage.num_written = start + num_new
        # not `replace`, which takes Python longer
        return KeyValueCache(storage, start + num_new, self.length, self.attend_empty, self.position_keys)

    def without_newest(self, number: int) -> KeyValueCache:
        """Return the cache before its newest tokens, which at most one call has appended; it shares the storage."""
        return KeyValueCache(self.storage, self.end - number, self.length, self.attend_empty, self.position_keys)

    def release_later(self) -> None:
        """Let the next tokens overwrite the rows after this cache's end, of caches that nobody uses any more."""
        self.storage.num_written = self.end

    @override
    def keys_of_positions(self, num_distances: int, project: Callable[[], Tensor]) -> Tensor:
        """Return the position keys as a view; `project` is called only if fewer than P are cached."""
        cached, r_NHP = self.position_keys, self.position_keys.r_NHP
        if r_NHP is None or r_NHP.shape[-1] < num_distances:
            r_NHP = project().permute(1, 2, 0).contiguous()
            if cached.num_distances < num_distances:  # else another thread has projected more meanwhile
                cached.r_NHP = r_NHP
        return r_NHP[..., r_NHP.shape[-1] - num_distances :].permute(2, 0, 1)

    @override
    def views(self) -> dict[str, Tensor]:
        k_BNMH, v_BNMH = self.newest(self.length)
        return {"keys": k_BNMH, "values": v_BNMH}

    @override
    def tensors(self) -> dict[str, Tensor]:
        tensors = self.views()
        if self.storage.num_begun:  # of its last row a memory that goes on from here writes the other half
            k_BNYH = tensors["keys"] = tensors["keys"].clone()
            k_BNYH[:, :, -1, : _num_own(k_BNYH)] = 0
        return tensors

    @override
    def with_tensors(self, tensors: Mapping[str, Tensor]) -> KeyValueCache:
        cache = KeyValueCache.of(tensors["keys"], tensors["values"], self.attend_empty)
        return replace(cache, position_keys=self.position_keys)

    @override
    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> KeyValueCache:
        return replace(super().to(device, dtype), position_keys=_PositionKeys())


def offset_halves(
    own_BXNH: Tensor,
    before_BYNH: Tensor,
    num_new: int,
    lengths_B: Tensor | None = None,
    starts_BX: Tensor | None = None,
    is_token_BY: Tensor | None = None,
) -> Tensor:
    """Return keys of which half is that of the token before (the setting key_offset), one more than tokens.

    Of the last key only that half is known; the rest is zeros.

    Args:
        own_BXNH: the keys of X tokens, the last of which are new.
        before_BYNH: those of the X tokens and of the one before them.
        num_new: T.
        lengths_B: number of new tokens of each batch row that are not padding, which is moved to the front; or None.
        starts_BX: the tokens that see none before them, whose half is 0; None if all see one.
        is_token_BY: false where `before_BYNH` is of an empty slot, after which that half is 0; None for no such slot.
    """
    split = _num_own(own_BXNH)
    own_BXNH, before_BYNH = own_BXNH[..., :split], before_BYNH[..., split:]
    if is_token_BY is not None:
        before_BYNH = before_BYNH * is_token_BY[..., None, None]
    if lengths_B is not None:
        own_BXNH, before_BYNH = (padding_first(keys, num_new, lengths_B) for keys in (own_BXNH, before_BYNH))
    if starts_BX is not None:
        starts_BX = starts_BX if lengths_B is None else padding_first(starts_BX, num_new, lengths_B)
        before_BYNH = before_BYNH * F.pad(~starts_BX, (0, 1), value=True)[..., None, None]
    return torch.cat([F.pad(own_BXNH, (0, 0, 0, 0, 0, 1)), before_BYNH], dim=-1)


def _num_own(k_BXNH: Tensor) -> int:
    """Return how many numbers of a key are its token's own; the others are those of the token before."""
    return k_BXNH.shape[-1] - k_BXNH.shape[-1] // 2


class KeyValueMemory(Memory[KeyValueCache]):
    """The KV cache of a model: the keys and values of every layer."""
