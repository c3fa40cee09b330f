"""`txl reproduce`: the paper's tables at any scale, compared with the paper's results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from transformer_xl.cli.flags import ModelFlags, TrainFlags, typed_settings
from transformer_xl.cli.options import ANY_MACHINE, Json, MachineOptions, parse_integers
from transformer_xl.cli.output import command_line, print_json, print_table

if TYPE_CHECKING:
    from transformer_xl.reproduction.reproduction import Reproduction

reproduce = App(
    name="reproduce", help="The paper's tables at any scale, compared with its results.", help_format="plaintext"
)


@dataclass(frozen=True)
class Scale:
    """What is trained, and how much of it."""

    corpus: Path = Path("corpora/enwik8")
    """Folder that 'txl prepare' made."""
    out: Path = Path("reproduction")
    """Folder for runs, results and the report; finished runs in it are reused."""
    recipe: str = "ablation"
    """Settings that all systems share."""
    seeds: str | None = None
    """Each system is trained once with each seed. [default: 1,2; with --smoke 1]"""
    max_tokens: int | None = None
    """Tokens of the test text that are scored, from its start. [default: 16384; with --smoke 512]"""
    smoke: bool = False
    """Train tiny models for a few steps, to try everything out in minutes."""
    workers: int | None = None
    """Number of trainings at a time. [default: one for each core; on a GPU one]"""
    device: str = "auto"
    """auto, cuda, mps or cpu."""
    model: ModelFlags | None = None
    train: TrainFlags | None = None

    def open(self) -> Reproduction:
        """Open the folder; everything is checked and nothing is written."""
        seeds = None if self.seeds is None else parse_integers("--seeds", self.seeds)
        from transformer_xl.reproduction.reproduction import Reproduction

        return Reproduction.open(
            self.out,
            self.corpus,
            recipe=self.recipe,
            **typed_settings(model=self.model, train=self.train),
            seeds=seeds,
            max_tokens=self.max_tokens,
            smoke=self.smoke,
            workers=self.workers,
            device=self.device,
            command=command_line(),
        )


ScaleOptions = Annotated[Scale, Parameter(name="*")]
_DEFAULT = Scale()


@reproduce.command
def ablation(*, scale: ScaleOptions = _DEFAULT, attention_windows: str | None = None, json: Json = False) -> None:
    """Train the ten systems of the paper's ablation, and score each with several attention windows.

    Two more are trained without recurrence at equal memory. About two hours on two CPU cores. Any setting of
    'txl train' may be given.

    Settings: the defaults, then the recipe (--recipe), then flags. When stopped, the same command resumes.

    Parameters
    ----------
    scale
        What is trained.
    attention_windows
        Attention windows with which each system is scored, in tokens. [default: from half a segment to six segments]
    """
    windows = None if attention_windows is None else parse_integers("--attention-windows", attention_windows)
    reproduction = scale.open()
    from transformer_xl.reproduction import tables
    from transformer_xl.reproduction.ablation import COLUMNS, NAMES, equal_memory_rows, equal_memory_title, table_rows

    result = tables.reproduce_ablation(reproduction, windows)
    if json:
        print_json({**result.values, "report": str(result.report)})
        return
    found = result.systems
    title = f"{NAMES[result.metric].capitalize()} and the paper's word perplexity"
    print_table(title, COLUMNS, table_rows(found))
    print_table(equal_memory_title(found), COLUMNS, equal_memory_rows(found))
    print_table("The paper's claims, and what came out here", ["in the paper", "here"], result.values["verdicts"])
    print(f"report: {result.report}")


@reproduce.command
def context(
    *,
    scale: ScaleOptions = _DEFAULT,
    context_step: int | None = None,
    max_context: int | None = None,
    num_positions: int = 1000,
    json: Json = False,
) -> None:
    """Train the models of the paper's two groups, and measure how far back text still helps each of them.

    Runs of the ablation in the same folder are reused. Each model is read with the attention window that
    scored best. A quarter of an hour of training on two CPU cores beyond the ablation's, and as much of measuring.

    Settings: the defaults, then the recipe (--recipe), then flags. When stopped, the same command resumes.

    Parameters
    ----------
    scale
        What is trained.
    context_step
        Tokens by which the context grows. [default: half a segment]
    max_context
        The longest context. [default: ten steps]
    num_positions
        Number of positions drawn from the test text.
    """
    reproduction = scale.open()
    from transformer_xl.reproduction import tables
    from transformer_xl.reproduction.context_table import COLUMNS, table_rows

    sweep = reproduction.context_sweep(context_step, max_context, num_positions)
    result = tables.reproduce_context(reproduction, sweep)
    if json:
        print_json({**result.values, "report": str(result.report)})
        return
    seeds = f"{len(reproduction.seeds)} seeds" if len(reproduction.seeds) > 1 else "1 seed"
    for rows in table_rows(result.values["groups"]):
        print_table(f"Relative effective context length in tokens, for each of {seeds}", COLUMNS, rows)
    print(f"report: {result.report}")


@reproduce.command
def speed(
    model: str = "enwik8-24l",
    /,
    *,
    out: Path = Path("reproduction"),
    smoke: bool = False,
    machine: MachineOptions = ANY_MACHINE,
    json: Json = False,
) -> None:
    """Compare evaluation with memory to a window moved token by token, for the report; see also 'txl analyze speed'.

    About ten minutes at the paper's sizes on two CPU cores.

    Parameters
    ----------
    model
        Name of a recipe, or folder of a run: the sizes.
    out
        Folder of a reproduction, new or not.
    smoke
        Use tiny models and short windows, to try it out.
    """
    from transformer_xl.analysis.evaluation_speed import COLUMNS, speed_tables
    from transformer_xl.reproduction import tables

    options = {"device": machine.device, "threads": machine.threads, "command": command_line()}
    result = tables.reproduce_speed(out, model, smoke=smoke, **options)
    if json:
        print_json({**result.values, "report": str(result.report)})
        return
    for title, rows in speed_tables(result.values).items():
        print_table(title, COLUMNS, rows)
    print(f"report: {result.report}")


@reproduce.command(name="all")
def everything(*, scale: ScaleOptions = _DEFAULT, speed_recipe: str = "enwik8-24l") -> None:
    """Make all of the paper's tables and plots in one folder, with one report.

    About three hours on two CPU cores.

    Settings: the defaults, then the recipe (--recipe), then flags. When stopped, the same command resumes.

    Parameters
    ----------
    scale
        What is trained.
    speed_recipe
        Recipe with the model sizes at which the speed of evaluation is measured.
    """
    reproduction = scale.open()
    from transformer_xl.reproduction import tables

    print(f"report: {tables.reproduce_all(reproduction, smoke=scale.smoke, speed_recipe=speed_recipe)}")
