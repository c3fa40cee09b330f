"""`txl reading-times`: how well surprisal predicts reading times, by memory length: a table, CSV for R, a plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.apps.surprisal.reading_time_config import ReadingTimeSweep, TableLayout
from transformer_xl.cli.flags import check_flags, optional_flags
from transformer_xl.cli.options import DEFAULT_DEVICE, DeviceFlags, Json
from transformer_xl.cli.output import check_outputs, load_and_say, print_json, print_table, printed_before_files
from transformer_xl.config import EvaluationConfig
from transformer_xl.progress import ProgressBar, note, say

if TYPE_CHECKING:
    from transformer_xl.apps.surprisal.reading_time_fits import ReadingTimeFits

_COMPARED = ("memory_length", "attention_window", "method", "dynamic", "extended_context_length", "warmup_tokens")
LayoutFlags = optional_flags("layout", TableLayout.model_fields)
SweepFlags = optional_flags("sweep", ReadingTimeSweep.model_fields)
ReadingFlags = optional_flags(
    "reading", EvaluationConfig.model_fields, *_COMPARED, default="if not set", reset_memory=True
)


def reading_times(
    run: Path,
    table: Path,
    /,
    *,
    layout: Annotated[LayoutFlags | None, Parameter(name="*")] = None,
    texts: Path | None = None,
    text_column: str = "text",
    sweep: Annotated[SweepFlags | None, Parameter(name="*")] = None,
    frequencies: Path | None = None,
    corpus: Path | None = None,
    whitespace: Literal["leading", "trailing"] = "leading",
    settings: Annotated[ReadingFlags | None, Parameter(name="*")] = None,
    checkpoint: Literal["best", "last"] = "best",
    out: Path | None = None,
    plot: Path | None = None,
    device_options: DeviceFlags = DEFAULT_DEVICE,
    json: Json = False,
) -> None:
    """Fit reading times by surprisal at several memory lengths, attention windows and orders of n-grams.

    Each fit is compared with one without surprisal, on texts that were held out, and with the best fit.

    Parameters
    ----------
    run
        Folder of a run.
    table
        Reading times: CSV with a header, separated by commas, semicolons or tabs; a row for each reader and word.
    layout
        Columns of the table.
    texts
        A table (CSV, JSON lines, Parquet and so on) with a text in each row, and its name in the item column.
        [default: the words of the table of times]
    text_column
        Column of the text in the file of texts.
    sweep
        What is compared.
    frequencies
        CSV with the columns word and count. [default: the words of a corpus are counted]
    corpus
        Corpus whose words are counted. [default: the one the run was trained on]
    whitespace
        Whether the space between two words belongs to the second, or to the first, which it ends.
    settings
        How the texts are read.
    checkpoint
        best: the weights with the lowest validation loss; last: those of the last checkpoint.
    out
        New CSV file of the readings with their predictors, for R.
    plot
        New file for a plot of the fits, .svg or .png.
    """
    check_outputs(out, plot)
    config, table_layout = check_flags(EvaluationConfig, settings), check_flags(TableLayout, layout)
    compared = check_flags(ReadingTimeSweep, sweep)
    from transformer_xl.apps.surprisal.reading_time_fits import fit_reading_times
    from transformer_xl.apps.surprisal.reading_times import corpus_word_counts, read_reading_times, read_word_counts
    from transformer_xl.run_folder import RunFolder
    from transformer_xl.text.sources.archives import read_text_file
    from transformer_xl.text.sources.items import ItemColumns, read_items

    items = None
    if texts is not None:
        columns = ItemColumns(text_column, (table_layout.item_column,), labels_setting="item_column")
        items = read_items(str(texts), read_text_file(texts), None, columns)
    times = read_reading_times(str(table), read_text_file(table), table_layout, items)
    if frequencies is None:
        counts = corpus_word_counts(RunFolder.open(run).open_corpus(corpus))
    else:
        counts = read_word_counts(str(frequencies), read_text_file(frequencies))
    loaded = load_and_say(run, device_options.choose(), checkpoint)
    num_tokens = sum(len(loaded.tokenizer.encode(" ".join(words))) + 1 for words in times.texts.values())
    num_tokens *= len(compared.memory_lengths) + len(compared.attention_windows)
    with ProgressBar("read", num_tokens * max(1, len(compared.ngram_orders)), "tokens") as bar:
        fits = fit_reading_times(loaded, times, counts, compared, config, whitespace=whitespace, progress=bar.advance)
    for reason, count in fits.left_out.items():
        note(f"{count:,} rows are not fitted: {reason}")
    with printed_before_files():
        if json:
            print_json({**fits.as_dict(), **loaded.weights_values})
        else:
            _print_fits(fits)
            say(f"the best in R, with the file of --out: {fits.formula}")
    if out is not None:
        fits.to_csv(out)
    if plot is not None:
        from transformer_xl.apps.surprisal.plot import draw_fits
        from transformer_xl.plots import write_plot

        write_plot(plot, draw_fits(fits))


def _print_fits(fits: ReadingTimeFits) -> None:
    cells = list[list[str]]()
    for fit in fits.rows:
        times = [f"{fit[name]:.4g}" for name in ("per_bit", "previous_per_bit")]
        cells.append(
            [fit["setting"], f"{fit['surprisal_bits']:.3f}", *_gain(fit, "delta"), *_gain(fit, "behind"), *times]
        )
    readings = f"{len(fits.observations['time']):,} readings, {fits.units} held out in turn"
    title = f"gain of log-likelihood by surprisal in nats per 1,000 readings; {readings}"
    titles = ["", "mean bits", "gain", "95%", "behind the best", "95%", "time per bit", "of words before"]
    print_table(title, titles, cells)
    if "mixed_p" in fits.rows[0]:
        cells = list[list[str]]()
        for fit in fits.rows:
            per_bit, low, high = (f"{fit[f'mixed_per_bit{end}']:.4g}" for end in ("", "_low", "_high"))
            gain = f"{1000 * fit['mixed_delta_nats']:.2f}"
            cells.append([fit["setting"], gain, f"{fit['mixed_p']:.2g}", per_bit, f"{low} to {high}"])
        print_table("mixed models of the same readings", ["", "gain", "p", "time per bit", "95%"], cells)


def _gain(fit: dict[str, Any], name: str) -> tuple[str, str]:
    nats, low, high = (1000 * fit[f"{name}_{end}"] for end in ("nats", "low", "high"))
    return f"{nats:.2f}", f"{low:.2f} to {high:.2f}"
