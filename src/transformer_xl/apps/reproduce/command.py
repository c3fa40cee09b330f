"""`txl reproduce`: the paper's tables at any scale, compared with the paper's results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from transformer_xl.cli.flags import ModelFlags, TrainFlags, given_settings
from transformer_xl.cli.options import DEFAULT_DEVICE, DeviceFlags, Integer, Json, parse_integers
from transformer_xl.cli.output import command_line, print_json, print_table

if TYPE_CHECKING:
    from transformer_xl.apps.reproduce.reproduction import Reproduction

reproduce = App(
    name="reproduce", help="The paper's tables at any scale, compared with its results.", help_format="plaintext"
)


@dataclass(frozen=True)
class Scale:
    """What is trained, on which corpus, and how much of it.

    The systems are the models that the paper's tables compare, such as Transformer-XL without recurrence.
    """

    corpus: Path = Path("corpora/enwik8")
    """Folder that 'txl prepare' made."""
    out: Path = Path("reproduction")
    """Folder for runs, results and the report; finished runs in it are reused."""
    recipe: str = "ablation"
    """Recipe (a name or a YAML file) with the settings that all systems share."""
    seeds: str | None = None
    """Each system is trained once with each seed. [default: 1,2; with --smoke 1]"""
    max_tokens: Annotated[int | None, Integer] = None
    """Number of test tokens to score, from the start of the test text. [default: 16384; with --smoke 512]"""
    smoke: bool = False
    """Train tiny models for a few steps, to try everything out in minutes."""
    device: str = "auto"
    """cuda, mps or cpu; auto: the fastest that is available."""
    model: ModelFlags | None = None
    train: TrainFlags | None = None

    def open(self) -> Reproduction:
        """Open the folder; everything is checked and nothing is written."""
        seeds = None if self.seeds is None else parse_integers("--seeds", self.seeds)
        from transformer_xl.apps.reproduce.reproduction import Reproduction

        # the fields of this class are named as the parameters of Reproduction.open
        options: dict[str, Any] = {**vars(self), **given_settings(model=self.model, train=self.train), "seeds": seeds}
        return Reproduction.open(**options, command=command_line())


ScaleOptions = Annotated[Scale, Parameter(name="*")]
_DEFAULT_SCALE = Scale()


def _print_results(
    results: dict[str, Any], out: Path, tables: Iterable[tuple[str, list[str], list[list[str]]]], *, json: bool
) -> None:
    """Print results as JSON or as tables, each with its title, columns and rows; and the path of the report."""
    report = str(out / "report.html")
    if json:
        print_json({**results, "report": report})
        return
    for title, columns, rows in tables:
        print_table(title, columns, rows)
    if results["caveat"]:
        print(results["caveat"])
    print(f"report: {report}")


@reproduce.command
def ablation(*, scale: ScaleOptions = _DEFAULT_SCALE, attention_windows: str | None = None, json: Json = False) -> None:
    """Train the ten systems of the paper's ablation, and score each with several attention windows.

    Two more, without recurrence, get longer segments, so that a training step needs as much device memory as one
    with recurrence. Takes about two hours on two CPU cores. Any setting of 'txl train' may be given.

    Settings: the defaults, then the recipe (--recipe), then flags. When stopped, the same command resumes.

    Parameters
    ----------
    scale
        What is trained, and how much of it.
    attention_windows
        Attention windows with which each system is scored, in tokens. [default: from half a segment of the recipe to
        six segments]
    """
    windows = None if attention_windows is None else parse_integers("--attention-windows", attention_windows)
    reproduction = scale.open()
    from transformer_xl.apps.reproduce import ablation, tables

    results = tables.reproduce_ablation(reproduction, windows)
    systems, metric = ablation.system_results(results), ablation.NAMES[results["metric"]].capitalize()
    shown = [
        (f"{metric} and the paper's word perplexity", ablation.COLUMNS, ablation.table_rows(systems)),
        (ablation.equal_memory_title(systems), ablation.COLUMNS, ablation.equal_memory_rows(systems)),
        ("Claims of the paper, and the results", ["claim of the paper", "result"], results["verdicts"]),
    ]
    _print_results(results, scale.out, shown, json=json)


@reproduce.command
def context(
    *,
    scale: ScaleOptions = _DEFAULT_SCALE,
    context_step: Annotated[int | None, Integer] = None,
    max_context: Annotated[int | None, Integer] = None,
    num_positions: Annotated[int, Integer] = 1000,
    json: Json = False,
) -> None:
    """Train the models of the paper's two groups, and measure how far back text still helps each of them.

    Runs of 'txl reproduce ablation' in the same folder are reused. Each model is evaluated with the attention window
    that scored best. On two CPU cores, it takes a quarter of an hour to train the models that the ablation lacks,
    and as long to measure.

    Settings: the defaults, then the recipe (--recipe), then flags. When stopped, the same command resumes.

    Parameters
    ----------
    scale
        What is trained, and how much of it.
    context_step
        Tokens by which the context grows. [default: half a segment]
    max_context
        The longest context, in tokens. [default: ten times --context-step]
    num_positions
        Number of positions drawn from the test text.
    """
    reproduction = scale.open()
    from transformer_xl.apps.reproduce import tables
    from transformer_xl.apps.reproduce.report import CONTEXT_COLUMNS, context_rows

    sweep = reproduction.context_sweep(context_step, max_context, num_positions)
    results = tables.reproduce_context(reproduction, sweep)
    seeds = f"{len(reproduction.seeds)} seeds" if len(reproduction.seeds) > 1 else "1 seed"
    title = f"Relative effective context length in tokens, for each of {seeds}"
    _print_results(
        results, scale.out, [(title, CONTEXT_COLUMNS, rows) for rows in context_rows(results["groups"])], json=json
    )


@reproduce.command
def speed(
    model: str = "enwik8-24l",
    /,
    *,
    out: Path = Path("reproduction"),
    smoke: bool = False,
    device_options: DeviceFlags = DEFAULT_DEVICE,
    json: Json = False,
) -> None:
    """Compare evaluation with memory to a window moved token by token, for the report; see also 'txl analyze speed'.

    Takes about ten minutes at the paper's sizes on two CPU cores.

    Parameters
    ----------
    model
        Name of a recipe, or folder of a run, which sets the sizes of both models.
    out
        Folder of a reproduction, new or not.
    smoke
        Use tiny models and short windows, to try it out.
    """
    from transformer_xl.apps.analyze.evaluation_speed import COLUMNS, speed_tables
    from transformer_xl.apps.reproduce import tables

    results = tables.reproduce_speed(out, model, smoke=smoke, command=command_line(), **vars(device_options))
    _print_results(results, out, [(title, COLUMNS, rows) for title, rows in speed_tables(results).items()], json=json)


@reproduce.command(name="all")
def everything(*, scale: ScaleOptions = _DEFAULT_SCALE) -> None:
    """Make all of the paper's tables and plots in one folder, with one report.

    Takes about three hours on two CPU cores.

    Settings: the defaults, then the recipe (--recipe), then flags. When stopped, the same command resumes.

    Parameters
    ----------
    scale
        What is trained, and how much of it.
    """
    reproduction = scale.open()
    from transformer_xl.apps.reproduce import tables

    print(f"report: {tables.reproduce_all(reproduction)}")
