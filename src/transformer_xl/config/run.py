"""Everything about a run: its settings together, and the recipes they may come from."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from transformer_xl.config.model import ModelConfig
from transformer_xl.config.settings import INT32_MAX, Settings, UserError, check_settings, nearest, read_yaml
from transformer_xl.config.train import TrainConfig


class EvaluationConfig(Settings):
    """How the run is evaluated unless told otherwise."""

    segment_length: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """New tokens read in one step; none: train.segment_length. It changes the speed and, without a window, the context."""
    memory_length: int | None = Field(default=None, ge=0, le=INT32_MAX)
    """Memory slots, in tokens; none: train.memory_length."""
    attention_window: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Number of keys a query sees, itself included; none: model.window."""
    clamp_length: int | None = Field(default=None, gt=0, le=INT32_MAX)
    """Distances above this count as this one; none: model.clamp_length."""


class CorpusReference(Settings):
    """Which corpus a run was trained on."""

    path: str
    """Folder of the corpus, as an absolute path."""
    tokenizer_sha256: str
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
        if "memory" in self.model.model_fields_set and self.model.memory != self.train.memory_length:
            raise ValueError(
                f"model.memory {self.model.memory} and train.memory_length {self.train.memory_length} differ; set train.memory_length alone"
            )
        if self.model.is_absolute and "memory_length" not in self.train.model_fields_set:
            object.__setattr__(self, "train", self.train.model_copy(update={"memory_length": 0}))
        object.__setattr__(self, "model", self.model.model_copy(update={"memory": self.train.memory_length}))
        return self

    @model_validator(mode="after")
    def _lengths_the_model_has(self) -> Self:
        model, train, wanted = self.model, self.train, self.evaluation
        if model.has_learned_positions:
            most = train.segment_length + train.memory_length
            if (model.learned_positions or 0) > most:
                raise ValueError(
                    f"model.learned_positions {model.learned_positions:,} are more than training goes through; "
                    f"give {most:,} (train.segment_length and train.memory_length) at most, or none"
                )
            found = {"learned_positions": model.learned_positions or most}
            object.__setattr__(self, "model", model.model_copy(update=found))
        self.model.check_context_limits(segment=train.segment_length, memory=train.memory_length)
        self.model.check_context_limits(
            segment=wanted.segment_length or 1,
            memory=wanted.memory_length or 0,
            window=wanted.attention_window,
            clamp=wanted.clamp_length,
        )
        if model.kind != "transformer" and train.compile != "off":
            raise ValueError(f"train.compile {train.compile} is for transformers, and this is {model.system}; give off")
        return self


class Recipe(Settings):
    """A named set of settings, with what is known about it."""

    title: str
    source: str
    """Where the settings come from."""
    corpus: str
    """The corpus they are meant for."""
    published: dict[str, float] = Field(default_factory=dict)
    """Published figures on the test text, by name with unit."""
    measured: dict[str, float] = Field(default_factory=dict)
    """Our own figures, by name with unit."""
    published_parameters: float | None = None
    """Number of parameters as published, which is rounded."""
    parameters: int | None = None
    """Number of parameters of these settings."""
    flops_per_step: float | None = None
    """Additions and multiplications in the matrix products of one training step."""
    bytes_per_step: float | None = None
    """Memory one training step needs in float32: weights, gradients, Adam's state, kept activations, hidden memory."""
    model: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] = Field(default_factory=dict)
    evaluation: dict[str, Any] = Field(default_factory=dict)


def run_settings(values: Mapping[str, Any], source: str) -> RunConfig:
    """Checks the settings of a run as a whole, as `check_settings` does."""
    return check_settings(RunConfig, values, source)


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
