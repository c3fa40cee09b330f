"""Settings of an evaluation: the method, how many tokens attention can see, and how the text is split into a batch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from transformer_xl.config.settings import INT32_MAX, Settings

EvaluationMethod = Literal["memory", "sliding-window", "dynamic", "both-sides"]
WITHOUT_MEMORY = frozenset[EvaluationMethod]({"sliding-window"})
"""The methods whose memory length is 0 unless one is given, which they refuse."""
WITH_PLAIN_WEIGHTS = frozenset[EvaluationMethod]({"dynamic", "both-sides"})
"""The methods that read with the model itself, not with one that is prepared for inference."""


class DynamicConfig(Settings):
    """Settings of dynamic evaluation, which trains the model on the text that it has scored (Krause et al. 2019).

    The defaults of the optimizer `rms` are those published for enwik8 (docs/evaluation.md).
    """

    optimizer: Literal["rms", "sgd"] = "rms"
    """rms: SGD with gradients divided by the root mean square of the gradients on the training text. sgd: plain SGD."""
    learning_rate: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Learning rate; none: 1e-6 for rms, 0.01 for sgd. With 0 the weights never change."""
    decay: float = Field(default=0.0, ge=0, le=1)
    """Each step also moves the weights this fraction of the distance back to the trained weights."""
    epsilon: float = Field(default=8.5e-6, gt=0, allow_inf_nan=False)
    """Added to the root mean square of rms, so that weights with tiny gradients make no large steps."""
    gradient_stats_tokens: int = Field(default=17_920, gt=0, le=INT32_MAX)
    """Tokens from the start of the training text over which rms averages squared gradients."""

    @model_validator(mode="after")
    def _reject_rms_settings_with_sgd(self) -> Self:
        for name in ("epsilon", "gradient_stats_tokens"):
            if self.optimizer == "sgd" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for the optimizer rms; leave it out with sgd")
        return self


class EvaluationConfig(Settings):
    """How a text is scored.

    In the settings of a run, none means the value of the model or of training. Settings passed to `evaluate` or `score`
    replace the run's, one by one; there, none removes the limit `attention_window` or `clamp_length`.
    """

    method: EvaluationMethod = "memory"
    """memory: segments with memory, as in the paper. sliding-window: each token is predicted from exactly the previous
    attention_window tokens, without memory, as by the paper's vanilla model. dynamic: like memory, with a gradient step
    on each segment after it is scored. both-sides (architecture xlnet): each token, or with surprisal each word, is
    hidden in turn and predicted from the text before and after it."""
    segment_length: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """New tokens processed at once; none: train.segment_length. It determines the speed and, without an attention
    window, the context."""
    memory_length: int | None = Field(default=None, ge=0, le=INT32_MAX)
    """Number of memory slots, one for each token; none: the length that was chosen on the validation text when
    training ended, or train.memory_length where none was measured. Can be much larger than in training."""
    extended_context_length: int | None = Field(default=None, ge=0, le=INT32_MAX)
    """Without memory: tokens before each segment that are read again with it and not scored; none: that of training, or
    0 with memory."""
    attention_window: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Maximum number of keys that a query attends to, including its own position; default: model.attention_window; none
    removes that limit. With a memory of attention_window - 1 tokens or more, the segment length changes no result."""
    clamp_length: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Distances between query and key above this one are encoded as this one; default: model.clamp_length; none removes
    that limit."""
    batch_size: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Sequences processed at once, which changes no result; none: 1, or as many as keep the device busy with
    reset_memory (documents) and sliding-window (windows)."""
    warmup_tokens: int | None = Field(default=None, ge=0, le=INT32_MAX)
    """Tokens processed but not scored before each sequence, to fill its memory; none: as many as its losses can depend
    on. Fewer are faster and less exact. Not related to the warm-up of training."""
    reset_memory: bool = False
    """Score each document as if it were the only text; otherwise memory continues from one document to the next."""
    softmax_temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Logits are divided by this before the softmax; above 1, probabilities are less confident."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Data type of matrix products; auto: bfloat16 (faster, less exact) where the hardware supports it."""
    num_orders: int = Field(default=1, ge=1, le=1000)
    """Method both-sides: number of random orders in which the tokens of a word are predicted, their losses averaged;
    1: from left to right."""
    dynamic: DynamicConfig = DynamicConfig()
    """Settings that only method dynamic uses."""
