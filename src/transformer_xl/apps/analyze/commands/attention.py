"""`txl analyze attention`: plots of what heads attend to, an interactive page, and the loss by distance."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from transformer_xl.cli.flags import check_flags, optional_flags
from transformer_xl.cli.options import DEFAULT_DEVICE, DeviceFlags, Integer, Json
from transformer_xl.cli.output import command_line, print_json, print_table, say_unknown
from transformer_xl.config import EvaluationConfig, UserError
from transformer_xl.progress import say

LengthFlags = optional_flags(
    "length", EvaluationConfig.model_fields, "method", "batch_size", "warmup_tokens", "reset_memory", "dtype", "dynamic"
)


@dataclass(frozen=True)
class Source:
    """The text to process."""

    prompt: str | None = None
    """The text itself."""
    text_file: Path | None = None
    """File with the text."""
    corpus: Path | None = None
    """Corpus with the run's tokenizer. [default: the one it was trained on]"""
    split: str | None = None
    """Split of the corpus: train, valid or test. [default: test]"""

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
            from transformer_xl.text.sources.archives import read_text_file

            return read_text_file(self.text_file)
        return None if self.prompt is None else self.prompt.encode(errors="surrogateescape")


_DEFAULT_SOURCE = Source()


def attention(
    run: Path,
    /,
    *,
    source: Annotated[Source, Parameter(name="*")] = _DEFAULT_SOURCE,
    max_tokens: Annotated[int, Integer] = 8192,
    lengths: Annotated[LengthFlags | None, Parameter(name="*")] = None,
    max_distance: Annotated[int | None, Integer] = None,
    heads: str | None = None,
    page_tokens: Annotated[int | None, Integer] = None,
    out: Path | None = None,
    checkpoint: Literal["best", "last"] = "best",
    device_options: DeviceFlags = DEFAULT_DEVICE,
    json: Json = False,
) -> None:
    """Draw what heads attend to, term by term, and how the loss decreases from a document's start.

    Parameters
    ----------
    run
        Folder of a run whose architecture is transformer-xl or shaw.
    source
        The text to process.
    max_tokens
        Maximum number of tokens to process, from the start.
    lengths
        Segment length, and how far attention looks back: memory length, attention window and clamp length.
    max_distance
        Largest distance in the plots of means, in tokens; memory is at least that long unless --memory-length is given.
        [default: the memory length, at most 640]
    heads
        Heads to plot individually: layer:head, both numbered from 0, separated by commas, such as 0:3,7:1. [default:
        the head with the largest mean distance in the first, middle and last layer]
    page_tokens
        Tokens on the page and in the plots of single heads, from the start of the text. [default: 192, or fewer
        if the text is shorter or they do not fit]
    out
        New folder for plots, page and results. [default: RUN-attention, next to the run]
    checkpoint
        best: the weights with the lowest validation loss; last: those of the last checkpoint.
    """
    text, head_list = source.text(), None if heads is None else _parse_heads(heads)
    config = check_flags(EvaluationConfig, lengths)
    from transformer_xl.apps.analyze.attention import analyze_attention
    from transformer_xl.run_folder import RunFolder

    if text is not None:
        say_unknown(RunFolder.open(run).tokenizer, [text])
    values = analyze_attention(
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
        **vars(device_options),
    )
    if json:
        print_json(values)
        return
    say(f"written: {values['folder']}; open attention.html there in a browser")
    n_heads = 1 + max(entry["head"] for entry in values["heads"])
    means = [f"{entry['mean_distance']:.1f}" for entry in values["heads"]]
    print_table(
        f"{run}: mean distance in tokens that each head attends to, over {values['num_queries']:,} queries, "
        f"memory length {values['memory_length']:,}, segment length {values['segment_length']:,}",
        ["layer", *(f"head {head}" for head in range(n_heads))],
        [[str(start // n_heads), *means[start : start + n_heads]] for start in range(0, len(means), n_heads)],
    )


def _parse_heads(text: str) -> list[tuple[int, int]]:
    """Parse (layer, head) pairs such as 0:3,7:1, and drop duplicates."""
    pairs = [re.fullmatch(r"\s*([0-9]{1,11})\s*:\s*([0-9]{1,11})\s*", part) for part in text.split(",")]
    if None in pairs:
        raise UserError(f"--heads {text}: must be layer:head, both from 0, separated by commas, such as 0:3,7:1")
    return list(dict.fromkeys((int(pair[1]), int(pair[2])) for pair in pairs if pair))
