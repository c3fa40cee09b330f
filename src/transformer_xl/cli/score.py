"""`txl score`: log-probabilities of texts, by token, line or file; `apps/surprisal/command.py` has words.

Shape suffixes: K tokens of a text or a line.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.flags import ScoreFlags, check_flags
from transformer_xl.cli.options import DEFAULT_DEVICE, NO_WORD_OPTIONS, DeviceFlags, JsonLines, WordFlags, WordOptions
from transformer_xl.cli.output import (
    check_outputs,
    load_and_say,
    perplexity_titles,
    print_csv,
    print_json,
    print_table,
    printable,
    printed_before_files,
    say_memory_length,
    say_method,
    say_unknown,
)
from transformer_xl.config import EvaluationConfig, UserError
from transformer_xl.files import csv_text, write_text
from transformer_xl.progress import ProgressBar, note

if TYPE_CHECKING:
    from transformer_xl.evaluation.score import TextScore
    from transformer_xl.text.sources.items import TextItem
    from transformer_xl.text.tokenizers import Tokenizer

_MAX_CELL_LENGTH = 60  # characters of a text in a table


def score(
    run: Path,
    /,
    *files: Annotated[Path, Parameter(allow_leading_hyphen=True)],
    per: Literal["token", "word", "line", "file"] = "line",
    both_sides: Annotated[bool, Parameter(negative=())] = False,
    settings: Annotated[ScoreFlags | None, Parameter(name="*")] = None,
    word_options: WordFlags = NO_WORD_OPTIONS,
    checkpoint: Literal["best", "last"] = "best",
    device_options: DeviceFlags = DEFAULT_DEVICE,
    json: JsonLines = False,
) -> None:
    """Print log-probabilities (natural logarithms) of texts, by token, line or file, in order; by word, surprisal in
    bits.

    Each file is read as if it were the only text, with empty memory at its start; with --no-reset-memory, memory
    continues from file to file. With --per word, each line (of CSV and JSON lines, each row) is also read alone.

    Parameters
    ----------
    run
        Folder of a run.
    files
        Texts, which may be compressed; with --per word also tables. - is standard input.
    per
        Unit of one line of output. Token scores add up to line scores, and line scores to file scores; by word, the
        output is a table of surprisals.
    both_sides
        Predict each token (with --per word, each word) from the text before and after it; for a run of architecture
        xlnet.
    settings
        How the texts are scored.
    word_options
        Options of --per word.
    checkpoint
        best: the weights with the lowest validation loss; last: those of the last checkpoint.
    """
    paths, config = _paths_by_name(files), check_flags(EvaluationConfig, settings)
    if both_sides:
        config = config.model_copy(update={"method": "both-sides"})
    _check_word_options(word_options, per, json=json)
    from transformer_xl.evaluation.plan import EvaluationPlan
    from transformer_xl.evaluation.score import encode_text
    from transformer_xl.evaluation.score import score as score_texts
    from transformer_xl.text.sources.archives import read_text_file, standard_input
    from transformer_xl.text.sources.tables import format_of, looks_like_table

    contents = {
        name: standard_input().buffer.read().removeprefix(codecs.BOM_UTF8) if name == "-" else read_text_file(path)
        for name, path in paths.items()
    }
    for name, content in contents.items():
        if per != "word" and (kind := format_of(name, content)) != "text":
            if kind in ("parquet", "arrow"):
                raise UserError(f"{name} is {kind}, not text; --per word reads its rows")
            note(f"{name} is {kind}, and read as it is; --per word reads its rows")
        elif per != "word" and looks_like_table(content):
            note(f"{name} looks like CSV, and is read as it is; --per word --input-format csv reads its rows")
        if b"\r" in content and b"\n" not in content:
            note(f"{name}: its lines end in CR alone, which ends no line here; change CR to LF (tr '\\r' '\\n')")
    items: list[TextItem] = []
    if per == "word":  # before the run is loaded, which takes longer
        from transformer_xl.apps.surprisal.command import read_all_items

        items = read_all_items(contents, word_options)
    device = device_options.choose()
    loaded = load_and_say(run, device, checkpoint)
    if per == "word":
        from transformer_xl.apps.surprisal.command import score_words

        score_words(loaded, items, config, word_options, json=json)
        return
    plan = EvaluationPlan.for_texts(loaded, config)
    if not both_sides:
        say_method(loaded.config, plan.method)
    say_memory_length(loaded, plan)
    for warning in plan.warnings(device):
        note(warning)
    num_tokens = sum(len(encode_text(loaded.tokenizer, name, content)) for name, content in contents.items())
    say_unknown(loaded.tokenizer, contents.values())
    if per != "file" and not loaded.tokenizer.is_newline_V.any():
        note("the run's tokenizer has no token for a line end, so each file counts as one line")
    with ProgressBar("score", num_tokens, "tokens") as bar:
        scores = score_texts(loaded, contents, config, progress=bar.advance)
    out = word_options.out
    with printed_before_files():
        if json:
            for record in _records(scores, per):
                print_json({**record, **loaded.weights_values}, indent=None)
        elif out is None:
            _print_records(scores, per)
    if out is not None:
        rows = list(_records(scores, per))
        table = csv_text(list(dict.fromkeys(name for row in rows for name in row)), rows)
        print_csv(table) if word_options.is_on_stdout else write_text(out, table)


def _check_word_options(options: WordOptions, per: str, *, json: bool) -> None:
    """Check that options of `--per word` are given with it alone, and that the output files can be written.

    Raises:
        UserError: they are not, or cannot.
    """
    given = [field.name for field in fields(options) if getattr(options, field.name) is not None]
    words_only = [name for name in given if name != "out"]
    if per != "word" and words_only:
        raise UserError(
            f"--{words_only[0].replace('_', '-')} is an option of --per word, not of --per {per}; add --per word"
        )
    if json and options.is_on_stdout:
        raise UserError("--json and --out - were both given; standard output has room for one of them")
    check_outputs(None if options.is_on_stdout else options.out, options.plot)


def _paths_by_name(files: tuple[Path, ...]) -> dict[str, Path]:
    """Return the files by name; in a name, bytes that are not UTF-8 become replacement characters."""
    if not files:
        raise UserError("txl score needs texts; give files after the run, or - for standard input")
    paths: dict[str, Path] = {}
    for file in files:
        name = os.fsencode(file).decode("utf-8", errors="replace")
        if name.startswith("-") and name != "-":  # unknown options arrive here, because - has to be allowed
            raise UserError(f"Unknown option: {name}; --help lists the options (write a file of that name as ./{name})")
        if name in paths:
            raise UserError(f"{name} was given twice; list each file once")
        paths[name] = file
    return paths


def _records(scores: list[TextScore], per: str) -> Iterator[dict[str, Any]]:
    """Yield one object for each file, line or token."""
    for text in scores:
        if per == "file":
            yield {"file": text.name, "logprob": -text.sums.nats, **text.sums.as_dict()}
            continue
        for line in text.lines():
            head = {"file": text.name, "line": line.number}
            if per == "line":
                content = text.tokenizer.decode(line.ids_K).removesuffix("\n")
                yield {**head, "tokens": len(line.ids_K), "logprob": -line.nats, "text": content}
                continue
            for position, (token, nats) in enumerate(zip(line.ids_K.tolist(), line.nats_K.tolist(), strict=True)):
                yield {**head, "position": position, **_token(text.tokenizer, token), "logprob": -nats}


def _token(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    """Return the id and the text of a token, and its bytes in hexadecimal if they are not whole UTF-8 characters."""
    content = tokenizer.decode_bytes([token])
    try:
        return {"token": token, "text": content.decode("utf-8")}
    except UnicodeDecodeError:
        return {"token": token, "text": content.decode("utf-8", errors="replace"), "hex": content.hex()}


def _print_records(scores: list[TextScore], per: str) -> None:
    perplexities = perplexity_titles(scores[0].tokenizer)
    columns = {
        "file": ["file", "tokens", "logprob", "nats_per_token", *perplexities, "bits_per_byte"],
        "line": ["text", "file", "line", "tokens", "logprob"],
        "token": ["text", "file", "line", "position", "token", "logprob"],
    }[per]
    rows = [[_cell(record[name]) for name in columns] for record in _records(scores, per)]
    if len(rows) > 1:
        nats, tokens = (sum(getattr(text.sums, name) for text in scores) for name in ("nats", "tokens"))
        last = {columns[0]: "all", "tokens": f"{tokens:,}", "logprob": f"{-nats:.4f}"}
        rows.append([last.get(name, "") for name in columns])
    titles = [perplexities.get(name, name.replace("_", " ")) for name in columns]
    print_table(f"log-probabilities (natural logarithms), by {per}", titles, rows)


def _cell(value: Any) -> str:
    """Format a table cell: escape newlines, tabs and other control characters, and truncate long texts."""
    if value is None:  # the perplexity of a text without words
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}"
    text = f"{value:,}" if isinstance(value, int) else str(value)
    text = printable(text)
    return text if len(text) <= _MAX_CELL_LENGTH else text[: _MAX_CELL_LENGTH - 3] + "..."
