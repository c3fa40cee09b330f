"""`txl runs`, `txl runs compare` and `txl plot`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from transformer_xl.cli.options import DEFAULT_DEVICE, DeviceFlags, Integer, Json
from transformer_xl.cli.output import (
    check_outputs,
    print_json,
    print_table,
    printed_before_files,
    say_method,
    say_unknown,
)
from transformer_xl.config import UserError
from transformer_xl.files import check_new_file, csv_text, write_text
from transformer_xl.progress import ProgressBar, say

if TYPE_CHECKING:
    from transformer_xl.apps.runs.compare import RunComparison

_EMPTY_WORDS = "CPU", "Processor"  # in names of processors
_Switch = Annotated[bool, Parameter(negative=())]
_TABLE = {
    "run": "run", "recipe": "recipe", "parameters": "size", "step": "steps", "tokens": "tokens",
    "train_nats_per_token": "train", "valid_nats_per_token": "valid", "valid_bits_per_byte": "bits/byte",
    "memory_length": "memory", "seconds": "time", "processor": "processor", "commit": "commit",
}  # fmt: skip

runs = App(name="runs", help="List runs with their results, or compare some.", help_format="plaintext")


@runs.default
def list_folder(
    folder: Path = Path("runs"),
    /,
    *,
    sort: str = "run",
    reverse: _Switch = False,
    csv: Path | None = None,
    json: Json = False,
) -> None:
    """List the runs in a folder and below it, with what they have recorded; no weights are loaded.

    Losses are the lowest, in nats per token; of training, of the steps between two lines of metrics.

    Parameters
    ----------
    folder
        The folder; that of a single run lists this one.
    sort
        Column to sort by, as JSON and CSV name it, such as valid_nats_per_token.
    reverse
        Sort from high to low.
    csv
        New file for the table as CSV, with more columns.
    """
    if csv is not None:
        check_new_file(csv)
    from transformer_xl.apps.runs.records import COLUMNS, list_runs

    rows = list_runs(folder, sort=sort, reverse=reverse)
    with printed_before_files():
        if json:
            print_json({"folder": str(folder), "runs": rows})
        else:
            _print_runs(rows)
    if csv is not None:
        write_text(csv, csv_text(COLUMNS, rows))


def _print_runs(rows: list[dict[str, Any]]) -> None:
    """Print the table of runs; long values that all have are in its title."""
    whole = [{name: _cell(row, name) for name in _TABLE} for row in rows if row["problem"] is None]
    shared = [name for name in ("recipe", "processor", "commit") if len({row[name] for row in whole}) == 1]
    if whole:
        title = f"runs: {', '.join(f'{name} {whole[0][name]}' for name in shared)}" if shared else "runs"
        columns = [name for name in _TABLE if name not in shared]
        print_table(title, [_TABLE[name] for name in columns], [[row[name] for name in columns] for row in whole])
    for row in rows:
        if row["problem"] is not None:
            say(f"damaged run: {row['problem']}")


def _cell(row: dict[str, Any], name: str) -> str:
    """Return the text of a cell in the table of runs."""
    value = row[name]
    match name:
        case "step":
            steps = f"{value:,} of {row['max_steps']:,}"
            return "-" if row["finished"] is None else f"{value:,}" if row["finished"] else steps
        case "parameters" | "tokens":
            digits = next((digits for digits in (9, 6, 3) if value >= 10**digits), 0)
            return f"{value / 10**digits:.3g}{ {9: 'G', 6: 'M', 3: 'K', 0: ''}[digits] }"
        case "seconds":
            return f"{int(value) // 3600}:{int(value) // 60 % 60:02}:{int(value) % 60:02}" if value else "-"
        case "recipe":
            return str(value or row["architecture"])
        case "processor":
            found = str(value or "-") if row["device"] in (None, "cpu") else row["device"]
            return " ".join(word for word in re.sub(r"\(R\)|\(TM\)", "", found).split() if word not in _EMPTY_WORDS)
    return _text(value)


@runs.command
def compare(
    *folders: Path,
    on: Path | None = None,
    corpus: Path | None = None,
    split: str | None = None,
    max_tokens: Annotated[int | None, Integer] = None,
    plot: Path | None = None,
    device_options: DeviceFlags = DEFAULT_DEVICE,
    json: Json = False,
) -> None:
    """Compare runs: the settings that differ, curves, and losses on the same text with intervals of their differences.

    With --on, --corpus or --split, each run reads the text as 'txl evaluate' does. Runs with different tokenizers are
    compared by byte. Intervals of 95% are of a paired bootstrap.

    Parameters
    ----------
    folders
        Folders of runs; the others are compared with the first.
    on
        File with a text, which may be compressed.
    corpus
        Folder of a corpus. [default: with --split, the one that all runs were trained on]
    split
        Its split: train, valid or test. [default: with --corpus, valid]
    max_tokens
        Number of tokens of the split, from its start. [default: all]
    plot
        New file for the curves, .svg or .png.
    """
    check_outputs(None, plot)
    if on is not None and (split is not None or max_tokens is not None):
        raise UserError("--split and --max-tokens are for a corpus, and --on is a file; leave them out")
    from transformer_xl.apps.runs.compare import CommonText, compare_runs, named_records

    text, device = None, str(device_options.choose())
    if any(value is not None for value in (on, corpus, split, max_tokens)):
        from transformer_xl.run_folder import RunFolder

        records = named_records(folders)
        shared = {"on": on, "corpus": corpus, "split": split or "valid", "max_tokens": max_tokens}
        text = CommonText.open(list(records.values()), **shared)
        for name, record in records.items():
            say_unknown(RunFolder.open(record.path).tokenizer, [b"".join(text.pieces)], name)
    if text is None:
        comparison = compare_runs(folders)
    else:
        with ProgressBar("score", round(text.num_bytes) * len(folders), "bytes") as bar:
            comparison = compare_runs(folders, text, device=device, progress=bar.advance)
    for row in comparison.losses:
        say_method(comparison.runs[row["run"]].config, row["method"], row["run"])
    with printed_before_files():
        if json:
            print_json(comparison.as_dict())
        else:
            _print_comparison(comparison)
    if plot is not None:
        from transformer_xl.apps.runs.curves import draw_curves
        from transformer_xl.plots import write_plot

        write_plot(plot, draw_curves(comparison.runs))


def _print_comparison(comparison: RunComparison) -> None:
    names = list(comparison.runs)
    _print_runs([run.as_dict() | {"run": name} for name, run in comparison.runs.items()])
    rows = [[name, *map(_setting, values)] for name, values in comparison.settings.items()]
    print_table("settings that differ", ["setting", *names], rows)
    if not comparison.losses:
        return
    measure = str(comparison.measure)
    rows = []
    for row in comparison.losses:
        low, high = row.get("difference_low"), row.get("difference_high")
        shown = f"{row['difference']:+.4f}" if "difference" in row else "-"
        interval = f" ({low:+.4f} to {high:+.4f})" if low is not None and high is not None else ""
        values = [_text(row[name]) for name in ("tokens", "memory_length", "nats_per_token", "bits_per_byte")]
        rows.append([row["run"], *values, shown + interval])
    columns = ["run", "tokens", "memory", "nats/token", "bits/byte", f"difference in {measure.replace('_', ' ')}"]
    print_table(f"losses on {comparison.text}", columns, rows)


def _text(value: Any) -> str:
    """Return a result as it is shown in a table."""
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value or "-")


def _setting(value: Any) -> str:
    """Return the value of a setting as it is typed."""
    if isinstance(value, list):
        return ",".join(map(_setting, value)) or "none"
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def plot(*folders: Path, out: Path | None = None, text: _Switch = False) -> None:
    """Draw the curves of runs over steps: loss, learning rate, gradient norm, tokens/s.

    Parameters
    ----------
    folders
        Folders of runs.
    out
        New file for the plot, .svg or .png. [default: curves.svg]
    text
        Draw the loss in the terminal instead, or with --out besides.
    """
    out = out or (None if text else Path("curves.svg"))
    check_outputs(None, out)
    if not folders:
        raise UserError("no run was given; name the folders of runs, such as runs/a runs/b")
    from transformer_xl.apps.runs.compare import named_records
    from transformer_xl.apps.runs.curves import draw_curves, text_curves

    records = named_records(folders)
    if text:
        from rich.console import Console

        is_terminal = sys.stdout.isatty()
        with printed_before_files():
            print(text_curves(records, Console().width if is_terminal else 100, colours=is_terminal))
    if out is not None:
        from transformer_xl.plots import write_plot

        write_plot(out, draw_curves(records))
        say(f"wrote {out}")
