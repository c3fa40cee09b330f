"""What all evaluation methods share: the resolved settings, the text to score, and the type of the losses that they
yield.

A method is a generator function `losses(model, text, plan)` in a file of its own (`with_memory.py`,
`sliding_window.py`, `dynamic.py`, `both_sides.py`). It reads the text with the model and yields the loss of every token
once, step by step. `evaluate.py` calls the method that the plan names.

Shape suffixes: B batch size, T new tokens, K tokens of a text, N documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transformer_xl.checkpoint_record import MemoryLengths
from transformer_xl.config import (
    WITH_PLAIN_WEIGHTS,
    WITHOUT_MEMORY,
    DynamicConfig,
    EvaluationConfig,
    EvaluationMethod,
    RunConfig,
    UserError,
    check_settings,
    check_type,
    merge,
)
from transformer_xl.device import Precision, has_bfloat16, resolve_dtype
from transformer_xl.inference import TokenModel
from transformer_xl.model.memory import ContextLimits
from transformer_xl.run import Run
from transformer_xl.text.token_store import Tokens

_LEARNING_RATES = {"rms": 1e-6, "sgd": 0.01}  # of dynamic evaluation, where none is set

ProgressCallback = Callable[[int], object]
"""Called with the number of tokens processed since the last call."""


def check_progress(progress: ProgressCallback | None) -> None:
    """Check an argument of a public function.

    Raises:
        UserError: it is no function.
    """
    if not callable(progress):
        check_type(progress, type(None), "progress", "give a function, which is called with numbers of tokens")


@dataclass(frozen=True)
class EvaluationPlan:
    """The resolved settings of an evaluation: those of `EvaluationConfig`, completed by the settings of the run."""

    segment_length: int
    """T: new tokens read in each step."""
    context_limits: ContextLimits
    """Memory length (slots in tokens), attention window (maximum number of keys that a query sees, itself included) and
    clamp length (distances above it are treated as this one); None as a window or clamp length: no limit."""
    batch_size: int | None = None
    """B: sequences read at once, or None for one (with `reset_memory`: enough documents to keep the device busy; with
    method sliding-window: enough windows)."""
    warmup_tokens: int | None = None
    """Unscored tokens that each sequence reads first, or None for the smallest number with which losses do not
    depend on the batch size."""
    reset_memory: bool = False
    """Whether the memory is emptied at the start of each document."""
    dtype: Precision = "float32"
    """Data type of matrix products; auto: bfloat16 where the hardware supports it, else float32."""
    method: EvaluationMethod = "memory"
    """How the text is read, which `_METHODS` in `evaluate.py` has a module for."""
    num_orders: int = 1
    """O: number of orders in which method both-sides predicts the tokens of a span."""
    keep_orders: bool = False
    """Whether that method yields the losses of each order, in a last dimension, in place of their mean."""
    dynamic: DynamicConfig = field(default_factory=DynamicConfig)
    """Settings that only method dynamic uses."""
    extended_context_length: int = 0
    """Tokens before each segment that are read again with it; above 0 only without memory."""
    softmax_temperature: float = 1.0
    """Divisor of the logits."""
    memory_length_reason: str = field(default="given", compare=False)
    """Why the memory has this length."""
    window_is_given: bool = field(default=False, compare=False)
    """Whether the attention window was given, rather than a setting of the run."""
    train_tokens_K: Tokens | None = field(default=None, repr=False, compare=False)
    """Token ids of the training text, which method dynamic needs with the optimizer rms."""

    @staticmethod
    def resolve(
        run: RunConfig,
        config: EvaluationConfig | None = None,
        *,
        memory_lengths: MemoryLengths | None = None,
    ) -> EvaluationPlan:
        """Resolve settings: those in `config`, else the run's evaluation settings, else model and training settings.

        The memory length is the one measured to be the best, rather than that of training, if it was measured with the
        same segment length, attention window and clamp length.

        Args:
            run: settings of the run.
            config: settings that override individual evaluation settings of the run.
            memory_lengths: what was measured for the weights in use, or None if nothing was.

        Raises:
            UserError: settings contradict each other.
        """
        overrides = EvaluationConfig() if config is None else config
        own, given = run.evaluation.model_dump(), overrides.model_dump(exclude_unset=True)
        optimizer = own["dynamic"]["optimizer"]
        if given.get("dynamic", {}).get("optimizer", optimizer) != optimizer:
            own["dynamic"] = {"decay": own["dynamic"]["decay"]}  # the rest is of another optimizer
        merged = check_settings(EvaluationConfig, merge(own, given), "evaluation")
        if "dynamic" in overrides.model_fields_set and merged.method != "dynamic":
            raise UserError(
                f"settings of method dynamic were given, but the method is {merged.method}; "
                "give method dynamic, or leave the settings out"
            )
        if merged.method == "sliding-window" and overrides.segment_length is not None:
            raise UserError(
                "segment_length was given, but method sliding-window reads windows of attention_window tokens; "
                "leave segment_length out"
            )

        def limit(name: Literal["attention_window", "clamp_length"]) -> int | None:
            """Return a limit; an explicit None in `config` removes it, a None in the run means the model's limit."""
            return getattr(merged, name) or (None if name in overrides.model_fields_set else run.model.limit(name))

        segment_length, block = merged.segment_length or run.train.segment_length, run.model.limit("perm_size")
        if merged.method == "both-sides":
            run.model.check_method(merged.method)
            assert block is not None
            segment_length = merged.segment_length or max(1, block // 2)
        elif merged.num_orders > 1 and (overrides.num_orders > 1 or merged.method == run.evaluation.method):
            raise UserError(f"num_orders={merged.num_orders} is for method both-sides; leave it out")
        window, clamp = limit("attention_window"), limit("clamp_length")
        memory_length, reason = run.train.memory_length, "as trained"
        if merged.memory_length is not None:
            reason = "evaluation.memory_length of the run" if overrides.memory_length is None else "given"
            memory_length = merged.memory_length
        elif merged.method in WITHOUT_MEMORY:
            memory_length, reason = 0, f"method {merged.method} has none"
        elif memory_lengths is not None:
            measured = memory_lengths.segment_length, memory_lengths.attention_window, memory_lengths.clamp_length
            if measured == (segment_length, window, clamp):
                memory_length, reason = memory_lengths.chosen, memory_lengths.describe()
            else:
                reason = "as trained; another was chosen with another segment, window or clamp length"
        is_given = overrides.extended_context_length is not None
        extended = overrides.extended_context_length if is_given else run.evaluation.extended_context_length
        if extended is None:
            extended = run.train.extended_context_length
        if memory_length and not is_given:
            extended = 0
        if extended and memory_length:
            raise UserError(
                f"extended_context_length {extended:,} is for evaluation without memory, and memory_length is "
                f"{memory_length:,} ({reason}); give one of them as 0"
            )
        return EvaluationPlan(
            segment_length=segment_length,
            context_limits=ContextLimits(memory_length, window, clamp),
            extended_context_length=extended,
            softmax_temperature=merged.softmax_temperature,
            memory_length_reason=reason,
            window_is_given=overrides.attention_window is not None,
            batch_size=merged.batch_size,
            warmup_tokens=merged.warmup_tokens,
            reset_memory=merged.reset_memory,
            dtype=merged.dtype,
            method=merged.method,
            dynamic=merged.dynamic,
            num_orders=merged.num_orders,
        )

    @staticmethod
    def of_run(run: Run, config: EvaluationConfig | None = None) -> EvaluationPlan:
        """Resolve settings, also the dtype, for the weights and the device of a loaded run; arguments as `resolve`."""
        plan = EvaluationPlan.resolve(run.config, config, memory_lengths=run.memory_lengths)
        return replace(plan, dtype=resolve_dtype(run.model.device, plan.dtype, run.model.like.dtype))

    @staticmethod
    def for_reading(run: Run, config: EvaluationConfig | None = None) -> EvaluationPlan:
        """As `of_run`, for what can only read with memory: method memory, unless `config` names one."""
        config = EvaluationConfig() if config is None else config
        method = {} if "method" in config.model_fields_set else {"method": "memory"}
        return EvaluationPlan.of_run(run, config.model_copy(update=method))

    @staticmethod
    def for_texts(run: Run, config: EvaluationConfig | None = None) -> EvaluationPlan:
        """As `of_run`, for texts without the training text: method memory, unless `config` names one, in place of the
        run's method dynamic, and of one without memory if `config` has a memory length."""
        method, given = run.config.evaluation.method, EvaluationConfig() if config is None else config
        is_memory = method == "dynamic" or (method in WITHOUT_MEMORY and given.memory_length)
        return (EvaluationPlan.for_reading if is_memory else EvaluationPlan.of_run)(run, config)

    def model_of(self, run: Run) -> TokenModel:
        """Return the model of a run that reads: prepared for inference, but for some methods."""
        return run.model if self.method in WITH_PLAIN_WEIGHTS else run.inference(self.dtype)

    @property
    def num_inputs(self) -> int:
        """Number of tokens read in each step: those of a segment and of the extended context."""
        return self.segment_length + self.extended_context_length

    @property
    def learning_rate(self) -> float:
        """The learning rate of method dynamic: the one that is set, or the default of its optimizer."""
        rate = self.dynamic.learning_rate
        return _LEARNING_RATES[self.dynamic.optimizer] if rate is None else rate

    def refuse_extended_context(self, what: str) -> None:
        """Refuse a run with an extended context where it cannot be read.

        Args:
            what: what reads no extended context; the message begins with it.

        Raises:
            UserError: the plan has an extended context.
        """
        if self.extended_context_length:
            raise UserError(
                f"{what} cannot read the extended context of {self.extended_context_length:,} tokens that this run "
                "has; give a memory length, or use txl evaluate, score or generate"
            )

    @property
    def needs_train_split(self) -> bool:
        """Whether the evaluation needs the training text: for the gradient statistics of the optimizer rms."""
        return self.method == "dynamic" and self.dynamic.optimizer == "rms"

    def as_dict(self) -> dict[str, Any]:
        """Return the settings by name, for JSON."""
        method_settings: dict[str, Any] = {}
        if self.method == "dynamic":
            unused = None if self.needs_train_split else {"epsilon", "gradient_stats_tokens"}
            method_settings = {**self.dynamic.model_dump(exclude=unused), "learning_rate": self.learning_rate}
        elif self.method == "both-sides":
            method_settings = {"num_orders": self.num_orders}
        names = ("memory_length_reason", "extended_context_length", "softmax_temperature")
        names += ("batch_size", "warmup_tokens", "reset_memory", "dtype")
        return {
            "method": self.method,
            "method_settings": method_settings,
            "segment_length": self.segment_length,
            **asdict(self.context_limits),
            **{name: getattr(self, name) for name in names},
        }

    def warnings(self, device: torch.device) -> list[str]:
        """Return warnings about valid settings that are probably not intended."""
        warnings: list[str] = []
        if self.dtype == "bfloat16" and not has_bfloat16(device):
            warnings.append("this device has no bfloat16 instructions and emulates them; float32 is faster and exact")
        memory_length, window = self.context_limits.memory_length, self.context_limits.attention_window
        if self.window_is_given and self.method == "memory" and window is not None and memory_length < window - 1:
            advice = f"give memory_length {window - 1}, or for a model without memory method sliding-window, to fill it"
            warnings.append(
                f"memory_length {memory_length:,} is too short for attention_window {window:,}: depending on its "
                f"position in the segment, a token sees as few as {memory_length + 1:,} keys; {advice}"
            )
        return warnings


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """A text to score, as token ids."""

    tokens_K: Tokens
    """Token ids, possibly a memory-mapped array."""
    bos_token_id: int
    """Input at the first position of the text (or of each document)."""
    document_starts_N: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """Positions where documents start, in ascending order; the first is 0."""
    span_K: npt.NDArray[Any] | None = None
    """Index of the span of each token, in ascending order, for method both-sides; None: each token is one."""

    def spans(self) -> list[range]:
        """Return the positions of each span's tokens."""
        if self.span_K is None:
            return [range(place, place + 1) for place in range(len(self.tokens_K))]
        inner = (np.flatnonzero(np.diff(self.span_K)) + 1).tolist()
        return [range(start, stop) for start, stop in pairwise([0, *inner, len(self.tokens_K)])]

    def boundaries(self, *, reset_memory: bool) -> npt.NDArray[np.int64]:
        """Return the positions where memory starts empty, and the end of the text, in ascending order."""
        inner_N = self.document_starts_N[1:] if reset_memory else self.document_starts_N[:0]
        inside_N = inner_N[inner_N < len(self.tokens_K)].astype(np.int64)
        return np.unique(np.concatenate([[0], inside_N, [len(self.tokens_K)]]))  # unique: drops empty documents


@dataclass(frozen=True)
class ScoredSpan:
    """Which losses of one batch row are scored: its first `length`, which are of consecutive tokens of the text."""

    row: int
    """Index of the batch row."""
    position: int
    """Position of the first scored token in the text."""
    length: int
    """Number of scored tokens."""


StepLosses = tuple[Tensor, list[ScoredSpan]]
"""Losses (B, T) of one step in nats, on the device, and which of them are scored."""
