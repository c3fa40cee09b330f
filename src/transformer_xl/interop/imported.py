"""What every reader of another program's files gives: a model in this package's terms.

A reader module offers two functions:

    recognizes(path) -> bool       whether the path looks like what it reads; cheap, never raises
    read(path) -> ImportedModel          the whole of it; UserError says what cannot be read or expressed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from transformer_xl.text.tokenizers import Tokenizer


@dataclass(frozen=True)
class ImportedModel:
    """A model of another program, in this package's terms."""

    model: dict[str, Any]
    """Settings of TransformerXLConfig."""
    train: dict[str, Any]
    """Settings of TrainConfig: segment and memory, as far as they are known."""
    evaluation: dict[str, Any]
    """Settings of EvaluationConfig: segment, memory, window and clamp."""
    weights: dict[str, Tensor]
    """By the names of TransformerXL.state_dict()."""
    tokenizer: Tokenizer | None
    """None: it stands elsewhere, and whoever converts has to name it."""
    remarks: tuple[str, ...] = ()
    """What was left out or deliberately differs, for the user."""
