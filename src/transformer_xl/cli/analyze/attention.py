"""`txl analyze attention`: plots of what heads attend to, an interactive page, and the loss by distance."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from transformer_xl.cli.flags import LengthFlags, evaluation_config
from transformer_xl.cli.options import ANY_MACHINE, Json, MachineOptions
from transformer_xl.cli.output import command_line, print_json, print_table, say_unknown
from transformer_xl.config import UserError
from transformer_xl.files import as_user_error
from transformer_xl.progress import say


@dataclass(frozen=True)
class Source:
    """Which text is read."""

    prompt: str | None = None
    """A text."""
    text_file: Path | None = None
    """File of a text."""
    corpus: Path | None = None
    """Corpus with the run's tokenizer. [default: the one it was trained on]"""
    split: str | None = None
    """train, valid or test, of a corpus. [default: test]"""

    def text(self) -> bytes | None:
        """Return the text, or None for a split of a corpus.

        Raises:
            UserError: more than one text is given, or the file cannot be read.
        """
        values = {"--prompt": self.prompt, "--text-file": self.text_file, "--corpus": self.corpus}
        flags = [flag for flag, value in values.items() if value is not None]
        if len(flags) > 1:
            raise UserError(f"{flags[0]} and {flags[1]} were both given; use one of them")
        if self.split is not None and flags not in ([], ["--corpus"]):
            raise UserError(f"--split {self.split} and {flags[0]} were both given; --split needs a corpus")
        if self.text_file is not None:
            with as_user_error(f"reading {self.text_file}"):
                return self.text_file.read_bytes()
        return None if self.prompt is None else self.prompt.encode(errors="surrogateescape")


_TEST_SPLIT = Source()


def attention(
    run: Path,
    /,
    *,
    source: Annotated[Source, Parameter(name="*")] = _TEST_SPLIT,
    max_tokens: int = 8192,
    lengths: Annotated[LengthFlags | None, Parameter(name="*")] = None,
    max_distance: int | None = None,
    heads: str | None = None,
    page_tokens: int | None = None,
    out: Path | None = None,
    checkpoint: Literal["best", "last"] = "best",
    machine: MachineOptions = ANY_MACHINE,
    json: Json = False,
) -> None:
    """Draw what heads attend to, term by term, and how the loss falls from a document's start.

    Parameters
    ----------
    run
        Folder of a run of transformer-xl or shaw.
    source
        Which text is read.
    max_tokens
        Read only this many tokens, from the start.
    lengths
        How far attention reaches.
    max_distance
        Largest distance in the plots of means, in tokens; memory is at least that long, unless it is given. [default:
        the memory length, at most 640]
    heads
        Heads to plot individually: layer:head, both from 0, separated by commas, such as 0:3,7:1. [default: of the
        first, middle and last layer the head with the largest mean distance]
    page_tokens
        Tokens on the page and in the plots of single heads, from the start of the text. [default: 192, or as many as
        there are or fit]
    out
        New folder for plots, page and results. [default: RUN-attention, next to the run]
    checkpoint
        The weights that were best on the validation text, or the last ones.
    """
    text, head_list, config = source.text(), None if heads is None else _heads(heads), evaluation_config(lengths)
    from transformer_xl.analysis.attention import analyze_attention
    from transformer_xl.run_folder import RunFolder

    if text is not None:
        say_unknown(RunFolder.open(run).tokenizer, [text])
    analysis = analyze_attention(
        run,
        text,
        corpus=source.corpus,
        split=source.split or "test",
        max_tokens=max_tokens,
        config=config,
        max_distance=max_distance,
        heads=head_list,
        page_tokens=page_tokens,
        out=out,
        checkpoint=checkpoint,
        command=command_line(),
        **dataclasses.asdict(machine),
    )
    values, distance_LN = analysis.values, analysis.distance_LN
    if json:
        print_json(values)
        return
    say(f"written: {analysis.folder}; open attention.html there in a browser")
    columns = ["layer", *(f"head {head}" for head in range(distance_LN.shape[1]))]
    rows = [[str(layer), *(f"{mean:.1f}" for mean in row)] for layer, row in enumerate(distance_LN.tolist())]
    title = (
        f"{run}: mean distance in tokens that each head attends to, {values['counted_tokens']:,} queries averaged, "
        f"memory length {values['memory_length']:,}, segment length {values['segment_length']:,}"
    )
    print_table(title, columns, rows)


def _heads(text: str) -> list[tuple[int, int]]:
    """Return the heads that were typed as one word, such as 0:3,7:1."""
    heads: list[tuple[int, int]] = []
    for word in text.split(","):
        parts = [part.strip() for part in word.split(":")]
        if len(parts) != 2 or not all(part.isascii() and part.isdecimal() and len(part) < 12 for part in parts):
            raise UserError(f"--heads {text}: must be layer:head, both from 0, separated by commas, such as 0:3,7:1")
        heads.append((int(parts[0]), int(parts[1])))
    return list(dict.fromkeys(heads))
