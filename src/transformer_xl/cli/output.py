"""What commands print on standard output: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from transformer_xl.progress import say

if TYPE_CHECKING:
    from rich.console import Console

    from transformer_xl.text.tokenizers import Tokenizer


def print_json(values: dict[str, Any], *, indent: int | None = 2) -> None:
    """Writes one JSON object to standard output (indent none: as one line of ASCII); inf and nan become null."""
    print(json.dumps(_plain(values), indent=indent))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Writes a table to standard output; the first column stands left, the others right."""
    from rich.table import Table
    from rich.text import Text

    # Text: brackets in names are not markup
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        # names are found by the eye and copied: they are folded last
        least = min(30, max((len(row[0]) for row in rows), default=0)) if index == 0 else None
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold", min_width=least)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console(stderr=False).print(table)


def console(*, stderr: bool = True) -> Console:
    """A console on standard error (or output); wide enough for a table where nobody looks through a window."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else 120, soft_wrap=not stream.isatty())


def say_unknown(tokenizer: Tokenizer, texts: Iterable[str | bytes]) -> None:
    """Says which words of texts are read as the vocabulary's unknown word."""
    if tokenizer.unk_token_id is None:
        return
    unk_token = tokenizer.decode([tokenizer.unk_token_id])
    for text in texts:
        unknown = tokenizer.unknown_words(text)
        if unknown:
            words = ", ".join(f"'{word[:40]}'" for word in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
            say(f"remark: not in the vocabulary, and read as {unk_token}: {words}")


def command_line() -> str:
    """What was typed."""
    return shlex.join(["txl", *sys.argv[1:]])
