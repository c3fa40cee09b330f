"""Base of all settings: validation, error messages, merging and reading YAML; and the error that users see."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from typing_extensions import override

INT32_MAX = 2**31 - 1  # upper limit of every count; a larger one is a typing error


class UserError(ValueError):
    """An error that the user can correct: one line with the given value, the expected value and what to do next."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint for a mistyped name, ` (did you mean 'x'?)`; empty if no known name is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""


@dataclass(frozen=True)
class _MisplacedBool:
    """A bool given for a setting that is not a bool; no type of setting accepts this class."""

    value: bool


class Settings(BaseModel):
    """An immutable group of settings; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _reject_bools(cls, values: Any) -> Any:
        """Keep pydantic from converting true to 1 for a number (YAML reads yes and on as true)."""
        if not isinstance(values, Mapping):
            return values
        misplaced = {name for name, value in values.items() if isinstance(value, bool) and not cls._takes_bool(name)}
        return {name: _MisplacedBool(value) if name in misplaced else value for name, value in values.items()}

    @classmethod
    def _takes_bool(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        return field is None or bool({bool, Any} & {field.annotation, *get_args(field.annotation)})


AnySettings = TypeVar("AnySettings", bound=Settings)


def check_settings(kind: type[AnySettings], values: Mapping[str, Any], source: str) -> AnySettings:
    """Build settings from plain values.

    Args:
        kind: class of the settings.
        values: the settings by name.
        source: where they come from, which error messages name.

    Raises:
        UserError: an unknown name, a wrong type or a value out of range.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{source}: {explain(kind, error)}") from None


def explain(kind: type[BaseModel], error: ValidationError) -> str:
    """Describe the first error of a validation in one line."""
    first = error.errors(include_url=False)[0]
    names, owner, others = _resolve(kind, first["loc"])
    setting = ".".join(names)
    if first["type"] == "extra_forbidden":
        tag = f" of {others.tag_name} {others.tag}" if others else ""
        having = [tag for tag, other in others.members.items() if names[-1] in other.model_fields] if others else []
        if having:
            return f"{setting} is a setting of {', '.join(having)}, and this is{tag[3:]}; leave it out"
        return f"unknown setting '{setting}'{tag}{nearest(names[-1], owner.model_fields)}"
    if first["type"] == "union_tag_invalid":
        context = first["ctx"]
        known = [name.strip(" '") for name in context["expected_tags"].split(",")]
        name, given = context["discriminator"].strip("'"), str(context["tag"])
        return f"{setting}.{name} '{given}': wanted one of {', '.join(known)}{nearest(given, known)}"
    wanted = first["msg"].removeprefix("Value error, ")
    if isinstance(first["input"], _MisplacedBool):
        return (
            f"{setting}: {wanted} (given: {first['input'].value}; in YAML yes, no, on and off are such, unless quoted)"
        )
    simple = isinstance(first["input"], str | int | float | None)
    given = f" (given: {first['input']!r})" if simple else ""
    return f"{setting}: {wanted}{given}" if setting else wanted


@dataclass(frozen=True)
class _Variant:
    """The member of a discriminated union that an error is about."""

    tag_name: str
    tag: str
    members: Mapping[str, type[BaseModel]]


def _resolve(
    kind: type[BaseModel], location: Sequence[int | str]
) -> tuple[list[str], type[BaseModel], _Variant | None]:
    """Follow an error's location through nested settings.

    Returns:
        the names of the setting, without the tags of unions that pydantic puts between them; the class that the last
        name belongs to; and which member of a union that class is, if it is one.
    """
    names: list[str] = []
    variant: _Variant | None = None
    parts = iter(location)
    for part in parts:
        names.append(str(part))
        field = kind.model_fields.get(str(part))
        inner = _models_in(field.annotation) if field else []
        if len(inner) == 1:
            kind, variant = inner[0], None
        elif inner and field and isinstance(field.discriminator, str):
            tag_name = field.discriminator
            members = {str(one.model_fields[tag_name].default): one for one in inner}
            tag = str(next(parts, ""))
            if tag in members:
                kind, variant = members[tag], _Variant(tag_name, tag, members)
    return names, kind, variant


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    members = get_args(annotation) or [annotation]
    return [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested settings; later ones take precedence."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
            merged[name] = merge(merged[name], value) if both else value
    return merged


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys, of which all but the last would be dropped silently."""

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
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date
        raise UserError(f"{source}: not readable as YAML ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise UserError(f"{source}: wanted a mapping of settings, found {type(values).__name__}")
    return values
