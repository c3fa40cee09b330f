"""`txl reproduce context`: relative effective context lengths of the paper's two groups of models."""

from __future__ import annotations

import json as encoder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from transformer_xl.cli.options import Json
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.cli.reproduce.scale import Scale
from transformer_xl.progress import ProgressBar, say
from transformer_xl.reproduction.reproduction import Reproduction, best_window, keep

if TYPE_CHECKING:
    from transformer_xl.analysis.effective_context import ContextSweep, GroupModel

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
    reproduction = Reproduction.opened(scale)
    make_context(reproduction, reproduction.context_sweep(step, longest, positions), json=json)


def make_context(reproduction: Reproduction, sweep: ContextSweep, *, json: bool = False) -> None:
    """Trains, measures, writes and prints what was found; groups measured before are taken as they are."""
    from transformer_xl.reproduction.context_table import COLUMNS, GROUPS, table_rows
    from transformer_xl.reproduction.systems import BY_NAME

    systems = [BY_NAME[name] for names in GROUPS for name in names]
    sweep.draw_positions(reproduction.corpus.split("test").num_tokens)
    reproduction.finish(systems, {system.name: reproduction.windows(system) for system in systems})
    known = _measured_before(reproduction.path / "context.json")
    groups: list[dict[str, Any]] = []
    figures = {**reproduction.about(), "groups": groups}
    report = reproduction.path / "report.html"
    for index, seed in enumerate(reproduction.seeds):
        for names in GROUPS:
            models = [_reader(reproduction, name, index) for name in names]
            same = (group for group in known if _is_of(group, seed, models, sweep))
            groups.append(next(same, None) or _measured(reproduction, seed, models, sweep))
            report = keep(reproduction.path, "context", figures)
    if json:
        print_json({**figures, "report": str(report)})
        return
    seeds = f"{len(reproduction.seeds)} seeds" if len(reproduction.seeds) > 1 else "1 seed"
    for rows in table_rows(groups):
        print_table(f"Relative effective context length in tokens, a figure for each of {seeds}", COLUMNS, rows)
    print(f"report: {report}")


def _measured(reproduction: Reproduction, seed: int, models: list[GroupModel], sweep: ContextSweep) -> dict[str, Any]:
    from transformer_xl.analysis.effective_context import measure_context

    cost = sum(reader.cost(sweep) for reader in models)
    names = ", ".join(reader.name for reader in models)
    say(f"seed {seed}: {names} read {cost:,} tokens in {len(sweep.contexts)} contexts")
    with ProgressBar("context", cost, "tokens") as bar:
        found = measure_context(models, reproduction.corpus.split("test").tokens, sweep, bar.advance)
    return {"trained_with_seed": seed, **found.as_dict()}


def _measured_before(file: Path) -> list[dict[str, Any]]:
    """The groups in a file; none where it is not there or damaged, as it is written again."""
    try:
        groups = encoder.loads(file.read_bytes())["groups"]
        return [group for group in groups if {"models", "contexts", "positions", "threshold"} <= group.keys()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _is_of(group: dict[str, Any], seed: int, models: list[GroupModel], sweep: ContextSweep) -> bool:
    """Whether a group is what would be measured."""
    found = [
        (model["name"], model["attention_window"], model["memory_length"], model["segment_length"])
        for model in group["models"]
    ]
    limits = [(model.plan.context_limits, model.plan.segment_length) for model in models]
    wanted = [
        (model.name, limit.attention_window, limit.memory_length, segment)
        for model, (limit, segment) in zip(models, limits, strict=True)
    ]
    same = (group["contexts"], len(group["positions"]), group["threshold"], group.get("trained_with_seed"))
    return found == wanted and same == (list(sweep.contexts), sweep.num_positions, sweep.threshold, seed)


def _reader(reproduction: Reproduction, name: str, index: int) -> GroupModel:
    from transformer_xl.analysis.effective_context import GroupModel
    from transformer_xl.config import EvaluationConfig
    from transformer_xl.device import choose_device
    from transformer_xl.evaluation.evaluate import EvaluationPlan
    from transformer_xl.reproduction.systems import BY_NAME
    from transformer_xl.run_folder import RunFolder

    system = BY_NAME[name]
    folder = RunFolder.open(reproduction.runs(system)[index])
    window = best_window(reproduction.scores(system)[index]) if system.attends and system.has_memory else None
    config = None if window is None else EvaluationConfig(memory_length=window - 1, attention_window=window)
    return GroupModel(
        name,
        folder.load_model(choose_device(reproduction.device)),
        EvaluationPlan.resolve(folder.config, config),
    )
