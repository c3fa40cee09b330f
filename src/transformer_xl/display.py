"""How results and other objects look when a program prints them or a notebook shows them: short, whatever they hold.

    class Result(Displayed): ...       repr(result): Result(path='runs/a', steps=500, weights=float32[23, 14])
                                       in a notebook: the same values as a table

A class that holds more than its fields should show overrides `summary` (both) or `details` (only the table). HTML uses
inline styles and no text color, so that it can be read on light and dark backgrounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any, cast

from typing_extensions import override

MAX_COLORED_TOKENS = 1000
"""Number of tokens that `tokens_html` should be given at most; they make about 100 kB of HTML."""

_MAX_CHARACTERS = 80  # of one value in a repr
_MAX_ITEMS = 6  # of a list or tuple in a repr
_MAX_TEXT = 10_000  # characters of a text in HTML
_STRONG_NATS = 8.0  # tokens with this loss or more have the strongest color


class Displayed:
    """Base class of dataclasses (declared with repr=False) with a short repr, and an HTML table in notebooks."""

    def summary(self) -> dict[str, Any]:
        """Return the values of the repr by name: the fields, unless a class overrides this."""
        return {field.name: getattr(self, field.name) for field in fields(cast(Any, self)) if field.repr}

    def details(self) -> Mapping[str, Any]:
        """Return the values of the table in a notebook by name."""
        return self.summary()

    @override
    def __repr__(self) -> str:
        values = ", ".join(f"{name}={shorten(value)}" for name, value in self.summary().items())
        return f"{type(self).__name__}({values})"

    def _repr_html_(self) -> str:
        """Return the HTML that Jupyter shows."""
        return table_html(type(self).__name__, self.details())


def shorten(value: object) -> str:
    """Return the repr of a value, shortened; of an array or tensor only the data type and shape."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str | bytes):
        return repr(value[:_MAX_CHARACTERS]) + _more(len(value) - _MAX_CHARACTERS, "characters")
    if isinstance(value, Sequence):
        shown = ", ".join(shorten(item) for item in value[:_MAX_ITEMS])
        return f"[{shown}{_more(len(value) - _MAX_ITEMS, 'items')}]"
    text = repr(str(value)) if isinstance(value, Path) else repr(value)
    return text if isinstance(value, Displayed) or len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def _more(number: int, unit: str) -> str:
    return f" ... and {number:,} more {unit}" if number > 0 else ""


def table_html(title: str, values: Mapping[str, Any]) -> str:
    """Return names and values as an HTML table."""
    rows = "".join(f"<tr>{_cell('th', name)}{_cell('td', _format(value))}</tr>" for name, value in values.items())
    return f'<table><caption style="text-align:left;font-weight:bold">{escape(title)}</caption>{rows}</table>'


def _cell(tag: str, text: str) -> str:
    return f'<{tag} style="text-align:left;vertical-align:top">{escape(text)}</{tag}>'


def _format(value: object) -> str:
    """Return a value as text for people: numbers with separators, strings without quotation marks."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)[:_MAX_TEXT] if isinstance(value, str | Path) else shorten(value)


def text_html(prompt: str, text: str) -> str:
    """Return a prompt in bold print and the text that follows it; long ones are truncated."""
    # a long prompt is cut at its beginning, which is farther from the text
    shown = f"<b>{escape(prompt[-_MAX_TEXT:])}</b>{escape(text[:_MAX_TEXT])}"
    return f'<div style="white-space:pre-wrap">{shown}<i>{_more(len(text) - _MAX_TEXT, "characters")}</i></div>'


def tokens_html(
    tokens: Iterable[tuple[str, str, float]],
    num_more: int = 0,
    quantity: str = "loss of each token",
    strongest: float = _STRONG_NATS,
    unit: str = "nats",
) -> str:
    """Return a text whose background shows how surprising each token was.

    Args:
        tokens: text of each token, what a tooltip says about it, and its loss in nats.
        num_more: number of tokens of the text that are left out.
        quantity: what the colors show, if not the loss.
        strongest: value of the strongest color.
        unit: unit of the values.
    """
    spans = "".join(
        # a newline alone would have no visible background
        f'<span title="{escape(note)}" style="background:{_color(value / strongest)}">'
        f"{escape(text).replace(chr(10), '&#8629;' + chr(10))}</span>"
        for text, note, value in tokens
    )
    scale = f"linear-gradient(90deg,{_color(0)},{_color(1)})"
    return (
        f'<div>{quantity}: 0 <span style="background:{scale};padding:0 3em"></span> {strongest:g} {unit} or '
        f'more</div><div style="white-space:pre-wrap;font-family:monospace;line-height:1.6">{spans}'
        f"<i>{_more(num_more, 'tokens')}</i></div>"
    )


def _color(share: float) -> str:
    return f"rgba(255,120,0,{0.65 * max(0.0, min(1.0, share)):.2f})"
