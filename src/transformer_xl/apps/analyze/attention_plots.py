"""Plots of `txl analyze attention`: means by distance, single heads, every term over a text, and loss by distance.

Colours are matplotlib's viridis, which colour-blind readers can tell apart. Mean attention decreases by orders of
magnitude within a few tokens, so its colour scale is logarithmic.

Shape suffixes: L layers, N heads, P distances, Q tokens of a text as queries and keys, G groups of distances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from transformer_xl.apps.analyze.attention_maps import TermMaps, pluralize
from transformer_xl.apps.analyze.attention_page import truncate
from transformer_xl.plots import COLOURS, save_plot, shown, tidy

Head = tuple[int, int]
"""Layer and head, both from 0."""

# smallest value of a logarithmic colour scale, as a fraction of the largest; lower ones look equal
_COLOUR_RANGE = 1e-4
_MAX_LABELS = 48  # number of token labels that fit along an axis
_MAX_LABEL = 14  # length of a label, in characters
_LABEL_INCHES = 0.15  # height of a label, in inches
_STYLES = ("-", "--", "-.", ":")  # line styles


def save(figure: Figure, stem: Path) -> list[str]:
    """Write a plot as `stem`.png and `stem`.svg; return the names of the files."""
    save_plot(stem.with_suffix(".png"), figure, ".png", dpi=110)
    figure.set_layout_engine("none")  # keep the layout computed for the .png
    save_plot(stem.with_suffix(".svg"), figure, ".svg", dpi=110)
    return [stem.with_suffix(suffix).name for suffix in (".png", ".svg")]


def draw_means(mean_LNP: npt.NDArray[np.float64]) -> Figure:
    """Draw mean attention by distance, with a row for each head of each layer."""
    n_layers, n_heads, num_distances = mean_LNP.shape
    num_rows = n_layers * n_heads
    row_inches = min(0.3, max(0.055, 9.0 / num_rows))
    figure = Figure(figsize=(9.0, max(2.4, row_inches * num_rows + 1.3)), layout="constrained")
    axes = figure.add_subplot()
    rows = np.ma.masked_invalid(mean_LNP.reshape(num_rows, num_distances))
    image = axes.imshow(
        rows,
        norm=_log_norm(rows),
        cmap="viridis",
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, num_distances - 0.5, num_rows, 0),
    )
    for layer in range(1, n_layers):
        axes.axhline(layer * n_heads, color="white", linewidth=0.8)
    # label every layer, or only every second, third and so on if the labels would overlap
    labelled = range(0, n_layers, max(1, int(np.ceil(_LABEL_INCHES / (row_inches * n_heads)))))
    axes.set_yticks([(layer + 0.5) * n_heads for layer in labelled], [f"layer {layer}" for layer in labelled])
    axes.tick_params(axis="y", length=0)
    if row_inches >= _LABEL_INCHES:
        right = axes.secondary_yaxis("right")
        right.set_yticks(np.arange(num_rows) + 0.5, [f"head {row % n_heads}" for row in range(num_rows)])
        right.tick_params(axis="y", length=0, labelsize=8)
    size = f"{pluralize(n_layers, 'layer')} x {pluralize(n_heads, 'head')}"
    axes.set(title=f"Mean attention by distance: {size}, a row each", xlabel="distance in tokens (0: the token itself)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, label="mean probability (logarithmic)", pad=0.02)
    return figure


def draw_heads(mean_LNP: npt.NDArray[np.float64], heads: Sequence[Head]) -> Figure:
    """Draw mean attention of single heads by distance, with both axes logarithmic; distance 0 is at the left edge."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    distance_P = np.arange(mean_LNP.shape[-1])
    for index, (layer, head) in enumerate(heads):
        style = _STYLES[index // len(COLOURS) % len(_STYLES)]
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(distance_P, mean_LNP[layer, head], style, color=colour, label=f"layer {layer}, head {head}")
    axes.set(
        title="Mean attention of single heads",
        xlabel="distance in tokens (0: the token itself)",
        ylabel="mean probability",
    )
    axes.set_yscale("log")
    axes.set_xscale("symlog", base=2, linthresh=1)  # symlog: a log axis that includes 0
    max_distance = len(distance_P) - 1
    ticks = [0, *(2**power for power in range(max_distance.bit_length()))]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlim(-0.1, max(1, max_distance) * 1.1)
    axes.xaxis.set_minor_locator(NullLocator())
    tidy(axes)
    axes.legend(frameon=False, loc="lower left", ncols=1 + len(heads) // 9, fontsize=9)
    return figure


def draw_terms(maps: TermMaps, head: Head, labels: Sequence[str]) -> Figure:
    """Draw each attention term of one head over a text, its scores and probabilities: queries in rows, keys in columns.

    Each map has its own colour scale; keys that a query does not see are white.
    """
    probability, score, *terms = maps.terms.items()
    panels = [*terms, score, probability]
    num_columns = len(panels) // 2
    figure = Figure(figsize=(4.6 * num_columns, 8.2), layout="constrained")
    figure.suptitle(f"Layer {head[0]}, head {head[1]}: the terms of its attention scores over {pluralize(len(labels))}")
    for number, (term, title) in enumerate(panels, start=1):
        axes = figure.add_subplot(2, num_columns, number)
        map_QQ = np.ma.masked_invalid(maps.map_QQ(term, *head))
        norm = _log_norm(map_QQ) if term == "probability" else None
        image = axes.imshow(map_QQ, cmap="viridis", norm=norm, interpolation="nearest")
        axes.set_title(title if norm is None else f"{title}, logarithmic", fontsize=10)
        _label_tokens(axes, labels, is_left=number % num_columns == 1, is_bottom=number > num_columns)
        figure.colorbar(image, shrink=0.75, label="probability" if norm else "term of the score")
    return figure


def draw_losses(losses: Mapping[str, Sequence[Mapping[str, Any]]], subject: str) -> Figure:
    """Draw mean loss by distance from a document's start, a line for each entry, with standard errors and counts.

    Args:
        losses: results of `loss_by_distance` for the same tokens under different settings, by the label of the line.
        subject: where distances start, such as "a document".
    """
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    for index, (label, groups) in enumerate(losses.items()):
        group_G = np.arange(len(groups)) + 0.08 * (index - 0.5)  # shifted, so that error bars do not overlap
        loss_G, error_G = (
            np.array([group[name] for group in groups], dtype=float) for name in ("nats_per_token", "standard_error")
        )
        upper.errorbar(
            group_G, loss_G, error_G, fmt="os"[index % 2] + _STYLES[index % len(_STYLES)],
            color=COLOURS[index], capsize=2, markersize=4, label=label,
        )  # fmt: skip
    first = next(iter(losses.values()))
    lower.bar(range(len(first)), [group["tokens"] for group in first], color="0.6", width=0.6)
    lower.set_yscale("log")
    lower.set(ylabel="tokens", xlabel=f"distance from the start of {subject}, in tokens (1: its first)")
    edges = [0, *(group["up_to_distance"] for group in first)]
    ranges = [f"{end:,}" if start + 1 == end else f"{start + 1:,}-{end:,}" for start, end in pairwise(edges)]
    # long labels are broken into two lines
    names = [text if len(text) < 8 else text.replace("-", "-\n") for text in ranges]
    lower.set_xticks(range(len(names)), names, fontsize=8)
    upper.set(title="Loss by distance from the start (bars: one standard error)", ylabel="nats per token")
    for axes in (upper, lower):
        tidy(axes)
        axes.grid(visible=False, axis="x")
        axes.tick_params(axis="x", which="minor", bottom=False)
    upper.legend(frameon=False)
    return figure


def _log_norm(values: np.ma.MaskedArray) -> LogNorm:
    """Return a logarithmic colour scale for positive values; `_COLOUR_RANGE` limits its range."""
    highest = float(values.max())
    lowest = max(float(values[values > 0].min()), highest * _COLOUR_RANGE)
    return LogNorm(min(lowest, 0.9 * highest), highest, clip=True)


def _label_tokens(axes: Axes, labels: Sequence[str], *, is_left: bool, is_bottom: bool) -> None:
    """Label queries and keys at the left and bottom of the figure with tokens, or with positions if there are many."""
    has_names = len(labels) <= _MAX_LABELS
    unit = "" if has_names else " (position)"
    axes.set(xlabel=f"key{unit}" if is_bottom else "", ylabel=f"query{unit}" if is_left else "")
    size = min(8.0, 210 / len(labels))  # font size in points: smaller for more labels, so that they do not overlap
    parts = [[shown(part) for part in label] for label in labels]
    names = [truncate(label_parts, _MAX_LABEL) for label_parts in parts]
    for axis, is_labelled, rotation in ((axes.xaxis, is_bottom, 90), (axes.yaxis, is_left, 0)):
        if not is_labelled:
            axis.set_ticks([])
        elif has_names:
            # parse_math=False: otherwise $ would start a formula
            axis.set_ticks(range(len(names)), names, fontsize=size, rotation=rotation, parse_math=False)
            axis.set_tick_params(length=0)
