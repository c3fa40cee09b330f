"""What all settings share: how they are checked, named in errors, joined and read; and the error a user sees."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from typing_extensions import override

INT32_MAX = 2**31 - 1  # of anything counted here; more is a slip of the finger


class UserError(ValueError):
    """Something the user can put right: one line that says what was given, what was wanted and what to type next."""


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint for a mistyped name: ` (did you mean 'x'?)`, or nothing where no known name is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""


class Settings(BaseModel):
    """A frozen group of settings; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool(cls, value: Any, info: ValidationInfo) -> Any:
        """Python and pydantic take true for 1, and YAML takes yes and on for true."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and not {bool, Any} & {kind, *get_args(kind)}:
            raise ValueError("true and false (in YAML also yes, no, on, off) are no value here; quote what is a word")
        return value


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


class _Loader(yaml.SafeLoader):
    """YAML in which no name stands twice in a mapping: all but the last would be lost without a word."""

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
            raise ValueError(f"'{twice}' stands twice in one mapping; join the two, or take one out")
        return super().construct_mapping(node, deep)


def read_yaml(text: str | bytes, source: str) -> dict[str, Any]:
    """Reads a YAML mapping.

    Raises:
        UserError: it is not YAML, or not a mapping.
    """
    try:
        values = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none
        raise UserError(f"{source}: not readable as YAML ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise UserError(f"{source}: wanted a mapping of settings, found {type(values).__name__}")
    return values
