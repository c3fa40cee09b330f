"""A learned prefix of keys and values, PEFT's prefix tuning, as the memory before a text.

The virtual tokens are the newest slots of the memory, at the distances that tokens before the text would have, and as
these they leave it when as many tokens follow as it has slots. With key_offset the first token after them sees none
before it, so the second half of its key is zeros.

Shape suffixes: B batch rows, T new tokens, M memory slots, S = M + T, P tokens of the prefix, N heads, H head width, Y
as many rows as M or S, with key_offset one more (see key_values.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.inference import InferenceModel, TokenModel
from transformer_xl.model.key_values import KeyValueCache, KeyValues, offset_halves
from transformer_xl.model.memory import ContextLimits, Memory, padding_first
from transformer_xl.model.relative import RelativeModel


@dataclass(frozen=True, eq=False, repr=False)
class PrefixCache(KeyValues):
    """The keys and values of a layer that pass gradients to the prefix, but not to the tokens that follow it."""

    k_BYNH: Tensor
    v_BMNH: Tensor

    @override
    def append(
        self, k_BTNH: Tensor, v_BTNH: Tensor, lengths_B: Tensor | None = None, starts_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor, PrefixCache]:
        """Append keys and values, as `KeyValueCache.append` does."""
        num_new, num_old = k_BTNH.shape[1], self.v_BMNH.shape[1]
        has_offset = self.k_BYNH.shape[1] > num_old

        def join(old_BMNH: Tensor, new_BTNH: Tensor) -> Tensor:
            rows_BSNH = torch.cat([old_BMNH.to(new_BTNH.dtype), new_BTNH], dim=1)
            return rows_BSNH if lengths_B is None else padding_first(rows_BSNH, num_new, lengths_B)

        def join_keys(new_BTNH: Tensor) -> Tensor:
            old_BYNH = self.k_BYNH.to(new_BTNH.dtype)
            if not has_offset:
                return join(old_BYNH, new_BTNH)
            before_BYNH = torch.cat([old_BYNH[:, num_old:], new_BTNH], dim=1)
            new_BYNH = offset_halves(new_BTNH, before_BYNH, num_new, None, starts_BT if lengths_B is None else None)
            k_BYNH = torch.cat([old_BYNH[:, :num_old], new_BYNH], dim=1)
            if lengths_B is None:
                return k_BYNH
            starts_BS = None if starts_BT is None else F.pad(starts_BT, (num_old, 0))
            return offset_halves(k_BYNH[:, :-1], k_BYNH, num_new, lengths_B, starts_BS)

        kept = PrefixCache(join_keys(k_BTNH.detach())[:, num_new:], join(self.v_BMNH, v_BTNH.detach())[:, num_new:])
        return join_keys(k_BTNH)[:, : num_old + num_new], join(self.v_BMNH, v_BTNH), kept

    @override
    def keys_of_positions(self, num_distances: int, project: Callable[[], Tensor]) -> Tensor:
        """Return the position keys, which are not cached, because weights may be trained."""
        return project()


def prefix_memory(model: TokenModel, prefix: DynamicCache, batch_size: int, limits: ContextLimits) -> Memory:
    """Return the memory that a learned prefix makes: with gradients, or a KV cache if the model is a prepared one.

    Args:
        model: what reads the text.
        prefix: keys and values (B, N, P, H) of each layer.
        batch_size: B.
        limits: M, and how far back attention can look.

    Raises:
        UserError: the architecture has no keys and values in memory, or the prefix has another shape than it needs.
    """
    own = model.model if isinstance(model, InferenceModel) else model
    if not isinstance(own, RelativeModel) or (own.config.attends_empty_slots and own.config.norm_first):
        raise UserError(
            f"past_key_values is a DynamicCache, and the memory of {own.config.architecture} has no keys and values "
            "(or not these); give what the model returned, or to begin MemoryCache(); use prompt tuning or p-tuning"
        )
    layers: list[Any] = [*prefix.layers]
    config, rows = own.config, [(layer.keys, layer.values) for layer in layers]
    num_virtual = prefix.get_seq_length()
    wanted = (batch_size, config.n_heads, num_virtual, config.head_dim)
    if len(rows) != config.n_layers or any(one is None or one.shape != wanted for pair in rows for one in pair):
        found = tuple(rows[0][0].shape) if rows and rows[0][0] is not None else ()
        raise UserError(
            f"past_key_values has {len(rows)} layers of shape {found}, this model {config.n_layers} of {wanted}; leave "
            "num_layers, token_dim and num_attention_heads out of the configuration of PEFT, or pass MemoryCache()"
        )
    if num_virtual > limits.memory_length:
        raise UserError(
            f"a prefix of {num_virtual} tokens does not fit a memory of {limits.memory_length}; set num_virtual_tokens "
            f"to {limits.memory_length} or less, or memory_length and evaluation_memory_length to {num_virtual} or more"
        )
    empty = model.initial_memory(batch_size, limits)
    num_empty, count_B = limits.memory_length - num_virtual, torch.full_like(empty.valid_B, num_virtual)
    num_begun = int(config.has_key_offset)
    padded = [(F.pad(k, (0, 0, num_empty, num_begun)), F.pad(v, (0, 0, num_empty, 0))) for k, v in rows]
    if isinstance(model, InferenceModel):
        tensors = {"valid": count_B, "position": count_B}
        for index, (k_BNYH, v_BNMH) in enumerate(padded):
            tensors |= {f"keys_{index}": k_BNYH, f"values_{index}": v_BNMH}
        return empty.with_tensors(empty.tensors() | tensors)
    own.cache_shapes[PrefixCache] = own.cache_shapes[KeyValueCache]
    caches = tuple(PrefixCache(k_BNYH.transpose(1, 2), v_BNMH.transpose(1, 2)) for k_BNYH, v_BNMH in padded)
    memory = Memory.empty(caches, batch_size, limits, count_B.device, num_recent=own.num_recent)
    return replace(memory, valid_B=count_B, position_B=count_B, min_valid=num_virtual)
