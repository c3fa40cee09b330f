"""Line charts as SVG elements for HTML pages, drawn by matplotlib without a display."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""A palette that colour-blind readers can tell apart (Okabe and Ito 2008)."""


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "-"
    colour: str | None = None
    """None: the next of COLOURS."""


@dataclass(frozen=True)
class Chart:
    """A line chart, with horizontal reference lines."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    references: Mapping[str, float] = field(default_factory=dict)
    """Horizontal reference lines, by their labels at the right edge."""
    logarithmic: bool = False
    """Whether the x axis is logarithmic."""
    top: float | None = None
    """Upper limit of the y axis, beyond which lines may continue; None: all is shown."""
    legend_beside: bool = False
    """Whether the legend is beside the chart, for many lines."""


def draw(chart: Chart) -> str:
    """Return the chart as an SVG element."""
    figure = Figure(figsize=(9.4 if chart.legend_beside else 7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_prop_cycle(color=COLOURS)
    for line in chart.lines:
        (drawn,) = axes.plot(line.x, line.y, line.style, label=line.label, linewidth=1.8)
        if line.colour is not None:
            drawn.set_color(line.colour)
    for name, level in chart.references.items():
        axes.axhline(level, color="0.45", linestyle=":", linewidth=1.2)
        axes.annotate(name, (1.0, level), xycoords=("axes fraction", "data"), xytext=(-4, 3),
                      textcoords="offset points", ha="right", color="0.3", fontsize=9)  # fmt: skip
    _format_axes(axes, chart)
    return svg_of(figure)


def _format_axes(axes: Axes, chart: Chart) -> None:
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if chart.logarithmic:
        positive = [x for line in chart.lines for x in line.x if x > 0]
        axes.set_xscale("symlog", base=2, linthresh=min(positive, default=1))
        ticks = sorted({x for line in chart.lines for x in line.x})
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.minorticks_off()
    if chart.top is not None:
        axes.set_ylim(top=chart.top)
    if len(chart.lines) > 1:
        where, anchor = ("center left", (1.0, 0.5)) if chart.legend_beside else ("best", None)
        axes.legend(frameon=False, loc=where, bbox_to_anchor=anchor)


def svg_of(figure: Figure) -> str:
    """Return a figure as an SVG element, without a date."""
    text = io.StringIO()
    FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
