"""Build self-contained HTML pages of text, tables and images, for the reports of `txl demo` and `txl reproduce`."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; } th, td { padding: .3rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; } th { border-bottom: 2px solid #888; }
td { border-bottom: 1px solid #ddd; } svg, img { max-width: 100%; height: auto; }
pre { background: #f5f5f2; padding: .8rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
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


def image(png: bytes, title: str) -> str:
    """Return a PNG image, embedded in the page as base64."""
    return f'<p><img alt="{escape(title)}" src="data:image/png;base64,{b64encode(png).decode()}"></p>'


def link(target: str, text: str) -> str:
    """Return a link to a file in the folder of the page."""
    return f'<p><a href="{escape(target)}">{escape(text)}</a></p>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first column is left-aligned, the others right-aligned."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
