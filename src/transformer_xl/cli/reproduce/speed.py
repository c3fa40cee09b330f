"""`txl reproduce speed`: the paper's table of evaluation speed, for the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from transformer_xl.cli.analyze.speed import Contested, measure_speed, show_speed
from transformer_xl.cli.options import ANY_MACHINE, Json, Machine, MachineOptions
from transformer_xl.cli.output import command_line, print_json
from transformer_xl.files import as_user_error
from transformer_xl.reproduction.reproduction import check_folder, keep

_THE_PAPERS = Contested()


def speed(
    model: str = "enwik8-24l",
    /,
    *,
    out: Path = Path("reproduction"),
    contested: Annotated[Contested, Parameter(name="*")] = _THE_PAPERS,
    smoke: bool = False,
    machine: MachineOptions = ANY_MACHINE,
    json: Json = False,
) -> None:
    """Compare evaluation with memory to a window moved token by token, and put the table into the report.

    About ten minutes at the paper's sizes on two CPU cores; 'txl analyze speed' says what each option does.

    Parameters
    ----------
    model
        Name of a recipe, or folder of a run: the sizes.
    out
        Folder of a reproduction, new or not.
    contested
        What is compared.
    smoke
        Tiny models and lengths: whether everything works.
    """
    figures = make_speed("tiny" if smoke else model, out, SMOKE if smoke else contested, machine)
    if json:
        print_json({**figures, "report": str(out / "report.html")})
        return
    show_speed(figures)
    print(f"report: {out / 'report.html'}")


SMOKE = replace(_THE_PAPERS, lengths="16,32", segments="8,16", rounds=1)


def make_speed(model: str, out: Path, contested: Contested, machine: Machine) -> dict[str, object]:
    """Measures, and writes figures and report into the folder.

    Raises:
        UserError: no such recipe or run, lengths that cannot be, or a folder of something else.
    """
    check_folder(out)
    figures = {"command": command_line(), **measure_speed(model, contested, machine)}
    with as_user_error(f"writing {out}"):
        out.mkdir(parents=True, exist_ok=True)
    keep(out, "speed", figures)
    return figures


def is_measured(model: str, out: Path) -> bool:
    """Whether the folder has the figures of this model."""
    from transformer_xl.reproduction.report import read_figures

    file = out / "speed.json"
    return file.exists() and read_figures(file).get("model") == model
