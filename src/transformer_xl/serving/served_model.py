"""A run that is served: its model in the dtype of matrix products, and the memories that texts are read with.

Shape suffixes: B batch size, M memory slots, P distances.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import EvaluationConfig, RelativeConfig, UserError
from transformer_xl.device import Precision, resolve_dtype
from transformer_xl.evaluation.plan import EvaluationPlan, compute_context
from transformer_xl.generation.batch import PREFILL_SEGMENT
from transformer_xl.model.baselines.recurrent import RecurrentCache
from transformer_xl.model.key_values import KeyValueCache
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits, LayerCache, Memory
from transformer_xl.model.precision import with_matrices_in
from transformer_xl.model.sizes import min_cache
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.run_folder import Run, weights_digest
from transformer_xl.serving.rows import MemoryState

READING_SLICE = 128
"""Tokens of a prompt that are read between two steps of the sequences that are being generated."""

_SAFETENSORS_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.int64: "I64"}
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in _SAFETENSORS_NAMES.items()}


@dataclass(eq=False)
class ServedModel:
    """A run that is served, under a name."""

    name: str
    run: Run
    model: LanguageModel
    """The model of the run, with its matrices in the dtype of matrix products."""
    dtype: Precision
    plan: EvaluationPlan
    """The run's evaluation settings; its memory length is that of requests which name none."""
    max_memory_length: int
    """The longest memory that a request may ask for."""
    weights_sha256: str
    """Checksum of weights, settings of the model and dtype: a state fits only the model that it was taken from."""
    _position_keys: list[Any] = field(default_factory=list)  # of each layer
    _weights_version: int | None = None  # of the weights that these were computed with
    _state_layout: list[tuple[str, tuple[int, ...], int | None, str]] = field(default_factory=list)

    @staticmethod
    def create(
        name: str,
        run: Run,
        *,
        dtype: Precision = "float32",
        memory_length: int | None = None,
        max_memory_length: int | None = None,
    ) -> ServedModel:
        """Prepare a run.

        Args:
            name: the name by which requests choose it.
            run: the loaded run.
            dtype: data type of matrix products.
            memory_length: memory length of requests that name none, or None for that of the run's evaluation.
            max_memory_length: the longest memory that a request may ask for, or None for `memory_length`.

        Raises:
            UserError: the model does not support the memory length.
        """
        given: dict[str, Any] = {} if memory_length is None else {"memory_length": memory_length}
        settings = EvaluationConfig(method="memory", **given)
        plan = EvaluationPlan.resolve(run.config, settings, memory_lengths=run.memory_lengths)
        longest = max(plan.context_limits.memory_length, max_memory_length or 0)
        run.config.model.check_context_limits(memory_length=longest)
        device = next(run.model.parameters()).device
        resolved = resolve_dtype(device, dtype)
        model = with_matrices_in(run.model, torch.bfloat16) if resolved == "bfloat16" else run.model
        served = ServedModel(name, run, model, dtype, plan, longest, weights_digest(run, resolved))
        served._prepare()
        return served

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    @property
    def has_memory(self) -> bool:
        """Whether the model can have memory slots."""
        return not self.plan.memoryless

    @property
    def is_trimmed(self) -> bool:
        """Whether memory slots that no token has filled may be left out, without an effect on the results."""
        config = self.model.config
        return isinstance(config, RelativeConfig) and not config.attend_empty_memory

    @property
    def attention_shape(self) -> tuple[int, int] | None:
        """Number of layers and of heads whose attention can be shown, or None if it cannot."""
        model = self.model
        return (model.config.n_layers, model.config.n_heads) if isinstance(model, TransformerXL) else None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute in the dtype of this model, in inference mode."""
        with compute_context(self.device, self.dtype):
            yield

    def check_memory_length(self, memory_length: int | None) -> int:
        """Return the memory length of a request, that of the run if it names none.

        Raises:
            UserError: it is above the longest that is served, or the model has no memory.
        """
        if memory_length is None:
            return self.plan.context_limits.memory_length
        if memory_length > self.max_memory_length:
            raise UserError(
                f"memory_length {memory_length:,} is above {self.max_memory_length:,}, the longest that this server "
                f"allows for {self.name}"
            )
        return memory_length

    def generation_slots(self, memory_length: int) -> int:
        """Return the number of memory slots with which text is generated: without memory, those of one segment."""
        return memory_length or self.run.config.train.num_inputs - 1

    def generation_memory(self, memory_length: int, num_tokens: int) -> Memory:
        """Return an empty memory to read a prompt with and to generate.

        Args:
            memory_length: the memory length of the request.
            num_tokens: number of tokens to read; a memory that no token would fill has fewer slots.
        """
        limits = self._limits(memory_length)
        if self.is_trimmed:
            slots = self.generation_slots(memory_length)
            return self._empty(self._reading_slots(slots, PREFILL_SEGMENT, num_tokens))
        segment_length = self.run.config.train.num_inputs
        return self._with_positions(self.model.generation_memory(1, limits, segment_length=segment_length))

    def scoring_memory(self, memory_length: int, num_tokens: int) -> Memory:
        """Return an empty memory to score a text with, as `score` does."""
        if self.is_trimmed:
            return self._empty(self._reading_slots(memory_length, self.plan.segment_length, num_tokens))
        return self._with_positions(self.model.inference_memory(1, self._limits(memory_length)))

    def _reading_slots(self, memory_length: int, segment_length: int, num_tokens: int) -> int:
        """Return the slots with which a segment can be read in slices: those of its tokens too, if they get filled."""
        # n-gram embeddings know no more earlier tokens than there are slots
        return min(memory_length + segment_length, max(num_tokens, self.model.config.max_ngram, 1))

    def _empty(self, num_slots: int) -> Memory:
        return self._with_positions(self.model.inference_memory(1, self._limits(num_slots)))

    def restored(self, state: MemoryState, num_tokens: int) -> Memory:
        """Return the memory of a state, with room to read `num_tokens` tokens after it.

        Raises:
            UserError: the state does not fit this model.
        """
        counts = {"valid": torch.tensor([state.num_valid]), "position": torch.tensor([state.num_read])}
        if self.is_trimmed:
            memory = self.model.inference_memory(1, self._limits(state.num_valid))
        else:
            memory = self.generation_memory(state.memory_length if self.has_memory else 0, num_tokens)
        # keys and values have the dtype of matrix products, others that of the model
        dtypes = {tensor.dtype for tensor in state.tensors.values() if tensor.is_floating_point()}
        memory = memory.to(dtype=dtypes.pop() if len(dtypes) == 1 else None)
        memory = memory.with_tensors({**state.tensors, **counts})
        if not self.is_trimmed:
            return self._with_positions(memory)
        slots = self.generation_slots(state.memory_length)
        segment_length = max(PREFILL_SEGMENT, self.plan.segment_length)
        needed = self._reading_slots(slots, segment_length, state.num_valid + num_tokens)
        return self._with_positions(memory.resized(needed))

    def state_shapes(self, state: MemoryState) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the dtype (as safetensors writes it) and shape of each tensor of a state with these counts."""
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, shape, slot_dim, dtype in self._state_layout:
            if slot_dim is not None:
                num_slots = state.num_valid if self.is_trimmed else state.memory_length
                shape = (*shape[:slot_dim], num_slots, *shape[slot_dim + 1 :])
            shapes[name] = dtype, shape
        return shapes

    def state_bytes(self, state: MemoryState) -> int:
        """Return the size of the tensors of a state with these counts, in bytes."""
        return sum(_ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in self.state_shapes(state).values())

    @property
    def max_slots(self) -> int:
        """The largest number of memory slots of a state."""
        return max(self.max_memory_length, self.generation_slots(0))

    @property
    def max_state_bytes(self) -> int:
        """Size of the largest state, in bytes."""
        return self.state_bytes(MemoryState({}, 0, self.max_slots, self.max_slots, self.max_slots))

    @staticmethod
    def dtype_name(tensor: Tensor) -> str:
        """Return the dtype of a tensor, as safetensors writes it."""
        return _SAFETENSORS_NAMES.get(tensor.dtype, "")

    @property
    def limits_text(self) -> str:
        """The attention window and the clamp length, with which keys and values were computed."""
        limits = self.plan.context_limits
        return f"attention_window {limits.attention_window}, clamp_length {limits.clamp_length}"

    def row_bytes(self, memory_length: int) -> int:
        """Return the size of the memory of one sequence, in bytes: a lower bound."""
        size = 2 if resolve_dtype(self.device, self.dtype) == "bfloat16" else 4
        return size * min_cache(self.model.config, self.generation_slots(memory_length))

    def _limits(self, memory_length: int) -> ContextLimits:
        return replace(self.plan.context_limits, memory_length=memory_length)

    def _prepare(self) -> None:
        """Look at the shapes of a state, and project the position keys of all distances, which later memories share.

        Projected when first needed, their last bits would depend on which request came first.
        """
        probe = self.generation_memory(self.plan.context_limits.memory_length, 1)
        with self.computing():  # the dtype of keys and values is known after the first token
            _, probe = self.model(torch.zeros(1, 1, dtype=torch.int64), probe)
        self._state_layout = [
            (f"{name}_{index}", tuple(tensor.shape), _slot_dim(cache), _SAFETENSORS_NAMES[tensor.dtype])
            for index, cache in enumerate(probe.layers)
            for name, tensor in cache.tensors().items()
        ]
        if probe.recent_BR is not None:
            self._state_layout.append(("recent", tuple(probe.recent_BR.shape), None, "I64"))
        segment_lengths = PREFILL_SEGMENT, self.plan.segment_length, self.run.config.train.num_inputs
        slots = self.max_slots + max(segment_lengths) if self.has_memory else 0
        memory = self.model.inference_memory(1, self._limits(slots))
        if not any(isinstance(cache, KeyValueCache) for cache in memory.layers):
            return
        with self.computing():
            _, memory = self.model(torch.zeros(1, READING_SLICE, dtype=torch.int64), memory)
        self._weights_version = memory.weights_version
        self._position_keys = [cache.position_keys for cache in memory.layers if isinstance(cache, KeyValueCache)]

    def _with_positions(self, memory: Memory) -> Memory:
        if not self._position_keys:
            return memory
        if memory.weights_version != self._weights_version:
            raise UserError(f"the weights of {self.name} changed since it is served; serve it again")
        layers: list[KeyValueCache] = []
        for cache, keys in zip(memory.layers, self._position_keys, strict=True):
            assert isinstance(cache, KeyValueCache)
            layers.append(replace(cache, position_keys=keys))
        return replace(memory, layers=tuple(layers))


def _slot_dim(cache: LayerCache) -> int | None:
    """Return the dimension of the slots in the tensors of a cache, or None for a state without slots."""
    return None if isinstance(cache, RecurrentCache) else cache.slot_dim
