"""Settings of training."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from transformer_xl.config.settings import INT32_MAX, Settings


class TrainConfig(Settings):
    """Settings of training."""

    segment_length: int = Field(default=128, gt=0, le=INT32_MAX)
    """T: tokens that each sequence of the batch advances in one step."""
    memory_length: int = Field(default=128, ge=0, le=INT32_MAX)
    """M: memory slots in training, in tokens."""
    batch_size: int = Field(default=16, gt=0, le=INT32_MAX)
    """B: sequences of one optimizer step, over all processes; each reads its own part of the text."""
    micro_batch_size: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Most sequences that one process computes at once, accumulating gradients: the same step up to the random draws of
    dropout, in less memory; none: all of them."""
    initial_segment_length: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Segment length of the first steps: segment_length halved once or more, with memory_length halved as often; none:
    full lengths from the start."""
    segment_warmup_steps: int = Field(default=0, ge=0, le=INT32_MAX)
    """Steps over which the lengths of segment and memory double from initial_segment_length to their full values."""
    max_steps: int = Field(default=2000, gt=0, le=INT32_MAX)
    """Number of optimizer steps."""
    optimizer: Literal["adam", "adamw", "muon"] = "adam"
    """adam, as in the paper; adamw; or muon for the matrices inside the layers, with AdamW for all other weights."""
    learning_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """Peak learning rate; try several times Adam's with Muon: small models did best at about 8 times in short runs."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's average of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of Adam's average of squared gradients."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's momentum."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Decoupled weight decay of matrices; each step subtracts this times the learning rate; adamw and muon only."""
    lr_schedule: Literal["cosine", "wsd"] = "cosine"
    """Learning rate after the warm-up: cosine decay, or stable and then linear decay (wsd)."""
    warmup_steps: int = Field(default=100, ge=0, le=INT32_MAX)
    """Steps over which the learning rate rises linearly from 0."""
    decay_steps: int = Field(default=0, ge=0, le=INT32_MAX)
    """With wsd: last steps, over which the learning rate falls linearly; before them it stays at its peak."""
    min_learning_rate_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end, as a fraction of the peak."""
    weight_average: Literal["none", "ema", "uniform"] = "none"
    """Average the weights over the steps, exponentially or uniformly; validate and save the average as best weights."""
    ema_decay: float = Field(default=0.999, ge=0, lt=1)
    """With ema: decay of the average at each step."""
    average_start_step: int = Field(default=0, ge=0, le=INT32_MAX)
    """Steps before averaging starts; until then the average is the current weights."""
    max_grad_norm: float = Field(default=0.25, gt=0)
    """Gradients with a larger norm are scaled down to this norm."""
    shuffle_documents: bool = False
    """Read documents (of One Billion Word: sentences) in a new random order each epoch; false: in text order."""
    loss: Literal["full", "half"] = "full"
    """Targets that the loss counts: all of a segment, or only its second half."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of matrix products; auto: bfloat16 where the machine has instructions for it."""
    compile: Literal["none", "layers", "cudagraphs"] = "none"
    """Compile the layers with torch.compile (slow first steps, faster later ones); cudagraphs: with CUDA graphs too."""
    activation_checkpointing: bool = False
    """Recompute the activations inside each layer in the backward pass: slower, with much less memory."""
    parallelism: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: the whole model in each (ddp), or weights and optimizer state sharded (fsdp)."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Seed of the initial weights, of dropout and of the order of shuffled documents."""
    log_interval: int = Field(default=10, gt=0, le=INT32_MAX)
    """Steps between two lines of training metrics in metrics.jsonl."""
    eval_interval: int = Field(default=500, gt=0, le=INT32_MAX)
    """Steps between two validations; the weights with the lowest loss are kept."""
    eval_tokens: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Tokens scored at each validation, from the start of the validation text; none: all."""
    checkpoint_interval: int = Field(default=500, gt=0, le=INT32_MAX)
    """Steps between two checkpoints from which training can resume."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, into the folder tensorboard/ of the run."""

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer == "adam" and self.weight_decay:
            raise ValueError(f"weight_decay {self.weight_decay:g} needs optimizer adamw or muon; adam has none")
        if self.decay_steps and self.lr_schedule != "wsd":
            raise ValueError(f"decay_steps {self.decay_steps:,} needs lr_schedule wsd; leave it out with cosine")
        if self.lr_schedule == "wsd" and self.warmup_steps + self.decay_steps > self.max_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps:,} and decay_steps {self.decay_steps:,} are together more than "
                f"max_steps {self.max_steps:,}"
            )
        if self.weight_average != "none" and self.average_start_step >= self.max_steps:
            raise ValueError(
                f"average_start_step {self.average_start_step:,} leaves no step of {self.max_steps:,} to average; "
                f"give {self.max_steps - 1:,} or less, or weight_average none"
            )
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if (self.micro_batch_size or 0) > self.batch_size:
            raise ValueError(f"micro_batch_size {self.micro_batch_size:,} is more than batch_size {self.batch_size:,}")
        if (self.initial_segment_length is None) != (self.segment_warmup_steps == 0):
            raise ValueError("initial_segment_length and segment_warmup_steps need each other; give both or neither")
        if self.segment_warmup_steps >= self.max_steps:
            raise ValueError(
                f"segment_warmup_steps {self.segment_warmup_steps:,} leaves no step of {self.max_steps:,} at full "
                f"length; give {self.max_steps - 1:,} or less, or more max_steps"
            )
        if self.initial_segment_length is not None and not self.num_doublings:
            raise ValueError(
                f"initial_segment_length {self.initial_segment_length:,} must be segment_length "
                f"{self.segment_length:,} halved once or several times"
            )
        if self.memory_length % 2**self.num_doublings:
            raise ValueError(
                f"memory_length {self.memory_length:,} cannot be halved as often as segment_length "
                f"{self.segment_length:,}"
            )
        return self

    @property
    def num_doublings(self) -> int:
        """How often the initial segment length doubles; 0 if it is the full length or doubling does not lead there."""
        ratio = self.segment_length // (self.initial_segment_length or self.segment_length)
        exact = ratio * (self.initial_segment_length or self.segment_length) == self.segment_length
        return ratio.bit_length() - 1 if exact and ratio & (ratio - 1) == 0 else 0
