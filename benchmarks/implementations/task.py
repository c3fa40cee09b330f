"""What an implementation of `training.py` or `inference.py` is given, and what it must offer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Task:
    """What is to be trained, and how."""

    implementation: str
    """Name of the module beside this file."""
    dtype: str
    """float32 or bfloat16."""
    variant: str
    """What the implementation is asked to do otherwise; empty: nothing."""
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
    """Distances above this count as this one; none: no limit. For reading alone."""

    def autocast(self) -> AbstractContextManager[object]:
        """Matrix products in the wanted number format."""
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)


class Implementation(Protocol):
    """A model in training, or one that reads, carrying its memory from step to step."""

    model: torch.nn.Module
    note: str
    """How it is set, in words."""
    versions: dict[str, str]

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """One whole step on tokens (B, T) that lie on the CPU; gives the mean loss in nats, on the device.

        In training with everything up to the changed weights; in reading with each target's nats, and for a single
        token (T = 1) with the choice of the next.
        """
        ...
