"""Settings of the model: one configuration class for each architecture, and their union `ModelConfig`.

A class has only the settings that its architecture uses; settings of other architectures are refused. The memory length
is not a setting of the model but of training (`train.memory_length`) and evaluation.

Cutoffs divide the vocabulary into clusters by token frequency (adaptive softmax, Grave et al. 2017): the head, with the
most frequent tokens, and one or more tails, whose embeddings may be narrower.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import override

from transformer_xl.config.evaluation_config import EvaluationMethod
from transformer_xl.config.settings import INT32_MAX, Settings, UserError, nearest, whole_number
from transformer_xl.config.train_config import TrainConfig


def _integers(value: Any) -> Any:
    """Convert `20000,40000`, as typed for a flag, to a tuple of integers, and None to an empty tuple."""
    if value is None:
        return ()
    if isinstance(value, str) and value != "auto":
        parts = [str(whole_number(part.strip())) for part in value.split(",")]
        if not all(part.isascii() and part.isdecimal() for part in parts):
            raise ValueError("must be integers separated by commas (20000,40000,200000), auto, or none")
        return tuple(int(part) for part in parts)
    return value


class RegularizationConfig(Settings):
    """Dropout of other parts than the layers' activations, and penalties, as for Penn Treebank (recipe ptb)."""

    embedding_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability that a step of training drops a token of the vocabulary: its embedding is 0 wherever it occurs,
    except at the beginning of a sequence (Gal and Ghahramani 2016)."""
    input_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Dropout of the embedded tokens and of the encodings of relative positions; none: dropout."""
    output_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Dropout of the last hidden states, before the softmax; none: dropout."""
    qkv_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the queries, keys and values of each layer, and of its position keys."""
    variational_dropout: bool = False
    """Drop the same activations of all tokens of a sequence in a step, with a mask for each sequence; attention
    probabilities keep a mask of their own for each token."""
    activation_penalty: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Added to the training loss: this times the mean square of the last hidden states before dropout (Merity et al.
    2017)."""
    temporal_activation_penalty: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Added to the training loss: this times the mean square of the change of the last hidden states from each token to
    the next."""


def grouped(values: Any) -> Any:
    """Return settings of a model with those of `regularization` in their group; 0.1 had them among the others.

    What is no mapping stays as it is, and is refused when it is checked.

    Raises:
        UserError: one is in both places.
    """
    if not isinstance(values, Mapping):
        return values
    names, group = RegularizationConfig.model_fields.keys(), values.get("regularization")
    flat = {name: value for name, value in values.items() if name in names}
    if not flat or not isinstance(group, (Mapping, type(None))):
        return values
    if twice := flat.keys() & (group or {}).keys():
        raise UserError(f"{min(twice)} was given twice, also in the group regularization; leave one out")
    others = {name: value for name, value in values.items() if name not in names}
    return others | {"regularization": {**(group or {}), **flat}}


class _Architecture(Settings):
    """What other parts ask of the settings of any architecture, in place of its class."""

    has_distances: ClassVar[bool] = False
    """Whether layers attend by the distance between query and key."""

    @property
    def attends_empty_slots(self) -> bool:
        """Whether queries attend to memory slots that are not filled yet (the setting attend_empty_memory)."""
        return self.__dict__.get("attend_empty_memory", False)

    @property
    def has_key_offset(self) -> bool:
        """Whether half of each key is that of the token before (the setting key_offset)."""
        return self.__dict__.get("key_offset", False)

    @property
    def has_attention_sinks(self) -> bool:
        """Whether a query may attend to nothing (the setting attention_sinks)."""
        return self.__dict__.get("attention_sinks", False)

    @property
    def attention_kernel(self) -> str | None:
        """Name of the attention kernel, or auto; None for a model that has none."""
        return self.__dict__.get("attn_implementation")

    @property
    def reads_backward(self) -> bool:
        """Whether training reads every second row of a batch backward (the setting bi_data)."""
        return self.__dict__.get("bi_data", False)

    @property
    def max_vectors(self) -> int | None:
        """Number of learned vectors of distances, which limits how many have a position key of their own, or None."""
        return self.__dict__.get("max_relative_positions")


class BaseModelConfig(_Architecture):
    """Settings that every architecture has: sizes, embedding and softmax."""

    has_memory: ClassVar[bool] = True
    """Whether the model passes information from one segment to the next."""
    is_recurrent: ClassVar[bool] = False
    """Whether it passes a state of fixed size, which depends on all earlier tokens."""
    refused: ClassVar[frozenset[str]] = frozenset()
    """Settings of a model and of training that others have too, and this one refuses."""

    architecture: str
    """Name of the model architecture, a key of `ARCHITECTURES`."""
    vocab_size: int = Field(default=256, gt=0, le=INT32_MAX)
    """V: number of tokens in the vocabulary; a run takes it from its corpus."""
    n_layers: int = Field(default=6, gt=0, le=INT32_MAX)
    """L: number of layers."""
    d_model: int = Field(default=256, gt=0, le=INT32_MAX, multiple_of=2)
    """D: width of the hidden states; even, because sinusoidal position encodings are half sines and half cosines."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Probability that dropout zeroes an activation in training."""
    regularization: RegularizationConfig = RegularizationConfig()
    """Other dropout, and penalties."""
    d_embed: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """E: width of a token embedding, which is projected to d_model; none: d_model, and no projection."""
    cutoffs: Annotated[tuple[int, ...] | Literal["auto"], BeforeValidator(_integers)] = ()
    """Adaptive embedding and softmax, for token ids in order of frequency: the first id of each tail; auto: chosen from
    the token counts of the corpus, if it has them; none: one softmax over all tokens."""
    div_val: int = Field(default=1, gt=0, le=INT32_MAX)
    """Factor by which each tail's embeddings are narrower than those of the previous cluster; 1: all equally wide."""
    tie_word_embeddings: bool = True
    """Use the embedding matrix as the weight matrix of the softmax; false: the softmax has a separate one."""
    tie_projections: Literal["all", "all_but_first", "none"] = "all"
    """Clusters in which the softmax uses the projection of the embedding (d_embed to d_model); in the others it has a
    separate one."""
    project_same_width: bool = True
    """With div_val: also project a cluster as wide as d_model (the authors' One Billion Word model does not)."""
    max_ngram: int = Field(default=1, ge=1, le=16)
    """Longest n-gram with an embedding of its own, looked up by a hash of its tokens and added to the embedding of its
    last token (Pagnoni et al. 2024); 1: tokens only."""
    ngram_buckets: int = Field(default=32768, gt=0, le=INT32_MAX)
    """With max_ngram: rows of the table of each n-gram length; n-grams with the same hash share a row."""
    d_ngram: int = Field(default=64, gt=0, le=INT32_MAX)
    """With max_ngram: width of an n-gram's embedding, which is projected to d_model."""

    @classmethod
    @override
    def _unknown_setting(cls, name: str) -> str:
        owners = [architecture for architecture, kind in ARCHITECTURES.items() if name in kind.model_fields]
        if not owners:
            return super()._unknown_setting(name)
        architecture = cls.model_fields["architecture"].default
        return f"{name} is a setting of {', '.join(owners)}, and this is architecture {architecture}; leave it out"

    @model_validator(mode="before")
    @classmethod
    def _group_regularization(cls, values: Any) -> Any:
        """Accept the settings of `regularization` where files of earlier versions have them, among the others."""
        return grouped(values)

    def flat(self) -> dict[str, Any]:
        """Return all settings as plain values without groups: what checksums and transformers' config.json have."""
        values = self.model_dump(mode="json")
        values |= values.pop("regularization")
        if not self.has_distances:
            del values["qkv_dropout"]
        return values

    @model_validator(mode="after")
    def _check_qkv_dropout(self) -> Self:
        if self.regularization.qkv_dropout and not self.has_distances:
            raise ValueError(f"regularization.qkv_dropout is not for {self.architecture}; leave it out")
        return self

    @model_validator(mode="after")
    def _check_clusters(self) -> Self:
        if self.cutoffs == "auto":
            return self
        cutoffs = f"cutoffs {', '.join(map(str, self.cutoffs))}"
        if any(start >= stop for start, stop in pairwise((0, *self.cutoffs))):
            raise ValueError(f"{cutoffs} must increase, starting at 1 or more; choose others, auto or none")
        if self.cutoffs and self.cutoffs[-1] >= self.vocab_size:
            raise ValueError(f"{cutoffs} must be below vocab_size {self.vocab_size:,}; choose others, auto or none")
        if len(self.cutoffs) > self.max_tails:
            raise ValueError(
                f"div_val {self.div_val} leaves the last of {len(self.cutoffs)} tails an embedding of width 0 (it "
                f"divides {self.d_embed or self.d_model} once for each tail); lower it, or choose fewer cutoffs"
            )
        return self

    @property
    def unused(self) -> dict[str, str]:
        """Settings without effect, each with what it needs; a recipe may state them, as it states all settings."""
        has_projection = self.div_val > 1 or self.d_embed not in (None, self.d_model)
        needed = {
            "tie_projections": "" if has_projection else "d_embed other than d_model or div_val 2 or more",
            "project_same_width": "" if self.div_val > 1 else "div_val 2 or more",
            "ngram_buckets": "" if self.max_ngram > 1 else "max_ngram 2 or more",
            "d_ngram": "" if self.max_ngram > 1 else "max_ngram 2 or more",
        }
        return {name: need for name, need in needed.items() if need}

    @property
    def orders(self) -> XLNetConfig | None:
        """These settings if training predicts some tokens of each segment in random orders, or None."""
        return None

    def resolved(self, segment_length: int) -> Self:
        """Return the settings with the defaults that depend on the length of training segments filled in."""
        return self

    def check_training(self, train: TrainConfig) -> None:
        """Check that this architecture can be trained with these settings.

        Raises:
            ValueError: it cannot; the message says what to change.
        """
        if train.ngram_learning_rate_ratio is not None and self.max_ngram > 1 and train.parallelism == "fsdp":
            raise ValueError(
                "train.ngram_learning_rate_ratio needs whole tables; give parallelism ddp, or "
                "train.ngram_learning_rate_ratio none"
            )

    def text_per_step(self, train: TrainConfig) -> int:
        """Return the number of tokens by which a step of training moves on in the text."""
        return train.batch_size * train.segment_length

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings of tokens."""
        return self.d_model**0.5

    @property
    def block_width(self) -> int:
        """Width of the blocks of a layer's matrices: of a head, or of a gate of a recurrent network."""
        return getattr(self, "head_dim", self.d_model)

    @property
    def inner_width(self) -> int:
        """Width of the inner activations of a layer."""
        return getattr(self, "d_ff", self.d_model)

    def limit(
        self, name: Literal["attention_window", "clamp_length", "max_position_embeddings", "perm_size"]
    ) -> int | None:
        """Return a limit of the model in tokens, or None if it is unlimited or has no such setting."""
        return getattr(self, name, None)

    def check_context_limits(
        self,
        *,
        segment_length: int = 1,
        memory_length: int = 0,
        attention_window: int | None = None,
        clamp_length: int | None = None,
    ) -> None:
        """Check that this architecture can process segments with these lengths, in tokens.

        Raises:
            UserError: the architecture has no such length, or a segment has more tokens than the model has positions.
        """
        if memory_length and not self.has_memory:
            raise UserError(f"{self.architecture} has no memory; give memory_length 0, not {memory_length:,}")
        for name, value in (("attention_window", attention_window), ("clamp_length", clamp_length)):
            if value and name not in type(self).model_fields:
                raise UserError(f"{self.architecture} has no {name}; give none, not {value:,}")
        num_positions = self.limit("max_position_embeddings")
        if num_positions is not None and segment_length > num_positions:
            raise UserError(
                f"{segment_length:,} tokens at once are more than the {num_positions:,} positions of this model "
                f"(max_position_embeddings); give {num_positions:,} at most as segment_length and "
                "extended_context_length together, or as attention_window of method sliding-window"
            )

    def check_method(self, method: EvaluationMethod) -> None:
        """Check that this architecture can be evaluated by a method.

        Raises:
            UserError: it cannot.
        """
        if method == "both-sides" and self.limit("perm_size") is None:
            raise UserError(
                f"method both-sides needs a model that reads to both sides, and this is {self.architecture}; give "
                "architecture xlnet, or another method"
            )

    @property
    def num_recent(self) -> int:
        """R: number of tokens before a segment that a memory keeps the ids of; at least one where layers need ids."""
        return max(
            self.max_ngram - 1, *(int(self.__dict__.get(name, False)) for name in ("value_embeddings", "key_offset"))
        )

    @property
    def ngram_table_parameters(self) -> int:
        """Number of parameters in the tables of n-grams."""
        return (self.max_ngram - 1) * self.ngram_buckets * self.d_ngram

    @property
    def cluster_boundaries(self) -> tuple[int, ...]:
        """0, the cutoffs and V: cluster i contains the token ids from boundary i to boundary i + 1, exclusive.

        Raises:
            UserError: the cutoffs have not been chosen from a corpus yet.
        """
        if self.cutoffs == "auto":
            raise UserError("cutoffs auto are chosen from a corpus by 'txl train'; set integers to build the model")
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


class LayerConfig(_Architecture):
    """Settings of attention and feed-forward layers, which the layers of a model and those of a backbone have."""

    if TYPE_CHECKING:  # settings that a model or a backbone declares, and its layers use
        n_layers: int = 1
        d_model: int = 2
        dropout: float = 0.0
        regularization: RegularizationConfig = RegularizationConfig()

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
    """Maximum number of keys that a query attends to, including its own position; none: all in segment and memory."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.d_head is None and self.d_model % self.n_heads:
            raise ValueError(
                f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}; choose a multiple, or set d_head"
            )
        return self

    @property
    def gru_gate_bias(self) -> float | None:
        """Initial bias of the gates that join a residual branch with its input, or None if their sum does."""
        return getattr(self, "gate_bias", None) if getattr(self, "gating", "none") == "gru" else None

    @property
    def has_residual_relu(self) -> bool:
        """Whether ReLU is applied to the result of each residual branch."""
        return getattr(self, "residual_relu", False)

    @property
    def head_dim(self) -> int:
        """H: width of one attention head."""
        return self.d_model // self.n_heads if self.d_head is None else self.d_head


class TransformerConfig(LayerConfig, BaseModelConfig):
    """Settings of every architecture with attention and feed-forward layers."""

    @property
    @override
    def unused(self) -> dict[str, str]:
        return super().unused | ({} if self.norm_first else {"final_norm": "norm_first true"})


class RelativeLayerConfig(LayerConfig):
    """Settings of layers that attend to a memory by relative distance."""

    has_distances: ClassVar[bool] = True

    qk_norm: bool = False
    """Apply RMSNorm to the queries and keys of each head, with learned scales (Henry et al. 2020)."""
    clamp_length: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Distances between query and key above this one are encoded as this one; none: no limit."""
    attn_implementation: str = "auto"
    """Name of the attention kernel; auto: the fastest for the device (all compute the same results)."""

    @property
    def value_layers(self) -> range:
        """Indices of the layers that add an embedding of each token to its values."""
        return range(0)

    @property
    def id_layers(self) -> range:
        """Indices of the layers that are given the ids of tokens, and keep them beside hidden states."""
        return range(self.n_layers) if self.has_key_offset else self.value_layers

    @property
    def n_bias_pairs(self) -> int:
        """Number of learned pairs of content and position biases, which the layers share in turn."""
        return 1

    @property
    def position_keys(self) -> Literal["projected", "tied", "learned"]:
        """Where position keys come from: encodings projected with weights of their own, or with those of the keys; or
        learned vectors."""
        return "projected"


class RelativeConfig(RelativeLayerConfig, TransformerConfig):
    """Settings of transformers that attend to a memory by relative distance."""

    attend_empty_memory: bool = False
    """Attend also to memory slots that are not filled yet, whose contents are zeros (as the authors' TensorFlow code
    and TransfoXL of Hugging Face do)."""


class TransformerXLConfig(RelativeConfig):
    """Transformer-XL (Dai et al. 2019)."""

    architecture: Literal["transformer-xl"] = "transformer-xl"
    learned_attention_biases: bool = True
    """Learn content_bias and position_bias (the paper's u and v); false: in each layer, both are the query of the
    encoding of distance 0."""
    tie_attention_biases: bool = True
    """Share one pair of content_bias and position_bias between all layers."""
    tie_key_projections: bool = False
    """Project the encodings of distances with the weights of the keys (W_{k,R} = W_{k,E}); false: with weights of their
    own."""
    value_embeddings: bool = False
    """In every second layer, the last included, add to the values of each token an embedding from a table of the
    layer's own, through a gate for each head (after Zhou et al. 2024; as in nanochat)."""
    key_offset: bool = False
    """Half of each head's key is that of the token before (partial key offset, as in modded-nanogpt), so that one layer
    can look for what followed the last time. Not together with attend_empty_memory."""
    attention_sinks: bool = False
    """Learn a score of each head that stands for no key (attention sinks; Xiao et al. 2023, as in gpt-oss), so that a
    query may attend to nothing: at the start of a text there are few keys, and a query need not match one of them."""

    @model_validator(mode="after")
    def _check_key_offset(self) -> Self:
        if self.key_offset and self.attend_empty_memory:
            raise ValueError(
                "key_offset is for models that attend to no empty slots; set key_offset or attend_empty_memory to false"
            )
        if self.key_offset and self.head_dim < 2:
            raise ValueError("key_offset takes half of each key from the token before, so d_head must be 2 or more")
        return self

    @property
    @override
    def value_layers(self) -> range:
        return range((self.n_layers - 1) % 2, self.n_layers, 2) if self.value_embeddings else range(0)

    @property
    @override
    def unused(self) -> dict[str, str]:
        tied = {} if self.learned_attention_biases else {"tie_attention_biases": "learned_attention_biases true"}
        return super().unused | tied

    @property
    @override
    def n_bias_pairs(self) -> int:
        return (1 if self.tie_attention_biases else self.n_layers) if self.learned_attention_biases else 0

    @property
    @override
    def position_keys(self) -> Literal["projected", "tied", "learned"]:
        return "tied" if self.tie_key_projections else "projected"


class XLNetConfig(RelativeConfig):
    """XLNet (Yang et al. 2019), which learns to predict the tokens of a block in random orders."""

    refused: ClassVar[frozenset[str]] = frozenset(
        {
            *("norm_first", "attention_window", "max_ngram", "activation_penalty", "temporal_activation_penalty"),
            *("shuffle_documents", "shuffle_length", "random_segment_lengths", "extended_context_length", "loss"),
        }
    )

    architecture: Literal["xlnet"] = "xlnet"
    norm_eps: float = Field(default=1e-12, gt=0, lt=1)
    """Added to the variance in every LayerNorm."""
    reuse_length: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Tokens at the start of a segment that memory keeps, and by which the next segment starts later; they do not see
    the rest of the segment; none: half of train.segment_length."""
    perm_size: int = Field(default=256, gt=0, le=INT32_MAX)
    """Longest block of a segment that is predicted in an order of its own, in tokens; the tokens before and after
    reuse_length are in different blocks."""
    num_predict: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Number of tokens of a segment that are predicted; none: one in six."""
    mask_alpha: int = Field(default=6, gt=0, le=INT32_MAX)
    """A predicted span of n tokens is at a random place in a context of n * mask_alpha / mask_beta other tokens."""
    mask_beta: int = Field(default=1, gt=0, le=INT32_MAX)
    """Divisor of mask_alpha."""
    max_gram: int = Field(default=5, gt=0, le=INT32_MAX)
    """Longest predicted span, in tokens; a span of n tokens is drawn with a probability in proportion to 1 / n."""
    functional_tokens: Annotated[tuple[int, ...] | Literal["auto"], BeforeValidator(_integers)] = "auto"
    """Ids of the tokens that end a part of a segment, and the segment (SEP, CLS), and are not predicted: a segment is A
    SEP B SEP CLS, with B the text after A or, half of the time, text from elsewhere; auto: those of the tokenizer, if
    it has them; none: a segment is plain text."""
    bi_data: bool = False
    """Read half of a batch's rows backward, with negated distances."""

    @property
    @override
    def orders(self) -> XLNetConfig | None:
        return self

    @property
    @override
    def embedding_scale(self) -> float:
        return 1.0

    @property
    @override
    def n_bias_pairs(self) -> int:
        return self.n_layers

    @property
    def functional_ids(self) -> tuple[int, ...]:
        """Ids of SEP and CLS, or none."""
        return () if self.functional_tokens == "auto" else self.functional_tokens

    @override
    def resolved(self, segment_length: int) -> Self:
        reuse_length, num_predict = self.reuse_length or segment_length // 2, self.num_predict or segment_length // 6
        return self.model_copy(update={"reuse_length": reuse_length, "num_predict": max(1, num_predict)})

    def following(self, segment_length: int) -> dict[str, None]:
        """Return the settings that follow from this segment length, without values, to be resolved with another."""
        own = dict.fromkeys(("reuse_length", "num_predict"))
        default = self.model_copy(update=own).resolved(segment_length)
        return {name: None for name in own if getattr(self, name) == getattr(default, name)}

    def part_lengths(self, segment_length: int) -> tuple[int, int]:
        """Return the numbers of text tokens in the two parts of a segment, before and after reuse_length."""
        reuse_length = self.reuse_length or segment_length // 2
        return reuse_length, segment_length - reuse_length - (3 if self.functional_ids else 0)

    @override
    def text_per_step(self, train: TrainConfig) -> int:
        return train.batch_size // (2 if self.bi_data else 1) * self.part_lengths(train.segment_length)[0]

    @override
    def check_training(self, train: TrainConfig) -> None:
        own = self.resolved(train.segment_length)
        first, second = own.part_lengths(train.segment_length)
        if first < 1 or second < (2 if self.functional_ids else 1):
            raise ValueError(
                f"model.reuse_length {first:,} leaves too little of train.segment_length {train.segment_length:,}; "
                "give half of it, or a longer segment"
            )
        most = min(2 * first, 2 * second + 1)
        if (own.num_predict or 0) > most:
            raise ValueError(
                f"model.num_predict {own.num_predict:,} is more than the tokens of a segment's parts; give {most:,} at "
                "most"
            )
        given = {
            "train.shuffle_documents true": train.shuffle_documents,
            f"train.shuffle_length {train.shuffle_length:,}": train.shuffle_length,
            "train.random_segment_lengths true": train.random_segment_lengths,
            f"train.extended_context_length {train.extended_context_length:,}": train.extended_context_length,
            "train.loss half": train.loss == "half",
        }
        if name := next((name for name, is_given in given.items() if is_given), None):
            raise ValueError(f"{name} is not for {self.architecture}; leave it out")
        if self.bi_data and (train.batch_size % 2 or (train.micro_batch_size or 0) % 2):
            raise ValueError(
                "model.bi_data reads half of a batch backward; give an even batch_size and micro_batch_size"
            )

    @model_validator(mode="after")
    def _check_xlnet(self) -> Self:
        penalties = self.regularization.activation_penalty, self.regularization.temporal_activation_penalty
        given = {
            "norm_first true": self.norm_first,
            f"attention_window {self.attention_window}": self.attention_window,
            f"max_ngram {self.max_ngram}": self.max_ngram > 1,  # an n-gram would show what is to be predicted
            "a penalty of activations": any(penalties),
        }
        if name := next((name for name, is_given in given.items() if is_given), None):
            raise ValueError(f"{name} is not for xlnet; leave it out")
        if self.max_gram > self.perm_size:
            raise ValueError(
                f"max_gram {self.max_gram:,} is longer than a block of perm_size {self.perm_size:,} tokens"
            )
        ids = self.functional_ids
        if len(ids) not in (0, 2) or not all(0 <= index < self.vocab_size for index in ids):
            raise ValueError(
                f"functional_tokens {', '.join(map(str, ids))} must be two token ids below "
                f"vocab_size {self.vocab_size:,}, those of SEP and CLS, or none"
            )
        return self


class ShawConfig(RelativeConfig):
    """Transformer-XL's recurrence with learned relative positions (Shaw et al. 2018)."""

    architecture: Literal["shaw"] = "shaw"
    max_relative_positions: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Number of distances between query and key with a learned vector; larger distances use the last vector; none: the
    number of distances in training (train.segment_length + train.memory_length)."""

    @property
    @override
    def n_bias_pairs(self) -> int:
        return 0

    @property
    @override
    def position_keys(self) -> Literal["projected", "tied", "learned"]:
        return "learned"


class AbsoluteConfig(TransformerConfig):
    """Settings of transformers with absolute positions, which have no memory."""

    has_memory: ClassVar[bool] = False
    learns_positions: ClassVar[bool] = False
    """Whether positions have learned vectors; they are sinusoids otherwise."""

    intermediate_layer_losses: bool = False
    """In the first half of training all layers predict the targets, not only the last; lower layers stop earlier
    (Al-Rfou et al. 2018)."""
    num_targets: int = Field(default=1, ge=1, le=2)
    """1: each position predicts the next token. 2: in training it also predicts the token after that, with half
    the weight in the loss (Al-Rfou et al. 2018)."""

    @model_validator(mode="after")
    def _check_losses(self) -> Self:
        if (self.intermediate_layer_losses or self.num_targets > 1) and self.cutoffs:
            raise ValueError("intermediate_layer_losses and num_targets 2 need one softmax; set cutoffs none")
        return self


class VaswaniConfig(AbsoluteConfig):
    """Transformer with sinusoidal absolute positions (Vaswani et al. 2017), without memory."""

    architecture: Literal["vaswani"] = "vaswani"


class AlRfouConfig(AbsoluteConfig):
    """Transformer with learned absolute positions at every layer (Al-Rfou et al. 2018), without memory."""

    learns_positions: ClassVar[bool] = True
    refused: ClassVar[frozenset[str]] = frozenset({"random_segment_lengths"})

    architecture: Literal["al-rfou"] = "al-rfou"
    max_position_embeddings: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Number of learned positions, which is the maximum segment length; none: train.segment_length."""


class RecurrentConfig(BaseModelConfig):
    """Settings of recurrent networks."""

    is_recurrent: ClassVar[bool] = True


class LSTMConfig(RecurrentConfig):
    """LSTM (Hochreiter & Schmidhuber 1997); the hidden size of every layer is d_model."""

    architecture: Literal["lstm"] = "lstm"


class QRNNConfig(RecurrentConfig):
    """QRNN (Bradbury et al. 2017); the hidden size of every layer is d_model."""

    architecture: Literal["qrnn"] = "qrnn"
    qrnn_kernel_size: int = Field(default=2, ge=1, le=2)
    """Number of input positions that the gates are computed from: 1: the current one; 2: the previous one as well."""
    zoneout: float = Field(default=0.0, ge=0, lt=1)
    """Probability that zoneout leaves an element of the state unchanged in a step of training."""


class BackboneConfig(RelativeLayerConfig):
    """Layers of Transformer-XL for continuous inputs (`Backbone`), by default those of GTrXL (Parisotto et al. 2019).

    norm_first false is the paper's order, norm_first true with residual_relu false and gating none the pre-norm order
    of the language models, and with residual_relu true it is TrXL-I, to which gating gru adds GTrXL's gates.
    """

    d_input: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Width of the inputs, which are projected to d_model; none: d_model, and no projection."""
    n_layers: int = Field(default=3, gt=0, le=INT32_MAX)
    """L: number of layers."""
    d_model: int = Field(default=256, gt=0, le=INT32_MAX, multiple_of=2)
    """D: width of the hidden states; even, because sinusoidal position encodings are half sines and half cosines."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability that dropout zeroes an activation in training; in reinforcement learning it makes the policy of an
    update differ from the one that acted."""
    regularization: RegularizationConfig = RegularizationConfig()
    """Of which variational_dropout and qkv_dropout have an effect."""
    norm_first: bool = True
    """Apply LayerNorm at the start of each residual branch; false: after each residual sum, as in the paper."""
    residual_relu: bool = True
    """Apply ReLU to the result of each residual branch, before it is added to the branch's input (TrXL-I)."""
    gating: Literal["none", "gru"] = "gru"
    """How the result of a residual branch is joined with its input; none: by their sum; gru: by a gate like that of a
    GRU (GTrXL)."""
    gate_bias: float = Field(default=2.0, allow_inf_nan=False)
    """With gating gru: initial value of the gates' biases b_g; the larger, the more of its input a new layer passes on
    unchanged."""


def _build(value: Any) -> Any:
    """Build the configuration that a mapping describes; `architecture` selects the class."""
    if isinstance(value, BaseModelConfig):
        return value
    if not isinstance(value, Mapping):
        raise ValueError("must be a mapping of settings")
    name = str(value.get("architecture", "transformer-xl"))
    if name not in ARCHITECTURES:
        raise ValueError(
            f"architecture '{name}' must be one of {', '.join(ARCHITECTURES)}{nearest(name, ARCHITECTURES)}"
        )
    return ARCHITECTURES[name].model_validate(value)


ModelConfig = Annotated[
    TransformerXLConfig | XLNetConfig | ShawConfig | VaswaniConfig | AlRfouConfig | LSTMConfig | QRNNConfig,
    BeforeValidator(_build),
]
"""The settings of any model; the value of `architecture` (transformer-xl by default) selects the class."""

ARCHITECTURES: Mapping[str, type[BaseModelConfig]] = {
    kind.model_fields["architecture"].default: kind
    for kind in (TransformerXLConfig, XLNetConfig, ShawConfig, VaswaniConfig, AlRfouConfig, LSTMConfig, QRNNConfig)
}
"""The configuration class of each architecture, by the value of `architecture`."""
