"""Settings as flags, such as `--model.n-layers 6`. Only given flags are passed on; config classes set defaults."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args

from cyclopts import Group, Parameter
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, create_model
from pydantic.fields import FieldInfo

from transformer_xl.config import (
    ARCHITECTURES,
    OTHER_NAMES,
    EvaluationConfig,
    Settings,
    TrainConfig,
    check_settings,
    whole_number,
)
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.text.text_config import TextConfig
from transformer_xl.text.tokenizers.tokenizer_config import TokenizerConfig

_Checked = TypeVar("_Checked", bound=Settings)


MODEL, TRAINING, EVALUATION = (
    Group(name, sort_key=index) for index, name in enumerate(("Model", "Training", "Evaluation"))
)
"""Groups of flags in help, in this order."""


def _model_fields() -> dict[str, FieldInfo]:
    """Return the settings of all architectures; descriptions list the architectures that have the setting."""
    description = "Model architecture. Flags that only some architectures have list them in brackets."
    choices: Any = Literal[*ARCHITECTURES]  # pyrefly: ignore[invalid-literal]
    fields = {"architecture": FieldInfo(annotation=choices, default="transformer-xl", description=description)}
    for name in dict.fromkeys(name for kind in ARCHITECTURES.values() for name in kind.model_fields):
        owners = [tag for tag, kind in ARCHITECTURES.items() if name in kind.model_fields]
        field = ARCHITECTURES[owners[0]].model_fields[name]
        if name in ("architecture", "vocab_size"):  # the corpus determines the vocabulary size
            continue
        if len(owners) < len(ARCHITECTURES):
            field = field._copy()
            field.description = f"{field.description} [{', '.join(owners)}]"
        fields[name] = field
    return fields


def optional_flags(
    name: str, settings: Mapping[str, FieldInfo], *excluded: str, default: str = "default", **defaults: object
) -> type[BaseModel]:
    """Return a pydantic class for the flags of a group of settings: all optional, without defaults and range checks.

    Args:
        name: name of the group, such as model.
        settings: the fields of a config class.
        excluded: names of settings without a flag.
        default: what the help calls the default of a setting.
        defaults: defaults that the command has in place of those of the settings.
    """
    fields: dict[str, Any] = {}
    for setting, field in settings.items():
        inner = field.annotation
        if setting in excluded:
            continue
        if isinstance(inner, type) and issubclass(inner, Settings):
            fields[setting] = (optional_flags(setting, inner.model_fields, default=default) | None, None)
            continue
        values = defaults.get(setting, field.default)
        shown = ",".join(map(str, values if isinstance(values, tuple) else [values])).lower() or "none"
        # settings that parse text take one argument, such as 20,40; for other tuples the flag is repeated
        parses_text = any(isinstance(constraint, BeforeValidator) for constraint in field.metadata)
        flag_type: Any = str if parses_text else inner
        if NoneType in get_args(inner):
            flag_type |= Literal["none"]
        if "none" not in get_args(inner):  # none is not a choice of the setting, so it stands for no limit
            flag_type = Annotated[flag_type, AfterValidator(lambda value: None if value == "none" else value)]
        if not parses_text and int in (inner, *get_args(inner)):
            flag_type = Annotated[flag_type, BeforeValidator(whole_number)]
        if field.default is True:  # also where commands have no --no-... for switches that are off by default
            flag_type = Annotated[flag_type, Parameter(negative=f"no-{setting.replace('_', '-')}")]
        description = f"{' '.join(str(field.description).split())} [{default}: {shown}]"
        fields[setting] = (flag_type | None, Field(default=None, description=description))
    return create_model(f"{name.capitalize()}Flags", **fields)


_UNSET = "if not set"  # neither by the recipe or run nor by a flag
ModelFlags = optional_flags("model", _model_fields(), default=_UNSET)
TrainFlags = optional_flags("train", TrainConfig.model_fields, default=_UNSET)
EvaluationFlags = optional_flags("evaluation", EvaluationConfig.model_fields, default=_UNSET)
GenerationFlags = optional_flags("generation", GenerationConfig.model_fields)
_OF_SAMPLING = (*("greedy", "temperature", "top_k", "top_p", "min_p", "seed", "num_samples", "memory_length", "dtype"),)
InfillFlags = optional_flags("infill", {name: GenerationConfig.model_fields[name] for name in _OF_SAMPLING})
ScoreFlags = optional_flags(
    "score", EvaluationConfig.model_fields, "method", "dynamic", default=_UNSET, reset_memory=True
)
TextFlags = optional_flags("text", TextConfig.model_fields)
TokenizerFlags = optional_flags(
    "tokenizer", TokenizerConfig.model_fields, "kind", "eos_token", "unk_token", "byte_fallback"
)


def given_settings(**groups: BaseModel | None) -> dict[str, dict[str, Any]]:
    """Return the settings given as flags, by group; `none` becomes None unless it is a choice of the setting."""
    return {group: flags.model_dump(exclude_unset=True) for group, flags in groups.items() if flags is not None}


def as_flags(settings: Mapping[str, Any], prefix: str = "--") -> list[str]:
    """Return the words of a command line that give settings by group, such as those of `given_settings`."""
    words: list[str] = []
    for name, value in settings.items():
        flag = f"{prefix}{name.replace('_', '-')}"
        if isinstance(value, Mapping):
            words += as_flags(value, f"{flag}.")
        elif isinstance(value, bool):
            words.append(flag if value else f"{prefix}no-{name.replace('_', '-')}")
        else:
            values = value if isinstance(value, (list, tuple)) else [value]
            words += [flag, ",".join("none" if item is None else str(item) for item in values)]
    return words


def check_flags(kind: type[_Checked], flags: BaseModel | None) -> _Checked:
    """Return the settings given as flags without a group.

    Raises:
        UserError: a value is out of range.
    """
    return check_settings(kind, given_settings(flags=flags).get("flags", {}))


def name_flags(message: str, flags: Iterable[str]) -> str:
    """Return a message of the library in which settings have the names of the flags that give them.

    The library writes a setting as its name (`memory_length`, `train.batch_size`), with `=` before its value
    (`seed=2`), and with a colon where something is wrong with it (`seed: must be an integer`). In a message about a
    YAML file, settings keep the names that they have there.

    Args:
        message: the message.
        flags: the flags of the command that was typed.
    """
    names = {flag.removeprefix("--").replace("-", "_"): flag for flag in flags if flag.startswith("--")}
    groups = {name.split(".")[0] for name in names if "." in name}  # no flag can be given for a group
    known = {name: flag for name, flag in names.items() if name not in groups}

    def typed(match: re.Match[str]) -> str:
        name, mark = match.groups()
        if name not in known or not (mark or "_" in name or "." in name):  # a word such as seed may be only a word
            return match[0]
        return known[name] + (" " if mark == "=" else mark)

    if ".yaml" in message:
        return message
    return re.sub(r"(?<![\w./'-])([a-z]\w*(?:\.[a-z]\w*)*)(?:\.\d+)?(=|:(?= )|(?![\w./'(-]))", typed, message)


def unknown_flag(flag: str, known: Sequence[str]) -> str:
    """Return the message on an unknown flag, with the flags that may be meant, of all groups of settings.

    Args:
        flag: what was typed, such as `--lr`.
        known: the flags of the command, such as `--train.learning-rate`.
    """
    typed = flag.split("=")[0].replace("_", "-").lower()
    if typed in known:
        return f"{flag} stands after --, which ends the options; write options before it"
    flags = [option for option in dict.fromkeys(known) if option.startswith("--") and "*" not in option]
    name = typed.lstrip("-").rpartition(".")[2]
    ends = {option: option.removeprefix("--").rpartition(".")[2] for option in flags}
    meant = [option for option in flags if ends[option] in (name, OTHER_NAMES.get(name))]
    meant = [option for option in meant if option.startswith(typed.removesuffix(name))] or meant  # in the same group
    if not meant:  # a typing error, in the whole flag where its group was given; or the beginning of a flag
        close = get_close_matches(name, ends.values(), n=1, cutoff=0.7)
        meant = get_close_matches(typed, flags, n=1) if "." in typed else [one for one in flags if ends[one] in close]
        meant = meant or [option for option in flags if ends[option].startswith(name)]
    return f"no option {flag}" + (f". Did you mean {' or '.join(meant[:3])}?" if meant else "")
