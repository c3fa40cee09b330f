"""Pictures, drawn by matplotlib without a screen, as SVG text that stands inside a page."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Line:
    """One line of a picture."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "-"


@dataclass(frozen=True)
class Chart:
    """A picture of lines, with horizontal marks to compare with."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Mapping[str, float] = field(default_factory=dict)
    """Levels to compare with, by name; each is named at the right edge."""
    logarithmic: bool = False
    """Whether x is drawn by its logarithm."""


def draw(chart: Chart) -> str:
    """The picture as an SVG element."""
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for line in chart.lines:
        axes.plot(line.x, line.y, line.style, label=line.label, linewidth=1.8)
    for name, level in chart.marks.items():
        axes.axhline(level, color="0.45", linestyle=":", linewidth=1.2)
        axes.annotate(name, (1.0, level), xycoords=("axes fraction", "data"), xytext=(-4, 3),
                      textcoords="offset points", ha="right", color="0.3", fontsize=9)  # fmt: skip
    _dress(axes, chart)
    return _svg(figure)


def _dress(axes: Axes, chart: Chart) -> None:
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if chart.logarithmic:
        positive = [x for line in chart.lines for x in line.x if x > 0]
        axes.set_xscale("symlog", base=2, linthresh=min(positive, default=1))
        ticks = sorted({x for line in chart.lines for x in line.x})
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.minorticks_off()
    if len(chart.lines) > 1:
        axes.legend(frameon=False)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
