"""Progress of long operations: a bar in a terminal or a notebook, and plain lines elsewhere.

All output is on standard error, so that results on standard output can be piped.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

NOTE = "note: "
"""Beginning of every line that tells the user what they may not expect."""

_SECONDS_BETWEEN_BARS = 0.25  # in a notebook

_wording: Callable[[str], str] = str


def say(text: str) -> None:
    """Print a line for the user, on standard error."""
    print(text, file=sys.stderr, flush=True)


def note(text: str, print_line: Callable[[str], None] = say) -> None:
    """Tell the user what they may not expect, such as a setting that is probably not intended.

    Args:
        text: the note, without a prefix.
        print_line: prints it; by default on standard error.
    """
    print_line(f"{NOTE}{_wording(text)}")


@contextmanager
def notes_worded(wording: Callable[[str], str]) -> Iterator[None]:
    """Word the notes inside the block otherwise: a command names settings by the flags that give them."""
    global _wording
    before, _wording = _wording, wording
    try:
        yield
    finally:
        _wording = before


@contextmanager
def without_library_warnings() -> Iterator[None]:
    """Silence the logged warnings of libraries, such as those of torchao when it is imported."""
    level = logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(level)


class ProgressBar:
    """A progress bar with throughput and remaining time.

    It is drawn in a terminal and in a notebook; anywhere else (a log file, a pipe) a plain line is printed every few
    seconds. Use it as a context manager.
    """

    def __init__(self, title: str, total: int, unit: str, *, seconds_between_lines: float = 10.0) -> None:
        """Prepare the bar; it is drawn when the `with` block begins.

        Args:
            title: name of the operation, shown before the bar.
            total: the amount that makes the bar full, in `unit`.
            unit: plural unit of the amounts, such as `steps` or `tokens`.
            seconds_between_lines: minimum time between two plain lines if no bar can be drawn.
        """
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        self._title, self._total, self._unit = title, total, unit
        self._seconds_between_lines = seconds_between_lines
        self._done, self._notes = 0, ""
        self._start = self._last_line = time.perf_counter()
        self._first_done = 0
        console = Console(file=sys.stderr, highlight=False)
        # in a notebook without ipywidgets, rich warns at every refresh; the notebook's own display draws a bar then
        has_widgets = console.is_jupyter and find_spec("ipywidgets") is not None
        self._is_html = console.is_jupyter and not has_widgets
        self._cell: Any = None
        can_draw = console.is_terminal or has_widgets
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=8),  # narrow, to leave room for the metrics
            TextColumn("{task.fields[notes]}", table_column=Column(overflow="fold")),  # in a narrow terminal, two lines
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not can_draw)
        self._task = self._bar.add_task(title, total=total, notes="")

    def __enter__(self) -> Self:
        self._bar.start()
        if self._is_html:
            self._cell = import_module("IPython.display").display({"text/html": ""}, raw=True, display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._cell:
            self._cell.update({"text/html": ""}, raw=True)

    def _draw_html(self) -> None:
        line = escape(f"{self._title}: {self._done:,} of {self._total:,} {self._unit}, {self._status()}")
        bar = f'<progress value="{self._done}" max="{self._total}" style="vertical-align:middle"></progress>'
        self._cell.update({"text/html": f"{bar} {line}, {self._left()} left"}, raw=True)

    def begin_at(self, done: int) -> None:
        """Set the amount that was done before, in a resumed run; the throughput does not include it."""
        self._done = self._first_done = done
        self.advance(0)

    def advance(self, amount: int, notes: str | None = None) -> None:
        """Advance the bar.

        Args:
            amount: the additional amount done, in `unit`.
            notes: text to show next to the bar from now on, instead of the throughput.
        """
        self._done += amount
        self._notes = self._notes if notes is None else notes
        self._bar.update(self._task, completed=self._done, notes=self._status())
        seconds = time.perf_counter() - self._last_line
        if self._cell and seconds >= _SECONDS_BETWEEN_BARS:
            self._last_line += seconds
            self._draw_html()
        elif self._bar.disable and not self._cell and seconds >= self._seconds_between_lines:
            self._last_line = time.perf_counter()
            say(f"{self._title}: {self._done:,} of {self._total:,} {self._unit}, {self._status()}, {self._left()} left")

    @property
    def seconds(self) -> float:
        """Seconds since the bar was created."""
        return time.perf_counter() - self._start

    def _rate(self) -> float:
        return (self._done - self._first_done) / max(1e-9, self.seconds)

    def _status(self) -> str:
        return self._notes or f"{self._rate():,.0f} {self._unit}/s"

    def _left(self) -> str:
        seconds = round((self._total - self._done) / max(1e-9, self._rate()))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


class StageBars:
    """Progress bars for stages that run one after another.

    Use it as a context manager, and call it with the name of the stage, the bytes done so far, and their total.
    """

    def __init__(self) -> None:
        self._stage, self._done = "", 0
        self._bar: ProgressBar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.__exit__()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Update the bar of the stage: `done` of `total` bytes are processed."""
        if self._bar is None or stage != self._stage:
            self.__exit__()
            self._stage, self._done = stage, done
            self._bar = ProgressBar(stage, max(total, done), "bytes").__enter__()  # shows the bar
            self._bar.begin_at(done)
        self._bar.advance(done - self._done)
        self._done = done
