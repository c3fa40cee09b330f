"""Scoring a text with memory: every token once, the same however the text is cut into segments and rows.

Memory carries what was read before, so the segment only sets the speed, and how much context beyond the memory the
later tokens of a segment have (none beyond the window, where one is set).

Shape suffixes: B rows, T new tokens, D model width, K tokens of the text.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transformer_xl.config import RelativeConfig, UserError
from transformer_xl.device import Precision, autocast
from transformer_xl.evaluation.plan import EvaluationPlan, Method, Part, Parts, Progress, Text
from transformer_xl.evaluation.stretches import Stretch, Stretches, segment_of, slots_needed
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.text.token_store import Tokens

_STEPS_AT_ONCE = 512  # losses left on the device before they are fetched, so that it need not wait for each step
_LOSSES_AT_ONCE = 2**20


@dataclass(frozen=True)
class Span:
    """Losses of one row of a step that belong to tokens following one another."""

    row: int
    columns: slice
    begin: int
    """Place of the first of these tokens in the text."""


Scored = tuple[Tensor, list[Span]]
"""Losses (B, T) on the device, and which of them count."""


@dataclass(frozen=True)
class Recurrence:
    """Reading on with memory: the paper's way."""

    name: str = "memory"

    @property
    def settings(self) -> dict[str, Any]:
        """Nothing beside the plan."""
        return {}

    def parts(self, model: LanguageModel, text: Text, plan: EvaluationPlan, progress: Progress | None = None) -> Parts:
        """The loss of every token, once; where there are several rows or documents, not in text order.

        Raises:
            UserError: rows of a model that looks back without end, and no warm-up that is to be enough.
        """
        warmup = plan.warmup_of(model)
        if warmup is None and plan.documents == "continue" and plan.rows not in (None, 1):
            raise UserError(
                f"rows {plan.rows}: {model.config.architecture} keeps something of all it read, so rows that begin "
                "inside the text are not exact; give 1, or say with a warmup how many tokens are to be enough"
            )
        return read(model, text, Stretches.cut(text, plan, warmup), plan, progress)


RECURRENCE: Method = Recurrence()


def read(
    model: LanguageModel, text: Text, stretches: Stretches, plan: EvaluationPlan, progress: Progress | None
) -> Parts:
    """Reads stretches of a text, those of about the same length side by side; the losses of what counts in them."""
    groups = stretches.groups(plan)
    return fetched(scored for group in groups for scored in _read_group(model, text, group, plan, progress))


@contextmanager
def computing(device: torch.device, precision: Precision, *, gradients: bool = False) -> Iterator[None]:
    """The context in which evaluation computes: the number format, and no gradients unless asked for."""
    with torch.enable_grad() if gradients else torch.inference_mode(), autocast(device, precision):
        yield


def attends_empty_memory(model: LanguageModel) -> bool:
    """Whether empty memory slots change the losses, so that the memory must have its full length."""
    return isinstance(model.config, RelativeConfig) and model.config.attend_empty_memory


def _read_group(
    model: LanguageModel, text: Text, group: list[Stretch], plan: EvaluationPlan, progress: Progress | None
) -> Iterator[Scored]:
    """Reads stretches side by side, longest first; a row goes when its stretch has ended, and so needs no mask."""
    device, segment = next(model.parameters()).device, plan.segment
    longest, context_limits = group[0].length, plan.context_limits
    if not attends_empty_memory(model):
        context_limits = replace(context_limits, memory_length=slots_needed(longest, plan))
    with computing(device, plan.precision):
        memory = model.inference_memory(len(group), context_limits)
    for offset in range(0, longest, segment):
        reading = sum(stretch.length > offset for stretch in group)
        inputs_BT, targets_BT = segment_of(text, group[:reading], offset, min(segment, longest - offset))
        spans = [run for row in range(reading) if (run := _counted(group[row], row, offset, segment))]
        with computing(device, plan.precision):
            if reading < memory.batch_size:
                memory = memory.select(range(reading))
            hidden_BTD, memory = model(inputs_BT.to(device), memory)
            nats_BT = model.nats(hidden_BTD, targets_BT) if spans else None
        if nats_BT is not None:
            yield nats_BT, spans
            if progress:
                progress(sum(span.columns.stop for span in spans))


def _counted(stretch: Stretch, row: int, offset: int, segment: int) -> Span | None:
    """What counts of a row's segment; nothing in its warm-up, which is whole segments."""
    start = stretch.first + offset
    if start < stretch.begin:
        return None
    return Span(row, slice(0, min(segment, stretch.end - start)), start)


def fetched(steps: Generator[Scored, None, None]) -> Parts:
    """Brings losses from the device, many steps at once."""
    waiting: list[Scored] = []
    num_waiting = 0
    with closing(steps):
        for nats_BT, spans in steps:
            waiting.append((nats_BT, spans))
            num_waiting += nats_BT.numel()
            if len(waiting) == _STEPS_AT_ONCE or num_waiting >= _LOSSES_AT_ONCE:
                yield from _fetch(waiting)
                waiting, num_waiting = list[Scored](), 0
        yield from _fetch(waiting)


def _fetch(waiting: list[Scored]) -> Iterator[Part]:
    if not waiting:
        return
    all_K = torch.cat([nats_BT.flatten() for nats_BT, _ in waiting]).cpu().numpy()
    begin = 0
    for nats_BT, spans in waiting:
        found_BT = all_K[begin : begin + nats_BT.numel()].reshape(nats_BT.shape)
        begin += nats_BT.numel()
        for span in spans:
            yield Part(span.begin, found_BT[span.row, span.columns])


def score_parts(model: LanguageModel, text: Text, plan: EvaluationPlan, progress: Progress | None = None) -> Parts:
    """The loss of every token of a text, once, by the plan's method, in parts that need not come in text order.

    The model is in evaluation mode meanwhile.

    Raises:
        UserError: what the method cannot do, or a weight that is not a number.
    """
    check_weights(model)
    was_training = model.training
    model.eval()
    try:
        with closing((plan.method or RECURRENCE).parts(model, text, plan, progress)) as parts:
            yield from parts
    finally:
        model.train(was_training)


def check_weights(model: LanguageModel) -> None:
    """Looks at all weights once.

    Raises:
        UserError: one of them is infinite or not a number; the message says in which tensor.
    """
    names = [name for name, _ in model.named_parameters()]
    whole = torch.stack([weight.detach().isfinite().all() for weight in model.parameters()]).tolist()
    odd = [name for name, good in zip(names, whole, strict=True) if not good]
    if odd:
        more = f" and {len(odd) - 1} more tensors" if odd[1:] else ""
        raise UserError(
            f"the weights {odd[0]}{more} hold numbers that are infinite or not numbers; train again with a lower "
            "learning rate, or take other weights (--weights best or last)"
        )


def ordered(parts: Iterable[Part], nats_K: npt.NDArray[Any]) -> float:
    """Puts losses into text order, in an array for all of them (which may lie on disk); gives their sum in float64."""
    total = 0.0
    for part in parts:
        nats_K[part.begin : part.begin + len(part.nats_K)] = part.nats_K
        total += part.sum
    return total


def token_nats(model: LanguageModel, tokens_K: Tokens, bos_token_id: int, plan: EvaluationPlan) -> npt.NDArray[Any]:
    """The loss of every token of a text in nats, in text order: (K,)."""
    width = next(model.parameters()).dtype
    nats_K = np.empty(len(tokens_K), dtype=np.float64 if width == torch.float64 else np.float32)
    ordered(score_parts(model, Text(tokens_K, bos_token_id), plan), nats_K)
    return nats_K


def sum_nats(
    model: LanguageModel, tokens_K: Tokens, bos_token_id: int, plan: EvaluationPlan, progress: Progress | None = None
) -> float:
    """The sum of all losses of a text, in nats (added up in float64)."""
    return sum((part.sum for part in score_parts(model, Text(tokens_K, bos_token_id), plan, progress)), 0.0)
