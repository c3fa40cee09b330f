"""The plot of effective context: how much each further step of context helps each model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from transformer_xl.analysis.plots import COLOURS
from transformer_xl.config import UserError
from transformer_xl.files import atomic_file

FORMATS = (".svg", ".png")

# dashes and markers repeat what colours say, for readers who cannot tell those apart
_STYLES = ("-", "--", "-.", ":", "-", "--", "-.")
_MARKS = ("o", "s", "^", "D", "v", "P", "X")


def check_plot_path(path: Path) -> None:
    """Check that a plot can be written to a path of this name.

    Raises:
        UserError: its suffix is not one of `FORMATS`.
    """
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path}: wanted a file name that ends in {' or '.join(FORMATS)}, for a plot in that format")


def draw_gains(found: Mapping[str, Any]) -> Figure:
    """Draw a panel for each fraction r, with a line for each model: the gain g(c, c + step) over c, and the threshold.

    Args:
        found: what `EffectiveContext.as_dict` returned.
    """
    fractions = list(found["baseline"])
    figure = Figure(figsize=(1.2 + 4.0 * len(fractions), 4.0), layout="constrained")
    panels = figure.subplots(1, len(fractions), sharey=True, squeeze=False)[0]
    for axes, fraction in zip(panels, fractions, strict=True):
        _draw_panel(axes, found, fraction)
    panels[0].set_ylabel(f"gain in perplexity by {found['context_step']:,} tokens more (%)")
    panels[0].set_ylim(bottom=0)
    panels[-1].legend(frameon=False, fontsize=9)
    return figure


def _draw_panel(axes: Axes, found: Mapping[str, Any], fraction: str) -> None:
    for model, colour, style, mark in zip(found["models"], cycle(COLOURS), cycle(_STYLES), cycle(_MARKS), strict=False):
        percent = [100 * gain for gain in model["fractions"][fraction]["gains"]]
        axes.plot(
            found["contexts"][:-1],
            percent,
            style,
            color=colour,
            marker=mark,
            markersize=4,
            linewidth=1.6,
            label=model["name"],
        )
    axes.axhline(100 * found["threshold"], color="0.45", linestyle=":", linewidth=1.2, label="threshold")
    share = "all positions" if float(fraction) == 1 else f"the hardest {100 * float(fraction):g}% of positions"
    axes.set(title=f"r = {fraction}: {share}", xlabel="context c (tokens)")
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def write_plot(path: Path, figure: Figure) -> None:
    """Write a plot atomically, in the format of the path's suffix.

    Raises:
        UserError: another suffix than those of `FORMATS`, or the file system refuses.
    """
    check_plot_path(path)
    suffix = path.suffix.lower().removeprefix(".")
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format=suffix, dpi=130, metadata={"Date": None} if suffix == "svg" else None)
