"""What commands print: tables and progress for people, one JSON object for programs.

Results go to standard output, progress to standard error, so that results can be piped.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from transformer_xl.text.tokenizer import Tokenizer


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


def say(text: str) -> None:
    """A line for people, to standard error."""
    print(text, file=sys.stderr, flush=True)


def say_unknown(tokenizer: Tokenizer, texts: Iterable[bytes]) -> None:
    """Says which words of texts are read as the vocabulary's unknown word."""
    from transformer_xl.text.tokenizers.words import WordTokenizer

    if not isinstance(tokenizer, WordTokenizer) or tokenizer.unknown is None:
        return
    for text in texts:
        unknown = [word for word, _ in tokenizer.lost(text).unknown]
        if unknown:
            words = ", ".join(f"'{word[:40]}'" for word in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
            say(f"remark: not in the vocabulary, and read as {tokenizer.unknown}: {words}")


def command_line() -> str:
    """What was typed."""
    return shlex.join(["txl", *sys.argv[1:]])


class ProgressBar:
    """A bar with throughput and time left on a terminal; elsewhere a plain line now and then."""

    def __init__(self, title: str, total: int, unit: str, *, seconds_between_lines: float = 10.0) -> None:
        """`total` counts what `advance` is told, in `unit`."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._title, self._total, self._unit = title, total, unit
        self._between = seconds_between_lines
        self._done, self._notes = 0, ""
        self._start = self._last_line = time.perf_counter()
        self._first_done: int | None = None
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=8),  # narrow: the figures must fit into 80 columns
            TextColumn("{task.fields[notes]}"),
            TimeRemainingColumn(),
        )
        err = console()
        self._bar = Progress(*columns, console=err, transient=True) if err.is_terminal else None
        self._task = self._bar.add_task(title, total=total, notes="") if self._bar else None

    def __enter__(self) -> ProgressBar:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def begin_at(self, done: int) -> None:
        """So much was done before (a resumed run)."""
        self._done = self._first_done = done
        self.advance(0)

    def advance(self, amount: int, notes: str | None = None) -> None:
        """So much more is done; `notes` replaces what stands beside the bar."""
        self._done += amount
        self._notes = self._notes if notes is None else notes
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=self._done, notes=self._beside())
        elif time.perf_counter() - self._last_line >= self._between:
            self._last_line = time.perf_counter()
            say(f"{self._title}: {self._done:,} of {self._total:,} {self._unit}, {self._beside()}, {self._left()} left")

    @property
    def seconds(self) -> float:
        """Time since it was made."""
        return time.perf_counter() - self._start

    def _rate(self) -> float:
        return (self._done - (self._first_done or 0)) / max(1e-9, self.seconds)

    def _beside(self) -> str:
        return self._notes or f"{self._rate():,.0f} {self._unit}/s"

    def _left(self) -> str:
        seconds = round((self._total - self._done) / max(1e-9, self._rate()))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
