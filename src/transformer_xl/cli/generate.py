"""`txl generate`: write text with a run, shown as it is made."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from transformer_xl.cli.output import print_json
from transformer_xl.config import UserError
from transformer_xl.files import explained


def generate(
    run: Path,
    /,
    *,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    tokens: int = 500,
    greedy: Annotated[bool, Parameter(negative=())] = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    memory: int | None = None,
    device: str = "auto",
    threads: int | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
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
    greedy
        Always take the likeliest token.
    temperature
        Below 1 bolder, above 1 wilder; 0 is greedy.
    top_k
        Draw from the k likeliest tokens only. [default: 40, the paper's, unless top-p is given]
    top_p
        Draw from the likeliest tokens that together reach this probability.
    seed
        Of the random choices: the same seed gives the same text.
    memory
        Memory slots, in tokens. [default: the run's evaluation memory]
    device
        auto, cuda, mps or cpu.
    threads
        CPU threads of one operation.
    json
        Print one JSON object when done, instead of the text as it is made.
    """
    if prompt is not None and prompt_file is not None:
        raise UserError("--prompt and --prompt-file were both given; use one of them")
    start: str | bytes | None = prompt
    if prompt_file is not None:
        with explained(f"reading {prompt_file}"):
            start = prompt_file.read_bytes()
    from transformer_xl.device import choose_device, set_threads
    from transformer_xl.generation.decoding import generate as write
    from transformer_xl.generation.sampling import Sampler
    from transformer_xl.run_folder import load

    set_threads(threads)
    top_k = 40 if top_k is None and top_p is None else top_k
    sampler = Sampler(0.0 if greedy else temperature, top_k, top_p)
    choose_device(device)
    loaded = load(run, device=device)
    began = time.perf_counter()
    pieces = write(loaded, start, tokens=tokens, sampler=sampler, seed=seed, memory=memory)
    if json:
        text = "".join(pieces)
        seconds = time.perf_counter() - began
        shown = start.decode("utf-8", "replace") if isinstance(start, bytes) else start
        figures = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
        print_json({"run": str(run), "prompt": shown, "text": text, "seed": seed, **figures})
        return
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
