"""A run that is served: its model prepared for inference, what reads its prompts, and the form of their memories."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from transformer_xl.apps.serve.config import ServerConfig
from transformer_xl.apps.serve.rows import MemoryState
from transformer_xl.baselines.recurrent import RecurrentCache
from transformer_xl.config import UserError
from transformer_xl.generation.generate import memory_plan, prompt_segment_length
from transformer_xl.inference import require_reading_memory
from transformer_xl.model.memory import ContextLimits, Memory
from transformer_xl.model.sizes import min_cache
from transformer_xl.model.transformer_xl import RelativeLanguageModel
from transformer_xl.progress import note
from transformer_xl.reader import STRIDE, Reader
from transformer_xl.run import Run, weights_digest


class ServedModel:
    """A run that is served, under a name."""

    def __init__(self, name: str, run: Run, config: ServerConfig | None = None) -> None:
        """Prepare a run.

        Args:
            name: the name by which requests choose it.
            run: the loaded run.
            config: dtype, and the memory lengths where the model has a memory; None for the defaults.

        Raises:
            UserError: the model does not support the memory length, or the memory of so many sequences certainly does
                not fit on the device.
        """
        config, has_memory = config or ServerConfig(), run.config.model.has_memory
        self.name, self.run = name, run
        if not has_memory and (config.memory_length or config.max_memory_length):
            note(f"{name} has no memory, so the memory length of the server is not for it")
        self.plan = memory_plan(run, config.memory_length if has_memory else None)
        """The run's evaluation settings; its memory length is that of requests which name none."""
        longest = (config.max_memory_length or 0) if has_memory else 0
        self.max_memory_length = max(self.plan.context_limits.memory_length, longest)
        """The longest memory that a request may ask for."""
        run.config.model.check_context_limits(memory_length=self.max_memory_length)
        self.inference = run.inference(config.dtype)
        """The model of the run, prepared in the dtype of matrix products."""
        self.weights_sha256 = weights_digest(run, self.inference.dtype)
        """Checksum of weights, settings of the model and dtype: a state fits only the model that it was taken from."""
        slots = self.generation_slots(self.max_memory_length)
        advice = "lower max_batch, memory_length or max_memory_length"
        require_reading_memory(self.inference, "serving", num_rows=config.max_batch, num_slots=slots, advice=advice)
        memory = self._first_memory()
        self._no_slots = memory.reset([0]).resized(0)  # from which all memories are derived
        # dtype and shape without slots of each tensor of a state, and its dimension of the slots
        self._state_layout = [
            (
                f"{name}_{index}",
                tensor.dtype,
                tuple(tensor.shape),
                None if isinstance(cache, RecurrentCache) else cache.slot_dim,
            )
            for index, cache in enumerate(self._no_slots.layers)
            for name, tensor in cache.tensors().items()
        ]
        if memory.recent_BR is not None:
            self._state_layout.append(("recent", torch.int64, tuple(memory.recent_BR.shape), None))

    def _first_memory(self) -> Memory:
        """Return a memory after the first tokens, from which all later ones are derived.

        They share its position keys, which are those of all distances that any of them needs. Projected when first
        needed, their last bits would depend on which request came first.
        """
        num_slots = self.max_slots + max(self.plan.segment_length, STRIDE) if self.run.config.model.has_memory else 0
        memory = self.inference.generation_memory(
            1, self._limits(num_slots), segment_length=self.run.config.train.num_inputs
        )
        return self.inference([[0, 0]], memory)[1]

    @property
    def attention_shape(self) -> tuple[int, int] | None:
        """Number of layers and of heads whose attention can be shown, or None if it cannot."""
        model = self.run.model
        return (model.config.n_layers, model.config.n_heads) if isinstance(model, RelativeLanguageModel) else None

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

    def empty_memory(self, num_slots: int) -> Memory:
        """Return an empty memory of batch size 1 to generate with; all of them share what is derived from weights."""
        return self._no_slots.resized(num_slots)

    def reader(self, memory_length: int, num_tokens: int, state: MemoryState | None = None) -> Reader:
        """Return what reads a prompt, after which text is generated.

        Args:
            memory_length: the memory length of the request.
            num_tokens: number of tokens to read; a memory that they would not fill has fewer slots.
            state: the memory that they continue, or None if there is none.

        Raises:
            UserError: the state does not fit this model.
        """
        slots, limits_visible = self.generation_slots(memory_length), self.inference.limits_visible
        num_before = 0 if state is None else state.num_valid
        memory = self.empty_memory(num_before if limits_visible else slots)
        if state is not None:
            counts = {"valid": torch.tensor([state.num_valid]), "position": torch.tensor([state.num_read])}
            memory = memory.with_tensors({**state.tensors, **counts})
        if not limits_visible:
            return Reader(self.inference, memory, segment_length=STRIDE)
        num_seen = num_before + num_tokens
        memory = memory.resized(min(slots, num_seen))
        segment_length = prompt_segment_length(self.inference, self.plan.segment_length, memory_length)
        return Reader(self.inference, memory, segment_length=segment_length, partial=num_seen > memory.length)

    def reads_as_score(self, memory_length: int) -> bool:
        """Return whether `reader` lets each token of a text see what it sees in `score`.

        Not without memory, where `score` has segments alone and text is generated from the newest tokens; nor where
        empty slots are attended, which makes the results depend on how many tokens are read at once.
        """
        config = self.inference.config
        attends_empty = config.attends_empty_slots
        return memory_length > 0 and not attends_empty

    def scoring_reader(self, memory_length: int, num_tokens: int) -> Reader:
        """Return what reads a text as `score` does, also where `reader` does not; arguments are those of `reader`."""
        return Reader.begin(
            self.inference,
            1,
            self._limits(memory_length),
            segment_length=self.plan.segment_length,
            partial=True,
            max_tokens=num_tokens,
        )

    def state_shapes(self, state: MemoryState) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the dtype and shape of each tensor of a state with these counts."""
        num_slots = state.num_valid if self.inference.limits_visible else state.memory_length
        return {
            name: (dtype, tuple(size + num_slots * (dim == slot_dim) for dim, size in enumerate(shape)))
            for name, dtype, shape, slot_dim in self._state_layout
        }

    @property
    def max_slots(self) -> int:
        """The largest number of memory slots of a state."""
        return max(self.max_memory_length, self.generation_slots(0))

    @property
    def max_state_bytes(self) -> int:
        """Size of the largest state, in bytes."""
        largest = MemoryState(0, self.max_slots, self.max_slots, self.max_slots)
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.state_shapes(largest).values())

    @property
    def limits_text(self) -> str:
        """The attention window and the clamp length, with which keys and values were computed."""
        limits = self.plan.context_limits
        return f"attention_window {limits.attention_window}, clamp_length {limits.clamp_length}"

    def row_bytes(self, memory_length: int) -> int:
        """Return the size of the memory of one sequence, in bytes: a lower bound."""
        size = 2 if self.inference.dtype == "bfloat16" else 4
        return size * min_cache(self.inference.config, self.generation_slots(memory_length))

    def _limits(self, memory_length: int) -> ContextLimits:
        return replace(self.plan.context_limits, memory_length=memory_length)
