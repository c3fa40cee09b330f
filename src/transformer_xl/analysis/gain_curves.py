"""The picture of effective context: how much each further step of context helps, model by model."""

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

# dashes and marks say the same as colours, for whoever sees none
_STYLES = ("-", "--", "-.", ":", "-", "--", "-.")
_MARKS = ("o", "s", "^", "D", "v", "P", "X")


def check_picture(path: Path) -> None:
    """Looks whether a picture can have this name.

    Raises:
        UserError: its ending is not one of `FORMATS`.
    """
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path}: wanted a name that ends in {' or '.join(FORMATS)}, for a picture of that kind")


def draw_gains(found: Mapping[str, Any]) -> Figure:
    """A panel for each fraction r, in it a line for each model: the gain g(c, c + step) over c, and the threshold.

    Args:
        found: what `EffectiveContext.as_dict` gave.
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
    share = "all places" if float(fraction) == 1 else f"the hardest {100 * float(fraction):g}% of places"
    axes.set(title=f"r = {fraction}: {share}", xlabel="context c (tokens)")
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def write_picture(path: Path, figure: Figure) -> None:
    """Writes a picture, whole or not at all, in the format that its name ends with.

    Raises:
        UserError: another ending than those of `FORMATS`, or the file system refuses.
    """
    check_picture(path)
    form = path.suffix.lower().removeprefix(".")
    with atomic_file(path) as aside:
        figure.savefig(aside, format=form, dpi=130, metadata={"Date": None} if form == "svg" else None)
