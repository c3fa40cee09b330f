"""`txl minimal-pairs`: accuracy on minimal pairs by phenomenon, as a table, JSON and CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from transformer_xl.cli.flags import ScoreFlags, check_flags
from transformer_xl.cli.options import DEFAULT_DEVICE, DeviceFlags, Json
from transformer_xl.cli.output import (
    check_outputs,
    load_and_say,
    print_json,
    print_table,
    printed_before_files,
    say_memory_length,
    say_unknown,
)
from transformer_xl.config import EvaluationConfig, UserError
from transformer_xl.progress import ProgressBar


def minimal_pairs(
    run: Path,
    /,
    *files: Path,
    context: Path | None = None,
    context_field: str | None = None,
    settings: Annotated[ScoreFlags | None, Parameter(name="*")] = None,
    checkpoint: Literal["best", "last"] = "best",
    out: Path | None = None,
    device_options: DeviceFlags = DEFAULT_DEVICE,
    json: Json = False,
) -> None:
    """Print how often the acceptable sentence of a minimal pair is the more probable one, by file and phenomenon.

    Parameters
    ----------
    run
        Folder of a run.
    files
        JSON lines with sentence_good and sentence_bad, and for groups UID, linguistics_term and field, as in BLiMP.
    context
        Text before every sentence, which the memory holds.
    context_field
        What holds the text before both sentences of a pair. [default: none]
    settings
        How the sentences are scored.
    checkpoint
        best: the weights with the lowest validation loss; last: those of the last checkpoint.
    out
        New CSV file with the log-probabilities (natural logarithms) of each pair.
    """
    if not files or len(set(files)) < len(files):
        raise UserError(f"{'a file was given twice' if files else 'there are no pairs'}; give files after the run")
    check_outputs(out, None)
    config = check_flags(EvaluationConfig, settings)
    from transformer_xl.apps.surprisal import minimal_pairs as library
    from transformer_xl.evaluation.plan import EvaluationPlan
    from transformer_xl.text.sources.archives import read_text_file
    from transformer_xl.text.sources.items import decode_table

    pairs = [
        pair
        for file in files
        for pair in library.read_minimal_pairs(str(file), read_text_file(file), context_field=context_field)
    ]
    before = "" if context is None else decode_table(str(context), read_text_file(context))
    loaded = load_and_say(run, device_options.choose(), checkpoint)
    say_memory_length(loaded, EvaluationPlan.for_reading(loaded, config))
    say_unknown(loaded.tokenizer, ["\n".join([before, *(f"{one.context}\n{one.good}\n{one.bad}" for one in pairs)])])
    with ProgressBar("score", 2 * len(pairs), "sentences") as bar:
        scores = library.minimal_pairs(loaded, pairs, config, context=before, progress=bar.advance)
    accuracies = scores.accuracies()
    with printed_before_files():
        if json:
            print_json({"accuracy": accuracies[-1]["accuracy"], "groups": accuracies, **loaded.weights_values})
        else:
            rows = [[row["name"], row["group"], f"{row['pairs']:,}", f"{row['accuracy']:.1%}"] for row in accuracies]
            print_table("accuracy on minimal pairs", ["name", "group", "pairs", "accuracy"], rows)
    if out is not None:
        scores.to_csv(out)
