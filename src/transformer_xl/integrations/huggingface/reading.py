"""What `forward` of all classes does between its arguments and the hidden states: rows that read a batch once.

Shape suffixes: B batch rows, T columns of the input, D model width, L layers, N heads, S keys, X any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.inference import InferenceModel, TokenModel
from transformer_xl.integrations.huggingface.cache import MemoryCache, Preparation
from transformer_xl.integrations.huggingface.padding import Padding, Step, join_steps, read_steps
from transformer_xl.model.memory import Memory
from transformer_xl.model.transformer_xl import LayerTrace, RelativeLanguageModel
from transformer_xl.reader import Reader


@dataclass
class Reading:
    """Rows that read a batch once."""

    model: TokenModel
    """What computes: the model, or the one that was prepared of it."""
    inputs_BTX: Tensor
    padding: Padding | None
    cache: MemoryCache | None
    preparation: Preparation | None
    keeps_memory: bool
    """Whether the memory is returned."""
    has_states: bool
    """Whether the hidden states of all layers are returned."""
    sees_later: bool = False
    """Whether tokens see those after them, so also padding on the right would be seen."""
    num_at_once: int = 0
    """Number of columns that are computed at once."""
    is_new: bool = False
    """Whether there is nothing before the inputs."""
    states_BTD: tuple[Tensor, ...] | None = None
    """The hidden states of all layers after reading, if they are returned."""
    traces: list[LayerTrace] | None = None
    """Those of all layers after reading, if attention is returned."""
    reader: Reader = field(init=False)
    reads_with: TokenModel = field(init=False)
    """What the reader calls."""

    def __post_init__(self) -> None:
        self.reads_with = self.model

    def check_token_labels(self, labels: Tensor | None) -> None:
        """Check that labels of tokens have the shape of the inputs.

        Raises:
            UserError: they have not.
        """
        wanted = tuple(self.inputs_BTX.shape[:2])
        if labels is not None and labels.shape != wanted:
            raise UserError(f"labels of shape {tuple(labels.shape)}; expected {wanted}, a label for each token")

    def columns(self, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the last hidden states of all columns (B, T, D), 0 for padding on the left.

        Args:
            head: what is returned of them instead, (B, T, X); it is given parts of the columns.
        """
        if head is None or self.has_states or self.traces is not None:
            hidden_BTD = self.join(self.steps())
            return hidden_BTD if head is None else head(hidden_BTD)
        steps = (step._replace(hidden_BPX=head(step.hidden_BPX)) for step in self.steps())
        return join_steps(steps, self.inputs_BTX.shape[1])

    def steps(self, **arguments: Any) -> Iterator[Step]:
        """Read, and yield the steps; arguments are those of `read_steps`. Padding on the right is read, unless passed
        or seen.

        With all layers, the hidden states of a step are side by side.
        """
        is_read = self.padding is not None and self.padding.side == "right" and not self.sees_later
        padding = arguments.pop("padding", None if is_read else self.padding)
        return read_steps(self.reader, self.inputs_BTX, padding, self.num_at_once, **arguments)

    def join(self, steps: Iterable[Step]) -> Tensor:
        """Return the last hidden states of the steps in their columns, and keep those of all layers if asked for."""
        joined_BTX, width = join_steps(steps, self.inputs_BTX.shape[1]), self.model.config.d_model
        states_BTD = joined_BTX.split(width, dim=-1)
        if isinstance(self.reads_with, AllLayers) and self.padding is None and self.reads_with.num_calls == 1:
            states_BTD = self.reads_with.states_BTD  # those that were computed with, for gradients with respect to them
        if self.has_states:
            self.states_BTD = tuple(states_BTD)
        return states_BTD[-1]

    def attentions(self) -> tuple[Tensor, ...] | None:
        """Return the attention probabilities of all layers (B, N, T, S), or None if they are not asked for."""
        if self.traces is None:
            return None
        probabilities = [trace.terms.probabilities_BNTS for trace in self.traces]
        num_tokens = self.inputs_BTX.shape[1]
        if self.is_new and self.model.limits_visible and probabilities[0].shape[-1] > num_tokens:
            probabilities = [one_BNTS[..., -num_tokens:] for one_BNTS in probabilities]  # without empty slots
        return tuple(probabilities)


class AllLayers:
    """A model whose hidden states are those of all layers side by side, (B, T, (L + 1) * D)."""

    def __init__(self, model: TokenModel) -> None:
        self._model = model
        self.states_BTD: Sequence[Tensor] = ()
        """Those of the newest call."""
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Memory]:
        self.num_calls += 1
        self.states_BTD, memory = self._states(*args, **kwargs)
        return torch.cat([*self.states_BTD], dim=-1), memory

    def _states(self, *args: Any, **kwargs: Any) -> tuple[Sequence[Tensor], Memory]:
        return self._model.hidden_states(*args, **kwargs)


class Traced(AllLayers):
    """The same, computed with the reference kernel; it keeps the trace of each layer in `traces`."""

    def __init__(self, model: TokenModel, traces: list[LayerTrace]) -> None:
        super().__init__(model)
        self._traces = traces

    @override
    def _states(self, *args: Any, **kwargs: Any) -> tuple[Sequence[Tensor], Memory]:
        tokens, memory = args
        inputs = kwargs.pop("inputs", None)
        if kwargs:
            raise UserError("output_attentions is for rows without padding that is left out; give one row at a time")
        prepared = self._model
        if isinstance(prepared, InferenceModel):
            model, computing = prepared.model, prepared.computing()
        else:
            model, computing = prepared, torch.set_grad_enabled(torch.is_grad_enabled())
        assert isinstance(model, RelativeLanguageModel)
        with computing:
            _, after = model.embed(tokens, memory, inputs)  # for its recent tokens
            self._traces += model.trace(tokens, memory, inputs_BTD=inputs)
            last_BTD = model.output_dropout(model.final_norm(self._traces[-1].output_BTD))
        states_BTD = [*(trace.input_BTD for trace in self._traces), last_BTD]
        caches = [trace.cache for trace in self._traces]
        return states_BTD, after.advance(caches, last_BTD.shape[1])


def check_shape(inputs: Tensor, *, is_ids: bool) -> None:
    """Check that the inputs are rows of one token or more.

    Raises:
        UserError: they are not.
    """
    if inputs.ndim != (2 if is_ids else 3) or not inputs.shape[1]:
        name, wanted = "inputs_embeds", "(batch, tokens, d_model)"
        if is_ids:
            name, wanted = "input_ids", "(batch, tokens)"
        raise UserError(
            f"{name} of shape {tuple(inputs.shape)}; expected {wanted}, with one token or more (a text from nothing "
            "begins with generation_config.bos_token_id)"
        )


def check_cache(cache: Cache | None) -> tuple[MemoryCache | None, DynamicCache | None]:
    """Return the cache, and a learned prefix of keys and values, which the cache then counts as columns.

    Raises:
        UserError: it is the cache of other models.
    """
    if cache is None or isinstance(cache, MemoryCache):
        return cache, None
    if isinstance(cache, DynamicCache) and cache.get_seq_length():
        begun = MemoryCache()
        begun.num_columns = cache.get_seq_length()
        return begun, cache
    raise UserError(
        f"past_key_values is a {type(cache).__name__}; this model has a memory: give what it returned, or to begin "
        "MemoryCache()"
    )


def refuse_others(arguments: Mapping[str, Any]) -> None:
    """Check that no argument is given that means nothing here.

    Raises:
        UserError: one is given.
    """
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        if name == "position_ids":
            raise UserError(
                "positions are relative to each token, and rows of several texts (packing, padding_free) would see "
                "each other; leave position_ids out, and give each text a row"
            )
        raise UserError(f"forward has no argument {name}; leave it out")
