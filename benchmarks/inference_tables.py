"""Tables and charts of docs/speed.md from the results of inference.py and `txl analyze speed`; used by `chart.py`."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

BLUE, ORANGE, BLACK = "#0072B2", "#E69F00", "#000000"
Results = dict[str, Any]


def inference_table(results: Results) -> str:
    """Return a Markdown table of the implementations in inference.json."""
    machine = results["machine"]
    lines = ["| | | tokens/s | ratio | peak memory, GiB |", "|---|---|---|---|---|"]
    for job, result in results["jobs"].items():
        for name, metrics in result["implementations"].items():
            package, _, dtype = name.replace("+int8", ", int8 weights").rpartition("-")
            version = metrics["versions"].get(package, "")
            package = "this package" if package == "ours" else f"{package} {version}".strip()
            low, high = metrics["ratio_range"]
            is_first = name == result["compared_with"]
            ratio = "" if is_first else f"{metrics['median_ratio']:.1f} ({low:.1f} to {high:.1f})"
            lines.append(
                f"| {job} | {package}, {dtype} | {metrics['median_tokens_per_second']:,.1f} | {ratio} | "
                f"{metrics['peak_resident_bytes'] / 2**30:.2f} |"
            )
    limits = results["generation_limit_tokens_per_second"]
    description = (
        f"{machine['cpu']} ({', '.join(machine['features'])}), {machine['threads']} threads, "
        f"load average before {machine['load_average_before']}; commit `{results['commit']}`; `{results['command']}`. "
        f"RAM was read at {machine['read_bytes_per_second'] / 1e9:.1f} GB/s, and a generated token must read "
        f"{results['bytes_per_generated_token_float32'] / 1e6:,.0f} MB in float32: at most {limits['float32']:,.0f} "
        f"tokens a second, in bfloat16 {limits['bfloat16']:,.0f}."
    )
    return "\n".join([description, "", *lines, *[f"\nLeft out: {line}." for line in results["left_out"]]])


def evaluation_table(results: Results) -> str:
    """Return a Markdown table of the results of `txl analyze speed`."""
    lines = [
        "| attention window | memory, ms a token (segment) | vanilla, scores stored, s | factor | vanilla, fused, s "
        "| factor | factor in the paper | FLOPs ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['attention_window']:,} | {row['memory_seconds'] * 1e3:.2f} ({row['segment_length']:,}) | "
        f"{row['vanilla_stored_seconds']:.2f} | {row['factor_stored']:,.0f} | {row['vanilla_fused_seconds']:.2f} | "
        f"{row['factor_fused']:,.0f} | {row['paper'] or 0:,.0f} | {row['flops_ratio']:,.0f} |"
        for row in results["rows"]
    ]
    description = (
        f"`txl analyze speed`: {results['model']}, {results['parameters']:,} parameters, vanilla model "
        f"{results['vanilla_parameters']:,} (it learns a vector for each position and layer), "
        f"{results['dtype']}, {results['threads']} threads on {results['processor']}, "
        f"torch {results['torch']}, clamp {results['clamp_length']}, medians of {results['repeats']} repeats."
    )
    return "\n".join([description, "", *lines])


def evaluation_chart(results: Results) -> Figure:
    """Return a chart of the speedup by memory over the attention window, with the paper's results."""
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.subplots()
    rows = results["rows"]
    lengths = [row["attention_window"] for row in rows]
    for key, label, color, marker, style in (
        ("factor_stored", "vanilla stores its scores, as in the paper", BLUE, "o", "-"),
        ("factor_fused", "vanilla uses fused attention", ORANGE, "s", "--"),
        ("paper", "paper (one GPU of 2018)", BLACK, "x", ":"),
    ):
        axes.plot(lengths, [row[key] for row in rows], label=label, color=color, marker=marker, linestyle=style)
    axes.set(xlabel="attention window, tokens", ylabel="time for a token without memory / with memory", ylim=(0, None))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
