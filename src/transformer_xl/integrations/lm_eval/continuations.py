"""Log-probabilities of continuations of texts; a context that several continuations share is read once.

A text is read in segments of `segment_length` tokens from its first, as the scorer of whole texts reads it
(`evaluation/with_memory.py`), so a continuation has the same losses here and there.

Shape suffixes: B batch size, T new tokens of a step, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.inference import InferenceModel, require_reading_memory
from transformer_xl.model.memory import Memory
from transformer_xl.reader import Reader

_KEYS_PER_STEP = 4096  # keys of all batch rows: enough to keep the device busy
_ADVICE = "lower memory_length or batch_size"  # where the memory does not fit


@dataclass(frozen=True)
class Continuation:
    """Tokens to score after a context."""

    context_ids: tuple[int, ...]
    """At least one token."""
    token_ids: tuple[int, ...]
    """At least one token."""


@dataclass
class ContinuationScore:
    """The loss of a continuation."""

    nats: float = 0.0
    is_greedy: bool = True
    """Whether each of its tokens is the most likely one."""


def score_continuations(
    model: InferenceModel,
    continuations: Sequence[Continuation],
    plan: EvaluationPlan,
    progress: Callable[[int], object] = lambda _: None,
) -> list[ContinuationScore]:
    """Return the loss of each continuation, in their order.

    A model without memory predicts each token from as many tokens as fit a segment, as in generation.

    Args:
        model: the model, prepared with the plan's dtype.
        continuations: what to score.
        plan: segment length, context limits, softmax temperature and batch size (None: enough to keep the device busy),
            which changes no result.
        progress: called with the number of continuations scored since the last call.
    """
    scores = [ContinuationScore() for _ in continuations]
    groups: dict[tuple[int, ...], list[int]] = {}  # the continuations that share what is read once
    for index, continuation in enumerate(continuations):
        assert continuation.context_ids
        assert continuation.token_ids
        shared_ids = continuation.context_ids
        if model.config.attends_empty_slots:  # slots for a part of a segment would be attended while they are empty
            shared_ids = shared_ids[: len(shared_ids) // plan.segment_length * plan.segment_length]
        groups.setdefault(shared_ids, []).append(index)
    contexts = sorted(groups, key=len, reverse=True)  # batch rows of similar length
    limits, segment_length = plan.context_limits, plan.segment_length
    # without memory, a model that cannot limit what each token sees reads one at a time
    stride = None if limits.memory_length or model.limits_visible else 1
    begin = 0
    while begin < len(contexts):
        left = [continuations[index] for context in contexts[begin:] for index in groups[context]]
        longest = max(len(continuation.context_ids) + len(continuation.token_ids) for continuation in left)
        num_slots = min(limits.memory_length + segment_length - 1, longest)
        batch_size = plan.batch_size or max(1, _KEYS_PER_STEP // (num_slots + segment_length))
        batch = contexts[begin : begin + batch_size]
        begin += len(batch)
        if limits.memory_length:
            reader = Reader.begin(
                model, len(batch), limits, segment_length=segment_length, partial=True, max_tokens=longest
            )
        else:  # each token sees as many as fit a segment, whatever its position
            memory = empty_memory(model, plan, len(batch))
            reader = Reader(model, memory, segment_length=1 if model.limits_visible else segment_length)
        for _ in reader.read(batch):
            pass
        # the row of its context, and the index, of each continuation of these contexts
        rows = [(row, index) for row, context in enumerate(batch) for index in groups[context]]
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size]
            _score(
                reader.select([row for row, _ in part]),
                [continuations[index] for _, index in part],
                [scores[index] for _, index in part],
                stride,
                plan.softmax_temperature,
            )
            progress(len(part))
    return scores


def empty_memory(model: InferenceModel, plan: EvaluationPlan, num_rows: int) -> Memory:
    """Return an empty memory; that of a model without memory holds the tokens of one segment, as in generation.

    Args:
        model: the model, prepared with the plan's dtype.
        plan: segment length and context limits.
        num_rows: B.

    Raises:
        UserError: it certainly does not fit on the device.
    """
    num_slots = plan.context_limits.memory_length
    require_reading_memory(model, "evaluation", num_rows=num_rows, num_slots=num_slots, advice=_ADVICE)
    return model.generation_memory(num_rows, plan.context_limits, segment_length=plan.segment_length)


def _score(
    reader: Reader,
    continuations: list[Continuation],
    scores: list[ContinuationScore],
    stride: int | None,
    temperature: float,
) -> None:
    """Read what is left of each continuation, and add the losses of its tokens to its score."""
    texts = [[*continuation.context_ids, *continuation.token_ids] for continuation in continuations]
    rest = [text[count:-1] for text, count in zip(texts, reader.num_read, strict=True)]
    # hidden states of a step, and how many of each row belong to tokens: the last ones
    steps = reader.read(rest, stride=stride)
    if reader.last_hidden_B1D is not None:
        steps = chain([(reader.last_hidden_B1D, [min(1, count) for count in reader.num_read])], steps)
    for hidden_BTD, lengths in steps:
        num_new = hidden_BTD.shape[1]
        targets_BT, is_scored_BT = torch.zeros(2, len(texts), num_new, dtype=torch.int64)
        for row, (text, length, end) in enumerate(zip(texts, lengths, reader.num_read, strict=True)):
            if length:  # the last hidden state is of token `end - 1` and predicts token `end`
                targets_BT[row, num_new - length :] = torch.tensor(text[end - length + 1 : end + 1])
                first = max(end - length + 1, len(continuations[row].context_ids))  # the first token that is scored
                is_scored_BT[row, num_new - (end + 1 - first) :] = 1
        nats_BT = reader.model.nats(hidden_BTD, targets_BT, temperature=temperature).cpu().double()
        best_BT = reader.model.topk(hidden_BTD, 1)[1][..., 0].cpu()
        nats_B = (nats_BT * is_scored_BT).sum(1).tolist()
        differs_B = ((best_BT != targets_BT) & (is_scored_BT > 0)).any(1).tolist()
        for score, nats, differs in zip(scores, nats_B, differs_B, strict=True):
            score.nats += nats
            score.is_greedy = score.is_greedy and not differs
