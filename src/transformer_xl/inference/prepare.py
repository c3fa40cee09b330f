"""`prepare_inference` makes of a model one that reads and generates fast, and whose weights are fixed.

    inference = prepare_inference(model, dtype="bfloat16")
    memory = inference.initial_memory(batch_size)              (a KV cache, if the model supports one)
    hidden_BTD, memory = inference(tokens_BT, memory)
    logits_BTV = inference.logits(hidden_BTD)

It has the contract of a language model, so what reads or generates takes either.

Shape suffixes: B batch size, T new tokens, D model width, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import BaseModelConfig
from transformer_xl.device import Precision, autocast, resolve_dtype
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits, Memory
from transformer_xl.model.precision import with_matrices_in
from transformer_xl.model.token_ids import TokenIds


class InferenceModel:
    """A model for reading and generating, of `prepare_inference`; no method computes gradients."""

    def __init__(self, model: LanguageModel, dtype: str) -> None:
        self.model = model
        """The model that computes, with converted weights: not the one that was prepared."""
        self.dtype = dtype
        """Of matrix products: float32 or bfloat16."""

    @property
    def config(self) -> BaseModelConfig:
        """Settings of the model."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.device

    @property
    def limits_visible(self) -> bool:
        """Whether calls take `visible_BT`, which limits how many keys each token attends to."""
        return self.model.limits_visible

    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> Memory:
        """Return an empty memory: a KV cache if the model supports one.

        Only this object continues it, as keys and values depend on the weights.

        Args:
            batch_size: B.
            context_limits: how far back attention can look, or None for the model's `context_limits`.

        Raises:
            UserError: the model does not support these limits.
        """
        with self.computing():
            return self.model.inference_memory(batch_size, context_limits)

    def generation_memory(
        self, batch_size: int, context_limits: ContextLimits | None = None, *, segment_length: int
    ) -> Memory:
        """Return an empty memory for generating token after token, as `LanguageModel.generation_memory`."""
        with self.computing():
            return self.model.generation_memory(batch_size, context_limits, segment_length=segment_length)

    def __call__(
        self, tokens: TokenIds | None = None, memory: Memory | None = None, **inputs: Any
    ) -> tuple[Tensor, Memory]:
        """Process T tokens of each batch row; arguments and results are those of `LanguageModel.forward`.

        Raises:
            UserError: as by the model; or the memory is of another prepared model.
        """
        with self.computing():
            return self.model(tokens, self.initial_memory_for(tokens, memory, inputs), **inputs)

    def hidden_states(
        self, tokens: TokenIds | None = None, memory: Memory | None = None, **inputs: Any
    ) -> tuple[list[Tensor], Memory]:
        """Return the hidden states of all layers, as `LanguageModel.hidden_states`."""
        with self.computing():
            return self.model.hidden_states(tokens, self.initial_memory_for(tokens, memory, inputs), **inputs)

    def initial_memory_for(self, tokens: TokenIds | None, memory: Memory | None, inputs: dict[str, Any]) -> Memory:
        """Return the memory, or an empty one for these inputs if it is None."""
        if memory is not None:
            return memory
        rows = inputs["inputs_BTD"] if tokens is None else torch.as_tensor(tokens)
        return self.initial_memory(len(rows) if rows.ndim > 1 else 1)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the next-token logits, shape (B, T, V), for every position."""
        with self.computing():
            return self.model.logits(hidden_BTD)

    def nats(self, hidden_BTD: Tensor, targets: TokenIds, *, temperature: float = 1.0) -> Tensor:
        """Return the cross-entropy of each target in nats (B, T), as `LanguageModel.nats`."""
        with self.computing():
            return self.model.nats(hidden_BTD, targets, temperature=temperature)

    def topk(self, hidden_BTD: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return logits and ids of the k most likely next tokens, (B, T, K) each, as `LanguageModel.topk`."""
        with self.computing():
            return self.model.topk(hidden_BTD, k)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute without gradients, and matrix products in the dtype."""
        with torch.no_grad(), autocast(self.device, self.dtype):  # pyrefly: ignore[bad-argument-type]
            yield


TokenModel = InferenceModel | LanguageModel
"""What reads tokens and predicts the next ones: a prepared model, or any language model, which is slower."""


def prepare_inference(model: LanguageModel, dtype: Precision = "float32") -> InferenceModel:
    """Return a model for reading and generating with the weights that a model has now.

    Args:
        model: the model, which is unchanged; after a change of its weights, prepare it again.
        dtype: of matrix products: float32, bfloat16, or auto for bfloat16 where the hardware supports it.
    """
    resolved = resolve_dtype(model.device, dtype)
    if resolved == "bfloat16":
        model = with_matrices_in(model, torch.bfloat16)
    return InferenceModel(model, resolved)
