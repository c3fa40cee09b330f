"""The tables and the chart of docs/speed.md about scoring, generation and evaluation with memory; see `chart.py`."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

BLUE, ORANGE, BLACK = "#0072B2", "#E69F00", "#000000"
Results = dict[str, Any]


def inference_table(results: Results) -> str:
    """Implementations of inference.py."""
    machine = results["machine"]
    lines = ["| | | tokens a second | times as many | peak memory, GiB |", "|---|---|---|---|---|"]
    for job, found in results["jobs"].items():
        for name, of in found["implementations"].items():
            who, _, precision = name.rpartition("-")
            who = "this package" if who == "ours" else f"{who} {of['versions'].get(who, '')}".strip()
            low, high = of["ratio_range"]
            times = "" if name == found["compared_with"] else f"{of['median_ratio']:.1f} ({low:.1f} to {high:.1f})"
            lines.append(
                f"| {job} | {who}, {precision} | {of['median_tokens_per_second']:,.1f} | {times} | "
                f"{of['peak_resident_bytes'] / 2**30:.2f} |"
            )
    limits = results["generation_limit_tokens_per_second"]
    said = (
        f"{machine['cpu']}, {machine['threads']} threads, load average before {machine['load_average_before']}; commit "
        f"`{results['commit']}`; `{results['command']}`. Memory was read at "
        f"{machine['read_bytes_per_second'] / 1e9:.1f} GB/s, and a generated token has to read "
        f"{results['bytes_per_generated_token_float32'] / 1e6:,.0f} MB in float32: at most {limits['float32']:,.0f} "
        f"tokens a second, in bfloat16 {limits['bfloat16']:,.0f}."
    )
    return "\n".join([said, "", *lines, *[f"\nLeft out: {line}." for line in results["left_out"]]])


def evaluation_table(results: Results) -> str:
    """Both tables of `txl analyze speed`, side by side."""
    lines = [
        "| attention window | memory, ms a token (segment) | vanilla, scores stored, s | factor | vanilla, fused, s "
        "| factor | the paper's | FLOPs ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['attention_window']:,} | {row['memory_seconds'] * 1e3:.2f} ({row['segment_length']:,}) | "
        f"{row['vanilla_stored_seconds']:.2f} | {row['factor_stored']:,.0f} | {row['vanilla_fused_seconds']:.2f} | "
        f"{row['factor_fused']:,.0f} | {row['paper'] or 0:,.0f} | {row['limit']:,.0f} |"
        for row in results["rows"]
    ]
    said = (
        f"`txl analyze speed`: {results['model']}, {results['parameters']:,} parameters beside "
        f"{results['vanilla_parameters']:,} (with a learned vector for each position and layer), "
        f"{results['dtype']}, {results['threads']} threads on {results['processor']}, "
        f"torch {results['torch']}, clamp {results['clamp_length']}, medians of {results['repeats']} repeats."
    )
    return "\n".join([said, "", *lines])


def evaluation_chart(results: Results) -> Figure:
    """The factors over the attention length, beside the paper's."""
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.subplots()
    rows = results["rows"]
    lengths = [row["attention_window"] for row in rows]
    for key, label, colour, mark, style in (
        ("factor_stored", "vanilla stores its scores, as in the paper", BLUE, "o", "-"),
        ("factor_fused", "vanilla has fused attention", ORANGE, "s", "--"),
        ("paper", "the paper's (one GPU of 2018)", BLACK, "x", ":"),
    ):
        axes.plot(lengths, [row[key] for row in rows], label=label, color=colour, marker=mark, linestyle=style)
    axes.set(xlabel="attention window, tokens", ylabel="times as long for a token without memory", ylim=(0, None))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
