"""`txl reproduce all`: the ablation, context lengths, pictures of attention and evaluation speed, in one report."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from transformer_xl.cli.analyze.attention import Pictures, attention
from transformer_xl.cli.analyze.speed import Contested
from transformer_xl.cli.options import Machine
from transformer_xl.cli.reproduce.ablation import make_ablation
from transformer_xl.cli.reproduce.context import make_context
from transformer_xl.cli.reproduce.scale import Scale
from transformer_xl.cli.reproduce.speed import SMOKE, is_measured, make_speed
from transformer_xl.progress import say
from transformer_xl.reproduction.reproduction import Reproduction, keep_report

_DEFAULT = Scale()


def everything(
    *,
    scale: Annotated[Scale, Parameter(name="*")] = _DEFAULT,
    speed_of: str = "enwik8-24l",
) -> None:
    """Make all of the paper's tables and pictures in one folder, with one report.

    About three hours on two CPU cores; when stopped, the same command goes on, and what is done is not done again.

    Parameters
    ----------
    scale
        How large all of it is.
    speed_of
        Recipe whose sizes the speed of evaluation is measured at.
    """
    reproduction = Reproduction.opened(scale)
    sweep = reproduction.context_sweep(positions=100 if scale.smoke else 1000)
    make_ablation(reproduction)
    make_context(reproduction, sweep)
    pictures = reproduction.path / "attention"
    if not pictures.exists():
        run = reproduction.path / "runs" / f"xl-full-seed{reproduction.seeds[0]}"
        attention(run, pictures=Pictures(out=pictures), machine=Machine(scale.device))
    model, contested = ("tiny", SMOKE) if scale.smoke else (speed_of, Contested())
    if not is_measured(model, scale.out):
        say("the speed of evaluation")
        make_speed(model, scale.out, contested, Machine(scale.device))
    keep_report(scale.out)
    print(f"all of it: {scale.out / 'report.html'}")
