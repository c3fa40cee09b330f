"""One page of what a reproduction has found so far: each table and picture beside the paper's, its scale and command.

It is made anew from the figures in the folder whenever a part of it is done.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformer_xl.analysis import evaluation_speed
from transformer_xl.analysis.gain_curves import draw_gains
from transformer_xl.analysis.plots import draw, svg_of
from transformer_xl.analysis.report import Page, heading, link, paragraph, picture, table, verbatim
from transformer_xl.config import UserError
from transformer_xl.reproduction import ablation, context_table
from transformer_xl.reproduction.ablation import Findings

Figures = Mapping[str, Any]


def read_figures(file: Path) -> dict[str, Any]:
    """Figures that a part of the reproduction has written.

    Raises:
        UserError: the file is damaged.
    """
    with _damage_told(file):
        found = json.loads(file.read_bytes())
        if not isinstance(found["command"], str):
            raise TypeError
        return found


@contextmanager
def _damage_told(file: Path) -> Iterator[None]:
    """What cannot be read of a file of figures means that it is not as it was written."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise UserError(f"{file} is damaged; delete it and make it again") from None


def reproduction_page(folder: Path) -> str:
    """The page as HTML, with a section for every part that has left its figures in the folder.

    Raises:
        UserError: a file there is damaged.
    """
    pieces = [
        paragraph(
            "Tables and pictures of Dai et al. 2019 (Transformer-XL), made again at the scale that each section says. "
            "Figures of the paper are WikiText-103's or of its machines: orderings and shapes compare, sizes do not."
        )
    ]
    for name, section in _SECTIONS.items():
        if (file := folder / f"{name}.json").exists():
            with _damage_told(file):
                pieces += section(read_figures(file))
    if (file := folder / "attention" / "figures.json").exists():
        with _damage_told(file):
            pieces += _attention(file.parent, read_figures(file))
    return Page("Transformer-XL: the paper's tables, made again", pieces).html()


def scale_line(figures: Figures) -> str:
    """Corpus, model and training, in a sentence."""
    model, train = figures["settings"]["model"], figures["settings"]["train"]
    seeds = ", ".join(map(str, figures["seeds"]))
    return (
        f"Trained on {figures['corpus']} ({figures['train_tokens']:,} tokens): {model['layers']} layers, "
        f"{model['width']} wide, segments of {train['segment']}, {train['rows']} rows, {train['steps']:,} steps, "
        f"seeds {seeds}."
    )


def _ablation(figures: Figures) -> list[str]:
    measure: ablation.Measure = figures["measure"]
    found = {name: Findings.of_dict(entry, measure) for name, entry in figures["systems"].items()}
    return [
        heading("Which part of the model helps? (table 6)"),
        paragraph(f"{scale_line(figures)} Scored on the first {figures['tokens']:,} test tokens."),
        verbatim(figures["command"]),
        paragraph(
            f"{ablation.NAMES[measure].capitalize()}, the mean over seeds and how far the farthest is from it; lower "
            "is better. Initial: at the attention length of training. The paper's are perplexities of words."
        ),
        table(ablation.COLUMNS, ablation.table_rows(found)),
        draw(ablation.chart(found)),
        heading("At equal memory (table 10)"),
        paragraph(
            f"{ablation.equal_memory_title(found)}. Without recurrence segments may be longer until a training step "
            "needs as much memory as one with recurrence, weights and optimiser included; steps are fewer, so that the "
            "text read is as much."
        ),
        table(ablation.COLUMNS, ablation.equal_memory_rows(found)),
        heading("What the paper says, and what came out here"),
        table(["in the paper", "here"], [list(pair) for pair in ablation.verdicts(found)]),
    ]


def _context(figures: Figures) -> list[str]:
    sweep = figures["groups"][0]
    contexts = sweep["contexts"]
    return [
        heading("How far does a text help? (table 8)"),
        paragraph(scale_line(figures)),
        verbatim(figures["command"]),
        paragraph(
            "Relative effective context length in tokens, a figure for each seed: "
            f"{len(sweep['positions']):,} places of the test text, contexts of {contexts[0]:,} to {contexts[-1]:,} in "
            f"steps of {sweep['context_step']:,}, and a gain of {sweep['threshold']:.0%} counts. Each table is a group, whose "
            "best every model is held to. Relative encodings are read with memory, also the one trained without it, "
            "at the attention length that scored best on the start of the same test text. The paper's are words, in "
            "steps of 100."
        ),
        *(table(context_table.COLUMNS, rows) for rows in context_table.table_rows(figures["groups"])),
        *(
            svg_of(draw_gains(group))
            for group in figures["groups"]
            if group["trained_with_seed"] == sweep["trained_with_seed"]
        ),
    ]


def _speed(figures: Figures) -> list[str]:
    where = f"{figures['number_format']}, {figures['threads']} threads on {figures['processor']}"
    return [
        heading("How much faster is evaluation with memory? (table 9)"),
        paragraph(
            f"{figures['model']}, {figures['parameters']:,} parameters, random weights, {where}: seconds for one "
            "predicted token at the same attention length, and how many times faster memory is than a window that "
            "moves token by token. Arithmetic allows: the factor if every multiplication took equally long."
        ),
        verbatim(figures["command"]),
        paragraph("Vanilla as the paper ran it, scores stored:"),
        table(evaluation_speed.COLUMNS, evaluation_speed.table_rows(figures, "stored")),
        paragraph("Vanilla with fused causal attention:"),
        table(evaluation_speed.COLUMNS, evaluation_speed.table_rows(figures, "fused")),
    ]


def _attention(folder: Path, figures: Figures) -> list[str]:
    pieces = [
        heading("What does a head see? (appendix D)"),
        paragraph(
            f"{figures['run']}, read over {figures['tokens']:,} tokens in segments of {figures['segment']:,} beside "
            f"{figures['memory']:,} slots of memory: the mean attention of every head to the tokens before, some heads "
            "by themselves, each term of the score alone, and the loss by distance from the start. The paper draws 640 "
            "words back of 160 heads."
        ),
        verbatim(figures["command"]),
    ]
    for what in ("mean_attention", "heads", "terms", "loss"):
        pictures = [name for name in figures["files"][what] if name.endswith(".png")]
        pieces += [picture((folder / name).read_bytes(), name.removesuffix(".png")) for name in pictures]
    page = f"{folder.name}/{figures['files']['page'][0]}"
    return [*pieces, link(page, "Every layer, head and term, token by token")]


_SECTIONS: dict[str, Callable[[Figures], list[str]]] = {
    "ablation": _ablation,
    "context": _context,
    "speed": _speed,
}
