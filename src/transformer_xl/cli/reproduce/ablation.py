"""`txl reproduce ablation`: the ten systems of the paper's ablation at any scale, beside the paper's figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from transformer_xl.cli.options import Json, whole_numbers
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.cli.reproduce.scale import Scale
from transformer_xl.reproduction.reproduction import Reproduction, keep

if TYPE_CHECKING:
    from transformer_xl.reproduction.ablation import Findings, Measure
    from transformer_xl.reproduction.systems import System

_DEFAULT = Scale()


def ablation(
    *,
    scale: Annotated[Scale, Parameter(name="*")] = _DEFAULT,
    lengths: str | None = None,
    json: Json = False,
) -> None:
    """Train the ten systems of the paper's ablation, and score each over a sweep of attention lengths.

    Two more are trained without recurrence at equal memory. About two hours on two CPU cores; when stopped, the same
    command goes on. Any setting of 'txl train' may be given.

    Parameters
    ----------
    scale
        How large all of it is.
    lengths
        Attention lengths at which each system is scored, in tokens. [default: from half a segment to six segments]
    """
    wanted = None if lengths is None else whole_numbers("--lengths", lengths)
    make_ablation(Reproduction.opened(scale), wanted, json=json)


def make_ablation(reproduction: Reproduction, wanted: tuple[int, ...] | None = None, *, json: bool = False) -> None:
    """Trains, scores, and writes and prints what was found."""
    from transformer_xl.reproduction.ablation import (
        COLUMNS,
        NAMES,
        equal_memory_rows,
        equal_memory_title,
        table_rows,
        verdicts,
    )
    from transformer_xl.reproduction.systems import ABLATION, EQUAL_MEMORY

    systems = (*ABLATION, *EQUAL_MEMORY)
    windows = {system.name: reproduction.windows(system, wanted) for system in systems}
    reproduction.finish(systems, windows)
    measure: Measure = "bits_per_byte" if reproduction.corpus.tokenizer.is_lossless else "perplexity"
    found = {system.name: _findings(reproduction, system, windows[system.name], measure) for system in systems}
    figures = {
        **reproduction.about(),
        "measure": measure,
        "systems": {name: findings.as_dict() for name, findings in found.items()},
        "verdicts": [list(pair) for pair in verdicts(found)],
    }
    report = keep(reproduction.path, "ablation", figures)
    if json:
        print_json({**figures, "report": str(report)})
        return
    print_table(f"{NAMES[measure].capitalize()} beside the paper's word perplexity", COLUMNS, table_rows(found))
    print_table(equal_memory_title(found), COLUMNS, equal_memory_rows(found))
    print_table(
        "What the paper says, and what came out here", ["in the paper", "here"], list(map(list, verdicts(found)))
    )
    print(f"report: {report}")


def _findings(reproduction: Reproduction, system: System, windows: tuple[int, ...], measure: Measure) -> Findings:
    from transformer_xl.reproduction.ablation import Findings
    from transformer_xl.reproduction.reproduction import read_scores

    files = reproduction.scores(system)
    by_seed = [{entry["attention_window"]: entry[measure] for entry in read_scores(file)} for file in files]
    by_length = {window: [scores[window] for scores in by_seed] for window in windows}
    segment, initial = reproduction.lengths(system)
    return Findings(system, segment, initial, by_length, measure)
