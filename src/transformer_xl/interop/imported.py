"""The model that a reader of another program's checkpoint returns, in this package's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from transformer_xl.text.tokenizers import Tokenizer


@dataclass(frozen=True)
class ImportedModel:
    """A model of another program: settings, weights and tokenizer in this package's names."""

    model: dict[str, Any]
    """Settings of TransformerXLConfig."""
    train: dict[str, Any]
    """segment_length and memory_length of TrainConfig, if known."""
    evaluation: dict[str, Any]
    """segment_length, memory_length, attention_window and clamp_length of EvaluationConfig, if known."""
    weights: dict[str, Tensor]
    """Tensors by the names of TransformerXL.state_dict()."""
    tokenizer: Tokenizer | None
    """The tokenizer, or None if the checkpoint has none and the user has to pass one."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about what was left out or deliberately differs."""
