"""The curves of runs: loss, learning rate, gradient norm and throughput over steps, as a figure or in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from matplotlib.figure import Figure

from transformer_xl.apps.runs.records import RunRecord
from transformer_xl.config import UserError, check_type
from transformer_xl.config.extras import missing_extra
from transformer_xl.plots import COLOURS, label_of, tidy

_PANELS = {"learning_rate": "learning rate", "grad_norm": "gradient norm", "tokens_per_second": "tokens/s"}
_LOSSES = {"nats_per_token": "loss in nats per token", "bits_per_byte": "loss in bits per byte"}
_STYLES = "-", "--", "-.", ":"  # so that lines that lie on each other are seen


def draw_curves(runs: Mapping[str, RunRecord]) -> Figure:
    """Draw the loss (of validation with markers), learning rate, gradient norm and throughput of runs over steps.

    The loss is in nats per token if all runs have the same tokenizer, else in bits per byte.

    Args:
        runs: the runs by the names that the legend has for them.

    Raises:
        UserError: no run has metrics.
    """
    check_type(runs, Mapping, "runs", "give runs by name, such as {'a': RunRecord.read('runs/a')}")
    loss = measure(runs.values())
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True).flat
    for axes, (name, title) in zip(panels, {loss: _LOSSES[loss], **_PANELS}.items(), strict=True):
        for index, (label, run) in enumerate(zip(map(label_of, runs), runs.values(), strict=True)):
            look: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "linestyle": _STYLES[index % len(_STYLES)]}
            x, y = _points(run, "train", name)
            # where validation is shown too, the training loss stands back
            axes.plot(x, y, **look, linewidth=1.2, alpha=0.55 if name == loss else 1.0, label=label)
            if name == loss:
                x, y = _points(run, "valid", name)
                axes.plot(x, y, **look, marker="o", markersize=3.5, linewidth=1.6, label=f"{label}, validation")
        axes.set(title=title)
        tidy(axes)
    for axes in figure.axes[2:]:
        axes.set_xlabel("steps")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False, fontsize=9)
    return figure


def text_curves(runs: Mapping[str, RunRecord], width: int = 100, *, colours: bool = False) -> str:
    """Return the losses of runs over steps as a plot of characters: of validation, or of training where there is none.

    Args:
        runs: the runs by their names.
        width: number of columns.
        colours: whether lines have colours, which a terminal shows; otherwise each run has a letter.

    Raises:
        UserError: no run has metrics, or plotext is not installed.
    """
    loss = measure(runs.values())
    try:
        plotext = import_module("plotext")
    except ImportError:
        raise missing_extra("plotext", "plot") from None
    figure = plotext.figure.clear()
    figure.plot_size(width, 24)
    figure.title(_LOSSES[loss])
    figure.label("steps", "x")
    for index, (label, run) in enumerate(runs.items()):
        points = _points(run, "valid", loss)
        x, y = points if len(points[0]) > 1 else _points(run, "train", loss)
        if not x:  # it has not begun; an empty signal would draw the others from 0 on
            continue
        signal = figure.signal(x, y, marker="braille" if colours else chr(ord("a") + index % 26))
        signal.label(label)
        signal.lines()
        figure.draw(signal)
    return figure.build().string(colorless=not colours)


def measure(runs: Any) -> str:
    """Return the name of the loss that runs are compared by.

    Raises:
        UserError: there is no run, or none has metrics.
    """
    found: Sequence[RunRecord] = list(runs)
    for run in found:
        check_type(run, RunRecord, "a run", "give RunRecord.read('runs/mine')")
    if not found:
        raise UserError("no run was given to draw; give one or more by name, such as {'a': RunRecord.read('runs/a')}")
    if not any(run.metrics for run in found):
        raise UserError(f"{found[0].path} has no metrics to draw; give runs that were trained (metrics.jsonl)")
    tokenizers = {run.config.corpus.tokenizer_sha256 if run.config.corpus else None for run in found}
    return "nats_per_token" if len(tokenizers) == 1 else "bits_per_byte"


def _points(run: RunRecord, split: str, name: str) -> tuple[list[int], list[float]]:
    """Return the steps and the values of a metric."""
    lines = [line for line in run.metrics if line["split"] == split and name in line]
    return [line["step"] for line in lines], [line[name] for line in lines]
