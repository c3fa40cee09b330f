"""Measures the loss of runs by memory length, and draws it in docs/memory.svg.

    txl prepare python-stdlib --tokenizer bpe --vocab-size 2048
    for seed in 1 2 3; do
      txl train demo --corpus corpora/python-stdlib --run runs/seed-$seed --train.seed $seed
    done
    python benchmarks/memory_length.py runs/seed-1 runs/seed-2 runs/seed-3
    python benchmarks/memory_length.py    # only draws

The runs are of one recipe and differ in their seed.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
from chart import BLACK, BLUE, HERE, set_style
from environment import commit
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

LENGTHS = (0, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = 65_536  # of the test text
RESULTS = HERE / "results" / "memory-length.json"


def measure(folders: list[Path]) -> dict[str, Any]:
    """Return bits per byte by memory length, a list with the value of each run."""
    from transformer_xl import evaluate, load

    runs = [load(folder) for folder in folders]
    by_length = {
        length: [
            evaluate(run, "test", max_tokens=TOKENS, memory_length=length, batch_size=8).bits_per_byte for run in runs
        ]
        for length in LENGTHS
    }
    train = runs[0].config.train
    return {
        "command": f"python benchmarks/memory_length.py {' '.join(folder.name for folder in folders)}",
        "commit": commit(),
        "recipe": runs[0].config.recipe,
        "seeds": [run.config.train.seed for run in runs],
        "parameters": runs[0].model.num_parameters(),
        "segment_length": train.segment_length,
        "trained_memory_length": train.memory_length,
        "max_steps": train.max_steps,
        "train_sha256": runs[0].config.corpus.train_sha256,
        "test_tokens": TOKENS,
        "bits_per_byte": by_length,
    }


def draw(results: dict[str, Any]) -> Figure:
    """Return the chart: mean and range of the runs by memory length.

    The lengths end with the first whose values are those of all longer ones. It is small, so that labels stay readable
    where a phone makes it smaller still.
    """
    lengths, values = map(list, zip(*results["bits_per_byte"].items(), strict=True))
    last = values.index(values[-1])
    labels = [f"{int(length):,}" for length in lengths[: last + 1]]
    if last + 1 < len(lengths):
        labels[last] += f" to\n{int(lengths[-1]):,}"
    values = values[: last + 1]
    places, means = range(last + 1), [math.fsum(runs) / len(runs) for runs in values]
    trained = lengths.index(str(results["trained_memory_length"]))
    figure = Figure(figsize=(5.2, 3.2), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.fill_between(places, list(map(min, values)), list(map(max, values)), color=BLUE, alpha=0.3, linewidth=0)
    axes.plot(places, means, "-o", color=BLUE, markersize=6)
    for place, mean in zip(places, means, strict=True):
        offset = (0, -18) if place else (26, -2)
        axes.annotate(f"{mean:.3f}", (place, mean), offset, textcoords="offset points", ha="center", fontsize=11)
    axes.axvline(trained, color=BLACK, linestyle=":", linewidth=1, alpha=0.5)
    axes.text(
        trained - 0.08, 0.4 * means[1] + 0.6 * means[0], "memory\nin training", ha="right", fontsize=11, color="0.3"
    )
    axes.set_xticks(places, labels, fontsize=11)
    axes.tick_params(axis="y", labelsize=11)
    low, high = axes.get_ylim()
    axes.set_ylim(min(means) - 0.16 * (high - low), high)
    axes.set_title(
        f"{lengths[trained]} tokens of memory save {means[0] - means[trained]:.2f} bits per byte", fontsize=13
    )
    axes.set_xlabel(f"memory in tokens, beside the segment of {results['segment_length']}", fontsize=11)
    axes.set_ylabel(f"bits per byte, {len(results['seeds'])} seeds", fontsize=11)
    set_style(axes, "both")
    return figure


def main() -> None:
    """Measure the runs that are given, and draw."""
    parser = argparse.ArgumentParser(description="Draws the loss by memory length.")
    parser.add_argument("runs", type=Path, nargs="*", help="runs to measure before drawing")
    args = parser.parse_args()
    if args.runs:
        RESULTS.write_text(json.dumps(measure(args.runs), indent=1) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    print({length: [round(value, 4) for value in runs] for length, runs in results["bits_per_byte"].items()})
    mpl.rcParams["svg.hashsalt"] = "transformer-xl"  # otherwise SVG ids are random
    FigureCanvasSVG(draw(results)).print_svg(HERE.parent / "docs" / "memory.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
