"""The model that a reader of another program's files returns, in this package's terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from transformer_xl.text.tokenizers import Tokenizer


@dataclass(frozen=True)
class ImportedModel:
    """A model of another program: settings, weights and tokenizer in this package's terms."""

    model: dict[str, Any]
    """Settings of TransformerXLConfig."""
    train: dict[str, Any]
    """segment_length and memory_length of TrainConfig, if known."""
    evaluation: dict[str, Any]
    """segment_length, memory_length, attention_window and clamp_length of EvaluationConfig, if known."""
    weights: dict[str, Tensor]
    """By the names of TransformerXL.state_dict()."""
    tokenizer: Tokenizer | None
    """None: the source comes without one, and the user has to give it."""
    remarks: tuple[str, ...] = ()
    """What was left out or deliberately differs, for the user."""
