"""Line charts, drawn by matplotlib: in HTML reports, and of `txl analyze context`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from transformer_xl.files import atomic_file

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Colours that colour-blind readers can tell apart (the palette of Okabe and Ito 2008)."""
STYLES = ("-o", "--s", "-.^", ":D", "-v", "--P", "-.X")
"""Line styles and markers, for readers who cannot tell the colours apart."""
# without a salt, the ids in an SVG are random; without these, the date is in a file
_SALT = {"svg.hashsalt": "transformer-xl"}
_NO_DATE: dict[str, dict[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "-"
    """Marker and line style as in matplotlib, such as `o--`."""
    colour: str | None = None
    """Colour of the line, or None for the next of COLOURS."""
    spread: Sequence[float] = ()
    """How far each value may be off, drawn as bars; the axis is then at least eight of the largest high."""


def draw(
    title: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Line],
    *,
    log_x: bool = False,
    max_y: float | None = None,
    legend_outside: bool = False,
    width: float = 7.2,
) -> str:
    """Return a line chart as an SVG element.

    Args:
        title: title above the chart.
        x_label: label of the x axis.
        y_label: label of the y axis.
        lines: the lines to draw; with more than one, the chart has a legend.
        log_x: whether the x axis is logarithmic.
        max_y: upper limit of the y axis, where higher lines are clipped, or None to show all values.
        legend_outside: whether the legend is to the right of the chart instead of inside it, for many lines.
        width: width in inches, without such a legend.
    """
    figure = Figure(figsize=(9.4 if legend_outside else width, 4.0 if width > 6 else 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_prop_cycle(color=COLOURS)
    for line in lines:
        axes.plot(line.x, line.y, line.style, color=line.colour, label=line.label, linewidth=1.8)
        if line.spread:
            axes.errorbar(line.x, line.y, line.spread, fmt="none", ecolor=axes.lines[-1].get_color(), capsize=3)
            (low, high), least = axes.get_ylim(), 8 * max(line.spread)
            axes.set_ylim(min(low, (low + high - least) / 2), max(high, (low + high + least) / 2))  # magnifies no noise
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    tidy(axes)
    if log_x:
        positive = [x for line in lines for x in line.x if x > 0]
        axes.set_xscale("symlog", base=2, linthresh=min(positive, default=1))  # symlog: a log axis that includes 0
        ticks = sorted({x for line in lines for x in line.x})
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.minorticks_off()
    if max_y is not None:
        axes.set_ylim(top=max_y)
    if len(lines) > 1:
        position, anchor = ("center left", (1.0, 0.5)) if legend_outside else ("best", None)
        axes.legend(frameon=False, loc=position, bbox_to_anchor=anchor)
    return to_svg(figure)


def shown(text: str) -> str:
    """Return a text with escapes for the characters that matplotlib's own font lacks, such as those of Chinese."""
    font = get_font(findfont(FontProperties()))
    return "".join(one if font.get_char_index(ord(one)) else ascii(one)[1:-1] for one in text)


def label_of(name: str) -> str:
    """Return a name as the label of a line: `$` begins no formula, and `_` does not take it out of the legend."""
    label = shown(name).replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def tidy(axes: Axes) -> None:
    """Draw a light grid, and hide the upper and right borders."""
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def to_svg(figure: Figure) -> str:
    """Return a figure as an SVG element; equal figures give equal text."""
    text = io.StringIO()
    with rc_context(_SALT):
        FigureCanvasSVG(figure).print_svg(text, metadata=_NO_DATE["svg"])
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def draw_gains(results: Mapping[str, Any]) -> Figure:
    """Draw a panel for each fraction r, with a line for each model: the gain g(c, c + step) over c, and the threshold.

    r, c and g are defined at the top of `effective_context.py`.

    Args:
        results: the return value of `measure_context`.
    """
    fractions = list(results["baseline"])
    figure = Figure(figsize=(1.2 + 4.0 * len(fractions), 4.0), layout="constrained")
    panels = figure.subplots(1, len(fractions), sharey=True, squeeze=False)[0]
    for axes, fraction in zip(panels, fractions, strict=True):
        for model, colour, style in zip(results["models"], cycle(COLOURS), cycle(STYLES), strict=False):
            percent = [100 * gain for gain in model["fractions"][fraction]["gains"]]
            contexts = results["contexts"][:-1]  # the longest context has no longer one to compare with
            name = label_of(model["name"])
            axes.plot(contexts, percent, style, color=colour, markersize=4, linewidth=1.6, label=name)
        axes.axhline(100 * results["threshold"], color="0.45", linestyle=":", linewidth=1.2, label="threshold")
        share = "all positions" if float(fraction) == 1 else f"the hardest {100 * float(fraction):g}% of positions"
        axes.set(title=f"r = {fraction}: {share}", xlabel="context c (tokens)")
        tidy(axes)
    panels[0].set_ylabel(f"gain in perplexity by {results['context_step']:,} tokens more (%)")
    panels[0].set_ylim(bottom=0)
    panels[-1].legend(frameon=False, fontsize=9)
    return figure


def write_plot(path: Path, figure: Figure) -> None:
    """Write a plot atomically, in the format of the path's suffix, such as .svg or .png.

    Raises:
        UserError: the file system refuses.
    """
    with atomic_file(path) as temporary:
        save_plot(temporary, figure, path.suffix, dpi=130)


def save_plot(path: Path, figure: Figure, suffix: str, *, dpi: int) -> None:
    """Write a plot in the format of a suffix; equal plots give equal files."""
    file_format = suffix.lower().removeprefix(".")
    with rc_context(_SALT):
        figure.savefig(path, format=file_format, dpi=dpi, metadata=_NO_DATE.get(file_format))
