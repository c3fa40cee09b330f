"""Markdown extension of the documentation site: fills in what is generated from the code.

A line `<!-- generated: settings -->` in a page becomes the tables of all settings, `<!-- generated: commands -->` the
flags of all commands, `<!-- generated: api -->` the reference of every public name of the package, and
`<!-- generated: tour -->` the notebook examples/tour.ipynb with its outputs.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from pydantic.fields import FieldInfo
from torch import nn
from typing_extensions import override

import transformer_xl
from transformer_xl import config
from transformer_xl.cli.main import build_app
from transformer_xl.config import RunConfig, Settings

INT32_MAX = 2**31 - 1  # the bound of every count, which docs/settings.md says once
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "a multiple of"}


def settings_tables() -> Iterator[str]:
    """Yield a table for each group of settings; for a union of classes, what they share and then what each adds."""
    hints = get_type_hints(RunConfig)
    for group, field in RunConfig.model_fields.items():
        if not isinstance(field.get_default(call_default_factory=True, validated_data={}), Settings):
            continue  # what `txl train` writes down about a run, and no setting
        first, *others = classes = list(_settings_classes(hints[group]))
        shared = {
            name: cells
            for name, cells in _rows(first).items()
            if all(_rows(other).get(name) == cells for other in others)
        }
        yield f"## {group}\n\n{_summary(first) if not others else ''}\n"
        yield from _table(group, shared)
        for kind in classes if others else ():
            own = {name: cells for name, cells in _rows(kind).items() if name not in shared}
            yield f"### {kind.__name__}\n\n{_summary(kind)}\n"
            yield from _table(f"{kind.__name__}.{group}", own)


def _settings_classes(annotation: Any) -> Iterator[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    for inner in get_args(annotation):
        yield from _settings_classes(inner)


def _summary(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _table(anchor: str, rows: dict[str, tuple[str, ...]]) -> Iterator[str]:
    if rows:
        yield "| setting | values | default | meaning |\n|---|---|---|---|"
    for name, cells in rows.items():
        yield f'| <code id="{anchor}.{name}">{name}</code> | {" | ".join(cells)} |'
    yield ""


def _rows(kind: type[Settings]) -> dict[str, tuple[str, ...]]:
    """Return for each setting the cells of its row: allowed values, default, meaning."""
    rows: dict[str, tuple[str, ...]] = {}
    for name, field in kind.model_fields.items():
        values = " or ".join(_values(field.annotation))
        if bounds := " and ".join(_bounds(field)):
            values = f"{values}, {bounds}"
        default = "required" if field.is_required() else f"`{_as_typed(field.default)}`"
        rows[name] = (values, default, " ".join((field.description or "").split()).replace("|", "\\|"))
    return rows


def _values(annotation: Any) -> list[str]:
    """Return the types and choices that an annotation allows, as Markdown."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return [f"`{_as_typed(choice)}`" for choice in inner]
    if origin in (Union, UnionType):
        return [one for part in inner for one in _values(part)]
    if origin is tuple:
        return [f"list of {' or '.join(_values(inner[0]))}"]
    return [
        "`none`" if annotation is type(None) else "`true` or `false`" if annotation is bool else annotation.__name__
    ]


def _bounds(field: FieldInfo) -> Iterator[str]:
    for constraint in field.metadata:
        for attribute, sign in _SIGNS.items():
            limit = getattr(constraint, attribute, None)
            if limit is not None and limit != INT32_MAX:
                yield f"{sign}&nbsp;{'2^63' if limit == 2**63 else f'{limit:g}'}"


def _as_typed(value: Any) -> str:
    """Return a value as it is typed after a flag or in YAML."""
    if value is None or value == ():
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def command_pages() -> Iterator[str]:
    """Yield the usage and flags of every command; the flags that are settings have a page of their own."""
    text = build_app().generate_docs(output_format="markdown")
    text = re.sub(r"(?<=\w) -m \w+(?= \[)", "", text)  # how the program that builds the pages was started
    text = text[text.index("\n## txl ") :]  # without the title and the table of contents, which the page has anyway
    settings = re.compile(r"^\*\*\w+\*\*:\n\n(?=\* `--(?:model|train|evaluation)\.)(?:.+\n)+\n?", re.MULTILINE)
    for command in re.split(r"^(?=##)", text, flags=re.MULTILINE):
        without, count = settings.subn("", command)
        yield without + ("Its other flags are the [settings](settings.md).\n\n" if count else "")


def api_entries() -> Iterator[str]:
    """Yield the public names by theme, as directives of mkdocstrings; settings are on a page of their own."""
    themes: dict[str, list[str]] = {"Workflow": [], "Model": [], "Results and data": [], "Settings": []}
    for name in transformer_xl.__all__:
        themes[_theme(getattr(transformer_xl, name))].append(name)
    for theme, names in themes.items():
        yield f"## {theme}\n"
        for name in names:
            yield f"::: transformer_xl.{name}"
            kind = getattr(config, name, None)
            if isinstance(kind, type) and issubclass(kind, Settings):
                properties = [name for name, value in vars(kind).items() if isinstance(value, property)]
                yield f"    options:\n      members: {properties or False}\n      inherited_members: false"
            yield ""


def _theme(thing: Any) -> str:
    if inspect.isfunction(thing):
        return "Workflow"
    if not isinstance(thing, type) or issubclass(thing, Settings):
        return "Settings"
    is_model = issubclass(thing, nn.Module) or thing.__module__.startswith(
        ("transformer_xl.model.", "transformer_xl.run")
    )
    return "Model" if is_model else "Results and data"


def tour() -> Iterator[str]:
    """Yield the cells of the notebook, each with its outputs: text, HTML as it is, pictures inside the page."""
    notebook = Path(__file__).parents[1] / "examples" / "tour.ipynb"
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                yield f"\n![output of the cell above](data:image/png;base64,{''.join(data['image/png']).strip()})"
            elif "text/html" in data:
                yield f"\n<div>{''.join(data['text/html']).strip()}</div>"
            elif text := "".join(data.get("text/plain", "")).strip("\n"):
                yield f"\n```\n{text}\n```"
        yield ""


_GENERATORS = {"settings": settings_tables, "commands": command_pages, "api": api_entries, "tour": tour}


class _Expand(Preprocessor):
    """Replaces the markers."""

    @override
    def run(self, lines: list[str]) -> list[str]:
        return "\n".join(self._expand(line) for line in lines).splitlines()

    def _expand(self, line: str) -> str:
        marker = re.fullmatch(r"<!-- generated: (\w+) -->", line)
        return "\n".join(_GENERATORS[marker[1]]()) if marker else line


class GeneratedPages(Extension):
    """Registers the preprocessor; it runs before all others."""

    @override
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_Expand(md), "generated_pages", priority=1000)


def makeExtension(**options: Any) -> GeneratedPages:
    """Return the extension; Python-Markdown looks for a function of this name."""
    return GeneratedPages(**options)
