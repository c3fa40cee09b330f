"""The report of a reproduction: one HTML page with each table beside the paper's, its scale and its command.

It is written from the result files in the folder whenever a part of the reproduction is finished.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformer_xl.analysis.evaluation_speed import COLUMNS, speed_tables
from transformer_xl.analysis.gain_curves import draw_gains
from transformer_xl.analysis.plots import draw, svg_of
from transformer_xl.analysis.report import Page, heading, image, link, paragraph, table, verbatim
from transformer_xl.config import UserError
from transformer_xl.files import write_text
from transformer_xl.reproduction import ablation, context_table
from transformer_xl.reproduction.ablation import SystemResult

Results = Mapping[str, Any]
"""What one part of a reproduction found, as read from its JSON file."""


def write_results(folder: Path, name: str, values: Results) -> Path:
    """Write the results of one part to NAME.json in the folder, and the report; return the report."""
    write_text(folder / f"{name}.json", json.dumps(values, indent=1) + "\n")
    return write_report(folder)


def write_report(folder: Path) -> Path:
    """Write the report on the results in the folder; return its path.

    Raises:
        UserError: a file of results is damaged.
    """
    report = folder / "report.html"
    write_text(report, report_page(folder))
    return report


def read_results(file: Path) -> dict[str, Any]:
    """Read the results of one part.

    Raises:
        UserError: the file is damaged.
    """
    with _refuse_damage(file):
        found = json.loads(file.read_bytes())
        if not isinstance(found["command"], str):
            raise TypeError
        return found


@contextmanager
def _refuse_damage(file: Path) -> Iterator[None]:
    """Raise a UserError that names the file, if the block cannot read the expected values from it."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise UserError(f"{file} is damaged; delete it and run its command again") from None


def report_page(folder: Path) -> str:
    """Return the report as HTML, with a section for each file of results in the folder.

    Raises:
        UserError: a file of results is damaged.
    """
    elements = [
        paragraph(
            "Tables and results of Dai et al. 2019 (Transformer-XL), reproduced at the scale that each section states. "
            "The paper's numbers are for WikiText-103 or for its machines: compare orderings and shapes, not sizes."
        )
    ]
    for name, section in _SECTIONS.items():
        if (file := folder / f"{name}.json").exists():
            with _refuse_damage(file):
                elements += section(read_results(file))
    if (file := folder / "attention" / "figures.json").exists():
        with _refuse_damage(file):
            elements += _attention(file.parent, read_results(file))
    return Page("Transformer-XL: the paper's tables, reproduced", elements).html()


def scale_line(results: Results) -> str:
    """Return corpus, model and training in a sentence."""
    model, train = results["settings"]["model"], results["settings"]["train"]
    seeds = ", ".join(map(str, results["seeds"]))
    return (
        f"Trained on {results['corpus']} ({results['train_tokens']:,} tokens): {model['n_layers']} layers, "
        f"d_model {model['d_model']}, segments of {train['segment_length']}, batch size {train['batch_size']}, "
        f"{train['max_steps']:,} steps, "
        f"seeds {seeds}."
    )


def _ablation(results: Results) -> list[str]:
    metric: ablation.Metric = results["metric"]
    found = {name: SystemResult.from_dict(entry, metric) for name, entry in results["systems"].items()}
    return [
        heading("Which part of the model helps? (table 6)"),
        paragraph(f"{scale_line(results)} Scored on the first {results['max_tokens']:,} test tokens."),
        verbatim(results["command"]),
        paragraph(
            f"{ablation.NAMES[metric].capitalize()}, the mean over seeds and the largest deviation from it; lower is "
            "better. Initial: with the attention window of training. The paper's are word perplexities."
        ),
        table(ablation.COLUMNS, ablation.table_rows(found)),
        draw(ablation.chart(found)),
        heading("At equal memory (table 10)"),
        paragraph(
            f"{ablation.equal_memory_title(found)}. Without recurrence segments may be longer until a training step "
            "needs as much memory as one with recurrence, weights and optimizer included; there are fewer steps, so "
            "that as much text is read."
        ),
        table(ablation.COLUMNS, ablation.equal_memory_rows(found)),
        heading("What the paper says, and what came out here"),
        table(["in the paper", "here"], [list(pair) for pair in ablation.verdicts(found)]),
    ]


def _context(results: Results) -> list[str]:
    sweep = results["groups"][0]
    contexts = sweep["contexts"]
    return [
        heading("How far does a text help? (table 8)"),
        paragraph(scale_line(results)),
        verbatim(results["command"]),
        paragraph(
            "Relative effective context length in tokens, a figure for each seed: "
            f"{len(sweep['positions']):,} positions of the test text, contexts of {contexts[0]:,} to {contexts[-1]:,} "
            f"in steps of {sweep['context_step']:,}, and a gain of {sweep['threshold']:.0%} counts. Each table is a "
            "group of models, each compared with the best of its group. Models with relative encodings read with "
            "memory, also those trained without, and with the attention window that scored best on the start of the "
            "same test text. The paper's lengths are in words, in steps of 100."
        ),
        *(table(context_table.COLUMNS, rows) for rows in context_table.table_rows(results["groups"])),
        *(
            svg_of(draw_gains(group))
            for group in results["groups"]
            if group["trained_with_seed"] == sweep["trained_with_seed"]
        ),
    ]


def _speed(results: Results) -> list[str]:
    where = f"{results['dtype']}, {results['threads']} threads on {results['processor']}"
    return [
        heading("How much faster is evaluation with memory? (table 9)"),
        paragraph(
            f"{results['model']}, {results['parameters']:,} parameters, random weights, {where}: seconds per "
            "predicted token with the same attention window, and how many times faster evaluation with memory is than "
            "a sliding window. Arithmetic allows: the factor if every multiplication took equally long."
        ),
        verbatim(results["command"]),
        *(
            element
            for title, rows in speed_tables(results).items()
            for element in (paragraph(f"{title}:"), table(COLUMNS, rows))
        ),
    ]


def _attention(folder: Path, results: Results) -> list[str]:
    elements = [
        heading("What do heads attend to? (appendix D)"),
        paragraph(
            f"{results['run']} on {results['tokens']:,} tokens, in segments of {results['segment_length']:,} with "
            f"memory length {results['memory_length']:,}: the mean attention of each head by distance, single heads, "
            "each term of the attention score, and the loss by distance from the start. The paper plots 160 heads over "
            "640 words."
        ),
        verbatim(results["command"]),
    ]
    for part in ("mean_attention", "heads", "terms", "loss"):
        plots = [name for name in results["files"][part] if name.endswith(".png")]
        elements += [image((folder / name).read_bytes(), name.removesuffix(".png")) for name in plots]
    page = f"{folder.name}/{results['files']['page'][0]}"
    return [*elements, link(page, "Every layer, head and term, token by token")]


_SECTIONS: dict[str, Callable[[Results], list[str]]] = {
    "ablation": _ablation,
    "context": _context,
    "speed": _speed,
}
