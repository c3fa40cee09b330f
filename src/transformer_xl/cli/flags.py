"""Settings as flags: `--model.n-layers 6`. Only what is typed is passed on; defaults are the configuration classes'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo

from transformer_xl.config import ARCHITECTURES, EvaluationConfig, TrainConfig


def _model_fields() -> dict[str, FieldInfo]:
    """Every setting of any architecture, with the architectures that have it in its description."""
    described = "Which model; settings that not every architecture has name those that do."
    choices: Any = Literal[*ARCHITECTURES]  # pyrefly: ignore[invalid-literal]
    fields = {"architecture": FieldInfo(annotation=choices, default="transformer-xl", description=described)}
    for name in dict.fromkeys(name for kind in ARCHITECTURES.values() for name in kind.model_fields):
        owners = [tag for tag, kind in ARCHITECTURES.items() if name in kind.model_fields]
        field = ARCHITECTURES[owners[0]].model_fields[name]
        if name in ("architecture", "vocab_size"):  # the corpus says the size of the vocabulary
            continue
        if len(owners) < len(ARCHITECTURES):
            field = field._copy()
            field.description = f"{field.description} [{', '.join(owners)}]"
        fields[name] = field
    return fields


_GROUPS: Mapping[str, Mapping[str, FieldInfo]] = {
    "model": _model_fields(),
    "train": TrainConfig.model_fields,
    "evaluation": EvaluationConfig.model_fields,
}


def _optional(group: str) -> type[BaseModel]:
    """The settings of a group, all optional and without defaults; `run_settings` checks their values."""
    fields: dict[str, Any] = {}
    for name, field in _GROUPS[group].items():
        default = "none" if field.default in (None, ()) else str(field.default).lower()
        several = any(get_origin(one) is tuple for one in get_args(field.annotation))
        kind: Any = str if several else field.annotation  # several integers are one word, 20,40
        if NoneType in get_args(field.annotation):
            kind |= Literal["none"]
        fields[name] = (
            kind | None,
            Field(default=None, description=f"{' '.join(str(field.description).split())} [default: {default}]"),
        )
    return create_model(f"{group.capitalize()}Flags", **fields)


ModelFlags = _optional("model")
TrainFlags = _optional("train")
EvaluationFlags = _optional("evaluation")


def given(**groups: BaseModel | None) -> dict[str, dict[str, Any]]:
    """Return the settings that were typed, by group; the word none means no limit, unless it is one of the choices."""
    return {
        group: {
            name: None if value == "none" and "none" not in _choices(group, name) else value for name, value in values
        }
        for group, values in (
            (group, flags.model_dump(exclude_unset=True).items())
            for group, flags in groups.items()
            if flags is not None
        )
    }


def _choices(group: str, name: str) -> Iterable[Any]:
    return get_args(_GROUPS[group][name].annotation)
