"""Settings: what can be set, in which units, with which checks; the recipes; and the error a user sees.

Settings come from three places, later ones winning: the defaults here, a recipe (a YAML file, see `recipes/`), and
flags such as `--model.layers 6`. They are checked once, as a whole, and stored whole in `config.yaml` of the run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

MOST = 2**31 - 1  # of anything counted here; more is a slip of the finger


class UserError(ValueError):
    """Something the user can put right: one line that says what was given, what was wanted and what to type next."""


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint for a mistyped name: ` (did you mean 'x'?)`, or nothing where no known name is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""


class Settings(BaseModel):
    """A frozen group of settings; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


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


class TrainConfig(Settings):
    """How the weights are found."""

    segment: int = Field(default=128, gt=0, le=MOST)
    """T: new tokens a row reads in one step."""
    memory: int = Field(default=128, ge=0, le=MOST)
    """M: memory slots in training, in tokens."""
    rows: int = Field(default=16, gt=0, le=MOST)
    """B: rows read side by side, each a stretch of text of its own."""
    steps: int = Field(default=2000, gt=0, le=MOST)
    """Optimiser steps in all."""
    learning_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """Peak learning rate of Adam."""
    warmup: int = Field(default=100, ge=0, le=MOST)
    """Steps over which the learning rate rises linearly from 0; after them it falls to 0 along a cosine."""
    clip: float = Field(default=0.25, gt=0)
    """Largest norm of the gradient; a larger gradient is scaled down to it."""
    order: Literal["text", "shuffled"] = "text"
    """The text as it stands, or its documents (One Billion Word: its sentences) in a new order each epoch."""
    loss: Literal["full", "half"] = "full"
    """Which targets count: all of a segment's, or only its second half's."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of matrix products; auto: bfloat16 where the machine has instructions for it."""
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


class EvaluationConfig(Settings):
    """How the run is evaluated unless told otherwise."""

    segment: int | None = Field(default=None, gt=0, le=MOST)
    """New tokens read in one step; none: train.segment. It changes the speed and, without a window, the context."""
    memory: int | None = Field(default=None, ge=0, le=MOST)
    """Memory slots, in tokens; none: train.memory."""
    window: int | None = Field(default=None, gt=0, le=MOST)
    """Number of keys a query sees, itself included; none: model.window."""
    clamp: int | None = Field(default=None, gt=0, le=MOST)
    """Distances above this count as this one; none: model.clamp_length."""


class CorpusReference(Settings):
    """Which corpus a run was trained on."""

    path: str
    """Folder of the corpus, as an absolute path."""
    vocabulary: str
    """Fingerprint (sha256) of its vocabulary."""
    train_sha256: str
    """Of the training tokens: a run goes on only with the text it began with."""


class RunConfig(Settings):
    """Everything about a run, stored as its config.yaml."""

    recipe: str | None = None
    corpus: CorpusReference | None = None
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _one_memory_length(self) -> Self:
        if "memory" in self.model.model_fields_set and self.model.memory != self.train.memory:
            raise ValueError(
                f"model.memory {self.model.memory} and train.memory {self.train.memory} differ; set train.memory alone"
            )
        object.__setattr__(self, "model", self.model.model_copy(update={"memory": self.train.memory}))
        return self


class Recipe(Settings):
    """A named set of settings, with what is known about it."""

    title: str
    source: str
    """Where the settings come from."""
    corpus: str
    """The corpus they are meant for."""
    published: dict[str, float] = {}
    """Published figures on the test text, by name with unit."""
    measured: dict[str, float] = {}
    """Our own figures, by name with unit."""
    published_parameters: float | None = None
    """Number of parameters as published, which is rounded."""
    parameters: int | None = None
    """Number of parameters of these settings."""
    step_flops: float | None = None
    """Additions and multiplications in the matrix products of one training step."""
    step_bytes: float | None = None
    """Memory one training step needs in float32: weights, gradients, Adam's state, kept activations, hidden memory."""
    model: dict[str, Any] = {}
    train: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}


AnySettings = TypeVar("AnySettings", bound=Settings)


def check_settings(kind: type[AnySettings], values: Mapping[str, Any], source: str) -> AnySettings:
    """Builds settings from plain values.

    Raises:
        UserError: an unknown name, a wrong type or a value out of range; the message names `source`.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{source}: {explain(kind, error)}") from None


def explain(kind: type[BaseModel], error: ValidationError) -> str:
    """The first thing wrong with the settings, in one line."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        *groups, name = first["loc"]
        return f"unknown setting '{place}'{nearest(str(name), _names(kind, groups))}"
    wanted = first["msg"].removeprefix("Value error, ")
    simple = isinstance(first["input"], str | int | float | None)
    given = f" (given: {first['input']!r})" if simple else ""
    return f"{place}: {wanted}{given}" if place else wanted


def _names(kind: type[BaseModel], groups: Iterable[int | str]) -> list[str]:
    for group in groups:
        inner = kind.model_fields[str(group)].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        kind = inner
    return list(kind.model_fields)


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Joins nested settings, later ones winning."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
            merged[name] = merge(merged[name], value) if both else value
    return merged


def read_yaml(text: str | bytes, source: str) -> dict[str, Any]:
    """Reads a YAML mapping.

    Raises:
        UserError: it is not YAML, or not a mapping.
    """
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none
        raise UserError(f"{source}: not readable as YAML ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise UserError(f"{source}: wanted a mapping of settings, found {type(values).__name__}")
    return values


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = resources.files("transformer_xl") / "recipes"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def load_recipe(name: str) -> Recipe:
    """Finds a recipe by its name, or by the path of a YAML file.

    Raises:
        UserError: there is none of that name (the nearest is offered), or it holds a wrong setting.
    """
    if name.endswith((".yaml", ".yml")):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"recipe file '{name}' cannot be read: {error}") from None
    elif name in recipe_names():
        text = (resources.files("transformer_xl") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        raise UserError(f"no recipe '{name}'{nearest(name, recipe_names())}; 'txl recipes' lists them")
    recipe = check_settings(Recipe, read_yaml(text, f"recipe {name}"), f"recipe {name}")
    run_settings({"model": recipe.model, "train": recipe.train, "evaluation": recipe.evaluation}, f"recipe {name}")
    return recipe


def run_settings(values: Mapping[str, Any], source: str) -> RunConfig:
    """Checks the settings of a run as a whole, as `check_settings` does."""
    return check_settings(RunConfig, values, source)
