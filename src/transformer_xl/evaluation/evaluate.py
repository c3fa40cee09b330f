"""Evaluating a run on a split of a corpus: metrics for the whole, and the loss of every token where wanted.

`evaluate` resolves the settings to an `EvaluationPlan`, lets the plan's method (`memory.py`, `sliding_window.py` or
`dynamic.py`) give every token its loss, sums them in float64, and divides once.

Shape suffixes: K tokens of the text.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from transformer_xl.config import EvaluationConfig, RunConfig, UserError, check_settings, merge
from transformer_xl.device import Precision, has_bfloat16, resolve_dtype
from transformer_xl.evaluation.dynamic import DynamicEvaluation
from transformer_xl.evaluation.memory import RecurrentMemory
from transformer_xl.evaluation.method import Method, ProgressCallback, StepLosses, TokenizedText
from transformer_xl.evaluation.metrics import Sums, chunks
from transformer_xl.evaluation.sliding_window import SlidingWindow
from transformer_xl.files import atomic_file
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits
from transformer_xl.run_folder import Run
from transformer_xl.text.token_store import Tokens, TokenSplit

_MAX_STEPS_ON_DEVICE = 512  # losses stay on the device that long, so that it need not wait for each step
_MAX_LOSSES_ON_DEVICE = 2**20


@dataclass(frozen=True)
class EvaluationPlan:
    """The settings of an evaluation, resolved: nothing is left to the run."""

    segment_length: int
    """T: new tokens read in one step."""
    context_limits: ContextLimits
    """Memory length, attention window and clamp length."""
    batch_size: int | None = None
    """B: sequences read at once; None: one, or with `reset_memory` as many documents as keep the machine busy."""
    warmup_tokens: int | None = None
    """Tokens each sequence reads before its own without counting them; None: as many as make the result exact."""
    reset_memory: bool = False
    """Whether each document is read as if it were the only text."""
    dtype: Precision = "float32"
    """Type of matrix products."""
    method: Method = field(default_factory=RecurrentMemory)

    @staticmethod
    def resolve(
        run: RunConfig, config: EvaluationConfig | None = None, *, train_split: TokenSplit | None = None
    ) -> EvaluationPlan:
        """Resolve settings: those in `config`, else the run's evaluation settings, else model and training settings.

        Args:
            run: settings of the run.
            config: settings that replace the run's evaluation settings, one by one.
            train_split: the training text, for method dynamic with the optimizer rms.

        Raises:
            UserError: settings that do not go together.
        """
        given = EvaluationConfig() if config is None else config
        chosen = check_settings(
            EvaluationConfig, merge(run.evaluation.model_dump(), given.model_dump(exclude_unset=True)), "evaluation"
        )
        if "dynamic" in given.model_fields_set and chosen.method != "dynamic":
            raise UserError(
                f"settings of method dynamic were given, but the method is {chosen.method}; give one of both"
            )
        if chosen.method == "sliding-window" and given.segment_length is not None:
            raise UserError(
                "segment-length was given, but method sliding-window reads windows of attention-window tokens"
            )

        def limit(name: Literal["attention_window", "clamp_length"]) -> int | None:
            """None set by the caller takes the limit away; None in the run's settings means the model's limit."""
            return getattr(chosen, name) or (None if name in given.model_fields_set else run.model.limit(name))

        memory_length = run.train.memory_length if chosen.memory_length is None else chosen.memory_length
        methods: dict[str, Method] = {
            "memory": RecurrentMemory(),
            "sliding-window": SlidingWindow(),
            "dynamic": DynamicEvaluation(chosen.dynamic, train_split.tokens if train_split else None),
        }
        return EvaluationPlan(
            segment_length=chosen.segment_length or run.train.segment_length,
            context_limits=ContextLimits(memory_length, limit("attention_window"), limit("clamp_length")),
            batch_size=chosen.batch_size,
            warmup_tokens=chosen.warmup_tokens,
            reset_memory=chosen.reset_memory,
            dtype=chosen.dtype,
            method=methods[chosen.method],
        )

    def as_dict(self, device: torch.device) -> dict[str, Any]:
        """Return the settings by name, for JSON; dtype auto as what it means on the device."""
        return {
            "method": self.method.name,
            "method_settings": self.method.settings,
            "segment_length": self.segment_length,
            **asdict(self.context_limits),
            "batch_size": self.batch_size,
            "warmup_tokens": self.warmup_tokens,
            "reset_memory": self.reset_memory,
            "dtype": resolve_dtype(device, self.dtype),
        }

    def remarks(self, device: torch.device) -> list[str]:
        """Return what is not wrong but may not be intended, a sentence each."""
        remarks: list[str] = []
        if self.dtype == "bfloat16" and not has_bfloat16(device):
            remarks.append("this machine has no bfloat16 instructions and emulates them; float32 is faster and exact")
        memory_length, window = self.context_limits.memory_length, self.context_limits.attention_window
        if self.method.name == "memory" and window is not None and memory_length < window - 1:
            remarks.append(
                f"memory-length {memory_length:,} is too short for attention-window {window:,}: depending on its "
                f"position in the segment, a token sees only {memory_length + 1:,} keys or more; "
                f"memory-length {window - 1} fills it"
            )
        return remarks


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics of a scored text, and the settings they were measured with."""

    tokens: int
    num_unknown: int
    """How many of them are the tokenizer's token for unknown words; 0 where it has none."""
    bytes: int
    """Of the text. Of part of a text of words or integers, whose white space is not kept: its share of the whole."""
    characters: int | None
    """Unicode characters; None for words or integers, where white space is not kept, and text that is not UTF-8."""
    words: int | None
    """Number of words, separated by white space; None for part of a text whose tokens are not words."""
    nats_per_token: float
    bits_per_byte: float
    bits_per_character: float | None
    perplexity: float
    """Per token."""
    word_perplexity: float | None
    """Per word of the text: line ends do not count as words, but their loss does."""
    seconds: float
    tokens_per_second: float
    method: str
    method_settings: dict[str, Any]
    segment_length: int
    memory_length: int
    attention_window: int | None
    clamp_length: int | None
    batch_size: int | None
    warmup_tokens: int | None
    reset_memory: bool
    dtype: str
    """float32 or bfloat16."""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields by name, for JSON."""
        return asdict(self)


def evaluate(
    run: Run,
    split: TokenSplit,
    config: EvaluationConfig | None = None,
    *,
    max_tokens: int | None = None,
    train_split: TokenSplit | None = None,
    progress: ProgressCallback | None = None,
    token_losses: Path | str | None = None,
) -> EvaluationResult:
    """Score a split of a corpus: every token once, as loss, perplexity and bits per byte.

    Args:
        run: a loaded run.
        split: the text, such as `Corpus.open(DIR).split("test")`; its tokenizer must be the run's.
        config: settings that replace the run's own evaluation settings, one by one; None replaces none.
        max_tokens: number of tokens to score, from the start of the split; None: all.
        train_split: the training text, for method dynamic with the optimizer rms.
        progress: called with the number of tokens scored since the last call.
        token_losses: a file to write, whole or not at all: the loss of every token in nats, in text order, as a numpy
            array (.npy) of float32.

    Raises:
        UserError: settings that do not go together, an empty split, token ids the model does not have, `max_tokens`
            below 1, or weights that are not finite.
    """
    plan = EvaluationPlan.resolve(run.config, config, train_split=train_split)
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"max-tokens {max_tokens}: wanted 1 or more")
    tokens_K = split.first(max_tokens)
    if not len(tokens_K):
        raise UserError("there is nothing to score; the split is empty")
    check_token_ids(tokens_K, run.model.config.vocab_size)
    text = TokenizedText(tokens_K, run.tokenizer.bos_token_id, split.document_starts)
    start = time.perf_counter()
    losses = stream_losses(run.model, text, plan, progress)
    if token_losses is not None:
        losses = _write_losses(losses, Path(token_losses), len(tokens_K))
    nats = sum((chunk.sum for chunk in losses), 0.0)
    seconds = time.perf_counter() - start
    return EvaluationResult(
        **Sums.of_split(nats, run.tokenizer, split, tokens_K).as_dict(),
        seconds=seconds,
        tokens_per_second=len(tokens_K) / seconds,
        **plan.as_dict(next(run.model.parameters()).device),
    )


def check_token_ids(tokens_K: Tokens, vocab_size: int) -> None:
    """Check that all token ids of a text are below the model's vocabulary size.

    Raises:
        UserError: one is not; the message names it.
    """
    if np.iinfo(tokens_K.dtype).max < vocab_size:
        return
    largest = max(int(chunk_K.max()) for chunk_K in chunks(tokens_K))
    if largest >= vocab_size:
        raise UserError(
            f"token id {largest} is not below the model's vocab_size {vocab_size}; give a corpus prepared with its "
            "tokenizer"
        )


def check_weights(model: LanguageModel) -> None:
    """Check that all weights are finite.

    Raises:
        UserError: one is not; the message names its tensor.
    """
    names = [name for name, _ in model.named_parameters()]
    finite = torch.stack([weight.detach().isfinite().all() for weight in model.parameters()]).tolist()
    odd = [name for name, good in zip(names, finite, strict=True) if not good]
    if odd:
        more = f" and {len(odd) - 1} more tensors" if odd[1:] else ""
        raise UserError(
            f"the weights {odd[0]}{more} are not finite; train again with a lower learning rate, or take another "
            "checkpoint (--checkpoint best or last)"
        )


@dataclass(frozen=True, eq=False)
class TokenLosses:
    """Losses of consecutive tokens of a text."""

    position: int
    """Position of the first of them."""
    nats_K: npt.NDArray[Any]
    """Loss of each in nats, in the dtype of the model's losses."""

    @property
    def sum(self) -> float:
        """Their sum, accumulated in float64."""
        return float(self.nats_K.sum(dtype=np.float64))


def stream_losses(
    model: LanguageModel, text: TokenizedText, plan: EvaluationPlan, progress: ProgressCallback | None = None
) -> Generator[TokenLosses, None, None]:
    """Yield the loss of every token of a text once, by the plan's method, in chunks that need not be in text order.

    Meanwhile the model is in evaluation mode.

    Raises:
        UserError: what the method cannot do, or weights that are not finite.
    """
    check_weights(model)
    was_training = model.training
    model.eval()
    try:
        with closing(plan.method.steps(model, text, plan)) as steps:
            pending: list[StepLosses] = []
            num_pending = 0
            for nats_BT, counted in steps:
                pending.append((nats_BT, counted))
                num_pending += nats_BT.numel()
                if progress:
                    progress(sum(losses.length for losses in counted))
                if len(pending) == _MAX_STEPS_ON_DEVICE or num_pending >= _MAX_LOSSES_ON_DEVICE:
                    yield from _fetch(pending)
                    pending, num_pending = list[StepLosses](), 0
            yield from _fetch(pending)
    finally:
        model.train(was_training)


def _fetch(steps: list[StepLosses]) -> Iterator[TokenLosses]:
    """Copy the losses of many steps from the device at once."""
    if not steps:
        return
    all_K = torch.cat([nats_BT.flatten() for nats_BT, _ in steps]).cpu().numpy()
    begin = 0
    for nats_BT, counted in steps:
        step_BT = all_K[begin : begin + nats_BT.numel()].reshape(nats_BT.shape)
        begin += nats_BT.numel()
        for losses in counted:
            yield TokenLosses(losses.position, step_BT[losses.row, : losses.length])


def losses_in_order(
    model: LanguageModel, text: TokenizedText, plan: EvaluationPlan, progress: ProgressCallback | None = None
) -> npt.NDArray[np.float64]:
    """Return the loss of every token of a text in nats, in text order; (K,)."""
    nats_K = np.full(len(text.tokens_K), np.nan)
    for chunk in stream_losses(model, text, plan, progress):
        nats_K[chunk.position : chunk.position + len(chunk.nats_K)] = chunk.nats_K
    return nats_K


def _write_losses(losses: Iterator[TokenLosses], file: Path, length: int) -> Iterator[TokenLosses]:
    """Pass the losses on, and write them to a file that appears when it is complete."""
    # written, not memory-mapped: with a full disk a mapped file would kill the process
    with atomic_file(file) as aside, aside.open("wb") as out:
        np.lib.format.write_array_header_1_0(out, {"descr": "<f4", "fortran_order": False, "shape": (length,)})
        begin = out.tell()
        for chunk in losses:
            out.seek(begin + 4 * chunk.position)
            out.write(chunk.nats_K.astype("<f4").tobytes())
            yield chunk
