"""Settings as flags: `--model.n-layers 6`. Only what is given is passed on; the defaults stay where they are."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field, create_model

from transformer_xl.config import EvaluationConfig, ModelConfig, Settings, TrainConfig

_NOT_FLAGS = {"vocab_size", "memory"}  # of the model: the corpus and train.memory say them

# settings that have none among their choices, where it is no limit taken away
_CHOOSE_NONE = {
    name
    for kind in (ModelConfig, TrainConfig, EvaluationConfig)
    for name, field in kind.model_fields.items()
    if "none" in get_args(field.annotation)
}


def _optional(kind: type[Settings], *leave_out: str) -> type[BaseModel]:
    """The same settings, none of them required and none with a default; checks are left to `run_settings`."""
    fields: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if name not in leave_out:
            help_text = f"{field.description} [default: {'none' if field.default in (None, ()) else field.default}]"
            several = any(get_origin(one) is tuple for one in get_args(field.annotation))
            kind_or_none: Any = str if several else field.annotation  # several numbers are one word, 20,40
            if NoneType in get_args(field.annotation):
                kind_or_none |= Literal["none"]
            fields[name] = (kind_or_none | None, Field(default=None, description=help_text))
    return create_model(f"{kind.__name__}Flags", **fields)


ModelFlags = _optional(ModelConfig, *_NOT_FLAGS)
TrainFlags = _optional(TrainConfig)
EvaluationFlags = _optional(EvaluationConfig)


def given(**groups: BaseModel | None) -> dict[str, dict[str, Any]]:
    """The settings that were typed, by group; the word none takes a limit away, unless it is a choice."""
    typed = {name: flags.model_dump(exclude_unset=True) for name, flags in groups.items() if flags is not None}
    return {
        group: {name: None if value == "none" and name not in _CHOOSE_NONE else value for name, value in values.items()}
        for group, values in typed.items()
    }
