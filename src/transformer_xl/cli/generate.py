"""`txl generate`: write text with a run, shown as it is made."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from transformer_xl.cli.options import ANY_MACHINE, Json, MachineOptions
from transformer_xl.cli.output import print_json
from transformer_xl.config import UserError
from transformer_xl.files import explained

if TYPE_CHECKING:
    from transformer_xl.generation.sampling import Sampler


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    greedy: Annotated[bool, Parameter(negative=())] = False
    """Always take the likeliest token."""
    temperature: float = 1.0
    """Below 1 bolder, above 1 wilder; 0 is greedy."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only; 40, as in the paper, unless this or top-p is given."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together reach this probability."""
    seed: int = 0
    """Of the random choices: the same seed gives the same text."""

    def sampler(self) -> Sampler:
        """As the generation wants it.

        Raises:
            UserError: a number out of range.
        """
        from transformer_xl.generation.sampling import Sampler

        top_k = 40 if self.top_k is None and self.top_p is None else self.top_k
        return Sampler(0.0 if self.greedy else self.temperature, top_k, self.top_p)


_THE_PAPERS = Sampling()


def generate(
    run: Path,
    /,
    *,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    tokens: int = 500,
    sampling: Annotated[Sampling, Parameter(name="*")] = _THE_PAPERS,
    memory: int | None = None,
    machine: MachineOptions = ANY_MACHINE,
    json: Json = False,
) -> None:
    """Write text with a trained model; it appears as it is made.

    Parameters
    ----------
    run
        Folder of a run.
    prompt
        Text to go on from. [default: begin a new text]
    prompt_file
        File that holds the prompt.
    tokens
        How many tokens to make.
    sampling
        How the next token is chosen.
    memory
        Memory slots, in tokens. [default: the run's evaluation memory]
    """
    if prompt is not None and prompt_file is not None:
        raise UserError("--prompt and --prompt-file were both given; use one of them")
    start: str | bytes | None = prompt
    if prompt_file is not None:
        with explained(f"reading {prompt_file}"):
            start = prompt_file.read_bytes()
    from transformer_xl.generation.decoding import generate as write
    from transformer_xl.run_folder import load

    sampler = sampling.sampler()
    loaded = load(run, device=str(machine.choose()))
    began = time.perf_counter()
    pieces = write(loaded, start, tokens=tokens, sampler=sampler, seed=sampling.seed, memory=memory)
    if json:
        text = "".join(pieces)
        seconds = time.perf_counter() - began
        shown = start.decode("utf-8", "replace") if isinstance(start, bytes) else start
        figures = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
        print_json({"run": str(run), "prompt": shown, "text": text, "seed": sampling.seed, **figures})
        return
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
