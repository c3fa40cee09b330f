"""`txl reproduce context`: relative effective context lengths of the paper's two groups of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from transformer_xl.cli.options import Json
from transformer_xl.cli.output import ProgressBar, print_json, print_table, say
from transformer_xl.cli.reproduce.workshop import Scale, Workshop, best_window

if TYPE_CHECKING:
    from transformer_xl.evaluation.effective_context import ContextSweep, Reader

_DEFAULT = Scale()


def context(
    *,
    scale: Annotated[Scale, Parameter(name="*")] = _DEFAULT,
    step: int | None = None,
    longest: int | None = None,
    positions: int = 1000,
    json: Json = False,
) -> None:
    """Train the models of the paper's two groups, and measure how far back a text still helps each of them.

    Runs of the ablation in the same folder are used as they are. Each model reads with the attention length that it
    is best with. A quarter of an hour of training on two CPU cores beyond the ablation's, and as much of measuring.

    Parameters
    ----------
    scale
        How large all of it is.
    step
        Tokens by which the context grows. [default: half a segment]
    longest
        The longest context. [default: ten steps]
    positions
        Number of places drawn from the test text.
    """
    with Workshop.opened(scale) as workshop:
        make_context(workshop, workshop.context_sweep(step, longest, positions), json=json)


def make_context(workshop: Workshop, sweep: ContextSweep, *, json: bool = False) -> None:
    """Trains, measures, and writes and prints what was found."""
    from transformer_xl.analysis.context_table import COLUMNS, GROUPS, table_rows
    from transformer_xl.analysis.systems import BY_NAME
    from transformer_xl.evaluation.effective_context import measure_context

    systems = [BY_NAME[name] for names in GROUPS for name in names]
    tokens_K = workshop.corpus.split("test").tokens
    sweep.places(len(tokens_K))
    workshop.finish(systems, {system.name: workshop.windows(system) for system in systems})
    groups: list[dict[str, Any]] = []
    for index, seed in enumerate(workshop.seeds):
        for names in GROUPS:
            readers = [_reader(workshop, name, index) for name in names]
            cost = sum(reader.cost(sweep) for reader in readers)
            say(f"seed {seed}: {', '.join(names)} read {cost:,} tokens in {len(sweep.contexts)} contexts")
            with ProgressBar("context", cost, "tokens") as bar:
                found = measure_context(readers, tokens_K, sweep, bar.advance)
            groups.append({"trained_with_seed": seed, **found.as_dict()})
    figures = {**workshop.about(), "groups": groups}
    report = workshop.keep("context", figures)
    if json:
        print_json({**figures, "report": str(report)})
        return
    for rows in table_rows(groups):
        print_table(f"Relative effective context length in tokens, a figure for each of {scale_of(workshop)}",
                    COLUMNS, rows)  # fmt: skip
    print(f"report: {report}")


def scale_of(workshop: Workshop) -> str:
    """How many seeds there are."""
    return f"{len(workshop.seeds)} seeds" if len(workshop.seeds) > 1 else "1 seed"


def _reader(workshop: Workshop, name: str, index: int) -> Reader:
    from transformer_xl.analysis.systems import BY_NAME
    from transformer_xl.device import choose_device
    from transformer_xl.evaluation.effective_context import Reader
    from transformer_xl.evaluation.plan import Plan
    from transformer_xl.run_folder import RunFolder

    system = BY_NAME[name]
    folder = RunFolder.open(workshop.runs(system)[index])
    window = best_window(workshop.scores(system)[index]) if system.attends and system.has_memory else None
    lengths = {} if window is None else {"memory": window - 1, "window": window}
    return Reader(name, folder.load_model(choose_device(workshop.device)), Plan.of(folder.config, **lengths))
