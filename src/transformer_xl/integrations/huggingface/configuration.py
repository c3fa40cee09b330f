"""Settings of a model as transformers' configuration: the model settings of a run, flat, with their names."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from transformers import PreTrainedConfig
from typing_extensions import override

from transformer_xl.config import ARCHITECTURES, ModelConfig, UserError, nearest
from transformer_xl.evaluation.pooling import Pooling
from transformer_xl.integrations.checkpoints import huggingface as transfo_xl
from transformer_xl.integrations.checkpoints.pretrained import MODEL_AUTO_MAP, MODEL_TYPE, model_settings, setting_names
from transformer_xl.model.memory import ContextLimits

_SOURCE = "the configuration"
_OF_HEADS = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)  # names in `to_dict` that are no settings of ours
# settings of heads that transformers had for the old classes too
_OF_CLASSIFIERS = ("id2label", "label2id", "problem_type", "pad_token_id")


class PretrainedTransformerXLConfig(PreTrainedConfig):
    """Settings of any of our models.

    Names are those of `TransformerXLConfig` and the other configuration classes, except that `attn_implementation` is
    `attention_kernel` here. The `evaluation_` settings apply in evaluation mode, the others in training mode.
    """

    model_type = MODEL_TYPE
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
    }

    def __init__(
        self,
        *,
        architecture: str = "transformer-xl",
        segment_length: int = 128,
        memory_length: int | None = None,
        evaluation_segment_length: int | None = None,
        evaluation_memory_length: int | None = None,
        evaluation_attention_window: int | None = None,
        evaluation_clamp_length: int | None = None,
        classifier_pooling: Pooling = "last",
        classifier_segments: int = 1,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the settings.

        Args:
            architecture: a key of `transformer_xl.config.ARCHITECTURES`.
            segment_length: longer rows are read in segments of this length.
            memory_length: memory slots in training; None means 128, or 0 for an architecture without memory.
            evaluation_segment_length: the same in evaluation mode; None means segment_length.
            evaluation_memory_length: the same in evaluation mode and of `generate`; None means memory_length.
            evaluation_attention_window: attention window in evaluation mode; None means attention_window.
            evaluation_clamp_length: clamp length in evaluation mode; None means clamp_length.
            classifier_pooling: which vector a classifier of texts makes of the last hidden states: that of the last
                token ("last"), or their mean ("mean").
            classifier_segments: a classifier of texts is trained on predictions at the ends of so many last segments.
            use_cache: whether `forward` returns the memory, in evaluation mode.
            bos_token_id: not used here; generation_config.json has it.
            eos_token_id: the same.
            pad_token_id: the same.
            kwargs: settings of the model, and those that every configuration of transformers has.

        Raises:
            UserError: a setting of the wrong type or value, or lengths that the architecture cannot have.
        """
        # `to_dict` has some settings under two names, of which ours counts
        kwargs = {name: value for name, value in kwargs.items() if name not in _OF_HEADS or name in self.attribute_map}
        own = {name: value for name, value in kwargs.items() if name not in self.attribute_map}
        kwargs = {self.attribute_map.get(name, name): value for name, value in kwargs.items()} | own
        model = model_settings({"architecture": architecture, **kwargs}, _SOURCE)
        names = setting_names(architecture)
        known = {theirs for one in ARCHITECTURES for theirs in setting_names(one).values()}
        if foreign := sorted((kwargs.keys() & known) - set(names.values())):
            raise UserError(f"{foreign[0]} is no setting of {architecture}{nearest(foreign[0], names)}; leave it out")
        values = model.flat()
        for ours, theirs in names.items():
            kwargs.pop(theirs, None)
            setattr(self, theirs, values[ours])
        self.segment_length = segment_length
        self.memory_length = (128 if model.has_memory else 0) if memory_length is None else memory_length
        self.evaluation_segment_length = evaluation_segment_length
        self.evaluation_memory_length = evaluation_memory_length
        self.evaluation_attention_window = evaluation_attention_window
        self.evaluation_clamp_length = evaluation_clamp_length
        if not isinstance(use_cache, bool):
            raise UserError(f"use_cache is {use_cache!r} in {_SOURCE}; give true or false")
        self.use_cache = use_cache
        self.classifier_pooling, self.classifier_segments = classifier_pooling, classifier_segments
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        self._check_lengths(model)
        kwargs["auto_map"] = MODEL_AUTO_MAP
        super().__init__(**kwargs)

    def model_config(self) -> ModelConfig:
        """Return the settings of the model.

        Raises:
            UserError: a setting was changed to an invalid value.
        """
        names = setting_names(self.architecture).values()
        model = model_settings({name: getattr(self, name) for name in names}, _SOURCE)
        self._check_lengths(model)  # arguments of from_pretrained come after __init__
        return model

    def _check_lengths(self, model: ModelConfig) -> None:
        if self.classifier_pooling not in ("last", "mean"):
            raise UserError(f"classifier_pooling is {self.classifier_pooling!r} in {_SOURCE}; give 'last' or 'mean'")
        if type(self.classifier_segments) is not int or self.classifier_segments < 1:
            raise UserError(f"classifier_segments is {self.classifier_segments!r} in {_SOURCE}; give 1 or more")
        for name in ("segment_length", "evaluation_segment_length"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UserError(f"{name} is {value!r} in {_SOURCE}; give an integer, 1 or more")
        for training in (True, False):
            limits = self.context_limits(training=training)
            model.check_context_limits(segment_length=self.rows_segment_length(training=training), **vars(limits))

    def context_limits(self, *, training: bool) -> ContextLimits:
        """Return how far back attention can look, in training mode or in evaluation mode."""
        own = {name: getattr(self, name, None) for name in ("memory_length", "attention_window", "clamp_length")}
        if not training:
            given = {name: getattr(self, f"evaluation_{name}") for name in own}
            own |= {name: value for name, value in given.items() if value is not None}
        return ContextLimits(**cast(Any, own))

    def rows_segment_length(self, *, training: bool) -> int:
        """Return the length of the segments in which longer rows are read."""
        return self.segment_length if training else self.evaluation_segment_length or self.segment_length

    @override
    def to_dict(self) -> dict[str, Any]:
        """Return all settings; those of attention heads also by the names that PEFT looks up here."""
        values = super().to_dict()
        if heads := values.get("n_heads"):
            values |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), heads)
            values["head_dim"] = self.d_head or self.d_model // heads
        return values

    @override
    def to_diff_dict(self) -> dict[str, Any]:
        """Return the settings for config.json, each once."""
        return {name: value for name, value in super().to_diff_dict().items() if name not in _OF_HEADS}

    @classmethod
    @override
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: a saved folder has a module that imports this package, not a copy of its code."""


class TransfoXLConfig(PreTrainedConfig):
    """Reads config.json of the old model type `transfo-xl`; the result is a `PretrainedTransformerXLConfig`."""

    model_type = transfo_xl.MODEL_TYPE

    @classmethod
    @override
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        model, lengths = transfo_xl.read_settings(config_dict, "config.json")
        flat = model.flat()
        values = {theirs: flat[ours] for ours, theirs in setting_names("transformer-xl").items()}
        kept = {name: config_dict[name] for name in _OF_CLASSIFIERS if config_dict.get(name) is not None}
        return PretrainedTransformerXLConfig.from_dict({**values, **lengths, **kept}, **kwargs)
