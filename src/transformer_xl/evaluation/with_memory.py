"""Evaluation with memory, as in the paper (section 3.2): segment after segment, every token once.

The text can be divided into sequences that are read as one batch. Each begins where a segment of its document begins,
and first reads a warm-up: whole segments before its own tokens, which fill the memory and are not scored. So every
token has the same position in the same segment as in the text read as one sequence, whatever the batch size. If the
warm-up covers the receptive field, each token also has the same loss. With `reset_memory` no sequence crosses a
document boundary; otherwise the whole text counts as one document.

Without memory, each segment can be read after an extended context: the tokens before it, again and unscored.

Shape suffixes: N documents, Q sequences, B batch size, T new tokens, X = T and their extended context, D model width,
K tokens of a text.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.evaluation.plan import EvaluationPlan, ScoredSpan, StepLosses, TokenizedText
from transformer_xl.inference import TokenModel, require_reading_memory
from transformer_xl.reader import Reader

_UNLIMITED = 2**62  # longer than any text, and small enough for int64
_KEYS_PER_STEP = 4096  # keys of all sequences of a batch: enough to keep the device busy


def losses(model: TokenModel, text: TokenizedText, plan: EvaluationPlan) -> Generator[StepLosses, None, None]:
    """Yield the loss of every token once; not in text order where several sequences are read as a batch.

    Raises:
        UserError: the batch size is above 1 for a model with an unlimited receptive field and no `warmup_tokens`.
    """
    warmup = warmup_length(model, plan)
    if warmup is None and not plan.reset_memory and plan.batch_size not in (None, 1):
        raise UserError(
            f"batch_size {plan.batch_size}: the state of {model.config.architecture} depends on all "
            "earlier tokens, so sequences that begin inside the text are not exact; "
            "give batch_size 1 or enough warmup_tokens"
        )
    yield from read_sequences(model, text, divide_text(text, plan, warmup), plan)


def receptive_field(model: TokenModel, plan: EvaluationPlan) -> int | None:
    """Return how many tokens before a segment its losses can depend on, through all layers, or None if on all of them.

    In a transformer with T new tokens and M memory slots, the first query of a segment sees M slots back. The hidden
    state in the oldest slot was computed in its own segment, which may have begun T - 1 tokens earlier, and could see M
    slots before that segment; so each further layer adds M, rounded up to whole segments. An attention window limits
    each layer to attention_window - 1 tokens back. With key_offset each layer sees one more. The state of a recurrent
    model depends on all earlier tokens. Without memory, losses depend on the tokens of the extended context.
    """
    memory, num_layers = plan.context_limits.memory_length, model.config.n_layers
    if not memory:
        return plan.extended_context_length
    if model.config.is_recurrent:
        return None
    num_more, window = int(model.config.has_key_offset), plan.context_limits.attention_window
    through_memory = memory + num_more + (num_layers - 1) * _round_up(memory + num_more, plan.segment_length)
    attended = through_memory if window is None else min(through_memory, num_layers * (window - 1 + num_more))
    # the n-grams of the oldest token, which may be of its own segment however short the memory is
    return attended + model.config.max_ngram - 1


def warmup_length(model: TokenModel, plan: EvaluationPlan) -> int | None:
    """Return the number of warm-up tokens of a sequence, in whole segments.

    None if only the whole text before the sequence would give the same losses as the undivided text.
    """
    needed = receptive_field(model, plan) if plan.warmup_tokens is None else plan.warmup_tokens
    return None if needed is None else _round_up(needed, plan.segment_length)


def _round_up(length: int, unit: int) -> int:
    return -(-length // unit) * unit


def memory_slots(model: TokenModel, length: int, plan: EvaluationPlan) -> int:
    """Return the number of slots needed for `length` tokens: the filled ones, or all of them.

    With the model setting `attend_empty_memory`, queries also attend to slots that no token has filled yet, as in the
    authors' code, so all slots count.
    """
    return plan.context_limits.memory_length if model.config.attends_empty_slots else _filled_slots(length, plan)


def _filled_slots(length: int, plan: EvaluationPlan) -> int:
    """Return the number of memory slots that are filled when the last segment of `length` tokens is read."""
    return min(plan.context_limits.memory_length, (length - 1) // plan.segment_length * plan.segment_length)


def rows_at_once(length: int, plan: EvaluationPlan) -> int:
    """Return the batch size for sequences of `length` tokens at most: the one that is set, or enough for the device."""
    return plan.batch_size or max(1, _KEYS_PER_STEP // (min(length, plan.segment_length) + _filled_slots(length, plan)))


class TextSequence(NamedTuple):
    """Consecutive tokens of a text that one batch row reads, as positions in the text."""

    first: int
    """Position of the first token that is read."""
    start: int
    """Position of the first scored token; the tokens before it are warm-up."""
    end: int
    """Position after the last token."""
    document_start: int
    """Position where the document starts; the token there is predicted from the BOS token."""

    @property
    def length(self) -> int:
        """Number of tokens read."""
        return self.end - self.first


def divide_text(text: TokenizedText, plan: EvaluationPlan, warmup: int | None) -> npt.NDArray[np.int64]:
    """Divide a text into sequences; each document gets a share of the batch size proportional to its length.

    Args:
        text: the text with its document starts.
        plan: the plan, of which segment length, batch size and `reset_memory` are used.
        warmup: number of warm-up tokens of each sequence, a multiple of the segment length, or None to leave documents
            undivided.

    Returns:
        the fields of each `TextSequence` (columns first, start, end, document_start), shape (Q, 4); an array, as a text
        may have millions of documents.
    """
    boundaries_N = text.boundaries(reset_memory=plan.reset_memory)
    start_N, end_N, total = boundaries_N[:-1], boundaries_N[1:], len(text.tokens_K)
    segments_N = -(-(end_N - start_N) // plan.segment_length)
    batch_size = 1 if warmup is None or plan.batch_size is None else min(plan.batch_size, total)
    share_N = -(-(end_N - start_N) * batch_size // total)
    sequences_N = np.minimum(share_N, segments_N)  # number of sequences of each document: each has at least a segment
    document_start_Q, document_end_Q, segments_Q, sequences_Q = (
        np.repeat(column_N, sequences_N) for column_N in (start_N, end_N, segments_N, sequences_N)
    )
    # index of each sequence within its document
    index_Q = np.arange(len(sequences_Q)) - np.repeat(np.cumsum(sequences_N) - sequences_N, sequences_N)
    start_Q = document_start_Q + index_Q * segments_Q // sequences_Q * plan.segment_length
    # start of the next sequence, before which this one ends
    next_Q = document_start_Q + (index_Q + 1) * segments_Q // sequences_Q * plan.segment_length
    first_Q = np.maximum(start_Q - min(warmup or 0, _UNLIMITED), document_start_Q)
    return np.stack([first_Q, start_Q, np.minimum(next_Q, document_end_Q), document_start_Q], axis=1)


def read_sequences(
    model: TokenModel, text: TokenizedText, sequences_Q4: npt.NDArray[np.int64], plan: EvaluationPlan
) -> Iterator[StepLosses]:
    """Read sequences, as returned by `divide_text`, in batches of similar length; yield losses of the scored tokens."""
    length_Q = sequences_Q4[:, 2] - sequences_Q4[:, 0]  # end - first
    longest_first_Q = np.argsort(-length_Q, kind="stable")
    begin = 0
    while begin < len(longest_first_Q):
        length = int(length_Q[longest_first_Q[begin]])
        batch_size = rows_at_once(length, plan)
        if begin == 0:  # the longest sequences; what is freed after them may count as used
            num_rows, num_new = min(batch_size, len(length_Q)), min(length, plan.segment_length)
            num_slots, advice = memory_slots(model, length, plan), "lower memory_length, segment_length or batch_size"
            require_reading_memory(
                model, "evaluation", num_rows=num_rows, num_new=num_new, num_slots=num_slots, advice=advice
            )
        rows_B4 = sequences_Q4[longest_first_Q[begin : begin + batch_size]].tolist()
        yield from _read_batch(model, text, [TextSequence(*row) for row in rows_B4], plan)
        begin += batch_size


def _read_batch(
    model: TokenModel, text: TokenizedText, batch: list[TextSequence], plan: EvaluationPlan
) -> Iterator[StepLosses]:
    """Read a batch, longest sequence first; a batch row is dropped when its sequence ends, so no mask is needed."""
    segment_length, longest = plan.segment_length, batch[0].length
    context_limits = replace(plan.context_limits, memory_length=memory_slots(model, longest, plan))
    reader = Reader.begin(model, len(batch), context_limits, segment_length=plan.num_inputs)
    for offset in range(0, longest, segment_length):
        batch_size = sum(sequence.length > offset for sequence in batch)
        inputs_BX, targets_BT = segment_tensors(
            text,
            batch[:batch_size],
            offset,
            min(segment_length, longest - offset),
            context_length=min(plan.extended_context_length, offset),
        )
        scored = [
            ScoredSpan(row=row, position=position, length=min(segment_length, sequence.end - position))
            for row, sequence in enumerate(batch[:batch_size])
            if (position := sequence.first + offset) >= sequence.start  # the warm-up is whole segments
        ]
        if batch_size < len(reader.num_read):
            reader = reader.select(range(batch_size))
        if plan.extended_context_length:  # read again with each segment, as the beginning of a text
            reader = Reader(model, reader.memory, segment_length=plan.num_inputs)
        hidden_BXD = reader.step(inputs_BX)
        if scored:
            hidden_BTD = hidden_BXD[:, -targets_BT.shape[1] :]
            yield model.nats(hidden_BTD, targets_BT, temperature=plan.softmax_temperature), scored


def segment_tensors(
    text: TokenizedText, batch: list[TextSequence], offset: int, length: int, *, context_length: int = 0
) -> tuple[Tensor, Tensor]:
    """Return inputs (B, X) and targets (B, T) of a segment, padded on the right, where no scored token attends.

    Args:
        text: the text.
        batch: sequences that are longer than `offset`.
        offset: number of tokens of each sequence before the segment.
        length: T.
        context_length: number of tokens before the segment that the inputs begin with, at most `offset`.
    """
    inputs_BX = np.full((len(batch), context_length + length), text.bos_token_id, dtype=np.int64)
    targets_BT = np.zeros((len(batch), length), dtype=np.int64)
    for row, sequence in enumerate(batch):
        start = sequence.first + offset
        end = min(start + length, sequence.end)
        targets_BT[row, : end - start] = text.tokens_K[start:end]
        first = start - context_length
        num_bos = 1 if first == sequence.document_start else 0
        inputs_BX[row, num_bos : end - first] = text.tokens_K[first - 1 + num_bos : end - 1]
    return torch.from_numpy(inputs_BX), torch.from_numpy(targets_BT)
