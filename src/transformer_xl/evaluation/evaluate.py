"""Evaluation of a run on a split of a corpus: metrics of the whole split, and optionally the loss of every token.

`evaluate` resolves the settings to an `EvaluationPlan`. The plan's method (`memory.py`, `sliding_window.py` or
`dynamic.py`) computes the loss of every token; the losses are summed in float64 and divided once.

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

# losses are copied from the device after this many steps or losses, because each copy synchronizes with the device
_MAX_STEPS_ON_DEVICE = 512
_MAX_LOSSES_ON_DEVICE = 2**20


@dataclass(frozen=True)
class EvaluationPlan:
    """The resolved settings of an evaluation; none of them depends on the run any more."""

    segment_length: int
    """T: new tokens read in each step."""
    context_limits: ContextLimits
    """Memory length, attention window and clamp length."""
    batch_size: int | None = None
    """B: sequences read at once, or None for one (with `reset_memory`: enough documents to keep the device busy)."""
    warmup_tokens: int | None = None
    """Unscored tokens that each sequence reads first, or None for the smallest number that gives exact losses."""
    reset_memory: bool = False
    """Whether the memory is emptied at the start of each document."""
    dtype: Precision = "float32"
    """Data type of matrix products."""
    method: Method = field(default_factory=RecurrentMemory)

    @staticmethod
    def resolve(
        run: RunConfig, config: EvaluationConfig | None = None, *, train_split: TokenSplit | None = None
    ) -> EvaluationPlan:
        """Resolve settings: those in `config`, else the run's evaluation settings, else model and training settings.

        Args:
            run: settings of the run.
            config: settings that override individual evaluation settings of the run.
            train_split: the training text, required by method dynamic with the optimizer rms.

        Raises:
            UserError: settings contradict each other.
        """
        overrides = EvaluationConfig() if config is None else config
        merged = check_settings(
            EvaluationConfig, merge(run.evaluation.model_dump(), overrides.model_dump(exclude_unset=True)), "evaluation"
        )
        if "dynamic" in overrides.model_fields_set and merged.method != "dynamic":
            raise UserError(
                f"settings of method dynamic were given, but the method is {merged.method}; "
                "give method dynamic, or leave the settings out"
            )
        if merged.method == "sliding-window" and overrides.segment_length is not None:
            raise UserError(
                "segment-length was given, but method sliding-window reads windows of attention-window tokens; "
                "leave segment-length out"
            )

        def limit(name: Literal["attention_window", "clamp_length"]) -> int | None:
            """Return a limit; an explicit None in `config` removes it, a None in the run means the model's limit."""
            return getattr(merged, name) or (None if name in overrides.model_fields_set else run.model.limit(name))

        memory_length = run.train.memory_length if merged.memory_length is None else merged.memory_length
        methods: dict[str, Method] = {
            "memory": RecurrentMemory(),
            "sliding-window": SlidingWindow(),
            "dynamic": DynamicEvaluation(merged.dynamic, train_split.tokens if train_split else None),
        }
        return EvaluationPlan(
            segment_length=merged.segment_length or run.train.segment_length,
            context_limits=ContextLimits(memory_length, limit("attention_window"), limit("clamp_length")),
            batch_size=merged.batch_size,
            warmup_tokens=merged.warmup_tokens,
            reset_memory=merged.reset_memory,
            dtype=merged.dtype,
            method=methods[merged.method],
        )

    def as_dict(self, device: torch.device) -> dict[str, Any]:
        """Return the settings by name, for JSON; dtype auto is resolved for the device."""
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
        """Return warnings about valid settings that are probably not intended."""
        warnings: list[str] = []
        if self.dtype == "bfloat16" and not has_bfloat16(device):
            warnings.append("this device has no bfloat16 instructions and emulates them; float32 is faster and exact")
        memory_length, window = self.context_limits.memory_length, self.context_limits.attention_window
        if self.method.name == "memory" and window is not None and memory_length < window - 1:
            warnings.append(
                f"memory-length {memory_length:,} is too short for attention-window {window:,}: depending on its "
                f"position in the segment, a token sees as few as {memory_length + 1:,} keys; "
                f"give memory-length {window - 1} to fill the window"
            )
        return warnings


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics of a scored text, and the settings they were measured with."""

    tokens: int
    """Number of scored tokens."""
    num_unknown: int
    """Number of scored tokens that are the tokenizer's unknown-word token; 0 if it has no such token."""
    bytes: int
    """Bytes of the text; for part of a text of words or integers, estimated from the mean bytes per token."""
    characters: int | None
    """Unicode characters, or None for text of words or integers (whitespace is not kept) or not in UTF-8."""
    words: int | None
    """Number of words separated by whitespace, or None for part of a text whose tokens are not words."""
    nats_per_token: float
    bits_per_byte: float
    bits_per_character: float | None
    perplexity: float
    """Per token."""
    word_perplexity: float | None
    """Per word of the text; newline tokens are not counted as words, but their loss is included."""
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
    """Score every token of a split once and return loss, perplexity and bits per byte.

    Args:
        run: a loaded run.
        split: the text, such as `Corpus.open(DIR).split("test")`; its tokenizer must be the run's.
        config: settings that override individual evaluation settings of the run.
        max_tokens: number of tokens to score from the start of the split, or None for all.
        train_split: the training text, required by method dynamic with the optimizer rms.
        progress: called with the number of tokens scored since the last call.
        token_losses: path of a .npy file to write atomically, with the loss of every token in nats, in text order, as
            float32.

    Raises:
        UserError: settings contradict each other, the split is empty, a token id is not below the model's vocab_size,
            `max_tokens` is below 1, or weights are not finite.
    """
    plan = EvaluationPlan.resolve(run.config, config, train_split=train_split)
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"max-tokens {max_tokens}: must be 1 or more")
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
        UserError: a token id is not; the message contains the largest one.
    """
    if np.iinfo(tokens_K.dtype).max < vocab_size:
        return
    largest = max(int(chunk_K.max()) for chunk_K in chunks(tokens_K))
    if largest >= vocab_size:
        raise UserError(
            f"token id {largest} is not below the model's vocab_size {vocab_size}; give a corpus prepared with the "
            "model's tokenizer"
        )


def check_weights(model: LanguageModel) -> None:
    """Check that all weights are finite.

    Raises:
        UserError: a weight is not; the message names its tensor.
    """
    names = [name for name, _ in model.named_parameters()]
    are_finite = torch.stack([weight.detach().isfinite().all() for weight in model.parameters()]).tolist()
    non_finite = [name for name, is_finite in zip(names, are_finite, strict=True) if not is_finite]
    if non_finite:
        more = f" and {len(non_finite) - 1} more tensors" if non_finite[1:] else ""
        raise UserError(
            f"the weights {non_finite[0]}{more} are not finite; train again with a lower learning rate, or use another "
            "checkpoint (--checkpoint best or last)"
        )


@dataclass(frozen=True, eq=False)
class TokenLosses:
    """Losses of consecutive tokens of a text."""

    position: int
    """Position of the first token in the text."""
    nats_K: npt.NDArray[Any]
    """Loss of each token in nats, in the dtype of the model's losses."""

    @property
    def sum(self) -> float:
        """Sum of the losses, accumulated in float64."""
        return float(self.nats_K.sum(dtype=np.float64))


def stream_losses(
    model: LanguageModel, text: TokenizedText, plan: EvaluationPlan, progress: ProgressCallback | None = None
) -> Generator[TokenLosses, None, None]:
    """Yield the loss of every token of a text once, by the plan's method, in chunks that need not be in text order.

    The model is in evaluation mode until the generator ends or is closed.

    Raises:
        UserError: the method does not support a setting of the plan, or weights are not finite.
    """
    check_weights(model)
    was_training = model.training
    model.eval()
    try:
        with closing(plan.method.steps(model, text, plan)) as steps:
            pending: list[StepLosses] = []
            num_pending = 0
            for nats_BT, scored in steps:
                pending.append((nats_BT, scored))
                num_pending += nats_BT.numel()
                if progress:
                    progress(sum(losses.length for losses in scored))
                if len(pending) == _MAX_STEPS_ON_DEVICE or num_pending >= _MAX_LOSSES_ON_DEVICE:
                    yield from _fetch(pending)
                    pending, num_pending = list[StepLosses](), 0
            yield from _fetch(pending)
    finally:
        model.train(was_training)


def _fetch(steps: list[StepLosses]) -> Iterator[TokenLosses]:
    """Copy the losses of several steps from the device in one transfer, and yield those of scored tokens."""
    if not steps:
        return
    all_K = torch.cat([nats_BT.flatten() for nats_BT, _ in steps]).cpu().numpy()
    begin = 0
    for nats_BT, scored in steps:
        step_BT = all_K[begin : begin + nats_BT.numel()].reshape(nats_BT.shape)
        begin += nats_BT.numel()
        for losses in scored:
            yield TokenLosses(losses.position, step_BT[losses.row, : losses.length])


def losses_in_order(
    model: LanguageModel, text: TokenizedText, plan: EvaluationPlan, progress: ProgressCallback | None = None
) -> npt.NDArray[np.float64]:
    """Return the loss of every token of a text in nats, in text order, shape (K,)."""
    nats_K = np.full(len(text.tokens_K), np.nan)
    for chunk in stream_losses(model, text, plan, progress):
        nats_K[chunk.position : chunk.position + len(chunk.nats_K)] = chunk.nats_K
    return nats_K


def _write_losses(losses: Iterator[TokenLosses], file: Path, length: int) -> Iterator[TokenLosses]:
    """Yield the losses unchanged, and write them to a .npy file that is moved to its path once it is complete."""
    # not memory-mapped: on a full disk, writing to a mapped file kills the process (SIGBUS)
    with atomic_file(file) as temporary, temporary.open("wb") as out:
        np.lib.format.write_array_header_1_0(out, {"descr": "<f4", "fortran_order": False, "shape": (length,)})
        begin = out.tell()
        for chunk in losses:
            out.seek(begin + 4 * chunk.position)  # 4 bytes per float32
            out.write(chunk.nats_K.astype("<f4").tobytes())
            yield chunk
