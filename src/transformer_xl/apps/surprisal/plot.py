"""Plots of surprisals by word, for `txl score --per word`, and of fits to reading times, for `txl reading-times`."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from transformer_xl.apps.surprisal.reading_time_fits import ReadingTimeFits
from transformer_xl.apps.surprisal.surprisal import ALONE, SurprisalTable
from transformer_xl.plots import COLOURS, STYLES, tidy

MAX_ITEMS = 12
"""Number of items that `draw_surprisal` draws, from the start of the table."""
_WORD_STYLES = ("--s", "-o", *STYLES[2:])


def draw_surprisal(table: SurprisalTable) -> Figure:
    """Draw a panel for each of the first items, with words on the x axis and a line for each column of surprisals."""
    shown = [(labels, words) for labels, rows in table.by_item() if (words := [row for row in rows if row["word"]])]
    shown = shown[:MAX_ITEMS]
    longest = max((len(words) for _, words in shown), default=1)
    figure = Figure(figsize=(max(5.0, 1.5 + 0.55 * longest), 0.6 + 2.5 * max(1, len(shown))), layout="constrained")
    panels = figure.subplots(max(1, len(shown)), 1, sharey=True, squeeze=False)[:, 0]
    for axes, (labels, words) in zip(panels, shown, strict=False):
        for column, colour, style in zip(table.surprisal_columns, cycle(COLOURS), cycle(_WORD_STYLES), strict=False):
            bits = [row[column] for row in words]
            axes.plot(range(len(bits)), bits, style, color=colour, markersize=4, linewidth=1.6, label=_label(column))
        # parse_math=False: otherwise $ would start a formula
        names = [row["word"] for row in words]
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right", rotation_mode="anchor", parse_math=False)
        axes.set_xlim(-0.5, longest - 0.5)
        axes.set_title(", ".join(map(str, labels)), loc="left", fontsize=10, parse_math=False)
        axes.set_ylabel("surprisal (bits)")
        tidy(axes)
    panels[0].set_ylim(bottom=0)
    if shown:
        figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, ncols=4, loc="outside upper right")
    return figure


def _label(column: str) -> str:
    name = column.removeprefix("surprisal_bits_")
    return "alone" if column == ALONE else f"with text before, {name.replace('_', ' ')}"


def draw_fits(fits: ReadingTimeFits) -> Figure:
    """Draw two panels over the length: the gain of log-likelihood by surprisal, and how far it is behind the best.

    There is a line for memory and for windows, of each n-gram order, with intervals of 95%. Those of the first panel
    overlap also where a difference is certain; the second has the intervals of the differences.
    """
    figure = Figure(figsize=(9.4, 3.6), layout="constrained")
    panels, lines = figure.subplots(1, 2), dict[str, list[tuple[int, dict[str, Any]]]]()
    for row in fits.rows:
        name = "attention_window" if row["memory_length"] is None else "memory_length"
        order = f", n-grams of up to {row['ngram_order']}" if row["ngram_order"] else ""
        lines.setdefault(name.replace("_", " ") + order, []).append((row[name], row))
    ticks = sorted({length for points in lines.values() for length, _ in points})
    for axes, value, title in zip(panels, ("delta", "behind"), ("gain by surprisal", "behind the best"), strict=True):
        for label, colour, style in zip(lines, cycle(COLOURS), cycle(STYLES), strict=False):
            x, rows = zip(*sorted(lines[label], key=lambda point: point[0]), strict=True)
            y, low, high = ([1000 * row[f"{value}_{end}"] for row in rows] for end in ("nats", "low", "high"))
            bars = np.abs([np.subtract(y, low), np.subtract(high, y)])
            axes.errorbar(x, y, bars, fmt=style, color=colour, markersize=4, linewidth=1.6, capsize=3, label=label)
        axes.set_xscale("symlog", base=2, linthresh=min((tick for tick in ticks if tick), default=1))
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.axhline(0, color="0.45", linestyle=":", linewidth=1.2)
        axes.set(title=title, xlabel="tokens")
        tidy(axes)
    panels[0].set_ylabel("nats per 1,000 readings")
    panels[0].legend(frameon=False)
    return figure
