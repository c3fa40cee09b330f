"""`txl train`: train a new model on a corpus, or resume a run."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from transformer_xl.cli.flags import EvaluationFlags, ModelFlags, TrainFlags, given
from transformer_xl.cli.options import ANY_MACHINE, Json, MachineOptions
from transformer_xl.cli.output import print_json
from transformer_xl.config import UserError
from transformer_xl.progress import say

if TYPE_CHECKING:
    from transformer_xl.training.train import TrainResult


def train(
    recipe: str | None = None,
    /,
    *,
    corpus: Path | None = None,
    run: Path | None = None,
    resume: Path | None = None,
    model: Annotated[ModelFlags | None, Parameter(group="Model")] = None,
    train: Annotated[TrainFlags | None, Parameter(group="Training")] = None,
    evaluation: Annotated[EvaluationFlags | None, Parameter(group="Evaluation")] = None,
    machine: MachineOptions = ANY_MACHINE,
    json: Json = False,
) -> int:
    """Train a new model on a corpus, or resume a run.

    Settings: the defaults, then the recipe, then flags. Ctrl-C or SIGTERM saves a checkpoint and ends the command with
    status 130 or 143; --resume continues from there as if it had never stopped.

    Parameters
    ----------
    recipe
        Name of a recipe ('txl recipes' lists them), or a YAML file like them.
    corpus
        Folder that 'txl prepare' made.
    run
        New folder for settings, weights and metrics. [default: runs/CORPUS-RECIPE]
    resume
        Folder of a run to resume, instead of a recipe and --run.
    """
    from transformer_xl.training import train as training

    flags = given(model=model, train=train, evaluation=evaluation)
    of_model, of_train, of_evaluation = (flags.get(group) for group in ("model", "train", "evaluation"))
    device, threads = machine.device, machine.threads
    if resume is None:
        if corpus is None:
            raise UserError("training needs --corpus DIR (from 'txl prepare'), or --resume RUN to resume a run")
        result = training.train(
            recipe, corpus, run, model=of_model, train=of_train, evaluation=of_evaluation,
            device=device, threads=threads, handle_signals=True,
        )  # fmt: skip
    elif recipe or run:
        raise UserError("--resume continues a run as it is; leave the recipe and --run out")
    elif of_model:
        raise UserError(f"model.{next(iter(of_model))} cannot change within a run; start a new one with --run DIR")
    else:
        result = training.resume(
            resume, corpus, train=of_train, evaluation=of_evaluation,
            device=device, threads=threads, handle_signals=True,
        )  # fmt: skip
    if result.rank == 0:
        _show(result, json)
    return 0 if result.finished else 128 + (result.stop_signal or signal.SIGTERM)


def _show(result: TrainResult, json: bool) -> None:
    best = result.best_nats_per_token
    if not result.finished:
        say(f"stopped and saved at step {result.step:,}; resume with: txl train --resume {result.path}")
    if json:
        print_json(
            {
                "run": str(result.path),
                "finished": result.finished,
                "step": result.step,
                "max_steps": result.max_steps,
                "best_valid_nats_per_token": best,
                "seconds": result.seconds,
            }
        )
    elif result.finished:
        valid = f", best validation loss {best:.4f} nats per token (perplexity {math.exp(best):.2f})" if best else ""
        print(f"{result.path}: {result.step:,} steps in {result.seconds:,.0f} s{valid}")
        print(f"next: txl evaluate {result.path}")
