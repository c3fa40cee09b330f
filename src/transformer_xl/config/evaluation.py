"""Settings of an evaluation: the method, how far attention looks back, and how the text is divided into a batch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from transformer_xl.config.settings import INT32_MAX, Settings


class DynamicConfig(Settings):
    """Settings of dynamic evaluation; the defaults of rms are those published for enwik8 (docs/evaluation.md)."""

    optimizer: Literal["rms", "sgd"] = "rms"
    """rms: steps divided by the root mean square of the gradients on the training text. sgd: plain steps."""
    learning_rate: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Size of a step; none: 1e-6 for rms, 0.01 for sgd. 0 leaves the weights as they are."""
    decay: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the way back to the trained weights that each step moves."""
    epsilon: float = Field(default=8.5e-6, gt=0, allow_inf_nan=False)
    """Added to the root mean square of rms, so that weights with tiny gradients take no large steps."""
    gradient_stats_tokens: int = Field(default=17_920, gt=0, le=INT32_MAX)
    """Tokens from the start of the training text over which rms averages squared gradients."""

    @model_validator(mode="after")
    def _sgd_has_no_statistics(self) -> Self:
        for name in ("epsilon", "gradient_stats_tokens"):
            if self.optimizer == "sgd" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for the optimizer rms; leave it out with sgd")
        return self


class EvaluationConfig(Settings):
    """How a text is scored.

    In the settings of a run, none means the value of the model or of training. Passed to `evaluate` or `score`, the
    settings replace the run's, one by one; there none takes away the limit `attention_window` or `clamp_length`.
    """

    method: Literal["memory", "sliding-window", "dynamic"] = "memory"
    """memory: segments with memory, as in the paper. sliding-window: each token from exactly the attention_window
    tokens before it, all computed anew, as the paper's vanilla model. dynamic: a gradient step after each segment."""
    segment_length: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """New tokens read in one step; none: train.segment_length. It sets the speed and, without a window, the context."""
    memory_length: int | None = Field(default=None, ge=0, le=INT32_MAX)
    """Memory slots, in tokens; none: train.memory_length. May be far more than in training."""
    attention_window: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Keys a query sees, itself included; default: model.attention_window, and a typed none removes the limit. With a
    memory of attention_window - 1 or more tokens, the segment length changes no result."""
    clamp_length: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Distances above this count as this one; default: model.clamp_length, and a typed none removes the limit."""
    batch_size: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Sequences of the text read at once, which changes no result; none: 1, or with reset_memory as many documents as
    keep the machine busy."""
    warmup_tokens: int | None = Field(default=None, ge=0, le=INT32_MAX)
    """Tokens each sequence reads before its own without counting them; none: as many as its losses can depend on. Fewer
    are faster and less exact."""
    reset_memory: bool = False
    """Read each document as if it were the only text; otherwise memory continues from one document to the next."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Type of matrix products. bfloat16 is less exact, and faster on hardware that has it, where auto takes it."""
    dynamic: DynamicConfig = DynamicConfig()
