"""Evaluation without memory, as the paper's vanilla model has it: a window that moves one token at a time.

Each token is predicted from exactly the `window` tokens before it (fewer near the start of the text), and everything
is computed anew for each: `window` times the work of reading on (Al-Rfou et al. 2018; paper sections 2 and 4.5).

Shape suffixes: R windows side by side, W tokens of a window, D model width, K tokens of the text, N documents.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from transformer_xl.config import UserError
from transformer_xl.evaluation.plan import EvaluationPlan, Parts, Progress, Text
from transformer_xl.evaluation.scoring import Scored, Span, computing, fetched, read
from transformer_xl.evaluation.stretches import Stretches
from transformer_xl.model.language_model import LanguageModel

_TOKENS_AT_ONCE = 4096  # of all windows side by side: enough for a machine to be busy


@dataclass(frozen=True)
class SlidingWindow:
    """The window that moves; `plan.rows` windows are computed at once, which changes no result."""

    context: int | None = None
    """Tokens each prediction sees; none: `plan.reach.window`. Longer than that, the window limits each layer alone."""
    name: str = "sliding-window"

    @property
    def settings(self) -> dict[str, Any]:
        """The context, where it is not the window."""
        return {} if self.context is None else {"context": self.context}

    def parts(self, model: LanguageModel, text: Text, plan: EvaluationPlan, progress: Progress | None = None) -> Parts:
        """The loss of every token, once.

        Raises:
            UserError: the plan has memory, or no window says how long the context is.
        """
        if plan.context_limits.memory_length:
            raise UserError(
                f"a moving window computes everything anew and has no memory, but memory {plan.context_limits.memory_length} is asked "
                "for (or is the run's own); give --memory 0 for the moving window, or --method memory"
            )
        if plan.warmup is not None:
            raise UserError("a moving window computes everything anew and warms up by nothing; leave out --warmup")
        context = self.context or plan.context_limits.attention_window
        if context is None:
            raise UserError("a moving window needs a length; give --window N, the tokens each prediction sees")
        return _moved(model, text, plan, context, progress)


def _moved(model: LanguageModel, text: Text, plan: EvaluationPlan, context: int, progress: Progress | None) -> Parts:
    """First the tokens that have fewer before them, each document's in one pass; then one window for each token."""
    edges_N = text.edges(plan.documents)
    heads = Stretches.whole(edges_N[:-1], np.minimum(edges_N[1:], edges_N[:-1] + context))
    # a pass over a window's tokens needs no window, and a recurrent model knows none
    window = plan.context_limits.attention_window if plan.context_limits.attention_window != context else None
    plan = replace(plan, context_limits=replace(plan.context_limits, attention_window=window))
    yield from read(model, text, heads, replace(plan, segment=context, rows=None), progress)
    yield from fetched(_windows(model, text, plan, context, progress))


def _windows(
    model: LanguageModel, text: Text, plan: EvaluationPlan, context: int, progress: Progress | None
) -> Generator[Scored, None, None]:
    device = next(model.parameters()).device
    rows = plan.rows or max(1, _TOKENS_AT_ONCE // context)
    for document, end in pairwise(text.edges(plan.documents).tolist()):
        for begin in range(document + context, end, rows):
            stop = min(begin + rows, end)
            read_K = text.tokens_K[begin - context : stop].astype(np.int64)
            inputs_RW = np.lib.stride_tricks.sliding_window_view(read_K[:-1], context)
            targets_R1 = torch.from_numpy(read_K[context:, None])
            with computing(device, plan.precision):
                tokens_RW = torch.from_numpy(inputs_RW.copy()).to(device)
                hidden_RWD, _ = model(tokens_RW, model.inference_memory(stop - begin, plan.context_limits))
                nats_R1 = model.nats(hidden_RWD[:, -1:], targets_R1)
            yield nats_R1.transpose(0, 1), [Span(0, slice(0, stop - begin), begin)]
            if progress:
                progress(stop - begin)
