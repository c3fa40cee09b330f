"""The plot of `txl analyze context`: how much each longer context improves the perplexity of each model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from transformer_xl.analysis.plots import COLOURS, tidy
from transformer_xl.files import atomic_file

# line styles and markers differ as well, for readers who cannot tell the colours apart
_STYLES = ("-o", "--s", "-.^", ":D", "-v", "--P", "-.X")


def draw_gains(results: Mapping[str, Any]) -> Figure:
    """Draw a panel for each fraction r, with a line for each model: the gain g(c, c + step) over c, and the threshold.

    r, c and g are defined at the top of `effective_context.py`.

    Args:
        results: the return value of `EffectiveContext.as_dict`.
    """
    fractions = list(results["baseline"])
    figure = Figure(figsize=(1.2 + 4.0 * len(fractions), 4.0), layout="constrained")
    panels = figure.subplots(1, len(fractions), sharey=True, squeeze=False)[0]
    for axes, fraction in zip(panels, fractions, strict=True):
        for model, colour, style in zip(results["models"], cycle(COLOURS), cycle(_STYLES), strict=False):
            percent = [100 * gain for gain in model["fractions"][fraction]["gains"]]
            contexts = results["contexts"][:-1]  # the longest context has no longer one to compare with
            axes.plot(contexts, percent, style, color=colour, markersize=4, linewidth=1.6, label=model["name"])
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
    suffix = path.suffix.lower().removeprefix(".")
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format=suffix, dpi=130, metadata={"Date": None} if suffix == "svg" else None)
