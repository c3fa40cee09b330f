"""`txl score`: log-probabilities of texts, by token, line or file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.evaluate import Lengths, Precision, Rows, plan_of, say_remarks
from transformer_xl.cli.options import ANY_MACHINE, MachineOptions
from transformer_xl.cli.output import print_json, print_table, say_unknown
from transformer_xl.config import UserError
from transformer_xl.files import as_user_error
from transformer_xl.progress import ProgressBar

if TYPE_CHECKING:
    from transformer_xl.evaluation.metrics import Sums
    from transformer_xl.evaluation.texts import Line, TextScore
    from transformer_xl.text.tokenizer import Tokenizer

JsonLines = Annotated[bool, Parameter(negative=(), help="Print JSON lines, one object each, and nothing else there.")]
_THE_RUNS, _MANY_ROWS = Lengths(), Rows()
_WIDEST = 60  # of a text in a table


def score(
    run: Path,
    /,
    *files: Annotated[Path, Parameter(allow_leading_hyphen=True)],
    per: Literal["token", "line", "file"] = "line",
    lengths: Annotated[Lengths, Parameter(name="*")] = _THE_RUNS,
    shares: Annotated[Rows, Parameter(name="*")] = _MANY_ROWS,
    weights: Literal["best", "last"] = "best",
    precision: Precision = "float32",
    machine: MachineOptions = ANY_MACHINE,
    json: JsonLines = False,
) -> None:
    """Say how likely texts are: natural logarithms of probabilities, by token, line or file, in order.

    Parameters
    ----------
    run
        Folder of a run.
    files
        Texts; - is standard input.
    per
        What there is a line of output for. Tokens add up to lines, and lines to files.
    lengths
        How far attention looks.
    shares
        How the text is shared out.
    weights
        The best weights on the validation text, or the last ones.
    precision
        Number format of matrix products; bfloat16 is faster where the machine has it, and less exact.
    """
    named = _names(files)
    from transformer_xl.evaluation.texts import encode_text
    from transformer_xl.evaluation.texts import score as score_texts
    from transformer_xl.run_folder import Run, RunFolder

    device = machine.choose()
    folder = RunFolder.open(run)
    plan = replace(plan_of(folder.config, lengths, shares, "reset"), precision=precision)
    texts = {name: _read(file) for name, file in named.items()}
    model = folder.load_model(device, weights)
    say_remarks([plan], device)
    total = sum(len(encode_text(folder.tokenizer, name, text)) for name, text in texts.items())
    say_unknown(folder.tokenizer, texts.values())
    with ProgressBar("score", total, "tokens") as bar:
        scores = score_texts(Run(model, folder.tokenizer, folder.config), texts, plan, progress=bar.advance)
    if json:
        for found in _records(scores, per):
            print_json(found, indent=None)
        return
    _show(scores, per)


def _names(files: tuple[Path, ...]) -> dict[str, Path]:
    """Each file by its name as text; bytes that are no UTF-8 become replacement signs."""
    if not files:
        raise UserError("txl score needs texts; give files after the run, or - for standard input")
    named: dict[str, Path] = {}
    for file in files:
        name = os.fsencode(file).decode("utf-8", errors="replace")
        if name.startswith("-") and name != "-":  # what begins with a hyphen comes here for the sake of - alone
            raise UserError(f"Unknown option: {name}; --help shows what can be given, and ./{name} is a file")
        if name in named:
            raise UserError(f"{name} was given twice; give each file once")
        named[name] = file
    return named


def _read(file: Path) -> bytes:
    if str(file) == "-":
        return sys.stdin.buffer.read()
    with as_user_error(f"reading {file}"):
        return file.read_bytes()


def _records(scores: list[TextScore], per: str) -> Iterator[dict[str, Any]]:
    """One object for each file, line or token."""
    for score in scores:
        if per == "file":
            yield {"file": score.name, **_figures(score.sums)}
            continue
        for line in score.lines():
            head = {"file": score.name, "line": line.number}
            if per == "line":
                tokens = len(line.ids_K)
                text = _text(score.tokenizer, line)
                yield {**head, "tokens": tokens, "logprob": -line.nats, "text": text}
            else:
                for place, (token, nats) in enumerate(zip(line.ids_K.tolist(), line.nats_K.tolist(), strict=True)):
                    yield {**head, "place": place, **_token(score.tokenizer, token), "logprob": -nats}


def _figures(sums: Sums) -> dict[str, Any]:
    return {
        "tokens": sums.tokens,
        "bytes": sums.bytes,
        "characters": sums.characters,
        "words": sums.words,
        "logprob": -sums.nats,
        "nats_per_token": sums.nats_per_token,
        "perplexity": sums.perplexity,
        "bits_per_byte": sums.bits_per_byte,
        "bits_per_character": sums.bits_per_character,
        "word_perplexity": sums.word_perplexity,
    }


def _text(tokenizer: Tokenizer, line: Line) -> str:
    return tokenizer.decode(line.ids_K).removesuffix("\n")


def _token(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    """A token as text, and as bytes where it is not whole characters."""
    content = tokenizer.decode_bytes([token])
    try:
        return {"token": token, "text": content.decode("utf-8")}
    except UnicodeDecodeError:
        return {"token": token, "text": content.decode("utf-8", errors="replace"), "hex": content.hex()}


def _show(scores: list[TextScore], per: str) -> None:
    found = list(_records(scores, per))
    columns = {
        "file": ["file", "tokens", "logprob", "nats_per_token", "perplexity", "bits_per_byte"],
        "line": ["text", "file", "line", "tokens", "logprob"],
        "token": ["text", "file", "line", "place", "token", "logprob"],
    }[per]
    rows = [[_cell(record[name]) for name in columns] for record in found]
    if len(found) > 1:
        nats = sum(score.sums.nats for score in scores)
        tokens = sum(score.sums.tokens for score in scores)
        last = {columns[0]: "all", "tokens": f"{tokens:,}", "logprob": f"{-nats:.4f}"}
        rows.append([last.get(name, "") for name in columns])
    title = f"natural logarithms of probabilities, by {per}"
    print_table(title, [name.replace("_", " ") for name in columns], rows)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    text = f"{value:,}" if isinstance(value, int) else in_one_line(str(value))
    return text if len(text) <= _WIDEST else text[: _WIDEST - 3] + "..."


def in_one_line(text: str) -> str:
    """A text that takes one line: line ends, tabs and other control characters as escapes."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
