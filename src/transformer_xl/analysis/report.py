"""Self-contained HTML pages of tables, charts and text."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; } th, td { padding: .3rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; } th { border-bottom: 2px solid #888; }
td { border-bottom: 1px solid #ddd; } svg, img { max-width: 100%; height: auto; }
pre { background: #f5f5f2; padding: .8rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Page:
    """An HTML page."""

    title: str
    elements: Sequence[str]
    """HTML of its body, in order."""

    def html(self) -> str:
        """Return the whole page."""
        title = escape(self.title)
        head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
        body = "\n".join(self.elements)
        return (
            f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n'
            f"<body>\n<h1>{title}</h1>\n{body}\n</body></html>\n"
        )


def heading(text: str) -> str:
    """Return a heading below the title."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def verbatim(text: str) -> str:
    """Return preformatted text."""
    return f"<pre>{escape(text)}</pre>"


def image(png: bytes, title: str) -> str:
    """Return an image that is embedded in the page."""
    return f'<p><img alt="{escape(title)}" src="data:image/png;base64,{b64encode(png).decode()}"></p>'


def link(target: str, text: str) -> str:
    """Return a link to a file beside the page."""
    return f'<p><a href="{escape(target)}">{escape(text)}</a></p>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first column is left-aligned, the others right-aligned."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
