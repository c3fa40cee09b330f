"""All settings of a run (`RunConfig`), and recipes, which are YAML files with settings and their results."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

from pydantic import Field, model_validator
from typing_extensions import override

from transformer_xl.config.evaluation_config import EvaluationConfig
from transformer_xl.config.model_config import (
    ARCHITECTURES,
    AlRfouConfig,
    BaseModelConfig,
    ModelConfig,
    RecurrentConfig,
    ShawConfig,
    TransformerXLConfig,
    grouped,
)
from transformer_xl.config.other_names import OTHER_NAMES
from transformer_xl.config.settings import (
    INT32_MAX,
    Settings,
    UserError,
    check_settings,
    check_type,
    merge,
    nearest,
    read_yaml,
)
from transformer_xl.config.train_config import TrainConfig

DEFAULT_RECIPE = "fast-small"
"""The recipe of `txl train` without one."""


class CorpusReference(Settings):
    """The corpus that a run was trained on."""

    path: str
    """Folder of the corpus, as an absolute path."""
    tokenizer_sha256: str
    """Fingerprint (sha256) of its tokenizer."""
    train_sha256: str
    """Checksum (sha256) of the training tokens: a run resumes only with the text that it started with."""


class LoraConfig(Settings):
    """A LoRA adapter (Hu et al. 2021): W + alpha / rank * B A in place of each matrix W, of which only A and B are
    trained."""

    rank: int = Field(ge=1, le=1024)
    """Number of rows of A and of columns of B; at most the smaller side of each W."""
    alpha: float = Field(gt=0, le=1e6)
    """The product B A is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability that dropout zeroes an input of A."""
    targets: tuple[str, ...] = Field(min_length=1)
    """Last names of the linear layers that are adapted, such as `q_proj`."""


class FinetuneConfig(Settings):
    """The run whose weights a fine-tuned run began with, and what is trained of them."""

    base: str
    """Folder of that run, as an absolute path."""
    base_sha256: str
    """Checksum (sha256) of the weights, without what their file says about them."""
    base_step: int = Field(ge=0, le=INT32_MAX)
    """Number of training steps after which the base had these weights; 0 for converted ones."""
    kept_tokens: int | None = None
    """Number of tokens whose embeddings were taken over from another tokenizer; none: the tokenizer is the base's."""
    freeze: tuple[str, ...] = ()
    """Patterns (`*`, `?`) of the names of parameters that are not trained, such as `embedding.*`."""
    layer_rate_decay: float = Field(default=1.0, gt=0, le=1)
    """Factor between the learning rates of a layer and the layer above it; the last one has the full rate."""
    lora: LoraConfig | None = Field(default=None, exclude_if=lambda value: value is None)
    """The adapter that is trained in place of the weights, which stay in the folder of the base; none: the weights."""
    merged: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether an adapter was trained, and then merged into these weights."""


class SettingsChange(Settings):
    """Settings of training that were changed when a run was resumed."""

    step: int = Field(ge=0)
    """Steps trained before the change."""
    before: dict[str, Any]
    """The changed settings of `train` up to this step, by name."""
    after: dict[str, Any]
    """The same settings from this step on."""

    @override
    def __str__(self) -> str:
        """Return the change in words, such as `train.learning_rate 0.001 -> 0.0005 from step 642 on`."""
        changes = [f"train.{name} {self.before[name]} -> {value}" for name, value in self.after.items()]
        return f"{', '.join(changes)} from step {self.step:,} on"


class RunConfig(Settings):
    """All settings of a run, stored as its config.yaml."""

    recipe: str | None = None
    """Name or path of the recipe that the settings started from."""
    corpus: CorpusReference | None = None
    model: ModelConfig = TransformerXLConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    finetune: FinetuneConfig | None = Field(default=None, exclude_if=lambda value: value is None)
    """Where the weights come from that a fine-tuned run began with; none: they were drawn at random."""
    history: tuple[SettingsChange, ...] = ()
    """Changes of `train` during training, oldest first; `train` has the settings after the last one."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        model, train, evaluation = self.model, self.train, self.evaluation
        distances = train.num_inputs + train.memory_length
        is_drawn = self.finetune is None  # weights that were taken over may have more positions than are needed
        if is_drawn and isinstance(model, ShawConfig) and (model.max_relative_positions or 0) > distances:
            raise ValueError(
                f"model.max_relative_positions {model.max_relative_positions:,} is more than the number of distances; "
                f"give {distances:,} (what a step of training reads, and train.memory_length) at most, or none"
            )
        if is_drawn and isinstance(model, AlRfouConfig) and (model.max_position_embeddings or 0) > train.num_inputs:
            raise ValueError(
                f"model.max_position_embeddings {model.max_position_embeddings:,} is more than the number of "
                f"positions; give {train.num_inputs:,} (what a step of training reads) at most, or none"
            )
        if isinstance(model, AlRfouConfig) and train.random_segment_lengths:
            raise ValueError("train.random_segment_lengths needs positions of any number, and al-rfou learns each")
        model.check_training(train)
        model.check_context_limits(segment_length=train.num_inputs, memory_length=train.memory_length)
        model.check_context_limits(
            segment_length=(evaluation.segment_length or 1) + (evaluation.extended_context_length or 0),
            memory_length=evaluation.memory_length or 0,
            attention_window=evaluation.attention_window,
            clamp_length=evaluation.clamp_length,
        )
        model.check_method(evaluation.method)
        if evaluation.extended_context_length and evaluation.memory_length:
            raise ValueError(
                f"evaluation.extended_context_length {evaluation.extended_context_length:,} is for evaluation without "
                f"memory, and evaluation.memory_length is {evaluation.memory_length:,}; set one of them to 0"
            )
        if isinstance(model, RecurrentConfig) and train.compile != "none":
            raise ValueError(f"train.compile {train.compile} is not for {model.architecture}; give none")
        return self

    @property
    def lora(self) -> LoraConfig | None:
        """The adapter that the run trains, or None if it trains weights."""
        return self.finetune.lora if self.finetune else None

    def without_adapter(self) -> RunConfig:
        """Return the settings of a run with whole weights, into which the adapter, if there is one, was merged."""
        if self.finetune is None or self.finetune.lora is None:
            return self
        return self.model_copy(update={"finetune": self.finetune.model_copy(update={"lora": None, "merged": True})})

    def resolved(self) -> RunConfig:
        """Return the settings with the defaults that depend on training lengths filled in, as a run stores them."""
        model, train = self.model, self.train
        if isinstance(model, ShawConfig) and model.max_relative_positions is None:
            defaults = {"max_relative_positions": train.num_inputs + train.memory_length}
        elif isinstance(model, AlRfouConfig) and model.max_position_embeddings is None:
            defaults = {"max_position_embeddings": train.num_inputs}
        else:
            return self.model_copy(update={"model": model.resolved(train.segment_length)})
        return self.model_copy(update={"model": model.model_copy(update=defaults)})

    def changed_from(self, earlier: RunConfig, step: int) -> RunConfig:
        """Return these settings with the history of earlier ones, and what differs in `train` as its last entry.

        Args:
            earlier: the settings of the run until now.
            step: number of steps trained with them.
        """
        before, after = (config.train.model_dump(mode="json") for config in (earlier, self))
        changed = [name for name in after if before[name] != after[name]]
        entry = SettingsChange(
            step=step,
            before={name: before[name] for name in changed},
            after={name: after[name] for name in changed},
        )
        return self.model_copy(update={"history": (*earlier.history, entry) if changed else earlier.history})

    def before_last_change(self) -> RunConfig:
        """Return the settings before the last entry of the history, if there is one."""
        if not self.history:
            return self
        # checked anew, as a setting may have had another name then
        before = {**self.train.model_dump(), **self.history[-1].before}
        train = check_settings(TrainConfig, before, "the history of settings")
        return self.model_copy(update={"train": train, "history": self.history[:-1]})


class Recipe(Settings):
    """A set of settings, with its published and measured results; a group has only the settings that are stated.

    All but the groups is for readers, and optional.
    """

    title: str = ""
    source: str = ""
    """Where the settings come from, such as a paper or a script of the authors' code."""
    corpus: str = "any"
    """Name of the corpus that the settings are for, or `any`."""
    published: dict[str, float] = Field(default_factory=dict)
    """Published results on the test split, by metric, such as bits_per_byte."""
    measured: dict[str, float] = Field(default_factory=dict)
    """Results of this package on the test split, by metric, such as bits_per_byte."""
    measured_corpus: str | None = None
    """Name of the corpus with the measured results, if the settings are for any."""
    published_parameters: float | None = None
    """Published number of parameters, rounded."""
    parameters: int | None = None
    """Exact number of parameters of these settings."""
    flops_per_step: float | None = None
    """Floating-point operations in the matrix products of one training step."""
    bytes_per_step: float | None = None
    """Device memory in bytes that one training step in float32 needs: weights, gradients, Adam's state, activations and
    the model's memory."""
    model: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] = Field(default_factory=dict)
    evaluation: dict[str, Any] = Field(default_factory=dict)


def run_settings(values: Mapping[str, Any], source: str) -> RunConfig:
    """Check the settings of a run as a whole, and fill in those that depend on others.

    Args:
        values: settings by group (model, train, evaluation and the other fields of RunConfig). If they lack
            train.memory_length, it becomes 0 for architectures without memory.
        source: the file or group the values come from; error messages begin with it.

    Raises:
        UserError: an unknown name, a wrong type, a value out of range, or settings that contradict each other.
    """
    architecture = ARCHITECTURES.get(str(_mapping(values, "model").get("architecture")))
    if architecture is not None and not architecture.has_memory:
        values = merge({"train": {"memory_length": 0}}, values)
    return check_settings(RunConfig, values, source).resolved()


def _mapping(values: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    """Return a group of settings that are not validated yet; empty if it is missing or not a mapping."""
    settings = values.get(group)
    return settings if isinstance(settings, Mapping) else {}


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def checked_names(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Make a public function answer an unknown keyword argument with a UserError that has the nearest name.

    A setting of a group that the function takes, such as `learning_rate` of `train`, is answered with that group.
    """
    arguments = inspect.signature(function).parameters
    groups = {"model": TransformerXLConfig, "train": TrainConfig, "evaluation": EvaluationConfig}

    @functools.wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if unknown := next((name for name in kwargs if name not in arguments), None):
            hint = nearest(unknown, arguments)
            for group, kind in groups.items():
                setting = OTHER_NAMES.get(unknown.replace("_", "-"), unknown).replace("-", "_")
                if group in arguments and setting in kind.model_fields:
                    hint = f" (did you mean {group}={{'{setting}': {kwargs[unknown]!r}}}?)"
            raise UserError(f"{function.__name__} has no argument '{unknown}'{hint}")
        return function(*args, **kwargs)

    return call


def given_settings(**groups: Mapping[str, Any] | Settings | None) -> dict[str, Mapping[str, Any]]:
    """Return by name the settings that a public function was given for groups, as dictionaries, objects or None.

    Of an object they are those that were set, and of a model's also the architecture, which is its class.

    Raises:
        UserError: a group is something else.
    """
    given: dict[str, Mapping[str, Any]] = {}
    for name, group in groups.items():
        check_type(group, (Mapping, Settings, type(None)), name, "give a dict of settings by name, or a config object")
        values = group.model_dump(exclude_unset=True) if isinstance(group, Settings) else group or {}
        architecture = {"architecture": group.architecture} if isinstance(group, BaseModelConfig) else {}
        given[name] = grouped({**architecture, **values}) if name == "model" else values
    return given


def refuse_unused(overrides: Mapping[str, Mapping[str, Any]], config: RunConfig) -> None:
    """Refuse settings that were given for a run and have no effect; those of a recipe are not given for it, nor are
    all settings of a group, as an object from another run has them.

    Args:
        overrides: the given settings by group.
        config: the settings with them.

    Raises:
        UserError: a given setting has no effect.
    """
    tables = {"ngram_learning_rate_ratio": "model.max_ngram 2 or more"} if config.model.max_ngram == 1 else {}
    for group, unused in (("model", config.model.unused), ("train", config.train.unused | tables)):
        given = overrides.get(group, {}).keys()
        for name, need in unused.items():
            if name in given and not given >= type(getattr(config, group)).model_fields.keys():
                raise UserError(f"{group}.{name} has no effect without {need}; give that too, or leave it out")


def merge_recipe(recipe: Recipe, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe by group, replaced by those in `overrides`.

    If the overrides choose another architecture, settings of the recipe that it lacks or refuses are omitted.
    """
    groups = {"model": grouped(recipe.model), "train": recipe.train, "evaluation": recipe.evaluation}
    if "model" in overrides:
        overrides = {**overrides, "model": grouped(overrides["model"])}
    architecture = _mapping(overrides, "model").get("architecture")
    if architecture in ARCHITECTURES.keys() - {recipe.model.get("architecture", "transformer-xl")}:
        kind = ARCHITECTURES[architecture]
        # the last two are also settings of evaluation
        lacking = {*groups["model"], "attention_window", "clamp_length"} - kind.model_fields.keys()
        lacking |= set() if kind.has_memory else {"memory_length"}
        lacking |= set() if kind.has_distances else {"qkv_dropout"}
        dropped = {"model": lacking | kind.refused, "train": lacking | kind.refused, "evaluation": lacking}
        groups = {
            group: {name: value for name, value in settings.items() if name not in dropped[group]}
            for group, settings in groups.items()
        }
        if isinstance(regularization := groups["model"].get("regularization"), Mapping):
            groups["model"]["regularization"] = {k: v for k, v in regularization.items() if k not in dropped["model"]}
    return merge(groups, overrides)


def recipe_names() -> list[str]:
    """Return the names of the recipes in the package."""
    folder = resources.files("transformer_xl") / "recipes"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def load_recipe(name: str) -> Recipe:
    """Load a recipe by its name, or by the path of a YAML file; config.yaml of a run, or the run's folder, is one too.

    Raises:
        UserError: there is no recipe of that name, or settings are invalid; the message has all of them.
    """
    values = read_yaml(recipe_text(name), f"recipe {name}")
    if "recipe" in values:  # config.yaml of a run
        run = run_settings(values, f"recipe {name}")
        settings = run.model_dump(mode="json", include={"model", "train", "evaluation"})
        if run.finetune is not None:  # a new model needs no more positions than training reads
            for setting in ("max_relative_positions", "max_position_embeddings"):
                settings["model"].pop(setting, None)
        if (xlnet := run.model.orders) is not None:  # what follows from the length of segments, and from the tokenizer
            settings["model"] |= xlnet.following(run.train.segment_length)
            if xlnet.functional_ids:
                settings["model"]["functional_tokens"] = "auto"
        values = {"title": f"settings of the run {name}", "source": name, **settings}
    values = {key: value for key, value in values.items() if value is not None}  # a group may be left empty
    recipe = check_settings(Recipe, values, f"recipe {name}")
    run_settings(merge_recipe(recipe, {}), f"recipe {name}")
    return recipe


def recipe_text(name: str) -> str:
    """Return the YAML text of a recipe, by its name, by the path of a YAML file, or by the folder of a run.

    Raises:
        UserError: there is no recipe of that name, or the file cannot be read.
    """
    if (Path(name) / "config.yaml").is_file():
        name = str(Path(name) / "config.yaml")
    is_path = name.endswith((".yaml", ".yml"))
    if not is_path and name not in recipe_names():
        raise UserError(f"no recipe '{name}'{nearest(name, recipe_names())}; 'txl recipes' lists them")
    try:
        file = Path(name) if is_path else resources.files("transformer_xl") / "recipes" / f"{name}.yaml"
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(
            f"recipe {name} cannot be read ({problem}); name a YAML file, or a recipe of 'txl recipes'"
        ) from None
