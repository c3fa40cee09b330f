"""What is scored and how: a text with its documents, lengths, rows, and the way tokens get their losses.

Shape suffixes: K tokens of a text, N its documents.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from transformer_xl.config import INT32_MAX, RecurrentConfig, RunConfig, UserError
from transformer_xl.device import Precision
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits
from transformer_xl.text.token_store import Tokens

Limit = int | Literal["none"]
"""A length in tokens; `none` takes the limit away."""

Documents = Literal["continue", "reset"]
"""Memory goes on from one document to the next, or each document is read as if it were the only text."""

Progress = Callable[[int], None]
"""Told how many tokens were scored since the last call."""


@dataclass(frozen=True, eq=False)
class Text:
    """Tokens to score."""

    tokens_K: Tokens
    """Token ids; may lie on disk."""
    bos_token_id: int
    """The token taken as read before the text (or before each document) begins."""
    starts_N: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """Where documents start, rising, the first 0."""

    def edges(self, documents: Documents) -> npt.NDArray[np.int64]:
        """Where what is read by itself begins and ends: the edges of the documents, or of the whole."""
        inner_N = self.starts_N[1:] if documents == "reset" else self.starts_N[:0]
        inside_N = inner_N[inner_N < len(self.tokens_K)].astype(np.int64)
        return np.unique(np.concatenate([[0], inside_N, [len(self.tokens_K)]]))  # empty documents fall together


@dataclass(frozen=True, eq=False)
class Part:
    """Losses of tokens that follow one another in the text."""

    begin: int
    """Place of the first of them."""
    nats_K: npt.NDArray[Any]
    """Loss of each in nats, in the number format of the model's losses."""

    @property
    def sum(self) -> float:
        """Their sum, added up in float64."""
        return float(self.nats_K.sum(dtype=np.float64))


Parts = Generator[Part, None, None]
"""Closed when no more are wanted, so that what is held meanwhile is given back."""


class Method(Protocol):
    """A way to give every token its loss."""

    @property
    def name(self) -> str:
        """As `txl evaluate --method` has it."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """What it goes by beside the plan, for JSON."""
        ...

    def parts(self, model: LanguageModel, text: Text, plan: EvaluationPlan, progress: Progress | None = None) -> Parts:
        """The loss of every token, once, in parts that need not come in text order."""
        ...


@dataclass(frozen=True)
class EvaluationPlan:
    """How a text is scored."""

    segment: int
    """T: new tokens read in one step."""
    context_limits: ContextLimits
    """How far attention looks back."""
    rows: int | None = None
    """B: stretches of the text read side by side. None: one, or, where each document is read by itself, as many
    documents as make good use of the machine. They do not change the result, unless `warmup` is too short."""
    warmup: int | None = None
    """Tokens that each stretch reads before its own, without counting them; none: as many as make the result exact."""
    documents: Documents = "continue"
    """Whether memory goes on from one document to the next."""
    precision: Precision = "float32"
    """Number format of matrix products."""
    method: Method | None = None
    """Another way than reading on with memory: a `MovingWindow` or `Dynamic`."""

    def __post_init__(self) -> None:
        """Refuses what cannot be."""
        for name, least in (("segment", 1), ("rows", 1), ("warmup", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value <= INT32_MAX:
                raise UserError(f"{name} {value:,}: wanted {least} or more, {INT32_MAX:,} at most")

    @staticmethod
    def of(config: RunConfig, **wanted: Limit | None) -> EvaluationPlan:
        """The run's evaluation settings, with those of `segment, memory, window, clamp` that are given replaced.

        Raises:
            UserError: a length that cannot be.
        """
        defaults = config.evaluation
        lengths: dict[str, Limit | None] = {
            "segment": defaults.segment_length or config.train.segment_length,
            "memory": config.train.memory_length if defaults.memory_length is None else defaults.memory_length,
            "window": defaults.attention_window or config.model.limit("attention_window"),
            "clamp": defaults.clamp_length or config.model.limit("clamp_length"),
        }
        assert wanted.keys() <= lengths.keys()
        lengths |= {name: value for name, value in wanted.items() if value is not None}
        segment, memory, window, clamp = (None if value == "none" else value for value in lengths.values())
        if segment is None:
            raise UserError("segment none: wanted 1 or more")
        if memory is None:
            raise UserError("memory none: wanted a number of tokens, 0 or more")
        return EvaluationPlan(segment, ContextLimits(memory, window, clamp))

    @property
    def window_is_full(self) -> bool:
        """Whether every query sees as many keys as the window allows, so that the segment changes nothing."""
        return (
            self.context_limits.attention_window is not None
            and self.context_limits.memory_length >= self.context_limits.attention_window - 1
        )

    def context_of_segment(self, model: LanguageModel) -> int | None:
        """How many tokens before a segment its losses can depend on, through all layers; none: on all of them.

        In a transformer, a query of the first token sees M slots back. What stands there was computed in its own
        segment, which may have begun T - 1 tokens earlier, and saw M slots before that; so each further layer adds M
        rounded up to whole segments. A window allows no layer more than window - 1 tokens. A recurrent model's state
        holds something of all it read.
        """
        memory, layers = self.context_limits.memory_length, len(model.layers)
        if memory and isinstance(model.config, RecurrentConfig):
            return None
        through_memory = memory + (layers - 1) * _round_up(memory, self.segment)
        window = self.context_limits.attention_window
        return through_memory if window is None else min(through_memory, layers * (window - 1))

    def warmup_of(self, model: LanguageModel) -> int | None:
        """Tokens a stretch reads before its own: those wanted or needed, in whole segments; none: no number will do."""
        needed = self.context_of_segment(model) if self.warmup is None else self.warmup
        return None if needed is None else _round_up(needed, self.segment)


def _round_up(length: int, unit: int) -> int:
    return -(-length // unit) * unit
