"""Settings of training."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from transformer_xl.config.settings import MOST, Settings


class TrainConfig(Settings):
    """How the weights are found."""

    segment: int = Field(default=128, gt=0, le=MOST)
    """T: new tokens a row reads in one step."""
    memory: int = Field(default=128, ge=0, le=MOST)
    """M: memory slots in training, in tokens."""
    rows: int = Field(default=16, gt=0, le=MOST)
    """B: rows read side by side, each a stretch of text of its own; several processes share them."""
    chunks: int = Field(default=1, gt=0, le=MOST)
    """Parts of a process's rows, worked off in turn: the same step up to dropout's draws, in less memory."""
    first_segment: int | None = Field(default=None, gt=0, le=MOST)
    """T of the first steps, `segment` halved some times, with the memory halved as often; none: full from the start."""
    length_warmup: int = Field(default=0, ge=0, le=MOST)
    """Steps over which segment and memory double from `first_segment` up to their full lengths."""
    steps: int = Field(default=2000, gt=0, le=MOST)
    """Optimiser steps in all."""
    optimizer: Literal["adam", "adamw", "muon"] = "adam"
    """The paper's Adam; AdamW; or Muon for the matrices inside the layers with AdamW for all other weights."""
    learning_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """Peak learning rate; try several times Adam's with Muon: small models did best at about 8 times in short runs."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's average of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of Adam's average of squared gradients."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's momentum."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Share of each matrix taken off at every step, times the learning rate; adamw and muon only."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """How the learning rate goes on after the warm-up: down a cosine at once, or stable and then down a line (wsd)."""
    warmup: int = Field(default=100, ge=0, le=MOST)
    """Steps over which the learning rate rises linearly from 0."""
    decay: int = Field(default=0, ge=0, le=MOST)
    """With wsd: steps at the end over which the learning rate falls linearly; before them it stays at its peak."""
    final_rate: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak's."""
    average: Literal["none", "exponential", "uniform"] = "none"
    """Keeps an average of the weights over the steps, and validates and saves that as the best weights."""
    average_decay: float = Field(default=0.999, ge=0, lt=1)
    """With exponential: how much of the average stays at each step."""
    average_from: int = Field(default=0, ge=0, le=MOST)
    """Steps done before the average begins; until then it is the weights themselves."""
    clip: float = Field(default=0.25, gt=0)
    """Largest norm of the gradient; a larger gradient is scaled down to it."""
    order: Literal["text", "shuffled"] = "text"
    """The text as it stands, or its documents (One Billion Word: its sentences) in a new order each epoch."""
    loss: Literal["full", "half"] = "full"
    """Which targets count: all of a segment's, or only its second half's."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of matrix products; auto: bfloat16 where the machine has instructions for it."""
    compile: Literal["off", "layers", "graphs"] = "off"
    """Compiles the layers with torch.compile (slow first steps, faster later ones); graphs: as CUDA graphs as well."""
    recompute: bool = False
    """Computes what is inside a layer again in the backward pass instead of keeping it: slower, much less memory."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Several processes: each with the whole model (ddp), or weights and optimiser in shares (fsdp)."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Seed of the first weights and of dropout."""
    log_every: int = Field(default=10, gt=0, le=MOST)
    """Steps between two lines of training figures in metrics.jsonl."""
    evaluate_every: int = Field(default=500, gt=0, le=MOST)
    """Steps between two validations; the best weights are kept."""
    evaluate_tokens: int | None = Field(default=None, gt=0, le=MOST)
    """Tokens of the validation text used at each validation, from its start; none: all."""
    save_every: int = Field(default=500, gt=0, le=MOST)
    """Steps between two checkpoints from which training can go on."""
    tensorboard: bool = False
    """Writes the figures for TensorBoard too, into the run's folder tensorboard/."""

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer == "adam" and self.weight_decay:
            raise ValueError(f"weight_decay {self.weight_decay:g} needs optimizer adamw or muon; adam has none")
        if self.decay and self.schedule != "wsd":
            raise ValueError(f"decay {self.decay:,} belongs to schedule wsd; a cosine falls all the way")
        if self.schedule == "wsd" and self.warmup + self.decay > self.steps:
            raise ValueError(f"warmup {self.warmup:,} and decay {self.decay:,} are more than the {self.steps:,} steps")
        if self.average != "none" and self.average_from >= self.steps:
            raise ValueError(
                f"average_from {self.average_from:,} leaves nothing of the {self.steps:,} steps to average; "
                f"give {self.steps - 1:,} or less, or average none"
            )
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.chunks > self.rows:
            raise ValueError(f"chunks {self.chunks:,} are more than the {self.rows:,} rows")
        if (self.first_segment is None) != (self.length_warmup == 0):
            raise ValueError("first_segment and length_warmup go together; give both or neither")
        if self.length_warmup >= self.steps:
            raise ValueError(
                f"length_warmup {self.length_warmup:,} leaves none of the {self.steps:,} steps at full length; "
                f"give {self.steps - 1:,} or less, or more steps"
            )
        if self.first_segment is not None and not self.num_doublings:
            raise ValueError(
                f"first_segment {self.first_segment:,} must be segment {self.segment:,} halved once or several times"
            )
        if self.memory % 2**self.num_doublings:
            raise ValueError(f"memory {self.memory:,} cannot be halved as often as segment {self.segment:,} is")
        return self

    @property
    def num_doublings(self) -> int:
        """How often the first segment doubles; 0 where it is the full one, or none that doubling leads to."""
        ratio = self.segment // (self.first_segment or self.segment)
        exact = ratio * (self.first_segment or self.segment) == self.segment
        return ratio.bit_length() - 1 if exact and ratio & (ratio - 1) == 0 else 0
