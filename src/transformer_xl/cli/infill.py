"""`txl infill`: fill the blanks of a text, given what is on both sides of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from transformer_xl.cli.flags import InfillFlags, check_flags
from transformer_xl.cli.options import DEFAULT_DEVICE, DeviceFlags, Integer, Json
from transformer_xl.cli.output import load_and_say, print_json, say_unknown
from transformer_xl.generation.generation_config import GenerationConfig


def infill(
    run: Path,
    /,
    *,
    text: str,
    num_tokens: Annotated[int, Integer] = 8,
    blank: str = "___",
    settings: Annotated[InfillFlags | None, Parameter(name="*", negative=())] = None,
    checkpoint: Literal["best", "last"] = "best",
    device_options: DeviceFlags = DEFAULT_DEVICE,
    json: Json = False,
) -> None:
    """Fill the blanks of a text with a model that reads to both sides (architecture xlnet).

    Parameters
    ----------
    run
        Folder of a run.
    text
        The text, with ___ where something is missing.
    num_tokens
        Number of tokens in each blank.
    blank
        The mark of a blank.
    checkpoint
        best: the weights with the lowest validation loss; last: those of the last checkpoint.
    """
    config = check_flags(GenerationConfig, settings)
    from transformer_xl.generation.infill import infill as fill

    loaded = load_and_say(run, device_options.choose(), checkpoint)
    say_unknown(loaded.tokenizer, text.split(blank or None))
    found = fill(loaded, text, config, num_tokens=num_tokens, blank=blank)
    if json:
        print_json({"run": str(run), **loaded.weights_values, "texts": [one.details() for one in found]})
        return
    for number, one in enumerate(found, start=1):
        head = f"--- {number} of {len(found)}, " if len(found) > 1 else "--- "
        print(f"{head}logprob {one.logprob:.3f}\n{one.text}")
