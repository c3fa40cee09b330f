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
    from transformer_xl.reproduction.demo import COLUMNS, CURVE_COLUMNS, PROMPT, run_demo

    result = run_demo(out, recipe=recipe, max_tokens=max_tokens, handle_signals=True, **vars(device_options))
    run = result.training
    if not run.finished:
        say(f"stopped at step {run.step:,}; 'txl demo' starts over")
        return 128 + (run.stop_signal or 2)
    if json:
        values = {
            "run": str(run.path),
            "report": str(result.report),
            "test": result.test,
            "by_memory_length": list(result.curve.values()),
            "gzip_bits_per_byte": result.compressors["gzip -9"],
            "xz_bits_per_byte": result.compressors["xz -9"],
            "prompt": PROMPT,
            "sample": result.sample,
            "seconds": result.seconds,
            "parameters": result.parameters,
            "date": result.date,
            **result.environment,
        }
        print_json(values)
    else:
        print(f"\nA sample, generated from {PROMPT!r}:\n\n{PROMPT}{result.sample}\n")
        print_table(f"Test: {result.test['bytes']:,} bytes of files never seen in training", COLUMNS, result.rows())
        print_table(f"The first {result.num_curve_bytes:,} of these bytes", CURVE_COLUMNS, result.curve_rows())
        print(f"report: {result.report}   ({result.seconds:,.0f} s in all)")
    return 0
