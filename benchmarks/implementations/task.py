"""The task that `worker.py` passes to an implementation, and the interface that each implementation provides."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Task:
    """The settings of a model and of its training or inference, equal for all implementations."""

    implementation: str
    """Name of a module in this folder."""
    dtype: str
    """float32 or bfloat16."""
    variant: str
    """A variant that the implementation's `Runner` describes, or empty."""
    device: str
    n_layers: int
    d_model: int
    n_heads: int
    d_head: int
    d_ff: int
    vocab_size: int
    batch_size: int
    segment_length: int
    memory_length: int
    dropout: float
    learning_rate: float
    max_grad_norm: float
    clamp_length: int | None = None
    """Largest relative distance; longer ones are treated as this one. None means no limit. For inference only."""

    @property
    def model_sizes(self) -> dict[str, Any]:
        """The sizes of the model, by their names in `TransformerXLConfig`."""
        return {
            name: getattr(self, name) for name in ("n_layers", "d_model", "n_heads", "d_head", "d_ff", "vocab_size")
        }

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context in which matrix products are computed in the task's dtype."""
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)


class Implementation(Protocol):
    """A model in training or inference that carries its memory from step to step."""

    model: torch.nn.Module
    note: str
    """Description of its configuration."""
    versions: dict[str, str]

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Process one segment, and return its mean loss in nats, on the device.

        In training this is a complete optimizer step. In inference it is a forward pass; for a single token (T = 1) it
        also samples the next token.

        Args:
            inputs_BT: token ids (batch size B, length T), on the CPU.
            targets_BT: the next token of each input, on the CPU.
        """
        ...


def optimizer_step(
    loss: Tensor, model: torch.nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float
) -> None:
    """Compute the gradients of the loss, clip them, and update the weights."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
