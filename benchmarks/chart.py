"""Draws the charts of docs/speed.md from the results of the benchmarks, and writes its tables and those of others.

    python benchmarks/chart.py [--results benchmarks/results] [--docs docs]

The others are docs/equal-time.md and docs/serving.md. Each table is between two HTML comments in the document, and
replaces what is between them. Where a file of results is missing, the document says `Not measured.` instead.
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
from environment import PROCESSOR_KINDS
from inference_tables import evaluation_chart, evaluation_table, inference_table
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

HERE = Path(__file__).parent
GIB = 2**30
# colors by Okabe and Ito, which color-blind readers can tell apart; markers and line styles differ as well
BLUE, ORANGE, GREEN, GREY, BLACK, PURPLE = "#0072B2", "#E69F00", "#009E73", "#999999", "#000000", "#CC79A7"
STYLES = (
    (BLUE, "o", "-"),
    (ORANGE, "s", "--"),
    (GREEN, "^", "-."),
    (PURPLE, "D", ":"),
    (BLACK, "v", "-"),
    (GREY, "x", "--"),
)
NOT_MEASURED = "Not measured."
Results = dict[str, Any]


def title(implementation: str) -> str:
    """Return the label of an implementation of training.py, such as ours-float32+compile."""
    rest, _, variant = implementation.partition("+")
    package, _, dtype = rest.rpartition("-")
    titles = {
        ("ours", ""): "this package",
        ("ours", "compile"): "this package, compiled",
        ("transformers", ""): "transformers 4.37.2",
        ("nanogpt", ""): "nanoGPT",
        ("x-transformers", ""): "x-transformers, rotary + flash",
        ("x-transformers", "bias"): "x-transformers, T5 bias",
    }
    return f"{titles.get((package, variant), implementation)}, {dtype}"


def training_table(results: Results) -> str:
    """Return a Markdown table of the implementations in training.json."""
    lines = [
        "| | parameters | tokens/s | speed of this package / its speed | peak memory, GiB | without libraries, GiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, metrics in results["implementations"].items():
        own = f"ours-{name.partition('+')[0].rpartition('-')[2]}"  # in the same dtype
        ours = results["implementations"].get(own, metrics)["tokens_per_second"]
        ratios = [rate / other for rate, other in zip(ours, metrics["tokens_per_second"], strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(
            f"| {title(name)} | {metrics['parameters'] / 1e6:.1f}M | {metrics['median_tokens_per_second']:,.0f} | "
            f"{'' if name == own else ratio} | {metrics['peak_resident_bytes'] / GIB:.2f} | "
            f"{metrics['peak_resident_bytes_beyond_libraries'] / GIB:.2f} |"
        )
    return "\n".join([environment(results), "", *lines, *[f"\nLeft out: {line}." for line in results["left_out"]]])


def kernels_table(results: Results) -> str:
    """Return a Markdown table of kernels.json, with a column for each kernel."""
    kernels = list(dict.fromkeys(line["kernel"] for line in results["times"]))
    rows: dict[str, dict[str, str]] = {}
    for line in results["times"]:
        forward, both = line["forward_seconds"] * 1e3, line["forward_backward_seconds"] * 1e3
        rows.setdefault(shape_label(line["shape"]), {})[line["kernel"]] = f"{forward:.1f} / {both:.1f}"
    lines = [f"| milliseconds, forward / with backward | {' | '.join(f'`{name}`' for name in kernels)} |"]
    lines.append(f"|---|{'---|' * len(kernels)}")
    lines += [f"| {label} | {' | '.join(cells.get(name, '') for name in kernels)} |" for label, cells in rows.items()]
    growth = [
        f"- `{series['kernel']}`, {'T and S growing' if series['grows'] == 'both' else 'S growing'}: "
        f"{series['ratio_per_doubling']:.2f} times more for each doubling, "
        f"{series['lengths'][-1]['peak_bytes'] / 2**20:,.0f} MiB at T = {series['lengths'][-1]['queries']:,}, "
        f"S = {series['lengths'][-1]['keys']:,}"
        for series in results["memory"]
    ]
    memory = ["", "Peak memory of one forward and backward pass without its inputs:", "", *growth] if growth else []
    return "\n".join([environment(results), "", *lines, *memory])


def linear_table(results: Results) -> str:
    """Return Markdown tables of linear.json, for one shape with packed weights and the most rows in training."""
    head = (
        f"`{results['command']}`; {processor({**results, 'features': results['cpu_features']})}, torch "
        f"{results['torch']}; commit `{results['commit']}`. GFLOP/s:"
    )
    lines = ["| 512 x 2,048 | rows | torch's linear | packed weights |", "|---|---|---|---|"]
    lines += [
        f"| {row['dtype']} | {row['rows']:,} | {row['linear_gflops']:.0f} | {row['packed_gflops']:.0f} |"
        for row in results["results"]
        if row["shape"] == [512, 2048]
    ]
    products = ("forward", "input_gradient", "weight_gradient")
    names = " | ".join(name.replace("_", " ") for name in products)
    rows = results.get("training", [])
    most = max((row["rows"] for row in rows), default=0)
    training = [f"| training, {most:,} rows, torch / oneDNN | {names} |", "|---|---|---|---|"]
    for row in (row for row in rows if row["rows"] == most):
        pairs = " | ".join(f"{row[f'blas_{name}']:.0f} / {row[f'onednn_{name}']:.0f}" for name in products)
        training.append(f"| {row['shape'][0]:,} x {row['shape'][1]:,} | {pairs} |")
    return "\n".join([head, "", *lines, *(["", *training] if len(training) > 2 else [])])


def gpu_table(results: Results) -> str:
    """Return a Markdown table of the training steps in gpu-DEVICE.json."""
    lines = [
        "| recipe | compile | batch size | ms/step | tokens/s | TFLOP/s | share of peak | peak memory, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in results.get("training", {}).get("lines", []):
        if "failed" in line:
            lines.append(f"| {line['recipe']} | {line['compile']} | failed | | | | | |")
            continue
        mfu, peak = line["model_flops_utilisation"], line["peak_device_bytes"]
        lines.append(
            f"| {line['recipe']} | {line['compile']} | {line['batch_size']} | {line['step_seconds'] * 1e3:.1f} | "
            f"{line['tokens_per_second']:,.0f} | {line['tflops']:.1f} | {f'{mfu:.1%}' if mfu else ''} | "
            f"{f'{peak / GIB:.2f}' if peak else ''} |"
        )
    return "\n".join([environment(results), "", *lines, "", *gpu_kernels(results)])


def gpu_kernels(results: Results) -> list[str]:
    """Return the lines of a Markdown table of the kernels' times in gpu-DEVICE.json, with a column for each kernel."""
    lines = [line for line in results.get("kernels", {}).get("lines", []) if "failed" not in line]
    names = list(dict.fromkeys(line["kernel"] for line in lines if line["kernel"] != "reference"))
    cells: dict[tuple[str, int, int], dict[str, str]] = {}
    for line in lines:
        shape = line["shape"]
        row = cells.setdefault((shape["dtype"], shape["queries"], shape["memory_length"]), {})
        row[line["kernel"]] = f"{line['forward_seconds'] * 1e3:.2f} / {line['forward_backward_seconds'] * 1e3:.2f}"
    head = [f"| {' | '.join(['dtype, T + M', *names])} |", f"|{'---|' * (1 + len(names))}"]
    return head + [
        f"| {' | '.join([f'{dtype}, {new:,} + {memory:,}', *(row.get(name, '') for name in names)])} |"
        for (dtype, new, memory), row in cells.items()
    ]


def equal_time_tables(text: str, results: Results) -> str:
    """Return Markdown tables of equal-time-TEXT.json: for each time one without and one with n-gram embeddings."""
    machine = results["machine"]
    hardware = f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['features'])})"
    sizes = f"validation text {results['valid_tokens']:,} tokens, test text {results['test_tokens']:,}"
    lines = [f"### {text}", "", f"{hardware}, {results['dtype']}; {sizes}."]
    for seconds, rows in results["tables"].items():
        for words, ngrams in (
            ("without n-gram embeddings", False),
            ("with the n-gram embeddings of this package", True),
        ):
            group = [row for row in rows if row["contestant"].endswith("-ngrams") == ngrams]
            lines += ["", f"{seconds} seconds {words}:", "", *_equal_time_rows(group)] if group else []
    return "\n".join(lines)


def _equal_time_rows(rows: list[Results]) -> list[str]:
    lines = [
        "| | bits per token | range | perplexity | seeds | parameters | steps | context | settings tried |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["range"]
        span = f"{low:.3f} to {high:.3f}" if row["seeds"] > 1 else ""
        context = "its state" if row["contestant"].startswith("lstm") else f"{row['context']:,}"
        lines.append(
            f"| {contestant(row)} | {row['test_bits_per_token']:.3f} | {span} | "
            f"{2 ** row['test_bits_per_token']:.4g} | {row['seeds']} | "
            f"{row['parameters']:,} | {row['steps']:,} | {context} | {row['choices_tried']} |"
        )
    return lines


def serving_table(name: str, results: Results) -> str:
    """Return a Markdown table of serving-RUN-SERVER-PROCESSOR.json, with a row for each number of clients."""
    hardware = processor({**results, "features": results["cpu_features"]})
    parameters = results["weight_bytes"] / results.get("number_bytes", 4)  # 4 in files that do not say
    description = (
        f"`{results['command']}`; {hardware}, torch {results['torch']}, load average before {results['busy']}; commit "
        f"`{results['commit']}`. {parameters / 1e6:.1f}M parameters in the bound, "
        f"{results['memory_slots']:,} memory slots, RAM read at {results['bytes_per_second'] / 1e9:.1f} GB/s."
    )
    lines = [
        "| clients | tokens/s | share of the bound | first token, s (p50, p99) | request, s (p50, p99) | requests "
        "| peak memory, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["results"]:
        first, whole = (
            f"{row[f'{name}_seconds_p50']:.2f}, {row[f'{name}_seconds_p99']:.2f}" for name in ("first_token", "request")
        )
        failed = f" ({row['errors']} failed)" if row["errors"] else ""
        lines.append(
            f"| {row['clients']} | {row['tokens_per_second']:,.0f} | {row['share_of_bound']:.1%} | {first} | {whole} | "
            f"{row['requests']:,}{failed} | {row['resident_bytes_peak'] / 2**20:,.0f} |"
        )
    kind = next(kind for kind in (*PROCESSOR_KINDS, "") if name.endswith(kind))
    words = {
        f"-{kind}": f" ({kind})",
        "-ours": ", this package",
        "-transformers": ", transformers",
        "-whole": ", whole answers",
        "-bfloat16": ", bfloat16",
    }
    for old, new in words.items():
        name = name.replace(old, new)
    return "\n".join([f"### {name}", "", description, "", *lines])


def contestant(row: Results) -> str:
    """Return the name of a contestant of equal_time.py with the settings that were best."""
    settings = row["settings"]
    train = settings.get("train", settings)
    kind = row["contestant"].removesuffix("-ngrams")
    name = {"ours": "this package", "lstm": "LSTM", "nanogpt": "nanoGPT", "gpt2": "GPT-2"}.get(kind, kind)
    details = []
    sizes = {"n_layers": settings.get("n_layer"), "d_model": settings.get("n_embd"), **settings.get("model", {})}
    details += [f"`{settings['recipe']}`"] if settings.get("recipe") else []
    details += [f"{sizes['n_layers']} layer{'s' * (sizes['n_layers'] > 1)} of {sizes['d_model']}"]
    details += [
        name.replace("_", " ") for name in ("value_embeddings", "key_offset", "attention_sinks") if sizes.get(name)
    ]
    details += [f"blocks of {settings['block_size']}"] if "block_size" in settings else []
    details += [f"segments of {train['segment_length']}"] if "segment_length" in train else []
    return ", ".join([name, *details, f"rate {train['learning_rate']:g}"])


def processor(machine: Results) -> str:
    """Return the processor, its vector instructions and the number of threads."""
    return f"{machine['cpu']} ({', '.join(machine['features'])}), {machine['threads']} threads"


def environment(results: Results) -> str:
    """Return a sentence with the hardware, versions, commit and command of the results."""
    machine = results["machine"]
    hardware = machine["device"] if machine["device"] != "cpu" else processor(machine)
    versions = results.get("versions") or results["implementations"][results["compared_with"]]["versions"]
    load = machine.get("load_average_before")
    load_words = f", load average before {load}" if load is not None else ""
    return f"{hardware}, torch {versions['torch']}{load_words}; commit `{results['commit']}`; `{results['command']}`."


def shape_label(shape: dict[str, Any]) -> str:
    """Return the row label of an attention shape: batch size B, queries T, memory M, heads x head width, ..."""
    sizes = f"B {shape['batch_size']}, T {shape['queries']}, M {shape['memory_length']}"
    parts = [sizes, f"{shape['n_heads']} x {shape['d_head']}"]
    parts += [f"window {shape['attention_window']}"] if shape["attention_window"] else []
    parts += [f"dropout {shape['dropout']:g}"] if shape["dropout"] else []
    return ", ".join([*parts, shape["dtype"]])


def training_chart(results: Results) -> Figure:
    """Return a chart of training speed and peak memory, with a bar for each implementation."""
    names = list(results["implementations"])
    all_metrics = [results["implementations"][name] for name in names]
    figure = Figure(figsize=(9.6, 1.2 + 0.42 * len(names)), layout="constrained")
    speed, memory = figure.subplots(1, 2, sharey=True)
    colors = [BLUE if name.startswith("ours") else ORANGE for name in names]
    medians = [metrics["median_tokens_per_second"] for metrics in all_metrics]
    rates = [metrics["tokens_per_second"] for metrics in all_metrics]
    below = [median - min(values) for median, values in zip(medians, rates, strict=True)]
    above = [max(values) - median for median, values in zip(medians, rates, strict=True)]
    labels = [title(name) for name in names]
    bars = speed.barh(labels, medians, xerr=[below, above], color=colors, ecolor=BLACK, capsize=3)
    speed.bar_label(bars, [f"{median:,.0f}" for median in medians], padding=6)
    speed.set(xlabel="tokens per second (line: range of the rounds)")
    speed.xaxis.set_major_formatter("{x:,.0f}")
    speed.set_xlim(0, 1.18 * max(map(max, rates)))
    peaks = [metrics["peak_resident_bytes"] / GIB for metrics in all_metrics]
    bars = memory.barh(labels, peaks, color=colors)
    memory.bar_label(bars, [f"{peak:.2f}" for peak in peaks], padding=3)
    memory.set(xlabel="peak resident memory, GiB", xlim=(0, 1.15 * max(peaks)))
    for axes in (speed, memory):
        set_style(axes, "x")
    speed.invert_yaxis()
    return figure


def memory_chart(results: Results) -> Figure | None:
    """Return a chart of peak memory over the number of keys, for a fixed and a growing number of queries."""
    if not results["memory"]:
        return None
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    panels = dict(zip(("keys", "both"), figure.subplots(1, 2, sharey=True), strict=True))
    kernels = list(dict.fromkeys(series["kernel"] for series in results["memory"]))
    for series in results["memory"]:
        color, marker, style = STYLES[kernels.index(series["kernel"]) % len(STYLES)]
        keys = [line["keys"] for line in series["lengths"]]
        peaks = [line["peak_bytes"] / 2**20 for line in series["lengths"]]
        label = f"{series['kernel']}: x {series['ratio_per_doubling']:.1f} per doubling"
        panels[series["grows"]].plot(keys, peaks, color=color, marker=marker, linestyle=style, label=label)
    queries = results["memory"][0]["lengths"][0]["queries"]
    for growing, panel_title in (("keys", f"T = {queries} queries"), ("both", "T = S / 2 queries")):
        axes = panels[growing]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set(title=panel_title, xlabel="S, keys")
        axes.legend(frameon=False)
        set_style(axes, "both")
    panels["keys"].set_ylabel("peak without the inputs, MiB")
    return figure


def set_style(axes: Axes, grid: str) -> None:
    """Draw grid lines of an axis (x, y or both), and no frame at the top and right."""
    axes.grid(visible=True, axis=grid, alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


SECTIONS: dict[str, tuple[Callable[[Results], str], Callable[[Results], Figure | None] | None]] = {
    "training": (training_table, training_chart),
    "small-training": (training_table, None),
    "linear": (linear_table, None),
    "kernels": (kernels_table, memory_chart),
    "gpu": (gpu_table, None),
    "inference": (inference_table, None),
    "evaluation-speed": (evaluation_table, evaluation_chart),
}


def result_files(folder: Path, name: str) -> list[Path]:
    """Return the files of a benchmark: those of all devices, texts or runs, or of all kinds of processors."""
    if name in ("gpu", "equal-time", "serving"):
        return sorted(path for path in folder.glob(f"{name}-*.json") if not path.stem.endswith("-peers"))
    return [path for kind in PROCESSOR_KINDS if (path := folder / f"{name}-{kind}.json").is_file()]


def section(name: str, results: list[Path], docs: Path) -> str:
    """Return tables of all results of a benchmark, and draw a chart of each beside the document."""
    table, chart = SECTIONS[name]
    parts: list[str] = []
    for path in results:
        values = json.loads(path.read_text(encoding="utf-8"))
        parts.append(table(values))
        figure = chart(values) if chart else None
        if figure is not None:
            svg = docs / f"speed-{path.stem}.svg"
            FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})
            parts.append(f"![{path.stem}]({svg.name})")
    return "\n\n".join(parts) or NOT_MEASURED


def with_table(document: str, name: str, table: str) -> str:
    """Return the document with the table between the comments of that name replaced."""
    begin, end = f"<!-- {name}: written by benchmarks/chart.py -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", flags=re.DOTALL)
    assert len(pattern.findall(document)) == 1, f"the document must contain the comments of {name} exactly once"
    return pattern.sub(lambda _: f"{begin}\n{table}\n{end}", document)


def main() -> None:
    """Write all charts and tables."""
    parser = argparse.ArgumentParser(description="Draws the charts and writes the tables of docs/speed.md.")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="default benchmarks/results")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs", help="folder with speed.md (default docs/)")
    args = parser.parse_args()
    mpl.rcParams["svg.hashsalt"] = "transformer-xl"  # otherwise SVG ids are random
    document = args.docs / "speed.md"
    text = document.read_text(encoding="utf-8")
    for name in SECTIONS:
        written = section(name, result_files(args.results, name), args.docs)
        print(f"## {name}\n\n{written}\n")
        text = with_table(text, name, written)
    document.write_text(text, encoding="utf-8")
    for page, name, table in (
        ("equal-time", "equal-time", equal_time_tables),
        ("serving", "serving", serving_table),
    ):
        document = args.docs / f"{page}.md"
        sections = [
            table(path.stem.removeprefix(f"{name}-"), json.loads(path.read_text(encoding="utf-8")))
            for path in result_files(args.results, name)
        ]
        text = with_table(document.read_text(encoding="utf-8"), name, "\n\n".join(sections) or NOT_MEASURED)
        document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
