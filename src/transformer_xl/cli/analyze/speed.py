"""`txl analyze speed`: how much faster memory makes evaluation, compared with the paper's table."""

from __future__ import annotations

import json as encoder
from pathlib import Path
from typing import Literal

from transformer_xl.cli.options import ANY_MACHINE, Json, MachineOptions, parse_integers
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.config import UserError
from transformer_xl.files import write_text


def speed(
    model: str = "enwik8-24l",
    /,
    *,
    attention_windows: str = "800,1800,2800,3800",
    segment_lengths: str = "128,256,512,1024,2048",
    clamp_length: int | Literal["auto", "none"] = "auto",
    repeats: int = 3,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    machine: MachineOptions = ANY_MACHINE,
    out: Path | None = None,
    json: Json = False,
) -> None:
    """Compare evaluation with memory to a window moved token by token (the paper's table of evaluation speed).

    Both models have the sizes of the recipe or run, and random weights. About ten minutes at the default sizes on two
    cores.

    Parameters
    ----------
    model
        Name of a recipe, or folder of a run: the sizes.
    attention_windows
        Tokens that each prediction sees.
    segment_lengths
        New tokens that the model with memory reads in one step; the fastest counts.
    clamp_length
        Distances above this count as this one; auto: as the recipe or run is evaluated.
    repeats
        How often each is timed, in turns; the median counts.
    dtype
        Type of matrix products, for both.
    out
        File for the results, as JSON.
    """
    if out is not None and out.exists():
        raise UserError(f"{out} exists already; choose another --out")
    windows = parse_integers("--attention-windows", attention_windows)
    lengths = parse_integers("--segment-lengths", segment_lengths)
    from transformer_xl.analysis.evaluation_speed import COLUMNS, SpeedComparison, compare_speed, speed_tables

    comparison = SpeedComparison(windows, lengths, repeats, None if clamp_length == "none" else clamp_length, dtype)
    measured = compare_speed(model, comparison, device=machine.device, threads=machine.threads)
    if out is not None:
        write_text(out, encoder.dumps(measured, indent=1) + "\n")
    if json:
        print_json(measured)
        return
    print(f"Evaluation speed: {model}, {measured['dtype']}, {measured['threads']} threads on {measured['processor']}")
    for title, rows in speed_tables(measured).items():
        print_table(title, COLUMNS, rows)
