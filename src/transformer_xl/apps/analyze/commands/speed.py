"""`txl analyze speed`: how much faster memory makes evaluation, compared with the paper's table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from transformer_xl.apps.analyze.analysis_config import SpeedComparison
from transformer_xl.cli.flags import check_flags, optional_flags
from transformer_xl.cli.options import DEFAULT_DEVICE, DeviceFlags, Json
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.files import check_new_file, write_json

SpeedFlags = optional_flags("speed", SpeedComparison.model_fields)


def speed(
    model: str = "enwik8-24l",
    /,
    *,
    settings: Annotated[SpeedFlags | None, Parameter(name="*")] = None,
    device_options: DeviceFlags = DEFAULT_DEVICE,
    out: Path | None = None,
    json: Json = False,
) -> None:
    """Compare evaluation with memory to a window moved token by token (the paper's table of evaluation speed).

    Both models have the sizes of the recipe or run, and random weights. Takes about ten minutes at the default sizes on
    two cores.

    Parameters
    ----------
    model
        Name of a recipe, or folder of a run, which sets the sizes of both models.
    settings
        What is compared.
    out
        File for the results, as JSON.
    """
    if out is not None:
        check_new_file(out)
    comparison = check_flags(SpeedComparison, settings)
    from transformer_xl.apps.analyze.evaluation_speed import COLUMNS, compare_speed, speed_tables

    results = compare_speed(model, comparison, **vars(device_options))
    if out is not None:
        write_json(out, results)
    if json:
        print_json(results)
        return
    print(f"Evaluation speed: {model}, {results['dtype']}, {results['threads']} threads on {results['processor']}")
    for title, rows in speed_tables(results).items():
        print_table(title, COLUMNS, rows)
