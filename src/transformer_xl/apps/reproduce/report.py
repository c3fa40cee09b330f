"""The report of a reproduction: one HTML page with each table, the paper's results, and the command that was run.

It is written from the result files in the folder whenever a part of the reproduction is finished.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformer_xl.apps.analyze.effective_context import FRACTIONS, format_length
from transformer_xl.apps.analyze.evaluation_speed import COLUMNS, speed_tables
from transformer_xl.apps.reproduce import ablation
from transformer_xl.apps.reproduce.reproduction import REPORT, report_damage
from transformer_xl.files import write_json, write_text
from transformer_xl.plots import draw_gains, to_svg
from transformer_xl.report_page import chart, heading, image, link, page, paragraph, table, verbatim

_PUBLISHED_LENGTHS = {
    "xl-larger": (900, 800, 700),
    "qrnn": (500, 400, 300),
    "lstm": (400, 300, 200),
    "xl-full": (700, 600, 500),
    "shaw-recurrent": (400, 400, 300),
    "relative-full": (300, 300, 300),
    "learned-half": (128, 128, 128),
}
"""The paper's lengths in words of WikiText-103, at each of FRACTIONS."""
CONTEXT_COLUMNS = ["system", "parameters", *(f"r = {fraction:g}" for fraction in FRACTIONS), "the paper's (words)"]

Results = Mapping[str, Any]
"""Results of one part of a reproduction (such as the ablation or the speed), as written to its JSON file."""


def write_results(folder: Path, name: str, values: Results) -> None:
    """Write the results of one part to NAME.json in the folder, and the report."""
    write_json(folder / f"{name}.json", values)
    write_report(folder)


def read_results(file: Path) -> dict[str, Any]:
    """Read the results of one part.

    Raises:
        UserError: the file is damaged.
    """
    with report_damage(file):
        results = json.loads(file.read_bytes())
        if not isinstance(results["command"], str):
            raise TypeError
        return results


def write_report(folder: Path) -> Path:
    """Write the report, with a section for each file of results in the folder; return its path.

    Raises:
        UserError: a file of results is damaged.
    """
    elements = [
        paragraph(
            "Tables and results of Dai et al. 2019 (Transformer-XL), reproduced at the scale that each section states. "
            "The paper's numbers are for WikiText-103 or for its hardware: compare rankings and curves, not values."
        )
    ]
    for name, section in _SECTIONS.items():
        if (file := folder / name).exists():
            with report_damage(file):
                elements += section(read_results(file), file.parent)
    report = folder / REPORT
    write_text(report, page("Transformer-XL: the paper's tables, reproduced", elements))
    return report


def _scale(results: Results) -> str:
    """Return a sentence on corpus, model and training, and one on what the results cannot show, if any."""
    model, train = results["settings"]["model"], results["settings"]["train"]
    return (
        f"Trained on {results['corpus']} ({results['train_tokens']:,} tokens): {model['n_layers']} layers, "
        f"d_model {model['d_model']}, segments of {train['segment_length']}, batch size {train['batch_size']}, "
        f"{train['max_steps']:,} steps, seeds {', '.join(map(str, results['seeds']))}. {results['caveat']}"
    ).strip()


def _ablation(results: Results, _: Path) -> list[str]:
    systems = ablation.system_results(results)
    return [
        heading("Which part of the model helps? (table 6)"),
        paragraph(f"{_scale(results)} Scored on the first {results['max_tokens']:,} test tokens."),
        verbatim(results["command"]),
        paragraph(
            f"{ablation.NAMES[results['metric']].capitalize()}, the mean over seeds and the largest deviation from it; "
            "lower is better. Initial: with the attention window of training. The paper reports word perplexities."
        ),
        table(ablation.COLUMNS, ablation.table_rows(systems)),
        chart(ablation.chart(systems)),
        heading("At equal memory (table 10)"),
        paragraph(
            f"{ablation.equal_memory_title(systems)}. Without recurrence segments may be longer until a training step "
            "needs as much memory as one with recurrence, weights and optimizer included; there are fewer steps, so "
            "that as much text is processed."
        ),
        table(ablation.COLUMNS, ablation.equal_memory_rows(systems)),
        heading("Claims of the paper, and the results"),
        paragraph(ablation.SPREAD),
        table(["claim of the paper", "result"], results["verdicts"]),
    ]


def _context(results: Results, _: Path) -> list[str]:
    first = results["groups"][0]
    contexts = first["contexts"]
    return [
        heading("How far back does text still help? (table 8)"),
        paragraph(_scale(results)),
        verbatim(results["command"]),
        paragraph(
            "Relative effective context length in tokens, a value for each seed: "
            f"{len(first['positions']):,} positions of the test text, contexts of {contexts[0]:,} to {contexts[-1]:,} "
            f"in steps of {first['context_step']:,}, gains of at least {first['threshold']:.0%}. Each table is a "
            "group of models, each compared with the best of its group. Models with relative encodings are evaluated "
            "with memory, even those trained without, and with the attention window that scored best on the start of "
            "the same test text. The paper's lengths are in words, in steps of 100."
        ),
        *(table(CONTEXT_COLUMNS, rows) for rows in context_rows(results["groups"])),
        *(
            chart(to_svg(draw_gains(group)))
            for group in results["groups"]
            if group["trained_with_seed"] == first["trained_with_seed"]
        ),
    ]


def context_rows(groups: Sequence[Mapping[str, Any]]) -> list[list[list[str]]]:
    """Return a table for each group of models, as rows under CONTEXT_COLUMNS; each cell has a length for each seed.

    Args:
        groups: the results of each group and seed, as returned by `measure_context`.
    """
    by_names: dict[tuple[str, ...], list[list[Mapping[str, Any]]]] = {}
    for group in groups:
        by_names.setdefault(tuple(model["name"] for model in group["models"]), []).append(group["models"])
    # zip: from a list of models for each seed to a tuple of seeds for each model
    return [[_row(models) for models in zip(*seeds, strict=True)] for seeds in by_names.values()]


def _row(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the row of a system from its results with each seed."""
    name, parameters = models[0]["name"], f"{models[0]['parameters']:,}"
    lengths = [
        ", ".join(format_length(model["fractions"][f"{fraction:g}"]) for model in models) for fraction in FRACTIONS
    ]
    return [name, parameters, *lengths, ", ".join(map(str, _PUBLISHED_LENGTHS[name]))]


def _speed(results: Results, _: Path) -> list[str]:
    elements = [
        heading("How much faster is evaluation with memory? (table 9)"),
        paragraph(
            f"{results['model']}, {results['parameters']:,} parameters, random weights, {results['dtype']}, "
            f"{results['threads']} threads on {results['processor']}: seconds per predicted token with the same "
            "attention window, and how many times faster evaluation with memory is than a sliding window. FLOPs ratio: "
            f"the factor if every multiplication took equally long. {results['caveat']}".strip()
        ),
        verbatim(results["command"]),
    ]
    for title, rows in speed_tables(results).items():
        elements += [paragraph(f"{title}:"), table(COLUMNS, rows)]
    return elements


def _attention(results: Results, folder: Path) -> list[str]:
    files = results["files"]
    plots = [name for part in ("mean_attention", "heads", "terms", "loss") for name in files[part]]
    return [
        heading("What do heads attend to? (appendix D)"),
        paragraph(
            f"{results['run']} on {results['tokens']:,} tokens, in segments of {results['segment_length']:,} with "
            f"memory length {results['memory_length']:,}: the mean attention of each head by distance, single heads, "
            "each term of the attention score, and the loss by distance from the start. The paper plots 160 heads over "
            "640 words."
        ),
        verbatim(results["command"]),
        *(image((folder / name).read_bytes(), name.removesuffix(".png")) for name in plots if name.endswith(".png")),
        link(f"{folder.name}/{files['page'][0]}", "Every layer, head and term, token by token"),
    ]


_SECTIONS: dict[str, Callable[[Results, Path], list[str]]] = {
    "ablation.json": _ablation,
    "context.json": _context,
    "speed.json": _speed,
    "attention/results.json": _attention,
}
"""Functions that return a section of the report from the results in a file and the folder of that file."""
