"""Log-probabilities of continuations of texts; a context that several continuations share is read once.

A text is read in segments of `segment_length` tokens from its first, as the scorer of whole texts reads it
(`evaluation/memory.py`), so a continuation has the same losses here and there. A context may end inside a segment.
The memory then has the tokens of that segment too, in slots of their own, and what a batch row attends to is limited to
what it would see within the segment: `memory_length` tokens before it, and the segment itself.

Shape suffixes: B batch size, T new tokens of a step, D model width, R recent tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from transformer_xl.config import RelativeConfig
from transformer_xl.evaluation.plan import EvaluationPlan, compute_context, require_inference_memory
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory

_KEYS_PER_STEP = 4096  # keys of all batch rows: enough to keep the device busy


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
    model: LanguageModel,
    continuations: Sequence[Continuation],
    plan: EvaluationPlan,
    progress: Callable[[int], object] = lambda _: None,
) -> list[ContinuationScore]:
    """Return the loss of each continuation, in their order.

    A model without memory predicts each token from as many tokens as fit a segment, as in generation.

    Args:
        model: the model, in evaluation mode.
        continuations: what to score.
        plan: segment length, context limits, dtype and batch size (None: enough to keep the device busy), which changes
            no result.
        progress: called with the number of continuations scored since the last call.

    Raises:
        UserError: the memory of a batch certainly does not fit on the device.
    """
    scores = [ContinuationScore() for _ in continuations]
    groups: dict[tuple[int, ...], list[int]] = {}  # the continuations that share what is read once
    for index, continuation in enumerate(continuations):
        assert continuation.context_ids
        assert continuation.token_ids
        groups.setdefault(_shared(model, continuation, plan), []).append(index)
    contexts = sorted(groups, key=len, reverse=True)  # batch rows of similar length
    begin = 0
    while begin < len(contexts):
        num_slots = _num_slots(model, continuations, groups, contexts[begin:], plan)
        batch_size = plan.batch_size or max(1, _KEYS_PER_STEP // (num_slots + plan.segment_length))
        batch = contexts[begin : begin + batch_size]
        begin += len(batch)
        reader = _Reader.create(model, plan, len(batch), num_slots)
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
            )
            progress(len(part))
    return scores


def _shared(model: LanguageModel, continuation: Continuation, plan: EvaluationPlan) -> tuple[int, ...]:
    """Return the tokens that are read once for all continuations with the same context."""
    context_ids = continuation.context_ids
    if isinstance(model.config, RelativeConfig) and model.config.attend_empty_memory:
        # slots for the tokens of a segment would be attended while they are empty: only whole segments are shared
        return context_ids[: len(context_ids) // plan.segment_length * plan.segment_length]
    return context_ids


def _num_slots(
    model: LanguageModel,
    continuations: Sequence[Continuation],
    groups: dict[tuple[int, ...], list[int]],
    contexts: list[tuple[int, ...]],
    plan: EvaluationPlan,
) -> int:
    """Return the number of memory slots with which no token of these continuations sees less than it should."""
    memory_length = plan.context_limits.memory_length
    if isinstance(model.config, RelativeConfig) and model.config.attend_empty_memory:
        return memory_length
    longest = max(
        len(continuations[index].context_ids) + len(continuations[index].token_ids)
        for context in contexts
        for index in groups[context]
    )
    return max(1, min(memory_length + plan.segment_length - 1, longest))


def empty_memory(model: LanguageModel, plan: EvaluationPlan, num_rows: int, num_slots: int | None = None) -> Memory:
    """Return an empty memory; that of a model without memory holds the tokens of one segment, as in generation.

    Args:
        model: the model.
        plan: segment length, context limits and dtype.
        num_rows: B.
        num_slots: number of slots in place of the plan's memory length, unless that is 0.

    Raises:
        UserError: it certainly does not fit on the device.
    """
    limits = plan.context_limits
    has_memory = limits.memory_length > 0
    if has_memory and num_slots is not None:
        limits = replace(limits, memory_length=num_slots)
    require_inference_memory(
        "the evaluation",
        model,
        num_rows=num_rows,
        num_new=plan.segment_length,
        num_slots=limits.memory_length,
        dtype=plan.dtype,
        advice="lower memory_length or batch_size",
    )
    with compute_context(next(model.parameters()).device, plan.dtype):
        if has_memory:
            return model.inference_memory(num_rows, limits)
        return model.generation_memory(num_rows, limits, segment_length=plan.segment_length)


class _Reader:
    """Batch rows that read tokens, each in the segments of its own text."""

    def __init__(
        self, model: LanguageModel, plan: EvaluationPlan, memory: Memory, num_read: list[int], hidden_B1D: Tensor | None
    ) -> None:
        self.model, self.plan, self._memory = model, plan, memory
        self.num_read = num_read
        """Number of tokens that each row has read."""
        self.hidden_B1D = hidden_B1D
        """The hidden state of each row's last token; of a row that has read none, it is meaningless."""

    @staticmethod
    def create(model: LanguageModel, plan: EvaluationPlan, num_rows: int, num_slots: int) -> _Reader:
        """Return rows that have read nothing."""
        return _Reader(model, plan, empty_memory(model, plan, num_rows, num_slots), [0] * num_rows, None)

    def select(self, rows: list[int]) -> _Reader:
        """Return these rows as they are now; a row may occur several times."""
        with torch.inference_mode():
            hidden_B1D = None if self.hidden_B1D is None else self.hidden_B1D[rows]
            memory = self._memory.select(rows)
        return _Reader(self.model, self.plan, memory, [self.num_read[row] for row in rows], hidden_B1D)

    def read(self, tokens: Sequence[Sequence[int]], *, all_needed: bool = False) -> Iterator[tuple[Tensor, list[int]]]:
        """Read tokens, no row across the end of a segment in one step.

        Args:
            tokens: token ids for each row.
            all_needed: whether the results of all tokens are used, not only that of the last one; a model without
                memory then reads one token at a time.

        Yields:
            hidden states of a step (B, T, D), and how many of them are of new tokens of each row: the last ones.
        """
        plan, segment_length, done = self.plan, self.plan.segment_length, [0] * len(tokens)
        has_memory = plan.context_limits.memory_length > 0
        device = next(self.model.parameters()).device
        while True:
            room = [segment_length - count % segment_length for count in self.num_read]
            if not has_memory:
                room = [1 if all_needed else segment_length] * len(tokens)
            lengths = [min(free, len(ids) - start) for free, ids, start in zip(room, tokens, done, strict=True)]
            width = max(lengths)
            if not width:
                return
            rows = [
                [0] * (width - length) + list(ids[start : start + length])
                for ids, start, length in zip(tokens, done, lengths, strict=True)
            ]
            is_padded = min(lengths) < width
            with compute_context(device, plan.dtype):
                memory = self._memory
                if has_memory:
                    visible = [plan.context_limits.memory_length + count % segment_length for count in self.num_read]
                    memory = memory.limited(visible)
                hidden_BTD, self._memory = self.model(
                    torch.tensor(rows, device=device),
                    memory,
                    lengths_B=torch.tensor(lengths, device=device) if is_padded else None,
                )
                last_B1D = hidden_BTD[:, -1:]
                if self.hidden_B1D is not None and not all(lengths):
                    is_new_B11 = torch.tensor([length > 0 for length in lengths], device=device)[:, None, None]
                    last_B1D = torch.where(is_new_B11, last_B1D, self.hidden_B1D)
                self.hidden_B1D = last_B1D
            self.num_read = [count + length for count, length in zip(self.num_read, lengths, strict=True)]
            done = [start + length for start, length in zip(done, lengths, strict=True)]
            yield hidden_BTD, lengths


def _score(reader: _Reader, continuations: list[Continuation], scores: list[ContinuationScore]) -> None:
    """Read what is left of each continuation, and add up the losses of its tokens."""
    texts = [[*continuation.context_ids, *continuation.token_ids] for continuation in continuations]
    starts = [len(continuation.context_ids) for continuation in continuations]  # of the tokens that are scored
    if reader.hidden_B1D is not None and any(reader.num_read):
        _add_losses(reader, reader.hidden_B1D, [min(1, count) for count in reader.num_read], texts, starts, scores)
    rest = [text[count:-1] for text, count in zip(texts, reader.num_read, strict=True)]
    for hidden_BTD, lengths in reader.read(rest, all_needed=True):
        _add_losses(reader, hidden_BTD, lengths, texts, starts, scores)


def _add_losses(
    reader: _Reader,
    hidden_BTD: Tensor,
    lengths: list[int],
    texts: list[list[int]],
    starts: list[int],
    scores: list[ContinuationScore],
) -> None:
    """Add the losses of the tokens that the last hidden states of each row predict, and that are to be scored.

    Args:
        reader: the rows, after the step.
        hidden_BTD: hidden states of the last step.
        lengths: number of hidden states of each row that belong to tokens: the last ones.
        texts: all tokens of each row.
        starts: the position in its text of each row's first token to score.
        scores: to which the losses are added.
    """
    num_new = hidden_BTD.shape[1]
    targets_BT, is_scored_BT = torch.zeros(2, len(texts), num_new, dtype=torch.int64)
    for row, (text, start, length, end) in enumerate(zip(texts, starts, lengths, reader.num_read, strict=True)):
        if length:  # the last hidden state is of token `end - 1` and predicts token `end`
            targets_BT[row, num_new - length :] = torch.tensor(text[end - length + 1 : end + 1])
            first = max(end - length + 1, start)  # the first token that is scored
            is_scored_BT[row, num_new - (end + 1 - first) :] = 1
    with compute_context(hidden_BTD.device, reader.plan.dtype):
        nats_BT = reader.model.nats(hidden_BTD, targets_BT).cpu().double()
        best_BT = reader.model.topk(hidden_BTD, 1)[1][..., 0].cpu()
    nats_B = (nats_BT * is_scored_BT).sum(1).tolist()
    differs_B = ((best_BT != targets_BT) & (is_scored_BT > 0)).any(1).tolist()
    for score, nats, differs in zip(scores, nats_B, differs_B, strict=True):
        score.nats += nats
        score.is_greedy = score.is_greedy and not differs
