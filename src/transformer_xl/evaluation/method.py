"""What an evaluation method is: it reads a text with a model and gives the loss of every token, step by step.

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
    """Token ids to score."""

    tokens_K: Tokens
    """Token ids; may be on disk."""
    bos_token_id: int
    """Input at the first position of the text (or of each document)."""
    document_starts_N: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """Where documents start, in increasing order; the first is 0."""

    def boundaries(self, *, reset_memory: bool) -> npt.NDArray[np.int64]:
        """Return where memory starts empty, and the end of the text: the edges of the documents, or of the whole."""
        inner_N = self.document_starts_N[1:] if reset_memory else self.document_starts_N[:0]
        inside_N = inner_N[inner_N < len(self.tokens_K)].astype(np.int64)
        return np.unique(np.concatenate([[0], inside_N, [len(self.tokens_K)]]))  # unique: drops empty documents


@dataclass(frozen=True)
class CountedLosses:
    """Which losses of a batch row count: the first `length`, of consecutive tokens of the text."""

    row: int
    position: int
    """Position of the first of these tokens in the text."""
    length: int


StepLosses = tuple[Tensor, list[CountedLosses]]
"""Losses (B, T) of one step in nats, on the device, and which of them count."""


class Method(Protocol):
    """A way to give every token its loss."""

    @property
    def name(self) -> str:
        """Value of `EvaluationConfig.method`."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the method alone, for JSON."""
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
