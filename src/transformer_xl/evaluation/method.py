"""The interface of evaluation methods, which read a text with a model and yield the loss of every token, step by step.

Shape suffixes: B batch size, T new tokens, K tokens of a text, N documents.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transformer_xl.device import Precision, autocast
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.text.token_store import Tokens

if TYPE_CHECKING:
    from transformer_xl.evaluation.evaluate import EvaluationPlan

ProgressCallback = Callable[[int], None]
"""Called with the number of tokens processed since the last call."""


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """A text to score, as token ids."""

    tokens_K: Tokens
    """Token ids, possibly a memory-mapped array."""
    bos_token_id: int
    """Input at the first position of the text (or of each document)."""
    document_starts_N: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """Positions where documents start, in ascending order; the first is 0."""

    def boundaries(self, *, reset_memory: bool) -> npt.NDArray[np.int64]:
        """Return the positions where memory starts empty, and the end of the text, in ascending order."""
        inner_N = self.document_starts_N[1:] if reset_memory else self.document_starts_N[:0]
        inside_N = inner_N[inner_N < len(self.tokens_K)].astype(np.int64)
        return np.unique(np.concatenate([[0], inside_N, [len(self.tokens_K)]]))  # unique: drops empty documents


@dataclass(frozen=True)
class CountedLosses:
    """The losses of a batch row that are scored: its first `length`, of consecutive tokens of the text."""

    row: int
    """Index of the batch row."""
    position: int
    """Position of the first scored token in the text."""
    length: int
    """Number of scored tokens."""


StepLosses = tuple[Tensor, list[CountedLosses]]
"""Losses (B, T) of one step in nats, on the device, and which of them are scored."""


class Method(Protocol):
    """A method of computing the loss of every token."""

    @property
    def name(self) -> str:
        """Value of `EvaluationConfig.method`."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that only this method has, for JSON."""
        ...

    def steps(
        self, model: LanguageModel, text: TokenizedText, plan: EvaluationPlan
    ) -> Generator[StepLosses, None, None]:
        """Yield the loss of every token once, in any order; closing the generator restores the model."""
        ...


@contextmanager
def compute_context(device: torch.device, dtype: Precision, *, gradients: bool = False) -> Iterator[None]:
    """Compute in `dtype`, and in inference mode unless gradients are needed."""
    with torch.enable_grad() if gradients else torch.inference_mode(), autocast(device, dtype):
        yield
