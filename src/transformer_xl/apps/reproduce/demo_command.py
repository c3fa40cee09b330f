"""`txl demo`: the main workflow on text that every Python installation has, in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from transformer_xl.cli.options import DEFAULT_DEVICE, DeviceFlags, Integer, Json
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.progress import say


def demo(
    *,
    out: Path = Path("runs/demo"),
    recipe: str = "demo",
    max_tokens: Annotated[int | None, Integer] = None,
    device_options: DeviceFlags = DEFAULT_DEVICE,
    json: Json = False,
) -> int:
    """Prepare, train, evaluate at several memory lengths, compare with gzip and xz, generate, and write a report.

    The text is the source of Python's own standard library. Takes a few minutes on two CPU cores.

    Parameters
    ----------
    out
        Folder for corpus, run and report.html; a demo already there is replaced.
    recipe
        Recipe (a name or a YAML file) with the settings of the model and its training.
    max_tokens
        Number of test tokens to score, from the start of the test text. [default: all]
    """
    from transformer_xl.apps.reproduce.demo import COLUMNS, CURVE_COLUMNS, curve_rows, prompt_end, rows, run_demo

    run, values = run_demo(out, recipe=recipe, max_tokens=max_tokens, handle_signals=True, **vars(device_options))
    if not run.finished:
        say(f"stopped at step {run.step:,}; 'txl demo' starts over")
        return 128 + (run.stop_signal or 2)
    if json:
        print_json(values)
        return 0
    num_bytes, num_curve_bytes = values["test"]["bytes"], values["by_memory_length"][0]["bytes"]
    sample = f"{prompt_end(values).rstrip()}\n--- generated:\n{values['samples']['0.9']}"
    print(f"\nA sample, after lines of the test text:\n\n{sample}\n")
    print_table(f"Test: {num_bytes:,} bytes of files never seen in training", COLUMNS, rows(values))
    print_table(f"The first {num_curve_bytes:,} of these bytes", CURVE_COLUMNS, curve_rows(values))
    print(f"report: {values['report']}   ({values['seconds']:,.0f} s in all)")
    return 0
