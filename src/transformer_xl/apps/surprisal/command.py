"""`txl score --per word`: the surprisal of words as a table, CSV, JSON lines and a plot."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.options import parse_integers
from transformer_xl.cli.output import check_outputs, print_json, print_table, say_unknown
from transformer_xl.config import EvaluationConfig, UserError
from transformer_xl.progress import ProgressBar, note

if TYPE_CHECKING:
    from transformer_xl.apps.surprisal.surprisal import SurprisalTable
    from transformer_xl.run_folder import Run
    from transformer_xl.text.items import TextItem


@dataclass(frozen=True)
class WordOptions:
    """Options of `--per word` alone."""

    whitespace: Literal["leading", "trailing"] | None = None
    """Whether the space between two words belongs to the second, or to the first, which it ends. [default: leading]"""
    sweep_memory_length: str | None = None
    """Several memory lengths, such as 0,64,512; each gives a column. [default: only that of --memory-length]"""
    input_format: Literal["text", "csv", "tsv", "jsonl"] | None = None
    """Each line of a text is an item, or each row of a table. [default: by the suffix of the file, else text]"""
    text_column: str | None = None
    """Column of the text in CSV and JSON lines. [default: text]"""
    item_columns: str | None = None
    """Columns that together identify an item, separated by commas, such as item,condition. [default: item]"""
    document_column: str | None = None
    """Column of the document, at whose start memory is empty. [default: a file is a document]"""
    out: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None
    """New CSV file; - is standard output."""
    plot: Path | None = None
    """New file for a plot of the first items, .svg or .png."""


WordFlags = Annotated[WordOptions, Parameter(name="*")]
NO_WORD_OPTIONS = WordOptions()


def check_word_options(options: WordOptions, per: str, *, json: bool) -> None:
    """Check that options of `--per word` are given with it alone, and that the output files can be written.

    Raises:
        UserError: they are not, or cannot.
    """
    given = [field.name for field in fields(options) if getattr(options, field.name) is not None]
    if per != "word" and given:
        raise UserError(
            f"--{given[0].replace('_', '-')} is an option of --per word, not of --per {per}; add --per word"
        )
    if json and _is_stdout(options.out):
        raise UserError("--json and --out - were both given; standard output has room for one of them")
    check_outputs(None if _is_stdout(options.out) else options.out, options.plot)


def read_all_items(contents: Mapping[str, bytes], options: WordOptions) -> list[TextItem]:
    """Return the items of all files; each file, or each document of it, is a document.

    Raises:
        UserError: a file has no items, is damaged, or lacks a column.
    """
    from transformer_xl.text.items import ItemColumns, format_of, read_items

    labels = [name.strip() for name in (options.item_columns or "item").split(",")]
    columns = ItemColumns(options.text_column or "text", tuple(labels), options.document_column)
    items: list[TextItem] = []
    for name, content in contents.items():
        input_format = options.input_format or format_of(name)
        named = options.text_column, options.item_columns, options.document_column
        if input_format == "text" and any(column is not None for column in named):
            raise UserError(f"{name}: columns were named, but a text has none; give --input-format csv, tsv or jsonl")
        if "file" in labels:
            raise UserError("the result has a column 'file' of its own; rename that of the items")
        for item in read_items(name, content, input_format, columns):
            document = f"{item.document} of {name}" if options.document_column else name
            items.append(replace(item, labels={"file": name, **item.labels}, document=document))
    return items


def score_words(run: Run, items: list[TextItem], config: EvaluationConfig, options: WordOptions, *, json: bool) -> None:
    """Compute the surprisal of all words, and print or write it."""
    from transformer_xl.apps.surprisal.surprisal import encode_item, surprisal, surprisal_plans

    lengths = None
    if options.sweep_memory_length is not None:
        if "memory_length" in config.model_fields_set:
            raise UserError("--memory-length and --sweep-memory-length were both given; use one of them")
        lengths = parse_integers("--sweep-memory-length", options.sweep_memory_length, minimum=0)
    device = next(run.model.parameters()).device
    plans = surprisal_plans(run, config, lengths)
    for warning in dict.fromkeys(warning for plan in plans.values() for warning in plan.warnings(device)):
        note(warning)
    say_unknown(run.tokenizer, ["\n".join(item.text for item in items)])
    whitespace = options.whitespace or "leading"
    num_tokens = sum(len(encode_item(run.tokenizer, item)[1]) for item in items)
    with ProgressBar("score", num_tokens * (1 + len(plans)), "tokens") as bar:
        table = surprisal(run, items, config, memory_lengths=lengths, whitespace=whitespace, progress=bar.advance)
    if _is_stdout(options.out):
        _print_csv(table)
    elif json:
        for row in table:
            print_json({**row, **run.weights_values}, indent=None)
    elif options.out is None:
        _print_rows(table, whitespace)
    # files are written after printing, so that a full disk loses no results
    if options.out is not None and not _is_stdout(options.out):
        table.to_csv(options.out)
    if options.plot is not None:
        from transformer_xl.apps.analyze.plots import MAX_ITEMS, draw_surprisal, write_plot

        if len(items) > MAX_ITEMS:
            note(
                f"the plot shows the first {MAX_ITEMS} of {len(items):,} items; for others, score a file of them alone"
            )
        write_plot(options.plot, draw_surprisal(table))


def _is_stdout(path: Path | None) -> bool:
    return path == Path("-")


def _print_csv(table: SurprisalTable) -> None:
    """Print CSV in UTF-8, whatever the encoding of the terminal."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    sys.stdout.write(table.to_csv())


def _print_rows(table: SurprisalTable, whitespace: str) -> None:
    columns = ["word", *(name for name in table.column_names if name != "word")]
    titles = [name.removeprefix("surprisal_bits_").replace("_", " ") for name in columns]
    rows = [[_cell(row[name]) for name in columns] for row in table]
    print_table(f"surprisal in bits, by word; spaces: {whitespace}", titles, rows)


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
