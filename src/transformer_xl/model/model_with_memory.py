"""The base class of all models: layers that are given a memory of earlier inputs and return the next one.

Shape suffixes: B batch size, R recent tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_xl.config import Settings, UserError, check_type
from transformer_xl.model.memory import ContextLimits, LayerCache, Memory
from transformer_xl.ops.dropout import FastDropout

WEIGHT_STD, NORM_STD = 0.02, 0.02  # init_std of the authors' code


class ModelWithMemory(nn.Module, ABC):
    """Layers, and the memory that is passed to them with the next inputs."""

    config: Settings
    """Settings of the model."""
    context_limits: ContextLimits
    """The limits of a new memory if none are passed."""
    input_dropout: FastDropout
    """Dropout of the inputs of the first layer."""
    attn_implementation: str | None = None
    """The attention kernel, or `auto`; None for a model without one. Training puts the kernel that a run began with in
    place of `auto`."""
    layers: nn.ModuleList
    """The layers in order, all of the same class; training may compile, recompute or shard each separately."""
    cache_shapes: dict[type[LayerCache], tuple[int, ...]]
    """The `LayerCache` classes that the layers accept, and the `token_shape` (shape of what a cache holds of one token)
    that a cache of each class must have; empty for a model without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.activation_checkpointing = False
        """Whether the backward pass recomputes the activations inside each layer instead of saving them."""
        self.num_recent = 0
        """R: number of tokens before a segment that a memory keeps the ids of, for n-gram or value embeddings."""
        self.owner: int | None = None
        """Number of this model if `prepare_inference` made it, None otherwise. A KV cache belongs to one such model."""

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A parameter that has the dtype and device of memory and of the encodings of distances."""

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.like.device

    @property
    def limits_visible(self) -> bool:
        """Whether `forward` takes `visible_BT`, which limits how many keys each token attends to."""
        return False

    @abstractmethod
    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> Memory:
        """Return an empty memory; in a model that was prepared for inference, a KV cache if it supports one.

        Args:
            batch_size: B.
            context_limits: how far back attention can look, or None for the model's `context_limits`.

        Raises:
            UserError: the model does not support these limits.
        """

    def check_memory(self, memory: Memory | None, batch_size: int) -> Memory:
        """Return the memory, or an empty one if it is None.

        Raises:
            UserError: the memory is of another batch size, of another model or of another preparation.
        """
        if memory is None:
            return self.initial_memory(batch_size)
        check_type(memory, Memory, "memory", "give the memory that the model returned, or None")
        if memory.batch_size != batch_size:
            raise UserError(
                f"memory of batch size {memory.batch_size} for inputs of batch size {batch_size}; "
                "use memory.select(rows), or initial_memory for new sequences"
            )
        num_caches = len(self.layers) if self.cache_shapes else 0  # a model without memory has no caches
        num_recent = 0 if memory.recent_BR is None else memory.recent_BR.shape[1]
        if (
            len(memory.layers) != num_caches
            or any(cache.token_shape != self.cache_shapes.get(type(cache)) for cache in memory.layers[:1])
            or num_recent != self.num_recent
        ):
            raise UserError("this memory was made by another model; start with initial_memory")
        if memory.owner is not None and memory.owner != self.owner:
            raise UserError(
                "this memory holds keys and values of another model, or of other weights or another dtype than it has "
                "now; begin with a new initial_memory of the model that prepare_inference returned"
            )
        return memory

    def check_dtype(self, inputs: Tensor) -> None:
        """Check that inputs have the dtype of the weights, unless autocast converts both.

        Raises:
            UserError: they have another.
        """
        dtype, kind = self.like.dtype, inputs.device.type
        if inputs.dtype != dtype and (kind == "meta" or not torch.is_autocast_enabled(kind)):
            raise UserError(f"inputs of dtype {inputs.dtype}, and the model has {dtype}; give inputs.to({dtype})")

    def run_layer(self, layer: nn.Module, *inputs: Any) -> Any:
        """Call a layer, with activation checkpointing if it is enabled."""
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(layer, *inputs, use_reentrant=False)
        return layer(*inputs)


def init_weights(module: nn.Module) -> None:
    """Draw the initial weights of a linear layer or LayerNorm as in the authors' code; other modules stay unchanged."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, WEIGHT_STD)
    elif isinstance(module, nn.LayerNorm):
        nn.init.normal_(module.weight, 1.0, NORM_STD)
    if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
        nn.init.zeros_(module.bias)
