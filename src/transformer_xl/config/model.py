"""Settings of the model."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from transformer_xl.config.settings import MOST, Settings, UserError


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

    vocabulary_size: int = Field(default=256, gt=0, le=MOST)
    """V: number of different tokens; in a run it is the corpus's."""
    layers: int = Field(default=6, gt=0, le=MOST)
    """L: number of layers."""
    width: int = Field(default=256, gt=0, le=MOST, multiple_of=2)
    """D: width of the model (an even number, half of it sines and half cosines in the position encoding)."""
    heads: int = Field(default=4, gt=0, le=MOST)
    """N: attention heads of a layer."""
    head_width: int | None = Field(default=None, gt=0, le=MOST)
    """H: width of one head; none: width / heads."""
    feedforward: int = Field(default=1024, gt=0, le=MOST)
    """F: width inside the feed-forward part."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Share of activations dropped in training, at the authors' places."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of attention probabilities dropped in training."""
    norm: Literal["post", "pre"] = "post"
    """Where LayerNorm stands: after each residual sum (the paper's), or first inside each residual branch."""
    final_norm: bool = True
    """With norm 'pre': a LayerNorm after the last layer too (the authors' pre-norm code has none)."""
    embedding_width: int | None = Field(default=None, gt=0, le=MOST)
    """E: width of a token's embedding, projected to the model's; none: the model's width, without a projection."""
    cutoffs: Annotated[tuple[int, ...] | Literal["auto"], BeforeValidator(_numbers)] = ()
    """Adaptive embedding and softmax: the ids, frequent ones first, where the head ends and each tail but the last
    ends; auto: found from the word counts of the corpus, where it has any; none: one softmax over all tokens."""
    div_val: int = Field(default=1, gt=0, le=MOST)
    """Each tail's embeddings are this many times narrower than those of the cluster before; 1: all alike."""
    tie_weights: bool = True
    """The softmax uses the embeddings as its weights; false: it has its own."""
    tie_projections: Literal["all", "all_but_first", "none"] = "all"
    """Which clusters' projections the softmax takes from the embedding; the others it has for itself."""
    project_equal_width: bool = True
    """With div_val: a cluster as wide as the model is projected too (the authors' One Billion Word model does not)."""
    tie_position_biases: bool = True
    """One pair of biases u, w for all layers; false: a pair for each layer."""
    memory: int = Field(default=128, ge=0, le=MOST)
    """Memory slots that `initial_memory` gives when not told otherwise; a run sets it to train.memory."""
    window: int | None = Field(default=None, gt=0, le=MOST)
    """Number of keys a query sees, itself included; none: all there are."""
    clamp_length: int | None = Field(default=None, gt=0, le=MOST)
    """Distances above this count as this one in the position encoding; none: no limit."""
    kernel: str = "auto"
    """How attention is computed: auto, or the name of a kernel (all give the same numbers)."""

    @model_validator(mode="after")
    def _check_clusters(self) -> Self:
        if self.cutoffs == "auto":
            return self
        said = f"cutoffs {', '.join(map(str, self.cutoffs))}"
        if any(start >= stop for start, stop in pairwise((0, *self.cutoffs))):
            raise ValueError(f"{said} must rise, from 1 on; give others, auto or none")
        if self.cutoffs and self.cutoffs[-1] >= self.vocabulary_size:
            raise ValueError(
                f"{said} must stay below the {self.vocabulary_size:,} tokens of the vocabulary; give others, auto or "
                "none"
            )
        if len(self.cutoffs) > self.most_tails:
            raise ValueError(
                f"div_val {self.div_val} leaves the last of {len(self.cutoffs)} tails no embedding (it divides "
                f"{self.embedding_width or self.width} as often); lower it, or give fewer cutoffs"
            )
        return self

    @model_validator(mode="after")
    def _fill_head_width(self) -> Self:
        if self.head_width is None:
            if self.width % self.heads:
                raise ValueError(
                    f"width {self.width} does not divide by heads {self.heads}; choose a multiple or set head_width"
                )
            object.__setattr__(self, "head_width", self.width // self.heads)
        return self

    @property
    def cluster_edges(self) -> tuple[int, ...]:
        """0, the cutoffs and V: cluster i holds the ids from edge i up to edge i + 1.

        Raises:
            UserError: the cutoffs are still to be found from a corpus.
        """
        if self.cutoffs == "auto":
            raise UserError("cutoffs auto are found by 'txl train' from a corpus; give numbers to build the model")
        return (0, *self.cutoffs, self.vocabulary_size)

    @property
    def most_tails(self) -> int:
        """How many tails have an embedding of some width."""
        if self.div_val == 1:
            return MOST
        widest, count = self.embedding_width or self.width, 0
        while widest >= self.div_val:
            widest, count = widest // self.div_val, count + 1
        return count

    @property
    def cluster_widths(self) -> tuple[int, ...]:
        """Embedding width of each cluster."""
        widest = self.embedding_width or self.width
        return tuple(widest // self.div_val**index for index in range(len(self.cluster_edges) - 1))

    @property
    def head_size(self) -> int:
        """H, always a number."""
        assert self.head_width is not None
        return self.head_width
