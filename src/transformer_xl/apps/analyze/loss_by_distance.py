"""How the loss decreases from a document's start, with memory reset there and with memory that continues.

`txl analyze attention` plots it. Shape suffixes: K tokens of a text, G groups of distances, N document starts
and the end of the text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from transformer_xl.evaluation.evaluate import stream_losses
from transformer_xl.evaluation.plan import EvaluationPlan, ProgressCallback, TokenizedText
from transformer_xl.inference import TokenModel

_MIN_CHUNKS = 8  # with fewer chunks, the mean loss near a start would be too noisy


def with_documents(text: TokenizedText, plan: EvaluationPlan) -> tuple[TokenizedText, int | None]:
    """Split a text that is a single document into chunks of equal length, and treat each chunk as a document.

    A chunk is twice as long as memory and a segment together, so that the plot extends beyond the tokens that see the
    start of the chunk. It is shorter if there would be fewer than eight chunks.

    Returns:
        The text with its document starts, and the chunk length in tokens; or the text unchanged and None if it has
        several documents.
    """
    if len(text.boundaries(reset_memory=True)) > 2:
        return text, None
    num_tokens, max_length = len(text.tokens_K), 2 * (plan.context_limits.memory_length + plan.segment_length)
    chunk_length = max(1, min(max_length, num_tokens // _MIN_CHUNKS))
    return TokenizedText(text.tokens_K, text.bos_token_id, np.arange(0, num_tokens, chunk_length)), chunk_length


def loss_by_distance(
    model: TokenModel,
    text: TokenizedText,
    plan: EvaluationPlan,
    *,
    reset_memory: bool,
    progress: ProgressCallback | None = None,
) -> list[dict[str, Any]]:
    """Score a text, and group the losses by distance from the start of their document.

    Args:
        model: as for `stream_losses`.
        text: the text, with the positions where its documents start.
        plan: how the text is scored; its `reset_memory` is replaced.
        reset_memory: whether memory is reset at the start of each document, or continues; the groups are the same.
        progress: called with the number of tokens scored since the last call.

    Returns:
        A dictionary for each group, for JSON: the largest distance, the number of tokens, the mean loss in nats per
        token, and its standard error, which takes tokens as independent and is None for a group of one token. The
        groups are distances 1, 2, 3 to 4, 5 to 8 and so on; the first token of a document is at distance 1.

    Raises:
        UserError: weights are not finite.
    """
    boundaries_N = text.boundaries(reset_memory=True)
    max_distance_G = 2 ** np.arange((int(np.diff(boundaries_N).max()) - 1).bit_length() + 1)
    count_G, sum_G, square_sum_G = (np.zeros(len(max_distance_G)) for _ in range(3))
    for part in stream_losses(model, text, replace(plan, reset_memory=reset_memory), progress):
        position_K = np.arange(part.position, part.position + len(part.nats_K))
        start_K = boundaries_N[np.searchsorted(boundaries_N, position_K, side="right") - 1]
        group_K = np.searchsorted(max_distance_G, position_K - start_K + 1)
        losses_K = part.nats_K.astype(np.float64)
        for total_G, weight_K in ((count_G, None), (sum_G, losses_K), (square_sum_G, losses_K**2)):
            total_G += np.bincount(group_K, weight_K, minlength=len(total_G))
    mean_G = sum_G / count_G
    variance_G = np.maximum(square_sum_G / count_G - mean_G**2, 0)
    error_G = np.sqrt(variance_G / np.where(count_G > 1, count_G - 1, np.nan))  # with count - 1 degrees of freedom
    return [
        {
            "up_to_distance": distance,
            "tokens": int(count),
            "nats_per_token": mean,
            "standard_error": None if np.isnan(error) else error,
        }
        for distance, count, mean, error in zip(
            *(column_G.tolist() for column_G in (max_distance_G, count_G, mean_G, error_G)), strict=True
        )
    ]
