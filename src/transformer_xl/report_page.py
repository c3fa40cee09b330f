"""Build self-contained HTML pages of text, tables and images, for the reports of `txl demo` and `txl reproduce`."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a;
  background: #fff; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
svg { width: 100%; max-width: 40rem; height: auto; display: block; }
.wide svg { min-width: 30rem; max-width: 50rem; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; overflow-wrap: normal; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } thead th { border-bottom: 2px solid #888; }
.facts th { font-weight: normal; color: #555; white-space: nowrap; }
.facts td { text-align: left; overflow-wrap: anywhere; }
pre { background: #f5f5f2; padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
pre mark { background: #cfe3f3; color: inherit; font-weight: bold; }
details { margin: .8rem 0; } summary { cursor: pointer; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #141414; } a { color: #8ab4f8; } .facts th { color: #aaa; }
  pre { background: #222; } pre mark { background: #2a4a63; } th, td { border-color: #444; }
  svg { filter: invert(.92) hue-rotate(180deg); } img { background: #fff; }
}
"""


def page(title: str, elements: Iterable[str]) -> str:
    """Return a whole page.

    Args:
        title: title of the page, and its first heading.
        elements: HTML of the body after that heading, in order; see the functions below.
    """
    title, body = escape(title), "\n".join(elements)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n'
        f"<body>\n<h1>{title}</h1>\n{body}\n</body></html>\n"
    )


def heading(text: str) -> str:
    """Return the heading of a section."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def verbatim(text: str) -> str:
    """Return preformatted text."""
    return f"<pre>{escape(text)}</pre>"


def details(summary: str, text: str) -> str:
    """Return preformatted text that is hidden until the reader opens it."""
    return f"<details><summary>{escape(summary)}</summary>{verbatim(text)}</details>"


def sample(prompt: str, continuation: str) -> str:
    """Return generated text after its prompt, which is marked."""
    return f"<pre><mark>{escape(prompt)}</mark>{escape(continuation)}</pre>"


def chart(svg: str) -> str:
    """Return an SVG element that scrolls by itself where it is wider than the screen."""
    return f'<div class="wide">{svg}</div>'


def image(png: bytes, title: str) -> str:
    """Return a PNG image, embedded in the page as base64."""
    return f'<p><img alt="{escape(title)}" src="data:image/png;base64,{b64encode(png).decode()}"></p>'


def link(target: str, text: str) -> str:
    """Return a link to a file in the folder of the page."""
    return f'<p><a href="{escape(target)}">{escape(text)}</a></p>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first column is left-aligned, the others right-aligned.

    It scrolls by itself where it is wider than the screen.
    """
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def facts(values: Mapping[str, str]) -> str:
    """Return a table of names and values."""
    rows = (f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in values.items())
    return f'<table class="facts">{"".join(rows)}</table>'
