"""Settings of the model."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from transformer_xl.config.settings import INT32_MAX, Settings, UserError


def _numbers(value: Any) -> Any:
    """Lets a flag give several numbers in one word, `20000,40000`; none is no number at all."""
    if value is None:
        return ()
    if isinstance(value, str) and value != "auto":
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isascii() and part.isdecimal() for part in parts):
            raise ValueError("wanted numbers with commas between them (20000,40000,200000), auto, or none")
        return tuple(int(part) for part in parts)
    return value


class ModelConfig(Settings):
    """The model alone: everything needed to build it, nothing about data or training."""

    vocab_size: int = Field(default=256, gt=0, le=INT32_MAX)
    """V: number of different tokens; in a run it is the corpus's."""
    kind: Literal["transformer", "lstm", "qrnn"] = "transformer"
    """What a layer is: attention and feed-forward, an LSTM, or a QRNN (both of the model's width; heads and
    feedforward have no meaning there)."""
    encoding: Literal["relative", "shaw", "sinusoidal", "learned"] = "relative"
    """How a transformer knows places: distances as in Transformer-XL, or a learned vector for each distance (Shaw et
    al. 2018); or the place in the segment, and then without memory: sinusoids (Vaswani et al. 2017), or learned
    vectors at every layer (Al-Rfou et al. 2018)."""
    n_layers: int = Field(default=6, gt=0, le=INT32_MAX)
    """L: number of layers."""
    d_model: int = Field(default=256, gt=0, le=INT32_MAX, multiple_of=2)
    """D: width of the model (an even number, half of it sines and half cosines in the position encoding)."""
    n_heads: int = Field(default=4, gt=0, le=INT32_MAX)
    """N: attention heads of a layer."""
    d_head: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """H: width of one head; none: width / heads."""
    d_ff: int = Field(default=1024, gt=0, le=INT32_MAX)
    """F: width inside the feed-forward part."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Share of activations dropped in training, at the authors' places."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of attention probabilities dropped in training."""
    norm: Literal["post", "pre"] = "post"
    """Where LayerNorm stands: after each residual sum (the paper's), or first inside each residual branch."""
    final_norm: bool = True
    """With norm 'pre': a LayerNorm after the last layer too (the authors' pre-norm code has none)."""
    norm_eps: float = Field(default=1e-5, gt=0, lt=1)
    """Added to the variance in every LayerNorm."""
    d_embed: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """E: width of a token's embedding, projected to the model's; none: the model's width, without a projection."""
    cutoffs: Annotated[tuple[int, ...] | Literal["auto"], BeforeValidator(_numbers)] = ()
    """Adaptive embedding and softmax: the ids, frequent ones first, where the head ends and each tail but the last
    ends; auto: found from the word counts of the corpus, where it has any; none: one softmax over all tokens."""
    div_val: int = Field(default=1, gt=0, le=INT32_MAX)
    """Each tail's embeddings are this many times narrower than those of the cluster before; 1: all alike."""
    tie_word_embeddings: bool = True
    """The softmax uses the embeddings as its weights; false: it has its own."""
    tie_projections: Literal["all", "all_but_first", "none"] = "all"
    """Which clusters' projections the softmax takes from the embedding; the others it has for itself."""
    project_same_width: bool = True
    """With div_val: a cluster as wide as the model is projected too (the authors' One Billion Word model does not)."""
    tie_attention_biases: bool = True
    """One pair of biases u, w for all layers; false: a pair for each layer."""
    attend_empty_memory: bool = False
    """Empty memory slots are attended, as the rows of zeros they are (the authors' TensorFlow code, Hugging Face)."""
    memory: int = Field(default=128, ge=0, le=INT32_MAX)
    """Memory slots that `initial_memory` gives when not told otherwise; a run sets it to train.memory_length."""
    attention_window: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Number of keys a query sees, itself included; none: all there are."""
    clamp_length: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Distances above this count as this one in the position encoding; none: no limit."""
    learned_positions: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Learned vectors of encoding shaw (farther distances share the last) or learned (the longest segment); none: as
    many as training has distances or places."""
    intermediate_layer_losses: bool = False
    """With encodings sinusoidal and learned: in the first half of training every layer predicts, not only the last;
    the lowest stop first (Al-Rfou et al. 2018)."""
    second_target: bool = False
    """With encodings sinusoidal and learned: in training each place also predicts the token after the next, at half
    the weight (Al-Rfou et al. 2018)."""
    qrnn_kernel_size: int = Field(default=2, ge=1, le=2)
    """Inputs that the gates of a QRNN see: 1, the token's own; 2, the one before as well."""
    zoneout: float = Field(default=0.0, ge=0, lt=1)
    """Share of a QRNN's state left as it was at each token, in training."""
    attn_implementation: str = "auto"
    """How relative attention is computed: auto, or the name of a kernel (all give the same numbers)."""

    @model_validator(mode="after")
    def _check_clusters(self) -> Self:
        if self.cutoffs == "auto":
            return self
        said = f"cutoffs {', '.join(map(str, self.cutoffs))}"
        if any(start >= stop for start, stop in pairwise((0, *self.cutoffs))):
            raise ValueError(f"{said} must rise, from 1 on; give others, auto or none")
        if self.cutoffs and self.cutoffs[-1] >= self.vocab_size:
            raise ValueError(
                f"{said} must stay below the {self.vocab_size:,} tokens of the vocabulary; give others, auto or none"
            )
        if len(self.cutoffs) > self.max_tails:
            raise ValueError(
                f"div_val {self.div_val} leaves the last of {len(self.cutoffs)} tails no embedding (it divides "
                f"{self.d_embed or self.d_model} as often); lower it, or give fewer cutoffs"
            )
        return self

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        for name, needed, fits in (
            ("encoding", "kind transformer", self.kind == "transformer"),
            ("attention_dropout", "kind transformer", self.kind == "transformer"),
            ("norm", "kind transformer", self.kind == "transformer"),
            ("attend_empty_memory", "encoding relative or shaw", self.is_relative),
            ("tie_attention_biases", "encoding relative", self.kind == "transformer" and self.encoding == "relative"),
            ("attn_implementation", "encoding relative or shaw", self.is_relative),
            ("learned_positions", "encoding shaw or learned", self.has_learned_positions),
            ("intermediate_layer_losses", "encoding sinusoidal or learned", self.is_absolute),
            ("second_target", "encoding sinusoidal or learned", self.is_absolute),
            ("qrnn_kernel_size", "kind qrnn", self.kind == "qrnn"),
            ("zoneout", "kind qrnn", self.kind == "qrnn"),
        ):
            value = getattr(self, name)
            if not fits and value != type(self).model_fields[name].default:
                raise ValueError(f"{name} {value} needs {needed}, and this is {self.system}; leave it out")
        if (self.intermediate_layer_losses or self.second_target) and self.cutoffs:
            raise ValueError("intermediate_losses and second_target need one softmax; give cutoffs none")
        self.check_context_limits(memory=self.memory if "memory" in self.model_fields_set else 0)
        if self.is_absolute:
            object.__setattr__(self, "memory", 0)
        return self

    @model_validator(mode="after")
    def _fill_head_width(self) -> Self:
        if self.d_head is None and self.kind == "transformer":
            if self.d_model % self.n_heads:
                raise ValueError(
                    f"width {self.d_model} does not divide by heads {self.n_heads}; choose a multiple or set head_width"
                )
            object.__setattr__(self, "d_head", self.d_model // self.n_heads)
        return self

    def check_context_limits(
        self, *, segment: int = 1, memory: int = 0, window: int | None = None, clamp: int | None = None
    ) -> None:
        """Whether this model can read so; the window and clamp of the settings are looked at in any case.

        Raises:
            UserError: it has no such length, or not so long a one.
        """
        window, clamp = window or self.attention_window, clamp or self.clamp_length
        if self.is_absolute and memory:
            raise UserError(f"{self.system} has no memory, and memory {memory:,} was given; give memory 0")
        if self.is_absolute and clamp:
            raise UserError(f"{self.system} knows no distances to clamp, and clamp {clamp:,} was given; give none")
        if self.kind != "transformer" and (window or clamp):
            name, value = ("window", window) if window else ("clamp", clamp)
            raise UserError(f"{self.system} does not attend, and {name} {value:,} was given; give {name} none")
        most = self.learned_positions
        if self.is_absolute and most is not None and segment > most:
            raise UserError(f"segment {segment:,} is longer than the {most:,} learned positions; give {most:,} at most")

    @property
    def system(self) -> str:
        """What kind of model this is, in the words of the settings."""
        return f"encoding {self.encoding}" if self.kind == "transformer" else f"kind {self.kind}"

    @property
    def is_relative(self) -> bool:
        """Whether it attends by distance, over a memory."""
        return self.kind == "transformer" and self.encoding in ("relative", "shaw")

    @property
    def is_absolute(self) -> bool:
        """Whether it knows places in the segment alone, and has no memory."""
        return self.kind == "transformer" and not self.is_relative

    @property
    def has_learned_positions(self) -> bool:
        """Whether `learned_positions` means anything."""
        return self.kind == "transformer" and self.encoding in ("shaw", "learned")

    @property
    def cluster_boundaries(self) -> tuple[int, ...]:
        """0, the cutoffs and V: cluster i holds the ids from edge i up to edge i + 1.

        Raises:
            UserError: the cutoffs are still to be found from a corpus.
        """
        if self.cutoffs == "auto":
            raise UserError("cutoffs auto are found by 'txl train' from a corpus; give numbers to build the model")
        return (0, *self.cutoffs, self.vocab_size)

    @property
    def max_tails(self) -> int:
        """How many tails have an embedding of some width."""
        if self.div_val == 1:
            return INT32_MAX
        widest, count = self.d_embed or self.d_model, 0
        while widest >= self.div_val:
            widest, count = widest // self.div_val, count + 1
        return count

    @property
    def cluster_widths(self) -> tuple[int, ...]:
        """Embedding width of each cluster."""
        widest = self.d_embed or self.d_model
        return tuple(widest // self.div_val**index for index in range(len(self.cluster_boundaries) - 1))

    @property
    def head_size(self) -> int:
        """H, always a number."""
        assert self.d_head is not None
        return self.d_head
