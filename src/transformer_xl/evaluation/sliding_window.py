"""Evaluation without memory, as for the paper's vanilla model: a window that moves one token at a time.

Each token is predicted from exactly the `attention_window` tokens before it (fewer near the start of the text), and
all hidden states are recomputed for each token: about `attention_window` times the FLOPs of evaluation with memory
(Al-Rfou et al. 2018; paper sections 2 and 4.5).

Shape suffixes: B windows computed at once, W tokens of a window, D model width, K tokens of the text, N documents (with
`reset_memory`; otherwise the whole text counts as one document).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from transformer_xl.config import UserError
from transformer_xl.evaluation.plan import EvaluationPlan, ScoredSpan, StepLosses, TokenizedText
from transformer_xl.evaluation.with_memory import read_sequences
from transformer_xl.inference import TokenModel, require_reading_memory

_TOKENS_PER_STEP = 4096  # tokens of all windows of one step: enough to keep the device busy


def losses(model: TokenModel, text: TokenizedText, plan: EvaluationPlan) -> Generator[StepLosses, None, None]:
    """Yield the loss of every token once; the plan's batch size is the number of windows computed at once.

    The first `attention_window` tokens of each document are scored in one pass, each later token with its own window.

    Raises:
        UserError: the plan has a memory or `warmup_tokens`, or has no attention window.
    """
    window, memory_length = plan.context_limits.attention_window, plan.context_limits.memory_length
    if memory_length:
        raise UserError(
            f"method sliding-window has no memory, but memory_length is {memory_length} (set, or that of the run); "
            "give memory_length 0, or method memory"
        )
    if plan.warmup_tokens is not None:
        raise UserError("method sliding-window reads whole windows and has no warm-up; leave out warmup_tokens")
    if window is None:
        raise UserError("method sliding-window needs attention_window; give the number of tokens to predict from")
    boundaries_N = text.boundaries(reset_memory=plan.reset_memory)  # document starts and the end of the text: N + 1
    starts_N, ends_N = boundaries_N[:-1], boundaries_N[1:]
    # a pass over `window` tokens needs no limit, and some models do not support attention_window
    plan = replace(plan, context_limits=replace(plan.context_limits, attention_window=None))
    # the first window of each document; columns: the fields of TextSequence (first, start, end, document_start)
    sequences_N4 = np.stack([starts_N, starts_N, np.minimum(ends_N, starts_N + window), starts_N], axis=1)
    yield from read_sequences(model, text, sequences_N4, replace(plan, segment_length=window, batch_size=None))

    batch_size = plan.batch_size or max(1, _TOKENS_PER_STEP // window)
    num_windows = min(batch_size, int((ends_N - starts_N).max()) - window)
    if num_windows > 0:
        advice = "lower attention_window or batch_size"
        require_reading_memory(model, "evaluation", num_rows=num_windows, num_new=window, num_slots=0, advice=advice)
    for document_start, document_end in pairwise(boundaries_N.tolist()):
        for start in range(document_start + window, document_end, batch_size):
            end = min(start + batch_size, document_end)
            tokens_K = text.tokens_K[start - window : end].astype(np.int64)
            inputs_BW = np.lib.stride_tricks.sliding_window_view(tokens_K[:-1], window)
            targets_B1 = torch.from_numpy(tokens_K[window:, None])
            memory = model.initial_memory(end - start, plan.context_limits)
            hidden_BWD, _ = model(torch.from_numpy(inputs_BW.copy()), memory)
            nats_B1 = model.nats(hidden_BWD[:, -1:], targets_B1, temperature=plan.softmax_temperature)
            # the last tokens of the windows are consecutive tokens of the text: one row of losses
            yield nats_B1.transpose(0, 1), [ScoredSpan(row=0, position=start, length=end - start)]
