"""Output of the commands on standard output: tables for people, one JSON object for programs."""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.config import RunConfig, UserError
from transformer_xl.files import check_new_file
from transformer_xl.progress import NOTE, note, say

if TYPE_CHECKING:
    import torch

    from transformer_xl.checkpoint_record import CheckpointName, ChosenWeights
    from transformer_xl.evaluation.plan import EvaluationPlan
    from transformer_xl.run import Run
    from transformer_xl.text.tokenizers import Tokenizer


@contextmanager
def printed_before_files() -> Iterator[None]:
    """Print results before they are written to files, so that a full disk loses none; the files are written although
    the program that reads standard output has closed it (txl ... | head)."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()


def discard_output() -> None:
    """Redirect standard output to /dev/null, so that flushing it at exit cannot fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(values: dict[str, Any], *, indent: int | None = 2) -> None:
    """Print one JSON object to standard output (on one line if indent is None); inf and nan become null."""
    print(json.dumps(_plain(values), indent=indent))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_csv(text: str) -> None:
    """Print CSV in UTF-8, whatever the encoding of the terminal."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")
    sys.stdout.write(text)


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table to standard output; the first column is left-aligned, the others right-aligned.

    Control characters of a text, which could be commands to the terminal, become escapes.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # rich.text.Text, because brackets in names would be read as markup
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        # names should stay in one piece, so they are wrapped last
        min_width = min(30, max((len(row[0]) for row in rows), default=0)) if index == 0 else None
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold", min_width=min_width)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    # pipes and files have no width, so tables must not be truncated there
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else 120
    console = Console(file=sys.stdout, highlight=False, width=width, soft_wrap=not is_terminal)
    with console.capture() as captured:  # as rich itself ends the process if standard output is closed
        console.print(table)
    sys.stdout.write(captured.get())


def printable(text: str) -> str:
    """Return the text on one line: newlines, tabs and other control characters become escapes."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def check_outputs(out: Path | None, plot: Path | None) -> None:
    """Check that the files of --out and --plot can be written, before anything is computed.

    Raises:
        UserError: they cannot, or are the same.
    """
    if plot is not None and plot.suffix.lower() not in (".svg", ".png"):
        raise UserError(f"{plot}: the name of a plot must end in .svg or .png")
    for path in filter(None, (out, plot)):
        check_new_file(path)
    if plot is not None and plot == out:
        raise UserError(f"{out} was given for --out and --plot; choose different files")


def perplexity_titles(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the perplexities to display for a tokenizer: title of the column by name of the metric.

    Bytes and characters have none (their figure is bits per byte), and integers are not words. With words as tokens,
    both perplexities are the same.
    """
    titles = {"perplexity": "perplexity/word", "token_perplexity": "perplexity/token"}
    names = {"word": ["perplexity"], "bpe": list(titles), "integer": ["token_perplexity"]}.get(tokenizer.kind, [])
    return {name: titles[name] for name in names}


def say_weights(weights: ChosenWeights | None, model: str = "") -> None:
    """Print which weights of a run are used, and which others there are; `model` names one of several models."""
    for line in weights.lines(model) if weights else ():
        (note if line.startswith(NOTE) else say)(line.removeprefix(NOTE))


def load_and_say(path: Path, device: torch.device, checkpoint: CheckpointName, *, int8: bool = False) -> Run:
    """Load a run, and print which of its weights are used."""
    from transformer_xl.run import load

    run = load(path, device=str(device), checkpoint=checkpoint)
    if int8:
        from transformer_xl.integrations.int8 import to_int8

        run = to_int8(run)
    say_weights(run.weights)
    return run


def say_memory_length(run: Run, plan: EvaluationPlan) -> None:
    """Print which memory length is used and why, if lengths were measured for the run and the user gave none."""
    if run.memory_lengths is not None and plan.memory_length_reason != "given":
        say(f"memory length {plan.context_limits.memory_length:,}: {plan.memory_length_reason}")


def say_method(config: RunConfig, method: str, model: str = "") -> None:
    """Print a note if texts are not read by the method of a run; `model` names one of several models."""
    if method != config.evaluation.method:
        as_evaluated = f"not {config.evaluation.method} as txl evaluate does, so losses differ"
        note(f"{model and f'{model}: '}read by method {method}, {as_evaluated}")


def say_unknown(tokenizer: Tokenizer, texts: Iterable[str | bytes], model: str = "") -> None:
    """Print a warning with the words of the texts that are not in the tokenizer's vocabulary; `model` names one of
    several models."""
    if tokenizer.unk_token_id is None:
        return
    unknown = list(dict.fromkeys(word for text in texts for word in tokenizer.unknown_words(text)))
    if unknown:
        words = ", ".join(f"'{printable(word[:40])}'" for word in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        read_as = tokenizer.decode([tokenizer.unk_token_id])
        note(f"{model and f'{model}: '}not in the vocabulary, and read as {read_as}: {words}")


def command_line() -> str:
    """Return the command line as it was typed."""
    return shlex.join(["txl", *sys.argv[1:]])
