"""A notebook without ipywidgets gets a bar from its own display."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from transformer_xl import progress


def test_a_notebook_without_widgets_shows_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Cell:
        def __init__(self) -> None:
            self.shown: list[str] = []

        def update(self, data: dict[str, str], *, raw: bool) -> None:
            assert raw
            self.shown.append(data["text/html"])

    cell, module = Cell(), ModuleType("IPython.display")

    def display(data: dict[str, str], **options: Any) -> Cell:
        assert options == {"raw": True, "display_id": True}
        return cell

    monkeypatch.setattr(module, "display", display, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(progress, "find_spec", lambda _: None)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_BARS", 0)
    with progress.ProgressBar("a <title>", 7, "tokens", seconds_between_lines=0) as bar:
        bar.advance(3)
        bar.advance(2)
    first, second, last = cell.shown
    assert '<progress value="3" max="7"' in first
    assert "a &lt;title&gt;: 5 of 7 tokens, " in second
    assert last == ""  # it is gone when the work is done
    assert capsys.readouterr() == ("", "")
