"""Plots of attention: means by distance, single heads, every term over a text, and the loss by distance.

Colours are viridis, which colour-blind readers can tell apart. Means fall by orders of magnitude within a few tokens,
so their colour scale is logarithmic.

Shape suffixes: L layers, N heads, P distances, Q tokens of a text as queries and keys, G groups of distances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from transformer_xl.analysis.attention_maps import TermMaps, pluralize
from transformer_xl.analysis.attention_page import truncate
from transformer_xl.analysis.loss_by_distance import LossByDistance
from transformer_xl.analysis.plots import COLOURS

Head = tuple[int, int]
"""Layer and head, both from 0."""

_COLOURS = "viridis"
_COLOUR_RANGE = 1e-4  # of the maximum; smaller values have the same colour
_MAX_LABELS = 48  # tokens that fit beside an axis
_MAX_LABEL = 14  # characters
_SIGNS = "\u00b7\u21b5\u21e5"  # for a space, a newline and a tab; matplotlib's font has them
_LABEL_INCHES = 0.15
_STYLES = ("-", "--", "-.", ":")


def save(figure: Figure, stem: Path) -> list[str]:
    """Write a plot as `stem`.png and `stem`.svg; return the names of the files."""
    figure.savefig(stem.with_suffix(".png"), dpi=110)
    figure.set_layout_engine("none")  # the layout is done
    figure.savefig(stem.with_suffix(".svg"), dpi=110, metadata={"Date": None})
    return [stem.with_suffix(end).name for end in (".png", ".svg")]


def draw_means(mean_LNP: npt.NDArray[np.float64]) -> Figure:
    """Draw mean attention by distance, with a row for each head of each layer."""
    layers, heads, num_distances = mean_LNP.shape
    row = min(0.3, max(0.055, 9.0 / (layers * heads)))
    figure = Figure(figsize=(9.0, max(2.4, row * layers * heads + 1.3)), layout="constrained")
    axes = figure.add_subplot()
    rows = np.ma.masked_invalid(mean_LNP.reshape(layers * heads, num_distances))
    image = axes.imshow(
        rows,
        norm=_logarithmic(rows),
        cmap=_COLOURS,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, num_distances - 0.5, layers * heads, 0),
    )
    for layer in range(1, layers):
        axes.axhline(layer * heads, color="white", linewidth=0.8)
    names = _evenly(layers, row * heads)
    axes.set_yticks([(layer + 0.5) * heads for layer in names], [f"layer {layer}" for layer in names])
    axes.tick_params(axis="y", length=0)
    if row >= _LABEL_INCHES:
        right = axes.secondary_yaxis("right")
        right.set_yticks(
            np.arange(layers * heads) + 0.5, [f"head {head}" for _ in range(layers) for head in range(heads)]
        )
        right.tick_params(axis="y", length=0, labelsize=8)
    axes.set_title(f"Mean attention by distance: {pluralize(layers, 'layer')} x {pluralize(heads, 'head')}, a row each")
    axes.set_xlabel("distance in tokens (0: the token itself)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, label="mean probability (logarithmic)", pad=0.02)
    return figure


def draw_heads(mean_LNP: npt.NDArray[np.float64], heads: Sequence[Head]) -> Figure:
    """Draw mean attention of single heads by distance, with both axes logarithmic; 0 is at the left edge."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    distance_P = np.arange(mean_LNP.shape[-1])
    for number, (layer, head) in enumerate(heads):
        style = _STYLES[number // len(COLOURS) % len(_STYLES)]
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(distance_P, mean_LNP[layer, head], style, color=colour, label=f"layer {layer}, head {head}")
    axes.set(
        title="Mean attention of single heads",
        xlabel="distance in tokens (0: the token itself)",
        ylabel="mean probability",
    )
    axes.set_yscale("log")
    axes.set_xscale("symlog", base=2, linthresh=1)
    last = len(distance_P) - 1
    ticks = [0, *(2**power for power in range(last.bit_length()))]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlim(-0.1, max(1, last) * 1.1)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", ncols=1 + len(heads) // 9, fontsize=9)
    return figure


def draw_terms(maps: TermMaps, head: Head, labels: Sequence[str]) -> Figure:
    """Draw each attention term of one head over a text, its scores and probabilities: queries in rows, keys in columns.

    Each map has its own colour scale; keys that a query does not see are white.
    """
    probability, score, *parts = maps.terms.items()
    shown = [*parts, score, probability]
    figure = Figure(figsize=(4.6 * (len(shown) // 2), 8.2), layout="constrained")
    figure.suptitle(f"Layer {head[0]}, head {head[1]}: the terms of its attention scores over {pluralize(len(labels))}")
    for number, (term, words) in enumerate(shown, start=1):
        axes = figure.add_subplot(2, len(shown) // 2, number)
        found_QQ = np.ma.masked_invalid(maps.map_QQ(term, *head))
        norm = _logarithmic(found_QQ) if term == "probability" else None
        image = axes.imshow(found_QQ, cmap=_COLOURS, norm=norm, interpolation="nearest")
        axes.set_title(words if norm is None else f"{words}, logarithmic", fontsize=10)
        _name_tokens(axes, labels, left=number % (len(shown) // 2) == 1, below=number > len(shown) // 2)
        figure.colorbar(image, shrink=0.75, label="probability" if norm else "term of the score")
    return figure


def draw_losses(losses: Mapping[str, LossByDistance], subject: str) -> Figure:
    """Draw mean loss by distance from a document's start, a line for each entry, with standard errors and counts.

    Args:
        losses: losses of the same tokens, by label.
        subject: what counts as a document, such as "a document".
    """
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    for number, (words, loss) in enumerate(losses.items()):
        group_G = np.arange(len(loss.last_G)) + 0.08 * (number - 0.5)
        axes.errorbar(
            group_G, loss.nats_G, loss.error_G, fmt="os"[number % 2] + _STYLES[number % len(_STYLES)],
            color=COLOURS[number], capsize=2, markersize=4, label=words,
        )  # fmt: skip
    first = next(iter(losses.values()))
    below.bar(np.arange(len(first.last_G)), first.count_G, color="0.6", width=0.6)
    below.set_yscale("log")
    below.set(ylabel="tokens", xlabel=f"distance from the start of {subject}, in tokens (1: its first)")
    edges = [0, *first.last_G.tolist()]
    names = [f"{high:,}" if low + 1 == high else f"{low + 1:,}-{high:,}" for low, high in pairwise(edges)]
    below.set_xticks(np.arange(len(names)), [_folded(name) for name in names], fontsize=8)
    axes.set(title="Loss by distance from the start (bars: one standard error)", ylabel="nats per token")
    for part in (axes, below):
        part.grid(visible=True, axis="y", alpha=0.25)
        part.spines[["top", "right"]].set_visible(False)
        part.tick_params(axis="x", which="minor", bottom=False)
    axes.legend(frameon=False)
    return figure


def _logarithmic(found: np.ma.MaskedArray) -> LogNorm:
    highest = float(found.max())
    lowest = max(float(found[found > 0].min()), highest * _COLOUR_RANGE)
    return LogNorm(min(lowest, 0.9 * highest), highest, clip=True)


def _folded(name: str) -> str:
    """Break a long label into two lines."""
    return name if len(name) < 8 else name.replace("-", "-\n")


def _evenly(count: int, inches: float) -> range:
    """Return the indices of the labels to draw: every one, or every second and so on if they would overlap."""
    return range(0, count, max(1, int(np.ceil(_LABEL_INCHES / inches))))


def _name_tokens(axes: Axes, labels: Sequence[str], *, left: bool, below: bool) -> None:
    """Label queries and keys at the outer axes with tokens, or with positions if there are many."""
    named = len(labels) <= _MAX_LABELS
    unit = "" if named else " (position)"
    axes.set(xlabel=f"key{unit}" if below else "", ylabel=f"query{unit}" if left else "")
    size = min(8.0, 210 / len(labels))
    names = [_in_font(label) for label in labels]
    for axis, outer, rotation in ((axes.xaxis, below, 90), (axes.yaxis, left, 0)):
        if not outer:
            axis.set_ticks([])
        elif named:
            # with parse_math, $ would start a formula
            axis.set_ticks(range(len(names)), names, fontsize=size, rotation=rotation, parse_math=False)
            axis.set_tick_params(length=0)


def _in_font(label: str) -> str:
    """Return a token as an axis label: characters that the font may lack as escapes, and truncated."""
    characters = [letter if letter.isascii() or letter in _SIGNS else ascii(letter)[1:-1] for letter in label]
    return truncate(characters, _MAX_LABEL)
