"""Settings of the model: one configuration class for each architecture, and their union `ModelConfig`.

A class has only the settings that its architecture reads; any other setting is refused, with the architecture's name.
Lengths of the memory are not here: they belong to training (`train.memory_length`) and evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from transformer_xl.config.settings import INT32_MAX, Settings, UserError


def _integers(value: Any) -> Any:
    """Accept several integers in one string, `20000,40000`, as a flag gives them; None means no integers."""
    if value is None:
        return ()
    if isinstance(value, str) and value != "auto":
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isascii() and part.isdecimal() for part in parts):
            raise ValueError("must be integers separated by commas (20000,40000,200000), auto, or none")
        return tuple(int(part) for part in parts)
    return value


class BaseModelConfig(Settings):
    """Settings that every architecture has: sizes, embedding and softmax."""

    has_memory: ClassVar[bool] = True
    """Whether the model carries anything from one segment to the next."""

    architecture: str
    """Which model this is."""
    vocab_size: int = Field(default=256, gt=0, le=INT32_MAX)
    """V: number of tokens in the vocabulary; a run takes it from its corpus."""
    n_layers: int = Field(default=6, gt=0, le=INT32_MAX)
    """L: number of layers."""
    d_model: int = Field(default=256, gt=0, le=INT32_MAX, multiple_of=2)
    """D: width of the hidden states; even, because sinusoidal position encodings are half sines and half cosines."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Probability that dropout zeroes an activation in training."""
    d_embed: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """E: width of a token embedding, which is projected to d_model; none: d_model, without a projection."""
    cutoffs: Annotated[tuple[int, ...] | Literal["auto"], BeforeValidator(_integers)] = ()
    """Adaptive embedding and softmax: token ids (frequent tokens first) where the head ends and where each tail but the
    last ends; auto: chosen from the token counts of the corpus, if it has them; none: one softmax over all tokens."""
    div_val: int = Field(default=1, gt=0, le=INT32_MAX)
    """Factor by which each tail's embeddings are narrower than those of the cluster before; 1: all equally wide."""
    tie_word_embeddings: bool = True
    """Use the embedding matrix as the weights of the softmax; false: the softmax has its own."""
    tie_projections: Literal["all", "all_but_first", "none"] = "all"
    """Clusters whose embedding projection the softmax shares; the other clusters have a projection of their own."""
    project_same_width: bool = True
    """With div_val: also project a cluster as wide as d_model (the authors' One Billion Word model does not)."""

    @model_validator(mode="after")
    def _check_clusters(self) -> Self:
        if self.cutoffs == "auto":
            return self
        given = f"cutoffs {', '.join(map(str, self.cutoffs))}"
        if any(start >= stop for start, stop in pairwise((0, *self.cutoffs))):
            raise ValueError(f"{given} must increase, starting at 1 or more; give others, auto or none")
        if self.cutoffs and self.cutoffs[-1] >= self.vocab_size:
            raise ValueError(f"{given} must be below vocab_size {self.vocab_size:,}; give others, auto or none")
        if len(self.cutoffs) > self.max_tails:
            raise ValueError(
                f"div_val {self.div_val} leaves the last of {len(self.cutoffs)} tails an embedding of width 0 (it "
                f"divides {self.d_embed or self.d_model} once for each tail); lower it, or give fewer cutoffs"
            )
        return self

    def limit(self, name: Literal["attention_window", "clamp_length", "max_position_embeddings"]) -> int | None:
        """Return one of the model's limits in tokens, or None if it is not limited or has no such setting."""
        return getattr(self, name, None)

    def check_context_limits(
        self,
        *,
        segment_length: int = 1,
        memory_length: int = 0,
        attention_window: int | None = None,
        clamp_length: int | None = None,
    ) -> None:
        """Check that this architecture can read with these lengths, in tokens.

        Raises:
            UserError: the architecture has no such length, or a segment is longer than its positions.
        """
        if memory_length and not self.has_memory:
            raise UserError(f"{self.architecture} has no memory; give memory_length 0, not {memory_length:,}")
        for name, value in (("attention_window", attention_window), ("clamp_length", clamp_length)):
            if value and name not in type(self).model_fields:
                raise UserError(f"{self.architecture} has no {name}; give none, not {value:,}")
        longest = self.limit("max_position_embeddings")
        if longest is not None and segment_length > longest:
            raise UserError(
                f"segment_length {segment_length:,} is longer than the {longest:,} positions of this model "
                f"(max_position_embeddings); give {longest:,} at most"
            )

    @property
    def cluster_boundaries(self) -> tuple[int, ...]:
        """0, the cutoffs and V: cluster i holds the ids from boundary i up to boundary i + 1.

        Raises:
            UserError: the cutoffs have not been chosen from a corpus yet.
        """
        if self.cutoffs == "auto":
            raise UserError("cutoffs auto are chosen from a corpus by 'txl train'; give integers to build the model")
        return (0, *self.cutoffs, self.vocab_size)

    @property
    def max_tails(self) -> int:
        """Number of tails whose embeddings have a width of at least 1."""
        if self.div_val == 1:
            return INT32_MAX
        width, count = self.d_embed or self.d_model, 0
        while width >= self.div_val:
            width, count = width // self.div_val, count + 1
        return count

    @property
    def cluster_widths(self) -> tuple[int, ...]:
        """Embedding width of each cluster."""
        width = self.d_embed or self.d_model
        return tuple(width // self.div_val**index for index in range(len(self.cluster_boundaries) - 1))


class TransformerConfig(BaseModelConfig):
    """Settings of every architecture with attention and feed-forward layers."""

    n_heads: int = Field(default=4, gt=0, le=INT32_MAX)
    """N: number of attention heads in each layer."""
    d_head: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """H: width of one attention head; none: d_model / n_heads."""
    d_ff: int = Field(default=1024, gt=0, le=INT32_MAX)
    """F: inner width of the feed-forward layers."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability that dropout zeroes an attention probability in training."""
    norm_first: bool = False
    """Apply LayerNorm at the start of each residual branch; false: after each residual sum, as in the paper."""
    final_norm: bool = True
    """With norm_first: apply LayerNorm after the last layer as well (the authors' pre-norm code does not)."""
    norm_eps: float = Field(default=1e-5, gt=0, lt=1)
    """Added to the variance in every LayerNorm."""
    attention_window: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Number of keys that a query attends to, its own position included; none: all there are."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.d_head is None and self.d_model % self.n_heads:
            raise ValueError(
                f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}; choose a multiple, or give d_head"
            )
        return self

    @property
    def head_dim(self) -> int:
        """H: width of one attention head."""
        return self.d_model // self.n_heads if self.d_head is None else self.d_head


class RelativeConfig(TransformerConfig):
    """Settings of transformers that attend to a memory by relative distance."""

    attend_empty_memory: bool = False
    """Attend to empty memory slots, which are zeros (as the authors' TensorFlow code and Hugging Face do)."""
    clamp_length: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Distances above this one are encoded as this one; none: no limit."""
    attn_implementation: str = "auto"
    """Attention kernel by name; auto: the fastest for the device (all give the same numbers)."""


class TransformerXLConfig(RelativeConfig):
    """Transformer-XL (Dai et al. 2019)."""

    architecture: Literal["transformer-xl"] = "transformer-xl"
    tie_attention_biases: bool = True
    """Share one pair of content_bias and position_bias (the paper's u and v) between all layers."""


class ShawConfig(RelativeConfig):
    """Transformer-XL's recurrence with learned relative positions (Shaw et al. 2018)."""

    architecture: Literal["shaw"] = "shaw"
    max_relative_positions: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Number of distances with a learned vector, which larger distances share with the last; none: as many as there are
    in training (train.segment_length + train.memory_length)."""


class AbsoluteConfig(TransformerConfig):
    """Settings of transformers with absolute positions, which have no memory."""

    has_memory: ClassVar[bool] = False

    intermediate_layer_losses: bool = False
    """In the first half of training every layer predicts, not only the last; the lowest layers stop first (Al-Rfou et
    al. 2018)."""
    num_targets: int = Field(default=1, ge=1, le=2)
    """2: in training each position also predicts the token after the next, at half the weight (Al-Rfou et al. 2018)."""

    @model_validator(mode="after")
    def _check_losses(self) -> Self:
        if (self.intermediate_layer_losses or self.num_targets > 1) and self.cutoffs:
            raise ValueError("intermediate_layer_losses and num_targets 2 need one softmax; give cutoffs none")
        return self


class VaswaniConfig(AbsoluteConfig):
    """Transformer with sinusoidal absolute positions (Vaswani et al. 2017), without memory."""

    architecture: Literal["vaswani"] = "vaswani"


class AlRfouConfig(AbsoluteConfig):
    """Transformer with learned absolute positions at every layer (Al-Rfou et al. 2018), without memory."""

    architecture: Literal["al-rfou"] = "al-rfou"
    max_position_embeddings: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Number of learned positions, which is the longest segment; none: train.segment_length."""


class RecurrentConfig(BaseModelConfig):
    """Settings of recurrent networks."""


class LSTMConfig(RecurrentConfig):
    """LSTM (Hochreiter & Schmidhuber 1997); every layer is as wide as the model."""

    architecture: Literal["lstm"] = "lstm"


class QRNNConfig(RecurrentConfig):
    """QRNN (Bradbury et al. 2017); every layer is as wide as the model."""

    architecture: Literal["qrnn"] = "qrnn"
    qrnn_kernel_size: int = Field(default=2, ge=1, le=2)
    """Number of inputs that the gates see: 1, the token's own; 2, the one before as well."""
    zoneout: float = Field(default=0.0, ge=0, lt=1)
    """Probability that zoneout leaves an element of the state as it was, in training."""


def _with_architecture(value: Any) -> Any:
    """Add architecture transformer-xl to a mapping that has none."""
    return {"architecture": "transformer-xl", **value} if isinstance(value, Mapping) else value


ModelConfig = Annotated[
    TransformerXLConfig | ShawConfig | VaswaniConfig | AlRfouConfig | LSTMConfig | QRNNConfig,
    Field(discriminator="architecture"),
    BeforeValidator(_with_architecture),
]
"""The settings of any model; the value of `architecture` selects the class."""

ARCHITECTURES: Mapping[str, type[BaseModelConfig]] = {
    "transformer-xl": TransformerXLConfig,
    "shaw": ShawConfig,
    "vaswani": VaswaniConfig,
    "al-rfou": AlRfouConfig,
    "lstm": LSTMConfig,
    "qrnn": QRNNConfig,
}
"""The configuration class of each architecture."""
