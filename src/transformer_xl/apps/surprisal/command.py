"""`txl score --per word`: the surprisal of words as a table, CSV, JSON lines and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformer_xl.cli.options import WordOptions, parse_integers
from transformer_xl.cli.output import (
    print_csv,
    print_json,
    print_table,
    printed_before_files,
    say_method,
    say_unknown,
)
from transformer_xl.config import EvaluationConfig, UserError
from transformer_xl.progress import ProgressBar, note

if TYPE_CHECKING:
    from transformer_xl.apps.surprisal.surprisal import SurprisalTable
    from transformer_xl.run import Run
    from transformer_xl.text.sources.items import TextItem


def read_all_items(contents: Mapping[str, bytes], options: WordOptions) -> list[TextItem]:
    """Return the items of all files; each file, or each document of it, is a document.

    Raises:
        UserError: a file has no items, is damaged, or lacks a column.
    """
    from transformer_xl.text.sources.items import ItemColumns, read_items
    from transformer_xl.text.sources.tables import format_of

    labels = [name.strip() for name in (options.item_columns or "item").split(",")]
    columns = ItemColumns(options.text_column or "text", tuple(labels), options.document_column)
    items: list[TextItem] = []
    for name, content in contents.items():
        input_format = options.input_format or format_of(name, content)
        named = options.text_column, options.item_columns, options.document_column
        if input_format == "text" and any(column is not None for column in named):
            raise UserError(f"{name}: columns were named, but a text has none; give --input-format of a table")
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
    if config.method != "both-sides":
        for method in dict.fromkeys(plan.method for plan in plans.values()):
            say_method(run.config, method)
    for warning in dict.fromkeys(warning for plan in plans.values() for warning in plan.warnings(device)):
        note(warning)
    say_unknown(run.tokenizer, ["\n".join(item.text for item in items)])
    whitespace = options.whitespace or "leading"
    num_tokens = sum(len(encode_item(run.tokenizer, item)[1]) for item in items)
    with ProgressBar("score", num_tokens * (1 + len(plans)), "tokens") as bar:
        table = surprisal(run, items, config, memory_lengths=lengths, whitespace=whitespace, progress=bar.advance)
    with printed_before_files():
        if options.is_on_stdout:
            print_csv(table.to_csv())
        elif json:
            for row in table:
                print_json({**row, **run.weights_values}, indent=None)
        elif options.out is None:
            _print_rows(table, whitespace)
    if options.out is not None and not options.is_on_stdout:
        table.to_csv(options.out)
    if options.plot is not None:
        from transformer_xl.apps.surprisal.plot import MAX_ITEMS, draw_surprisal
        from transformer_xl.plots import write_plot

        if len(items) > MAX_ITEMS:
            note(
                f"the plot shows the first {MAX_ITEMS} of {len(items):,} items; for others, score a file of them alone"
            )
        write_plot(options.plot, draw_surprisal(table))


def _print_rows(table: SurprisalTable, whitespace: str) -> None:
    columns = ["word", *(name for name in table.column_names if name != "word")]
    titles = [name.removeprefix("surprisal_bits_").replace("_", " ") for name in columns]
    rows = [[_cell(row[name]) for name in columns] for row in table]
    print_table(f"surprisal in bits, by word; spaces: {whitespace}", titles, rows)


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
