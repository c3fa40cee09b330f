"""How the loss falls from a document's start, with memory reset there and with memory that continues.

Shape suffixes: K tokens of a text, G groups of distances, N documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer_xl.evaluation.evaluate import stream_losses
from transformer_xl.evaluation.plan import EvaluationPlan, ProgressCallback, TokenizedText
from transformer_xl.model.language_model import LanguageModel

_MIN_CHUNKS = 8  # of a text without documents: fewer would show the noise of single tokens


@dataclass(frozen=True, eq=False)
class LossByDistance:
    """Mean loss at distances 1, 2, 3 to 4, 5 to 8 and so on; the first token of a document is at distance 1."""

    last_G: npt.NDArray[np.int64]
    """The largest distance of each group: 1, 2, 4, 8, ..."""
    count_G: npt.NDArray[np.int64]
    """Number of tokens in each group."""
    nats_G: npt.NDArray[np.float64]
    """Mean loss in nats per token."""
    error_G: npt.NDArray[np.float64]
    """Standard error of that mean, taking tokens as independent; nan for a single token."""

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return an entry for each group as plain values, for JSON."""
        columns = (self.last_G, self.count_G, self.nats_G, self.error_G)
        names = ("up_to_distance", "tokens", "nats_per_token", "standard_error")
        groups = zip(*(column.tolist() for column in columns), strict=True)
        return [
            {name: None if value != value else value for name, value in zip(names, group, strict=True)}
            for group in groups
        ]


def with_chunks(text: TokenizedText, plan: EvaluationPlan) -> tuple[TokenizedText, int | None]:
    """Return the text with documents: if it is one document, it is split into chunks of equal length.

    Chunks are twice as long as memory and a segment together, and shorter if there would be fewer than eight.

    Returns:
        The text, and the length of its chunks in tokens; None if it has documents.
    """
    if len(text.boundaries(reset_memory=True)) > 2:
        return text, None
    length = max(
        1, min(2 * (plan.context_limits.memory_length + plan.segment_length), len(text.tokens_K) // _MIN_CHUNKS)
    )
    return TokenizedText(text.tokens_K, text.bos_token_id, np.arange(0, len(text.tokens_K), length)), length


def loss_by_distance(
    model: LanguageModel,
    text: TokenizedText,
    plan: EvaluationPlan,
    *,
    reset_memory: bool,
    progress: ProgressCallback | None = None,
) -> LossByDistance:
    """Score a text, and group the losses by distance from the start of their document.

    Args:
        model: any language model, in evaluation mode.
        text: the text, with its documents.
        plan: how it is scored.
        reset_memory: whether memory is reset at each document, or continues; the groups are the same.
        progress: called with the number of tokens scored since the last call.

    Raises:
        UserError: weights that are not finite.
    """
    edges_N = text.boundaries(reset_memory=True)
    longest = int(np.diff(edges_N).max())
    last_G = 2 ** np.arange((longest - 1).bit_length() + 1)
    count_G, sum_G, square_G = (np.zeros(len(last_G)) for _ in range(3))
    for part in stream_losses(model, text, replace(plan, reset_memory=reset_memory), progress):
        position_K = np.arange(part.position, part.position + len(part.nats_K))
        start_K = edges_N[np.searchsorted(edges_N, position_K, side="right") - 1]
        group_K = np.searchsorted(last_G, position_K - start_K + 1)
        nats_K = part.nats_K.astype(np.float64)
        for total_G, weight_K in ((count_G, None), (sum_G, nats_K), (square_G, nats_K**2)):
            total_G += np.bincount(group_K, weight_K, minlength=len(last_G))
    mean_G = sum_G / count_G
    spread_G = np.maximum(square_G / count_G - mean_G**2, 0)
    left_G = np.where(count_G > 1, count_G - 1, np.nan)
    return LossByDistance(last_G, count_G.astype(np.int64), mean_G, np.sqrt(spread_G / left_G))
