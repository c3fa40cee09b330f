"""Settings of training: lengths, optimizer, schedules, and the intervals of logging, validation and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from transformer_xl.config.settings import INT32_MAX, Settings, nearest

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""A program that a run sends its metrics to (`training/trackers.py`)."""


def _tracker_names(value: Any) -> Any:
    """Convert `wandb,mlflow`, as typed for a flag, to names, and None to none of them; refuse unknown ones."""
    names = value.split(",") if isinstance(value, str) else value or ()
    if not isinstance(names, (list, tuple)):
        return value
    names, known = [str(name).strip() for name in names if name], get_args(TrackerName)
    if unknown := next((name for name in names if name not in known), None):
        raise ValueError(f"no tracker '{unknown}'{nearest(unknown, known)}; there are {', '.join(known)}")
    return tuple(dict.fromkeys(names))


class TrainConfig(Settings):
    """Settings of training."""

    RETIRED: ClassVar[Mapping[str, Any]] = {
        "initial_segment_length": None,
        "segment_warmup_steps": 0,
        "muon_momentum": 0.95,
    }

    segment_length: int = Field(default=128, gt=0, le=INT32_MAX)
    """T: number of tokens of each sequence of the batch in one step."""
    memory_length: int = Field(default=128, ge=0, le=INT32_MAX)
    """M: number of memory slots (tokens) in training."""
    extended_context_length: int = Field(default=0, ge=0, le=INT32_MAX)
    """Without memory: tokens before each segment that are read again with it, with gradients and without loss."""
    random_segment_lengths: bool = False
    """Draw the segment length of each step: from a normal distribution with mean segment_length, in 5% of the steps
    half of it, and standard deviation 5, at least 5; the learning rate of a step is scaled by its length (Merity et
    al. 2017)."""
    batch_size: int = Field(default=16, gt=0, le=INT32_MAX)
    """B: sequences of one optimizer step, over all processes; each is a different part of the text."""
    micro_batch_size: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Maximum number of sequences that one process computes at once, accumulating gradients: the same step with
    less device memory (only the dropout masks differ); none: all sequences at once."""
    max_steps: int = Field(default=2000, gt=0, le=INT32_MAX)
    """Number of optimizer steps."""
    max_epochs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """New runs: lower max_steps to the steps that read the training text this often, and other numbers of steps, such
    as warmup_steps, in proportion; a max_steps that is given with a recipe replaces the recipe's max_epochs; none:
    max_steps alone."""
    optimizer: Literal["adam", "adamw", "muon", "soap-muon"] = "adam"
    """adam (as in the paper), adamw, muon (for the matrices in the layers, with AdamW for all other weights), or
    soap-muon (muon whose momentum is first divided by the root of the second moment, in the eigenbasis of the
    gradients' covariance)."""
    learning_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's average of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of Adam's average of squared gradients."""
    muon_learning_rate_ratio: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Muon's learning rate divided by `learning_rate`, which is AdamW's; both optimizers scale their updates to about
    the same size."""
    ngram_learning_rate_ratio: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Update the tables of n-grams by RMSProp with the decay beta2, and only the rows that a batch looks up, without
    weight decay: their learning rate divided by `learning_rate`; none: all rows, as other weights."""
    embedding_learning_rate_ratio: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Peak learning rate of the embedding, and of the softmax weights it shares, divided by `learning_rate`; at the end
    both have the same rate."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """With adamw, muon and soap-muon, decoupled weight decay of matrices: each step subtracts this times the learning
    rate times the weight. With adam, L2 regularization: this times the weight is added to the gradient of every
    weight."""
    lr_schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    """Learning rate after the warm-up: cosine or linear decay, or stable and then linear decay (wsd)."""
    warmup_steps: int = Field(default=100, ge=0, le=INT32_MAX)
    """Steps over which the learning rate increases linearly from 0."""
    decay_steps: int = Field(default=0, ge=0, le=INT32_MAX)
    """With wsd: number of last steps in which the learning rate decreases linearly; before them it stays at its
    peak."""
    min_learning_rate_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end, as a fraction of the peak."""
    weight_average: Literal["none", "ema", "uniform"] = "none"
    """Average the weights over the steps, exponentially or uniformly; the average is validated and saved as best
    weights."""
    ema_decay: float = Field(default=0.999, ge=0, lt=1)
    """With ema: decay of the average at each step."""
    average_start_step: int = Field(default=0, ge=0, le=INT32_MAX)
    """Number of steps before averaging starts; until then the current weights are used as the average."""
    average_learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Constant learning rate while weights are averaged; lr_schedule then ends at average_start_step; none: lr_schedule
    goes on to max_steps."""
    max_grad_norm: float = Field(default=0.25, gt=0)
    """Gradients whose norm over all parameters is larger are scaled down to this norm."""
    shuffle_documents: bool = False
    """Train on the documents (in One Billion Word, sentences) in a new random order each epoch; false: in text
    order."""
    shuffle_length: int = Field(default=0, ge=0, le=INT32_MAX)
    """Tokens of the pieces that the text, or with shuffle_documents each document, is cut into to be trained on in a
    new random order each epoch (shorter ones in a short text, so that each row has one); 0: not cut."""
    loss: Literal["full", "half"] = "full"
    """Targets in the loss: all of a segment, or only its second half."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of matrix products; auto: bfloat16 where the hardware supports it."""
    compile: Literal["none", "layers", "cudagraphs"] = "none"
    """Compile the layers with torch.compile (slower first steps, faster later ones); cudagraphs: also use CUDA
    graphs."""
    activation_checkpointing: bool = False
    """Recompute the activations inside each layer in the backward pass: slower, with much less device memory."""
    parallelism: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: the whole model in each (ddp), or weights and optimizer state divided among them
    (fsdp)."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Random seed of the initial weights, dropout and the order of shuffled documents."""
    log_interval: int = Field(default=10, gt=0, le=INT32_MAX)
    """Steps between two lines of training metrics in metrics.jsonl."""
    eval_interval: int = Field(default=500, gt=0, le=INT32_MAX)
    """Steps between two validations; the weights with the lowest validation loss are saved as best weights."""
    eval_tokens: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Number of tokens scored at each validation, from the start of the validation text; none: all."""
    checkpoint_interval: int = Field(default=500, gt=0, le=INT32_MAX)
    """Steps between two checkpoints from which training can resume."""
    trackers: Annotated[tuple[TrackerName, ...], BeforeValidator(_tracker_names)] = ()
    """Programs that also get the settings, the metrics, the results and a sample of the run: tensorboard (event files
    in the folder tensorboard/ of the run), wandb, mlflow, trackio."""

    @model_validator(mode="before")
    @classmethod
    def _read_tensorboard(cls, values: Any) -> Any:
        """Read the switch `tensorboard`, which earlier versions had in place of its name in `trackers`."""
        if not isinstance(values, Mapping) or not isinstance(values.get("tensorboard"), bool):
            return values
        kept = dict(values)
        names = [name for name in _tracker_names(kept.get("trackers")) if name != "tensorboard"]
        names += ["tensorboard"] * kept.pop("tensorboard")
        return {**kept, "trackers": names}

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.decay_steps and self.lr_schedule != "wsd":
            raise ValueError(f"decay_steps {self.decay_steps:,} needs lr_schedule wsd; leave it out with others")
        if self.lr_schedule == "wsd" and self.warmup_steps + self.decay_steps > self.schedule_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps:,} and decay_steps {self.decay_steps:,} are together more than "
                f"{'max_steps' if self.schedule_steps == self.max_steps else 'average_start_step'} "
                f"{self.schedule_steps:,}"
            )
        if self.weight_average != "none" and self.average_start_step >= self.max_steps:
            raise ValueError(
                f"average_start_step {self.average_start_step:,} leaves no step of {self.max_steps:,} to average; "
                f"give {self.max_steps - 1:,} or less, or weight_average none"
            )
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.extended_context_length and self.memory_length:
            raise ValueError(
                f"extended_context_length {self.extended_context_length:,} is for training without memory, and "
                f"memory_length is {self.memory_length:,}; set one of them to 0"
            )
        if self.random_segment_lengths and self.compile != "none":
            raise ValueError(
                f"compile {self.compile} needs segments of fixed lengths; leave it or random_segment_lengths out"
            )
        if self.optimizer == "soap-muon" and self.parallelism == "fsdp":
            raise ValueError("optimizer soap-muon needs whole matrices; give parallelism ddp or optimizer muon")
        if (self.micro_batch_size or 0) > self.batch_size:
            raise ValueError(f"micro_batch_size {self.micro_batch_size:,} is more than batch_size {self.batch_size:,}")
        return self

    @property
    def unused(self) -> dict[str, str]:
        """Settings without effect, each with what it needs; a recipe may state them, as it states all settings."""
        needed = {
            "muon_learning_rate_ratio": "" if self.has_muon else "optimizer muon or soap-muon",
            "ema_decay": "" if self.weight_average == "ema" else "weight_average ema",
            "average_start_step": "" if self.weight_average != "none" else "weight_average ema or uniform",
            "average_learning_rate": "" if self.weight_average != "none" else "weight_average ema or uniform",
        }
        return {name: need for name, need in needed.items() if need}

    @property
    def has_muon(self) -> bool:
        """Whether Muon updates the matrices of the layers."""
        return self.optimizer in ("muon", "soap-muon")

    @property
    def num_inputs(self) -> int:
        """Number of tokens that a sequence reads in a step: those of a segment and of its extended context."""
        return self.segment_length + self.extended_context_length

    @property
    def schedule_steps(self) -> int:
        """Number of steps of lr_schedule; with average_learning_rate, fewer than max_steps."""
        if self.weight_average == "none" or self.average_learning_rate is None:
            return self.max_steps
        return self.average_start_step
