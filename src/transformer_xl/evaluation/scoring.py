"""Scoring a text as one stream: every token once, in text order, with memory as long as wanted.

Memory carries what was read before, so the segment only sets the speed, and how much context beyond the memory the
later tokens of a segment have (none beyond the window, where one is set).

Shape suffixes: B rows, T new tokens, K tokens of the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transformer_xl.config import RunConfig, UserError
from transformer_xl.device import Precision, autocast, number_format
from transformer_xl.evaluation.metrics import Sums
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Reach
from transformer_xl.run_folder import Run
from transformer_xl.text.segments import SegmentStream, StreamPosition
from transformer_xl.text.token_store import Tokens, TokenSplit
from transformer_xl.text.vocabularies.words import WordVocabulary
from transformer_xl.text.vocabulary import Vocabulary

_TOKENS_AT_ONCE = 2**20  # tokens looked through at once
_PARTS_AT_ONCE = 512  # sums left on the device before they are fetched, so that it need not wait for each


Limit = int | Literal["none"]
"""A length in tokens; `none` takes the limit away."""


@dataclass(frozen=True)
class Plan:
    """How a text is scored."""

    segment: int
    """T: new tokens read in one step."""
    reach: Reach
    """How far attention looks back."""
    rows: int = 1
    """B: stretches of the text read side by side, each starting with an empty memory; 1: the text as it is."""
    precision: Precision = "float32"
    """Number format of matrix products."""

    @staticmethod
    def of(config: RunConfig, **wanted: Limit | None) -> Plan:
        """The run's evaluation settings, with those of `segment, memory, window, clamp` that are given replaced.

        Raises:
            UserError: a length that cannot be.
        """
        defaults = config.evaluation
        lengths: dict[str, Limit | None] = {
            "segment": defaults.segment or config.train.segment,
            "memory": config.train.memory if defaults.memory is None else defaults.memory,
            "window": defaults.window or config.model.window,
            "clamp": defaults.clamp or config.model.clamp_length,
        }
        assert wanted.keys() <= lengths.keys()
        lengths |= {name: value for name, value in wanted.items() if value is not None}
        segment, memory, window, clamp = (None if value == "none" else value for value in lengths.values())
        if segment is None or segment < 1:
            raise UserError(f"segment {segment}: wanted 1 or more")
        if memory is None:
            raise UserError("memory none: wanted a number of tokens, 0 or more")
        return Plan(segment, Reach(memory, window, clamp))


@dataclass(frozen=True)
class Evaluation:
    """The figures of a scored text, with how they were obtained."""

    tokens: int
    unknown: int
    """How many of them are the vocabulary's word for unknown words; 0 where it has none."""
    bytes: int
    """Of the text. Of part of a text of words or numbers, whose white space is not kept: its share of the whole."""
    nats_per_token: float
    bits_per_byte: float
    perplexity: float
    seconds: float
    tokens_per_second: float
    segment: int
    memory: int
    window: int | None
    clamp: int | None
    precision: str

    def as_dict(self) -> dict[str, Any]:
        """By name, for JSON."""
        return asdict(self)


Progress = Callable[[int], None]
"""Told how many tokens were read since the last call."""


def score_segments(
    model: LanguageModel, stream: SegmentStream, plan: Plan, progress: Progress | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields, segment by segment, the nats (B, T) and which of them count (B, T); on the model's device."""
    device = next(model.parameters()).device
    memory = model.initial_memory(stream.rows, plan.reach)
    for index in range(stream.num_segments):
        segment = stream.read(StreamPosition(segment=index)).trimmed()
        inputs_BT, targets_BT, counted_BT = (
            torch.from_numpy(np.ascontiguousarray(array))
            for array in (segment.inputs_BT, segment.targets_BT, segment.counted_BT)
        )
        inputs_BT, counted_BT = inputs_BT.to(device), counted_BT.to(device)
        with torch.inference_mode(), autocast(device, plan.precision):
            hidden_BTD, memory = model(inputs_BT, memory)
            nats_BT = model.nats(hidden_BTD, targets_BT)
        yield nats_BT, counted_BT
        if progress:
            progress(int(segment.counted_BT.sum()))


def token_nats(model: LanguageModel, tokens_K: Tokens, start_id: int, plan: Plan) -> npt.NDArray[Any]:
    """The loss of every token of a text in nats, in text order: (K,)."""
    assert plan.rows == 1
    parts = [nats_BT[0].cpu().numpy() for nats_BT, _ in score_segments(model, _stream(tokens_K, start_id, plan), plan)]
    return np.concatenate(parts)


def sum_nats(
    model: LanguageModel,
    tokens_K: Tokens,
    start_id: int,
    plan: Plan,
    progress: Progress | None = None,
) -> float:
    """The sum of all losses of a text, in nats (added up in float64)."""
    stream = _stream(tokens_K, start_id, plan)
    total = 0.0
    parts: list[Tensor] = []
    for nats_BT, counted_BT in score_segments(model, stream, plan, progress):
        parts.append((nats_BT * counted_BT).sum())
        if len(parts) == _PARTS_AT_ONCE:
            total += _fetch(parts)
            parts.clear()
    return total + (_fetch(parts) if parts else 0.0)


def _stream(tokens_K: Tokens, start_id: int, plan: Plan) -> SegmentStream:
    longest_row = -(-len(tokens_K) // plan.rows)
    return SegmentStream(tokens_K, rows=plan.rows, segment=min(plan.segment, longest_row), start_id=start_id)


def _parts(tokens_K: Tokens) -> Iterator[npt.NDArray[Any]]:
    """A text piece by piece, so that a large one is never in memory whole."""
    for start in range(0, len(tokens_K), _TOKENS_AT_ONCE):
        yield tokens_K[start : start + _TOKENS_AT_ONCE]


def _check_known(tokens_K: Tokens, num_known: int) -> None:
    if np.iinfo(tokens_K.dtype).max < num_known:
        return
    largest = max(int(part_K.max()) for part_K in _parts(tokens_K))
    if largest >= num_known:
        raise UserError(
            f"token {largest} is not one of the {num_known} the model knows; give a corpus of its vocabulary"
        )


def _count_bytes(vocabulary: Vocabulary, split: TokenSplit, tokens_K: Tokens) -> int:
    if len(tokens_K) == split.num_tokens:
        return split.num_bytes
    if vocabulary.kind in ("words", "integers"):  # decoded, it would be another text: unknown words, white space
        return max(1, round(split.bytes_per_token * len(tokens_K)))
    return sum(len(vocabulary.decode_bytes(part_K)) for part_K in _parts(tokens_K))


def _count_unknown(vocabulary: Vocabulary, tokens_K: Tokens) -> int:
    if not isinstance(vocabulary, WordVocabulary) or vocabulary.unknown is None:
        return 0
    unknown = vocabulary.words.index(vocabulary.unknown)
    return sum(int(np.count_nonzero(part_K == unknown)) for part_K in _parts(tokens_K))


def _fetch(parts: list[Tensor]) -> float:
    return float(torch.stack(parts).cpu().double().sum())


def evaluate(
    run: Run, split: TokenSplit, plan: Plan | None = None, *, limit: int | None = None, progress: Progress | None = None
) -> Evaluation:
    """Scores a split of a corpus as one stream.

    Args:
        run: a loaded run.
        split: the text, as `Corpus.open(DIR).split("test")` gives it; its vocabulary must be the run's.
        plan: lengths and precision; none: the run's evaluation settings.
        limit: number of tokens scored, from the start; none: all.
        progress: told how many tokens were read.

    Raises:
        UserError: the split is empty or holds tokens the model does not know, or the limit is below 1.
    """
    plan = plan or Plan.of(run.config)
    if limit is not None and limit < 1:
        raise UserError(f"limit {limit}: wanted 1 or more tokens")
    tokens_K = split.first(limit)
    if not len(tokens_K):
        raise UserError("there is nothing to score; the split is empty")
    _check_known(tokens_K, run.model.config.vocabulary_size)
    num_bytes = _count_bytes(run.vocabulary, split, tokens_K)
    was_training = run.model.training
    run.model.eval()
    start = time.perf_counter()
    try:
        nats = sum_nats(run.model, tokens_K, run.vocabulary.start_id, plan, progress)
    finally:
        run.model.train(was_training)
    seconds = time.perf_counter() - start
    sums = Sums(nats, len(tokens_K), num_bytes)
    return Evaluation(
        tokens=sums.tokens,
        unknown=_count_unknown(run.vocabulary, tokens_K),
        bytes=num_bytes,
        nats_per_token=sums.nats_per_token,
        bits_per_byte=sums.bits_per_byte,
        perplexity=sums.perplexity,
        seconds=seconds,
        tokens_per_second=sums.tokens / seconds,
        segment=plan.segment,
        memory=plan.reach.memory,
        window=plan.reach.window,
        clamp=plan.reach.clamp_length,
        precision=number_format(next(run.model.parameters()).device, plan.precision),
    )
