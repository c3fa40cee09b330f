"""Scoring of spans given the text on both sides of them, with a model of two streams (XLNet, Yang et al. 2019).

The tokens of a span are hidden together and predicted one after another, each given those before it in an order: from
left to right, or in random orders. By the chain rule the losses of an order add up to that of the span, exactly. With
spans of one token, the sum over a text is its pseudo-log-likelihood (Salazar et al. 2020, arXiv 1910.14659).

A span sees the memory before the segment that it begins in, this segment, and what follows in the block of `perm_size`
tokens that begins with it. Memory is read segment by segment, so no state in it has seen a later segment. Each span has
a pass of its own over the block, as all other tokens must be read without it.

Shape suffixes: B spans read at once, T tokens of a block, Q hidden tokens of a span, K tokens of a text, O orders, V
tokens of the spans that begin in a segment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import replace
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.device import autocast
from transformer_xl.evaluation.plan import EvaluationPlan, ScoredSpan, StepLosses, TokenizedText
from transformer_xl.inference import TokenModel
from transformer_xl.model.memory import Memory
from transformer_xl.xlnet.two_streams import XLNet, visible_in_order

_TOKENS_PER_STEP = 4096  # tokens of all blocks that are read at once: enough to keep the device busy


def losses(model: TokenModel, text: TokenizedText, plan: EvaluationPlan) -> Generator[StepLosses, None, None]:
    """Yield the loss of every token once, the mean over the orders; the batch size is the number of spans read at once.

    Raises:
        UserError: the model does not read to both sides, or a setting does not fit.
    """
    for position, nats_OV in _losses_by_order(model, text, plan):
        nats_BV = nats_OV.T[None] if plan.keep_orders else nats_OV.mean(0, keepdim=True)
        yield nats_BV, [ScoredSpan(row=0, position=position, length=nats_OV.shape[1])]


def _losses_by_order(
    model: TokenModel, text: TokenizedText, plan: EvaluationPlan
) -> Generator[tuple[int, Tensor], None, None]:
    """Yield for each segment in which spans begin the place of the first one, and the losses of their tokens (O, V).

    Raises:
        UserError: as by `losses`.
    """
    assert isinstance(model, XLNet)  # the plan is of such a model
    plan.refuse_extended_context("method both-sides")
    if plan.warmup_tokens is not None:
        raise UserError("method both-sides reads each text from its start; leave out warmup_tokens")
    block = model.config.perm_size
    if plan.segment_length > block:
        raise UserError(
            f"segment_length {plan.segment_length:,} is above perm_size {block:,} of the model, the block in which it "
            f"learned to see later tokens; give {block:,} at most"
        )
    spans, limits = deque(text.spans()), plan.context_limits
    with torch.no_grad(), autocast(model.device, plan.dtype):
        for start, end in pairwise(text.boundaries(reset_memory=plan.reset_memory).tolist()):
            slots = limits.memory_length if model.config.attends_empty_slots else min(limits.memory_length, end - start)
            memory = model.initial_memory(1, replace(limits, memory_length=slots))
            for first in range(start, end, plan.segment_length):
                after = min(first + plan.segment_length, end)
                begun = list[range]()
                while spans and spans[0].start < after:
                    begun.append(spans.popleft())
                if begun:
                    read = range(first, min(first + block, end))
                    yield begun[0].start, _losses(model, memory, text, plan, begun, read)
                if after < end:
                    memory = model.two_streams(_ids(text, range(first, after)), memory).memory


def _losses(
    model: XLNet, memory: Memory, text: TokenizedText, plan: EvaluationPlan, spans: list[range], block: range
) -> Tensor:
    """Return the losses (O, V) of the tokens of spans that begin in the first segment of a block."""
    first, rows = spans[0].start, list[_Row]()
    for span in spans:  # one that is longer than the block sees nothing after it
        read = range(block.start, max(block.stop, span.stop))
        rows += [_Row(read, span, number, order) for number, order in enumerate(_orders(span, plan.num_orders))]
    nats_OV = torch.empty(plan.num_orders, spans[-1].stop - first, dtype=torch.float64)
    for read, same in groupby(rows, key=lambda row: row.read):
        group, size = list(same), plan.batch_size or max(1, _TOKENS_PER_STEP // len(read))
        for part in (group[index : index + size] for index in range(0, len(group), size)):
            rank_BT = torch.full((len(part), len(read)), -1)
            targets_BQ = torch.empty(len(part), max(len(row.span) for row in part), dtype=torch.int64)
            for index, row in enumerate(part):
                begin = row.span.start - read.start
                rank_BT[index, begin : begin + len(row.span)] = row.order
                # those of a shorter span repeat its last token
                targets_BQ[index] = torch.arange(begin, begin + targets_BQ.shape[1]).clamp(
                    max=begin + len(row.span) - 1
                )
            ids_BT = _ids(text, read).expand(len(part), -1)
            streams = model.two_streams(
                ids_BT,
                memory.select([0] * len(part)),
                visible=visible_in_order(rank_BT),
                targets=targets_BQ,
            )
            nats_BQ = model.nats(
                streams.query_BQD, ids_BT.gather(1, targets_BQ), temperature=plan.softmax_temperature
            ).cpu()
            for row, nats_Q in zip(part, nats_BQ, strict=True):
                at = slice(row.span.start - first, row.span.stop - first)
                nats_OV[row.number, at] = nats_Q[: len(row.span)]
                if len(row.span) == 1:
                    nats_OV[:, at] = nats_Q[0]
    return nats_OV


class _Row(NamedTuple):
    """A batch row: a span and one of its orders."""

    read: range
    """The tokens that are read."""
    span: range
    """Those that are hidden."""
    number: int
    """Number of the order."""
    order: Tensor
    """The place of each hidden token in the order."""


def _orders(span: range, number: int) -> list[Tensor]:
    """Return the places of a span's tokens in each order: left to right if it is one, else random; one for one token.

    They depend on the place of the span alone, so a text is scored alike whenever it is scored.
    """
    if number == 1 or len(span) == 1:
        return [torch.arange(len(span))]
    generator = torch.Generator().manual_seed(span.start)
    return [torch.randperm(len(span), generator=generator) for _ in range(number)]


def _ids(text: TokenizedText, places: range) -> Tensor:
    """Return the tokens at these places (1, T)."""
    return torch.from_numpy(text.tokens_K[places.start : places.stop].astype(np.int64))[None]
