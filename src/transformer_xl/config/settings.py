"""The base class of all settings, with validation and error messages; merging of settings; YAML files; UserError."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from typing_extensions import override

INT32_MAX = 2**31 - 1  # upper limit of all counts: C code stores some as int32, and a larger one is a typo anyway


class UserError(ValueError):
    """An error that the user can correct; its message is one line: what is wrong, what is expected, what to do."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint for a mistyped name, ` (did you mean 'x'?)`, or an empty string if no name is similar."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""


@dataclass(frozen=True)
class _MisplacedBool:
    """Stands for a bool where a setting is not a bool; pydantic accepts this class for no type of setting."""

    value: bool


class Settings(BaseModel):
    """Base class of groups of settings: immutable, and unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, /, **data: Any) -> None:
            """Check settings given as keyword arguments.

            Raises:
                UserError: an unknown name, a wrong type or a value out of range.
            """
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise UserError(f"{type(self).__name__}: {explain(error)}") from None

        __init__.__pydantic_base_init__ = True  # pydantic then validates groups within groups without calling it

    @model_validator(mode="before")
    @classmethod
    def _check_names_and_bools(cls, values: Any) -> Any:
        """Refuse unknown names, and keep pydantic from converting true to 1 (YAML reads yes and on as true)."""
        if not isinstance(values, Mapping):
            return values
        if unknown := [str(name) for name in values if name not in cls.model_fields]:
            raise ValueError(cls._unknown_setting(unknown[0]))
        return {
            name: _MisplacedBool(value) if isinstance(value, bool) and not cls._takes_bool(name) else value
            for name, value in values.items()
        }

    @classmethod
    def _unknown_setting(cls, name: str) -> str:
        return f"unknown setting '{name}'{nearest(name, cls.model_fields)}"

    @classmethod
    def _takes_bool(cls, name: str) -> bool:
        annotation = cls.model_fields[name].annotation
        return bool({bool, Any} & {annotation, *get_args(annotation)})


AnySettings = TypeVar("AnySettings", bound=Settings)


def check_settings(kind: type[AnySettings], values: Mapping[str, Any], source: str) -> AnySettings:
    """Build settings from plain values.

    Args:
        kind: class of the settings.
        values: the settings by name.
        source: the file or group the values come from; error messages begin with it.

    Raises:
        UserError: an unknown name, a wrong type or a value out of range.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{source}: {explain(error)}") from None


def explain(error: ValidationError) -> str:
    """Describe the first error of a validation in one line."""
    first = error.errors(include_url=False)[0]
    setting, value = ".".join(map(str, first["loc"])), first["input"]
    message = first["msg"].removeprefix("Value error, ")
    if isinstance(value, _MisplacedBool):
        message += f" (given: {value.value}; in YAML yes, no, on and off are bools, unless quoted)"
    elif isinstance(value, str | int | float | None):
        message += f" (given: {value!r})"
    return f"{setting}: {message}" if setting else message


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested settings, given as several mappings; the values of later ones take precedence.

    Raises:
        UserError: a group of settings would be replaced by something else, or the reverse.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            both = [isinstance(item, Mapping) for item in (merged.get(name), value) if item is not None]
            if any(both) and not all(both):
                raise UserError(f"{name}: must be a mapping of settings")
            merged[name] = merge(merged[name], value) if both == [True, True] else value
    return merged


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys; PyYAML silently keeps only the last value."""

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        if twice := next((name for index, name in enumerate(names) if name in names[:index]), None):
            raise ValueError(f"duplicate key '{twice}'; merge the two, or remove one")
        return super().construct_mapping(node, deep)


def read_yaml(text: str | bytes, source: str) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        UserError: the text is not YAML, or not a mapping.
    """
    try:
        values = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a duplicate key or an impossible date
        raise UserError(f"{source}: not readable as YAML ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise UserError(f"{source}: must be a mapping of settings, not {type(values).__name__}")
    return values
