"""Settings of `txl analyze context` and `txl analyze speed`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from transformer_xl.config.settings import INT32_MAX, Settings


def _split(value: Any) -> Any:
    """Split several numbers in one string, such as `128,256`, as a flag gives them."""
    return value.split(",") if isinstance(value, str) else value


_Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
_Counts = Annotated[tuple[_Count, ...], BeforeValidator(_split), Field(min_length=1)]


class ContextSweep(Settings):
    """Settings of `txl analyze context`: the losses of a model are measured with shorter and longer contexts.

    They say which context lengths are compared, at how many positions of a text, and how small a gain counts as none.
    """

    min_context: int | None = Field(default=None, ge=1, le=INT32_MAX)
    """The shortest context, in tokens; none: context_step."""
    context_step: _Count = 100
    """How many tokens longer each context is than the one before."""
    max_context: int | None = Field(default=None, ge=1, le=INT32_MAX)
    """The upper limit of the context, in tokens; none: min_context + 9 * context_step."""
    num_positions: _Count = 1000
    """Number of positions drawn from the text; each has as many tokens before it as the upper limit of the context."""
    seed: int = Field(default=1, ge=0, le=INT32_MAX)
    """Seed of the random positions."""
    threshold: float = Field(default=0.01, gt=0, lt=1)
    """The effective length of a model is the first context from which context_step more tokens lower perplexity by a
    smaller fraction than this."""

    @model_validator(mode="after")
    def _check_sweep(self) -> Self:
        if len(self.contexts) < 2:
            start = self.min_context or self.context_step
            raise ValueError(
                f"max_context {self.longest:,} leaves nothing to compare with min_context {start:,}; give at least "
                f"{start + self.context_step:,} (min_context + context_step)"
            )
        return self

    @property
    def longest(self) -> int:
        """The upper limit of the context, in tokens."""
        return self.max_context or (self.min_context or self.context_step) + 9 * self.context_step

    @property
    def contexts(self) -> range:
        """The context lengths, in ascending order."""
        return range(self.min_context or self.context_step, self.longest + 1, self.context_step)


class SpeedComparison(Settings):
    """What is compared: the speed of evaluation with memory and with a sliding window; the defaults are the paper's."""

    attention_windows: _Counts = (800, 1800, 2800, 3800)
    """Maximum number of keys that a query attends to, for both models, the one with memory and the vanilla one with
    a sliding window; several are separated by commas."""
    segment_lengths: _Counts = (128, 256, 512, 1024, 2048)
    """Segment lengths of the model with memory, separated by commas; the fastest is reported."""
    repeats: _Count = 3
    """How often each model is timed, one after the other in turns; medians are reported."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of matrix products, for the model with memory and the vanilla one; auto: bfloat16 where the hardware
    supports it."""
