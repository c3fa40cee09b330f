"""Draws the charts of docs/speed.md from the results and writes its tables: figures there come from nowhere else.

    python benchmarks/chart.py [--results benchmarks/results] [--docs docs]

Results that are not there are left out, and their tables say that nothing was measured. Tables stand in the document
between two marks, and only what is between them is replaced. They are printed too.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from inference_tables import evaluation_chart, evaluation_table, inference_table
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

HERE = Path(__file__).parent
GIB = 2**30
# Okabe and Ito's colours, which differ for colour-blind eyes too; other marks and line styles say the same
BLUE, ORANGE, GREEN, GREY, BLACK, PURPLE = "#0072B2", "#E69F00", "#009E73", "#999999", "#000000", "#CC79A7"
CYCLE = (
    (BLUE, "o", "-"),
    (ORANGE, "s", "--"),
    (GREEN, "^", "-."),
    (PURPLE, "D", ":"),
    (BLACK, "v", "-"),
    (GREY, "x", "--"),
)
NOTHING = "Not measured."
Results = dict[str, Any]


def title(implementation: str) -> str:
    """An implementation's name for people."""
    rest, _, variant = implementation.partition("+")
    who, _, precision = rest.rpartition("-")
    named = {
        ("ours", ""): "this package",
        ("ours", "compile"): "this package, compiled",
        ("transformers", ""): "transformers 4.37.2",
        ("x-transformers", ""): "x-transformers, rotary + flash",
        ("x-transformers", "bias"): "x-transformers, T5 bias",
    }
    return f"{named.get((who, variant), implementation)}, {precision}"


def training_table(results: Results) -> str:
    """Implementations of training.py."""
    lines = [
        "| | parameters | tokens a second | this package is faster by | peak memory, GiB | beyond libraries, GiB |",
        "|---|---|---|---|---|---|",
    ]
    first = results["implementations"][results["compared_with"]]["tokens_per_second"]
    for name, of in results["implementations"].items():
        times = [one / other for one, other in zip(first, of["tokens_per_second"], strict=True)]
        faster = f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
        lines.append(
            f"| {title(name)} | {of['parameters'] / 1e6:.1f}M | {of['median_tokens_per_second']:,.0f} | "
            f"{'' if name == results['compared_with'] else faster} | {of['peak_resident_bytes'] / GIB:.2f} | "
            f"{of['peak_resident_bytes_beyond_libraries'] / GIB:.2f} |"
        )
    return "\n".join([environment(results), "", *lines, *[f"\nLeft out: {line}." for line in results["left_out"]]])


def kernels_table(results: Results) -> str:
    """Times of kernels.py, a column for each kernel."""
    kernels = list(dict.fromkeys(line["kernel"] for line in results["times"]))
    rows: dict[str, dict[str, str]] = {}
    for line in results["times"]:
        one, both = line["forward_seconds"] * 1e3, line["forward_backward_seconds"] * 1e3
        rows.setdefault(shape_words(line["shape"]), {})[line["kernel"]] = f"{one:.1f} / {both:.1f}"
    lines = [f"| milliseconds, forward / with backward | {' | '.join(f'`{name}`' for name in kernels)} |"]
    lines.append(f"|---|{'---|' * len(kernels)}")
    lines += [f"| {words} | {' | '.join(of.get(name, '') for name in kernels)} |" for words, of in rows.items()]
    growth = [
        f"- `{of['kernel']}`, {'T and S growing' if of['grows'] == 'both' else 'S growing'}: "
        f"{of['ratio_per_doubling']:.2f} times more for each doubling, "
        f"{of['lengths'][-1]['peak_bytes'] / 2**20:,.0f} MiB at T = {of['lengths'][-1]['queries']:,}, "
        f"S = {of['lengths'][-1]['keys']:,}"
        for of in results["memory"]
    ]
    more = ["", "Peak memory of one forward and backward pass beyond its inputs:", "", *growth] if growth else []
    return "\n".join([environment(results), "", *lines, *more])


def gpu_table(results: Results) -> str:
    """Whole steps of gpu.py."""
    lines = [
        "| recipe | compile | batch size | ms a step | tokens a second | TFLOP/s | share of peak | peak memory, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for of in results.get("training", {}).get("lines", []):
        if "failed" in of:
            lines.append(f"| {of['recipe']} | {of['compile']} | failed | | | | | |")
            continue
        share, most = of["model_flops_utilisation"], of["peak_device_bytes"]
        lines.append(
            f"| {of['recipe']} | {of['compile']} | {of['batch_size']} | {of['step_seconds'] * 1e3:.1f} | "
            f"{of['tokens_per_second']:,.0f} | {of['tflops']:.1f} | {f'{share:.1%}' if share else ''} | "
            f"{f'{most / GIB:.2f}' if most else ''} |"
        )
    return "\n".join([environment(results), "", *lines])


def optimizers_table(results: Results) -> str:
    """Arms of optimizers.py."""
    lines = [
        f"| | steps | final nats a token | tokens to where `{results['compared_with']}` ends | time to there |",
        "|---|---|---|---|---|",
    ]

    def words(spread: dict[str, Any] | None, digits: int) -> str:
        if spread is None:
            return "never there"
        low, high = spread["range"]
        return f"{spread['median']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    for name, of in results["arms"].items():
        shares = [words(of[f"share_of_{what}_to_reach_the_first"], 2) for what in ("tokens", "seconds")]
        final = words(of["final_nats_per_token"], 3)
        lines.append(f"| `{name}` | {results['steps'][name]:,} | {final} | {shares[0]} | {shares[1]} |")
    budget = ", ".join(f"{amount:,} {what}" for what, amount in results["budget"].items())
    said = f"Recipe `{results['recipe']}`, {budget} for each training."
    return "\n".join([environment(results), said, "", *lines])


def environment(results: Results) -> str:
    """Where and how it was measured."""
    machine = results["machine"]
    where = machine["device"] if machine["device"] != "cpu" else f"{machine['cpu']}, {machine['threads']} threads"
    versions = results.get("versions") or results["implementations"][results["compared_with"]]["versions"]
    load = machine.get("load_average_before")
    busy = f", load average before {load}" if load is not None else ""
    return f"{where}, torch {versions['torch']}{busy}; commit `{results['commit']}`; `{results['command']}`."


def shape_words(shape: dict[str, Any]) -> str:
    """A shape for people."""
    sizes = f"B {shape['batch_size']}, T {shape['queries']}, M {shape['memory_length']}"
    parts = [sizes, f"{shape['n_heads']} x {shape['d_head']}"]
    parts += [f"window {shape['attention_window']}"] if shape["attention_window"] else []
    parts += [f"dropout {shape['dropout']:g}"] if shape["dropout"] else []
    return ", ".join([*parts, shape["dtype"]])


def training_chart(results: Results) -> Figure:
    """Tokens a second, and memory, a bar for each implementation."""
    names = list(results["implementations"])
    of = [results["implementations"][name] for name in names]
    figure = Figure(figsize=(9.6, 1.2 + 0.42 * len(names)), layout="constrained")
    speed, memory = figure.subplots(1, 2, sharey=True)
    colours = [BLUE if name.startswith("ours") else ORANGE for name in names]
    medians = [one["median_tokens_per_second"] for one in of]
    ranges = [
        [middle - min(one["tokens_per_second"]) for middle, one in zip(medians, of, strict=True)],
        [max(one["tokens_per_second"]) - middle for middle, one in zip(medians, of, strict=True)],
    ]
    bars = speed.barh([title(name) for name in names], medians, xerr=ranges, color=colours, ecolor=BLACK, capsize=3)
    speed.bar_label(bars, [f"{middle:,.0f}" for middle in medians], padding=6)
    speed.set(xlabel="tokens a second (line: range of the rounds)")
    speed.xaxis.set_major_formatter("{x:,.0f}")
    speed.set_xlim(0, 1.18 * max(max(one["tokens_per_second"]) for one in of))
    peaks = [one["peak_resident_bytes"] / GIB for one in of]
    bars = memory.barh([title(name) for name in names], peaks, color=colours)
    memory.bar_label(bars, [f"{peak:.2f}" for peak in peaks], padding=3)
    memory.set(xlabel="peak resident memory, GiB", xlim=(0, 1.15 * max(peaks)))
    for axes in (speed, memory):
        dress(axes, "x")
    speed.invert_yaxis()
    return figure


def memory_chart(results: Results) -> Figure | None:
    """Peak memory over the number of keys, both axes by their logarithm; a panel for each way to grow."""
    if not results["memory"]:
        return None
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    panels = dict(zip(("keys", "both"), figure.subplots(1, 2, sharey=True), strict=True))
    kernels = list(dict.fromkeys(of["kernel"] for of in results["memory"]))
    for of in results["memory"]:
        colour, mark, style = CYCLE[kernels.index(of["kernel"]) % len(CYCLE)]
        keys = [line["keys"] for line in of["lengths"]]
        peaks = [line["peak_bytes"] / 2**20 for line in of["lengths"]]
        label = f"{of['kernel']}: {of['ratio_per_doubling']:.1f} times a doubling"
        panels[of["grows"]].plot(keys, peaks, color=colour, marker=mark, linestyle=style, label=label)
    queries = results["memory"][0]["lengths"][0]["queries"]
    for way, words in (("keys", f"T = {queries} queries"), ("both", "T = S / 2 queries")):
        axes = panels[way]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set(title=words, xlabel="S, keys")
        axes.legend(frameon=False)
        dress(axes, "both")
    panels["keys"].set_ylabel("peak beyond the inputs, MiB")
    return figure


def optimizers_chart(results: Results) -> Figure:
    """Validation loss over tokens and over seconds; a line for each arm, its seeds thin, their median bold."""
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    panels = dict(zip(("tokens", "seconds"), figure.subplots(1, 2, sharey=True), strict=True))
    for (name, seeds), (colour, mark, style) in zip(results["runs"].items(), CYCLE * 4, strict=False):
        for what, axes in panels.items():
            runs = list(seeds.values())
            for points in runs:
                y = [point["nats_per_token"] for point in points]
                axes.plot([point[what] for point in points], y, color=colour, linewidth=0.6, alpha=0.5)
            x, y = (
                [statistics.median(run[place][key] for run in runs) for place in range(min(map(len, runs)))]
                for key in (what, "nats_per_token")
            )
            axes.plot(x, y, color=colour, marker=mark, markersize=4, linestyle=style, label=name)
    for what, axes in panels.items():
        axes.set(xlabel=f"training {what}" if what == "seconds" else "tokens read")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        dress(axes, "both")
    ends = [
        point["nats_per_token"]
        for seeds in results["runs"].values()
        for points in seeds.values()
        for point in points[1:]
    ]
    panels["tokens"].set(ylabel="validation loss, nats a token")
    if ends:
        panels["tokens"].set_ylim(min(ends) - 0.05, max(ends) + 0.05)
    panels["seconds"].legend(frameon=False)
    return figure


def dress(axes: Axes, grid: str) -> None:
    """The same look for all."""
    axes.grid(visible=True, axis=grid, alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


DRAWN: dict[str, tuple[Callable[[Results], str], Callable[[Results], Figure | None] | None]] = {
    "training": (training_table, training_chart),
    "kernels": (kernels_table, memory_chart),
    "gpu": (gpu_table, None),
    "optimizers": (optimizers_table, optimizers_chart),
    "inference": (inference_table, None),
    "evaluation-speed": (evaluation_table, evaluation_chart),
}


def newest(folder: Path, name: str) -> list[Path]:
    """The files of results by that name: NAME.json, and for a GPU one for each device."""
    paths = folder.glob("gpu-*.json") if name == "gpu" else folder.glob(f"{name}.json")
    return sorted(path for path in paths if not path.stem.endswith("-peers"))


def with_table(document: str, name: str, table: str) -> str:
    """The document with the table between its marks replaced."""
    begin, end = f"<!-- {name}: written by benchmarks/chart.py -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", flags=re.DOTALL)
    assert len(pattern.findall(document)) == 1, f"the marks of {name} are not in the document once"
    return pattern.sub(lambda _: f"{begin}\n{table}\n{end}", document)


def main() -> None:
    """Writes charts and tables."""
    parser = argparse.ArgumentParser(description="Charts and tables of docs/speed.md from the results.")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="default results/ beside this file")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs", help="folder with speed.md (default docs/)")
    sizes = parser.parse_args()
    mpl.rcParams["svg.hashsalt"] = "transformer-xl"  # else each drawing names its parts anew
    document = sizes.docs / "speed.md"
    text = document.read_text(encoding="utf-8")
    for name, (table, chart) in DRAWN.items():
        found = [json.loads(path.read_text(encoding="utf-8")) for path in newest(sizes.results, name)]
        tables = "\n\n".join(table(results) for results in found)
        drawn = chart(found[0]) if chart and found else None
        if drawn is not None:
            picture = sizes.docs / f"speed-{name}.svg"
            FigureCanvasSVG(drawn).print_svg(picture, metadata={"Date": None})
            tables += f"\n\n![{name}]({picture.name})"
        print(f"## {name}\n\n{tables or NOTHING}\n")
        text = with_table(text, name, tables or NOTHING)
    document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
