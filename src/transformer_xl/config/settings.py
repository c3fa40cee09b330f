"""The base class of all settings, with validation and error messages; merging of settings; YAML files; UserError."""

from __future__ import annotations

import difflib
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails
from typing_extensions import override

from transformer_xl.config.other_names import OTHER_NAMES

INT32_MAX = 2**31 - 1  # upper limit of all counts: C code stores some as int32, and a larger one is a typo anyway


class UserError(ValueError):
    """An error that the user can correct; its message is one line: what is wrong, what is expected, what to do."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint for a mistyped name, ` (did you mean 'x'?)`, or an empty string if no name is similar."""
    known = list(names)
    other = OTHER_NAMES.get(name.replace("_", "-"), "").replace("-", "_")
    close = [other] if other in known else difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""


_NUMBERS: dict[type, type] = {int: Integral, float: Real}


def check_type(value: object, kinds: type | tuple[type, ...], name: str, advice: str) -> None:
    """Check the type of an argument of a public function.

    Args:
        value: the argument.
        kinds: the types that are right: int and float are those of NumPy too; a bool is no number.
        name: name of the argument, with which the message begins.
        advice: what to give instead.

    Raises:
        UserError: the type is another one.
    """
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    numbers = tuple(_NUMBERS[kind] for kind in allowed if kind in _NUMBERS)
    if not isinstance(value, (*allowed, *numbers)) or (isinstance(value, bool) and bool not in allowed):
        shown = f" ({value!r:.40})" if isinstance(value, str | int | float) else ""
        raise UserError(f"{name} is of type {type(value).__name__}{shown}; {advice}")


def whole_number(value: Any) -> Any:
    """Convert text such as `1e3` or `2.5e6` to the integer that it is, also in a list; return others unchanged.

    A command line gives text, and so does PyYAML for a number with an exponent and no decimal point.
    """
    if isinstance(value, (list, tuple)):
        return [whole_number(item) for item in value]
    if isinstance(value, str) and "e" in value.lower():
        try:
            number = float(value)
        except ValueError:
            return value
        if number.is_integer() and abs(number) < 2**63:
            return int(number)
    return value


@dataclass(frozen=True)
class _UnknownSetting:
    """Stands for the value of an unknown setting, which pydantic refuses together with all other wrong values."""

    message: str


@dataclass(frozen=True)
class _MisplacedBool:
    """Stands for a bool where a setting is not a bool; pydantic accepts this class for no type of setting."""

    value: bool


class Settings(BaseModel):
    """Base class of groups of settings: immutable, and unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    RETIRED: ClassVar[Mapping[str, Any]] = {}
    """Settings of earlier versions that are gone, each with the only value that files may still state: what it is now
    always. It is left out."""

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

    @classmethod
    @override
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Add the fields to the docstring, so that `help` shows what they mean."""
        described = [(name, field.description) for name, field in cls.model_fields.items() if field.description]
        fields = (f"    {name}: {' '.join(description.split())}" for name, description in described)
        cls.__doc__ = f"{inspect.getdoc(cls)}\n\nAttributes:\n" + "\n".join(fields)

    @model_validator(mode="before")
    @classmethod
    def _check_names_and_numbers(cls, values: Any) -> Any:
        """Mark unknown names, read 1e3 as an integer, and keep pydantic from reading true (YAML: also yes) as 1."""
        if not isinstance(values, Mapping):
            return values
        kept = {str(name): value for name, value in values.items() if (name, value) not in cls.RETIRED.items()}
        return {name: cls._check_value(name, value) for name, value in kept.items()}

    @classmethod
    def _check_value(cls, name: str, value: Any) -> Any:
        if name not in cls.model_fields:
            return _UnknownSetting(cls._unknown_setting(name))
        annotation = cls.model_fields[name].annotation
        types = {annotation, *get_args(annotation)}
        if isinstance(value, bool) and not types & {bool, Any}:
            return _MisplacedBool(value)
        return whole_number(value) if int in types and str not in types else value

    @classmethod
    def _unknown_setting(cls, name: str) -> str:
        if name in cls.RETIRED:
            return f"{name} is gone since an earlier version, and is always {cls.RETIRED[name]} now; leave it out"
        return f"unknown setting '{name}'{nearest(name, cls.model_fields)}"


AnySettings = TypeVar("AnySettings", bound=Settings)


def check_settings(
    kind: type[AnySettings], values: Mapping[str, Any], source: str | None = None, *, flags: str | None = None
) -> AnySettings:
    """Build settings from plain values.

    Args:
        kind: class of the settings.
        values: the settings by name.
        source: the file or group the values come from, or None; error messages begin with it.
        flags: as in `explain`.

    Raises:
        UserError: an unknown name, a wrong type or a value out of range.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        message = explain(error, flags)
        raise UserError(f"{source}: {message}" if source else message) from None


def check_overrides(
    kind: type[Settings], config: Settings | None, overrides: Iterable[str], arguments: Iterable[str]
) -> None:
    """Check the settings that a public function takes both as an object and as keyword arguments.

    Args:
        kind: class of the settings.
        config: the object, or None.
        overrides: names of the settings given as keyword arguments; their values are not checked here.
        arguments: names of the function's own arguments, which may be the nearest to an unknown name.

    Raises:
        UserError: `config` is of another class, or a name is not one of its settings.
    """
    advice = f"give {kind.__name__}(...), or its settings as keyword arguments"
    check_type(config, (kind, type(None)), "config", advice)
    if unknown := next((name for name in overrides if name not in kind.model_fields), None):
        hint = nearest(unknown, [*kind.model_fields, *arguments])
        raise UserError(f"no argument '{unknown}'{hint}; keyword arguments are the settings of {kind.__name__}")


_MAX_ERRORS = 8  # of one message
_MAX_VALUE = 60  # characters of a value in a message


def explain(error: ValidationError, flags: str | None = None) -> str:
    """Describe the errors of a validation in one line; with several settings wrong, they are numbered.

    Args:
        error: the failed validation.
        flags: the beginning of the flags that were validated, such as `--model.`, or None if they are no flags.
    """
    messages: dict[str, str] = {}  # by setting: a value that fits no type of a union has an error for each of them
    for item in error.errors(include_url=False):
        names = [
            str(part)
            for part in item["loc"]
            if isinstance(part, int) or (part not in _UNION_MEMBERS and part.isidentifier())
        ]
        key = ".".join(names)
        if isinstance(item["input"], _UnknownSetting):
            names = names[:-1]  # its message has the name, which is in none if it is no identifier
        if flags is None:
            setting = ".".join(names)
        else:  # a flag has no name for a part of its value
            setting = flags + ".".join(name for name in names if not name.isdecimal()).replace("_", "-")
        messages.setdefault(key, f"{setting}: {_describe(item)}" if setting else _describe(item))
    lines = list(messages.values())
    if len(lines) == 1:
        return lines[0]
    shown = [f"({number}) {line}" for number, line in enumerate(lines[:_MAX_ERRORS], start=1)]
    more = f" and {len(lines) - _MAX_ERRORS} more" if len(lines) > _MAX_ERRORS else ""
    return f"{len(lines)} errors: {' '.join(shown)}{more}"


_UNION_MEMBERS = {"int", "float", "str", "bool"}  # pydantic adds the type that was tried to the name of the setting


def _describe(error: ErrorDetails) -> str:
    """Describe one error of a validation, without the name of the setting."""
    value, message = error["input"], error["msg"].removeprefix("Value error, ")
    if isinstance(value, _UnknownSetting):
        return value.message
    if isinstance(value, _MisplacedBool):
        return f"{message} (given: {value.value}; in YAML yes, no, on and off are bools, unless quoted)"
    if error["type"] == "missing":
        return "missing"
    if isinstance(value, str | int | float | None):
        given = repr(value)
        return f"{message} (given: {given if len(given) <= _MAX_VALUE else given[:_MAX_VALUE] + '...'})"
    return message


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested settings, given as several mappings; the values of later ones take precedence.

    Raises:
        UserError: a group of settings would be replaced by something else, or the reverse.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, given in layer.items():
            value = given.model_dump(exclude_unset=True) if isinstance(given, Settings) else given
            both = [isinstance(item, Mapping) for item in (merged.get(name), value) if item is not None]
            if any(both) and not all(both):
                raise UserError(f"{name}: must be a mapping of settings")
            merged[name] = merge(merged[name], value) if both == [True, True] else value
    return merged


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their names with those of their groups, such as `train.max_steps`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


_MAX_VALUES, _MAX_DEPTH = 50_000, 100  # of a YAML file, far more than settings have


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys (PyYAML silently keeps only the last value), and what exhausts memory."""

    def __init__(self, stream: str | bytes) -> None:
        super().__init__(stream)
        self._num_values, self._depth, self._sizes = 0.0, 0, dict[int, float]()

    @override
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Count what a node stands for: of aliases of aliases a few lines make billions of values."""
        before, is_alias = self._num_values, self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError(f"more than {_MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._num_values += self._sizes.get(id(node), math.inf) if is_alias else 1
        self._sizes.setdefault(id(node), self._num_values - before)
        if self._num_values > _MAX_VALUES:
            raise ValueError(f"more than {_MAX_VALUES:,} values, or an alias within its anchor")
        return node

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = Counter(name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode))
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise ValueError(f"duplicate key '{twice}'; merge the two, or remove one")
        return super().construct_mapping(node, deep)


def read_yaml(text: str | bytes, source: str) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        UserError: the text is not YAML, or not a mapping.
    """
    try:
        values = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        advice = "check brackets, quotes, colons and indentation there (spaces, no tabs)"
        raise UserError(f"{source}: not readable as YAML ({place}{error.problem}); {advice}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a duplicate key or an impossible date
        raise UserError(f"{source}: not readable as YAML ({' '.join(str(error).split())})") from None
    except (LookupError, AttributeError, TypeError, OverflowError):  # PyYAML raises them for !!bool x, !!int ''
        raise UserError(f"{source}: not readable as YAML (a value is not of its type); leave out tags (!!)") from None
    if not isinstance(values, dict):
        raise UserError(f"{source}: must be a mapping of settings, not {type(values).__name__}")
    return values
