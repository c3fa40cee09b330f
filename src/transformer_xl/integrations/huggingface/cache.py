"""The cache that `generate` and `forward` pass on: a holder of one immutable Memory, and of what continues it.

In transformers others change the weights: optimizers, adapters, `load_state_dict`. So nobody can be told to prepare the
model for inference again; each cache keeps what it was begun with, and the weights are compared before it is continued.

Shape suffixes: B batch rows.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache
from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.inference import InferenceModel, prepare_inference
from transformer_xl.inference.fingerprint import Fingerprint
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Preparation:
    """A prepared model, and the weights that it was made from."""

    inference: InferenceModel
    _fingerprint: Fingerprint

    @staticmethod
    def of(model: LanguageModel, dtype: Dtype) -> Preparation | None:
        """Prepare a model, or return None if its weights are elsewhere: sharded over processes, or not loaded.

        Args:
            model: the model, in evaluation mode.
            dtype: as for `prepare_inference`.
        """
        for parameter in model.parameters():
            if parameter.is_meta or hasattr(parameter.data, "placements"):  # a DTensor
                return None
        return Preparation(prepare_inference(model, dtype), Fingerprint(model))

    def is_current(self, model: LanguageModel) -> bool:
        """Return whether it is of this model as it is now."""
        return self._fingerprint.matches(model)


def preparable_dtype(model: LanguageModel) -> Dtype | None:
    """Return the dtype to prepare a model for, or None if its own modules are needed.

    They are in training mode, which has dropout, with torch.compile, and under autocast to float16.
    """
    if model.training or torch.compiler.is_compiling():
        return None
    if not torch.is_autocast_enabled(model.device.type):
        return "float32"
    return "bfloat16" if torch.get_autocast_dtype(model.device.type) == torch.bfloat16 else None


class MemoryCache(Cache):
    """`past_key_values` of our models.

    `forward` replaces its `memory` by the next one, as other caches are extended in place. The memory itself is never
    changed: `copy.copy(cache)` continues from here again.
    """

    def __init__(self) -> None:
        """Begin without a memory."""
        super().__init__(layers=[])
        self.memory: Memory | None = None
        """The memory of earlier tokens, or None if there are none."""
        self.num_columns = 0
        """Number of columns of the input that were read, padding included."""
        self.preparation: Preparation | None = None
        """What computed the memory and continues it, or None if the model itself does."""
        self.is_checked = False
        """Whether `generate` has just compared the weights, so that the next call need not; it sets it for each."""

    @override
    def __repr__(self) -> str:
        return f"MemoryCache(num_columns={self.num_columns}, memory={self.memory})"

    def __bool__(self) -> bool:
        return True  # also without memory

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryCache:
        return copy.copy(self)  # the memory is a value

    def advance(self, memory: Memory, num_columns: int, preparation: Preparation | None) -> None:
        """Hold the memory after `num_columns` more columns of the input, which `preparation` computed."""
        self.memory, self.num_columns, self.preparation = memory, self.num_columns + num_columns, preparation

    @override
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_columns

    @property
    def max_cache_len(self) -> int:
        """Any number of columns, which PEFT asks for before it makes a prefix."""
        return -1

    @override
    def reset(self) -> None:
        self.memory, self.num_columns, self.preparation = None, 0, None

    @override
    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    @override
    def batch_select_indices(self, indices: Tensor) -> None:
        if self.memory is None:
            return
        rows = torch.as_tensor(indices).tolist()
        if rows != list(range(self.memory.batch_size)):
            self.memory = self.memory.select(rows)

    @override
    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.memory is not None:
            self.batch_select_indices(torch.arange(self.memory.batch_size).repeat_interleave(repeats))

    @override
    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise UserError("a memory cannot forget its newest tokens (crop); keep a copy from before them")

    @property
    @override
    def is_croppable(self) -> bool:
        return False
