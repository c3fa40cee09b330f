"""`txl analyze speed`: how much faster memory makes evaluation, as a table beside the paper's."""

from __future__ import annotations

import json as encoder
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.options import ANY_MACHINE, Json, Machine, MachineOptions, whole_numbers
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.config import UserError, load_recipe, run_settings
from transformer_xl.files import write_text
from transformer_xl.progress import say

if TYPE_CHECKING:
    from transformer_xl.analysis.evaluation_speed import Contest, Task
    from transformer_xl.config import RunConfig


@dataclass(frozen=True)
class Contested:
    """What is compared."""

    lengths: str = "800,1800,2800,3800"
    """Attention lengths, in tokens."""
    segments: str = "128,256,512,1024,2048"
    """New tokens that memory reads in one step; the quickest counts."""
    clamp: int | Literal["none"] | None = None
    """Distances above this count as this one. [default: as the recipe or run is evaluated]"""
    rounds: int = 3
    """How often each is timed, in turns; the median counts."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of matrix products, for both."""

    def task(self, config: RunConfig) -> Task:
        """As the contest wants it."""
        from transformer_xl.analysis.evaluation_speed import Task

        clamp = self.clamp
        if clamp is None:
            clamp = config.evaluation.clamp_length or config.model.limit("clamp_length") or "none"
        # cutoffs to be found from a text are left out: the softmax is no part of the comparison
        sizes = config.model.model_copy(update={"cutoffs": ()}) if config.model.cutoffs == "auto" else config.model
        return Task(
            sizes,
            lengths=whole_numbers("--lengths", self.lengths),
            clamp=None if clamp == "none" else clamp,
            segments=whole_numbers("--segments", self.segments),
            rounds=self.rounds,
            precision=self.precision,
        )


_THE_PAPERS = Contested()


def speed(
    model: str = "enwik8-24l",
    /,
    *,
    contested: Annotated[Contested, Parameter(name="*")] = _THE_PAPERS,
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
    contested
        What is compared.
    out
        File for the figures, as JSON.
    """
    if out is not None and out.exists():
        raise UserError(f"{out} exists already; choose another --out")
    figures = measure_speed(model, contested, machine)
    if out is not None:
        write_text(out, encoder.dumps(figures, indent=1) + "\n")
    if json:
        print_json(figures)
        return
    show_speed(figures)


def measure_speed(model: str, contested: Contested, machine: Machine) -> dict[str, Any]:
    """All that was measured, for JSON.

    Raises:
        UserError: no such recipe or run, or lengths that cannot be.
    """
    from transformer_xl.analysis.evaluation_speed import Contest
    from transformer_xl.device import keep_freed_memory

    task = contested.task(_settings(model))
    device = machine.choose()
    keep_freed_memory()
    contest = Contest(task, device)
    rows = list(contest.rows(say))
    return {"model": model, **_circumstances(contest), "rows": [row.as_dict() for row in rows]}


def _settings(model: str) -> RunConfig:
    if (Path(model) / "config.yaml").is_file():
        from transformer_xl.run_folder import RunFolder

        return RunFolder.open(model).config
    recipe = load_recipe(model)
    groups = {"model": recipe.model, "train": recipe.train, "evaluation": recipe.evaluation}
    return run_settings(groups, f"recipe {model}")


def _circumstances(contest: Contest) -> dict[str, Any]:
    from transformer_xl.device import environment

    memory, vanilla = contest.parameters
    return {
        "parameters": memory,
        "vanilla_parameters": vanilla,
        "clamp": contest.task.clamp,
        "rounds": contest.task.rounds,
        "number_format": contest.format,
        **environment(contest.device),
    }


def show_speed(figures: dict[str, Any]) -> None:
    """Prints the two tables."""
    from transformer_xl.analysis.evaluation_speed import COLUMNS, table_rows

    head = f"{figures['model']}, {figures['number_format']}, {figures['threads']} threads on {figures['processor']}"
    print_table(
        f"Evaluation speed, {head}. Vanilla as the paper ran it: scores stored", COLUMNS, table_rows(figures, "stored")
    )
    print_table("Vanilla with fused causal attention", COLUMNS, table_rows(figures, "fused"))
