"""Settings of training."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from transformer_xl.config.settings import INT32_MAX, Settings


class TrainConfig(Settings):
    """How the weights are found."""

    segment_length: int = Field(default=128, gt=0, le=INT32_MAX)
    """T: new tokens a row reads in one step."""
    memory_length: int = Field(default=128, ge=0, le=INT32_MAX)
    """M: memory slots in training, in tokens."""
    batch_size: int = Field(default=16, gt=0, le=INT32_MAX)
    """B: rows read side by side, each a stretch of text of its own; several processes share them."""
    chunks: int = Field(default=1, gt=0, le=INT32_MAX)
    """Parts of a process's rows, worked off in turn: the same step up to dropout's draws, in less memory."""
    initial_segment_length: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """T of the first steps, `segment` halved some times, with the memory halved as often; none: full from the start."""
    segment_warmup_steps: int = Field(default=0, ge=0, le=INT32_MAX)
    """Steps over which segment and memory double from `first_segment` up to their full lengths."""
    max_steps: int = Field(default=2000, gt=0, le=INT32_MAX)
    """Optimiser steps in all."""
    optimizer: Literal["adam", "adamw", "muon"] = "adam"
    """The paper's Adam; AdamW; or Muon for the matrices inside the layers with AdamW for all other weights."""
    learning_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """Peak learning rate; try several times Adam's with Muon: small models did best at about 8 times in short runs."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's average of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of Adam's average of squared gradients."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's momentum."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Share of each matrix taken off at every step, times the learning rate; adamw and muon only."""
    lr_schedule: Literal["cosine", "wsd"] = "cosine"
    """How the learning rate goes on after the warm-up: down a cosine at once, or stable and then down a line (wsd)."""
    warmup_steps: int = Field(default=100, ge=0, le=INT32_MAX)
    """Steps over which the learning rate rises linearly from 0."""
    decay_steps: int = Field(default=0, ge=0, le=INT32_MAX)
    """With wsd: steps at the end over which the learning rate falls linearly; before them it stays at its peak."""
    min_learning_rate_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak's."""
    weight_average: Literal["none", "exponential", "uniform"] = "none"
    """Keeps an average of the weights over the steps, and validates and saves that as the best weights."""
    ema_decay: float = Field(default=0.999, ge=0, lt=1)
    """With exponential: how much of the average stays at each step."""
    average_start_step: int = Field(default=0, ge=0, le=INT32_MAX)
    """Steps done before the average begins; until then it is the weights themselves."""
    max_grad_norm: float = Field(default=0.25, gt=0)
    """Largest norm of the gradient; a larger gradient is scaled down to it."""
    order: Literal["text", "shuffled"] = "text"
    """The text as it stands, or its documents (One Billion Word: its sentences) in a new order each epoch."""
    loss: Literal["full", "half"] = "full"
    """Which targets count: all of a segment's, or only its second half's."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of matrix products; auto: bfloat16 where the machine has instructions for it."""
    compile: Literal["off", "layers", "graphs"] = "off"
    """Compiles the layers with torch.compile (slow first steps, faster later ones); graphs: as CUDA graphs as well."""
    activation_checkpointing: bool = False
    """Computes what is inside a layer again in the backward pass instead of keeping it: slower, much less memory."""
    parallelism: Literal["ddp", "fsdp"] = "ddp"
    """Several processes: each with the whole model (ddp), or weights and optimiser in shares (fsdp)."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Seed of the first weights and of dropout."""
    log_interval: int = Field(default=10, gt=0, le=INT32_MAX)
    """Steps between two lines of training figures in metrics.jsonl."""
    eval_interval: int = Field(default=500, gt=0, le=INT32_MAX)
    """Steps between two validations; the best weights are kept."""
    eval_tokens: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Tokens of the validation text used at each validation, from its start; none: all."""
    checkpoint_interval: int = Field(default=500, gt=0, le=INT32_MAX)
    """Steps between two checkpoints from which training can go on."""
    tensorboard: bool = False
    """Writes the figures for TensorBoard too, into the run's folder tensorboard/."""

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer == "adam" and self.weight_decay:
            raise ValueError(f"weight_decay {self.weight_decay:g} needs optimizer adamw or muon; adam has none")
        if self.decay_steps and self.lr_schedule != "wsd":
            raise ValueError(f"decay {self.decay_steps:,} belongs to schedule wsd; a cosine falls all the way")
        if self.lr_schedule == "wsd" and self.warmup_steps + self.decay_steps > self.max_steps:
            raise ValueError(
                f"warmup {self.warmup_steps:,} and decay {self.decay_steps:,} are more than the {self.max_steps:,} steps"
            )
        if self.weight_average != "none" and self.average_start_step >= self.max_steps:
            raise ValueError(
                f"average_from {self.average_start_step:,} leaves nothing of the {self.max_steps:,} steps to average; "
                f"give {self.max_steps - 1:,} or less, or average none"
            )
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.chunks > self.batch_size:
            raise ValueError(f"chunks {self.chunks:,} are more than the {self.batch_size:,} rows")
        if (self.initial_segment_length is None) != (self.segment_warmup_steps == 0):
            raise ValueError("first_segment and length_warmup go together; give both or neither")
        if self.segment_warmup_steps >= self.max_steps:
            raise ValueError(
                f"length_warmup {self.segment_warmup_steps:,} leaves none of the {self.max_steps:,} steps at full length; "
                f"give {self.max_steps - 1:,} or less, or more steps"
            )
        if self.initial_segment_length is not None and not self.num_doublings:
            raise ValueError(
                f"first_segment {self.initial_segment_length:,} must be segment {self.segment_length:,} halved once or several times"
            )
        if self.memory_length % 2**self.num_doublings:
            raise ValueError(
                f"memory {self.memory_length:,} cannot be halved as often as segment {self.segment_length:,} is"
            )
        return self

    @property
    def num_doublings(self) -> int:
        """How often the first segment doubles; 0 where it is the full one, or none that doubling leads to."""
        ratio = self.segment_length // (self.initial_segment_length or self.segment_length)
        exact = ratio * (self.initial_segment_length or self.segment_length) == self.segment_length
        return ratio.bit_length() - 1 if exact and ratio & (ratio - 1) == 0 else 0
