"""`txl train`: train a new model on a corpus, or resume a run."""

from __future__ import annotations

import math
import shlex
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from transformer_xl.cli.flags import (
    EVALUATION,
    MODEL,
    TRAINING,
    EvaluationFlags,
    ModelFlags,
    TrainFlags,
    as_flags,
    given_settings,
)
from transformer_xl.cli.options import DEFAULT_DEVICE, DeviceFlags, DeviceOptions, Integer, Json
from transformer_xl.cli.output import print_json, print_table, say_weights
from transformer_xl.config import DEFAULT_RECIPE, UserError, merge
from transformer_xl.files import quoted
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
    from_step: Annotated[int | None, Integer, Parameter(name="--from")] = None,
    base: Path | None = None,
    find_rate: Annotated[bool, Parameter(negative=())] = False,
    model: Annotated[ModelFlags | None, Parameter(group=MODEL)] = None,
    train: Annotated[TrainFlags | None, Parameter(group=TRAINING)] = None,
    evaluation: Annotated[EvaluationFlags | None, Parameter(group=EVALUATION)] = None,
    device_options: DeviceFlags = DEFAULT_DEVICE,
    json: Json = False,
) -> int:
    """Train a new model on a corpus, or resume a run.

    Settings: those of the recipe, replaced by flags; "if not set" is for what neither sets. Ctrl-C or SIGTERM saves a
    checkpoint, validates its weights and ends the command with status 130 or 143; a second one skips the validation.
    --resume continues from there with the same training as without the stop.

    Parameters
    ----------
    recipe
        Name of a recipe ('txl recipes' lists them), a YAML file in the same format, or the folder of a run. [default:
        fast-small]
    corpus
        Folder that 'txl prepare' created; with --resume, its new location if it has moved.
    run
        New folder for settings, weights and metrics. [default: runs/CORPUS-RECIPE]
    resume
        Folder of a run to resume, instead of a recipe and --run.
    from_step
        With --resume, go back to the checkpoint of this step, with the settings of training that it had. Later
        checkpoints are kept aside until new ones overtake them, and the best weights until better ones are found.
    base
        With --resume of an adapter, the new folder of its base if that has moved.
    find_rate
        Do not train, but propose a learning rate by short trainings, in about a minute for a small model.
    """
    from transformer_xl.training import train as training

    if recipe is None and resume is None:
        recipe = DEFAULT_RECIPE
    options: dict[str, Any] = given_settings(model=model, train=train, evaluation=evaluation)
    if resume is None and (from_step is not None or base is not None):
        raise UserError("--from and --base are for a run that is resumed; give --resume RUN too, or leave them out")
    if find_rate:
        if resume is not None:
            raise UserError("--find-rate is for a new run; give the recipe and the settings of the run, not --resume")
        _find_rate(recipe or DEFAULT_RECIPE, _given_corpus(corpus), run, options, device_options, as_json=json)
        return 0
    options |= {**vars(device_options), "handle_signals": True}
    if resume is None:
        result = training.train(recipe, _given_corpus(corpus), run, **options)
    elif recipe or run:
        raise UserError("--resume takes the settings and the folder from the run; leave the recipe and --run out")
    elif "model" in options:
        setting = next(iter(options["model"]))
        raise UserError(f"model.{setting} cannot change within a run; start a new one with --run DIR")
    elif (resume / "classifier.json").is_file():
        if given := [name for name in ("train", "evaluation") if name in options]:
            raise UserError(f"settings of {given[0]} cannot change within a classifier's training; leave them out")
        if corpus or base or from_step is not None:
            raise UserError("a classifier is resumed from its newest checkpoint; leave --corpus, --base and --from out")
        from transformer_xl.apps.classify.command import resume_classifier

        return resume_classifier(resume, json=json, **options)
    else:
        result = training.resume(resume, corpus, from_step=from_step, base=base, **options)
    return print_result(result, as_json=json)


def _given_corpus(corpus: Path | None) -> Path:
    if corpus is None:
        raise UserError("training needs --corpus DIR (from 'txl prepare'), or --resume RUN to resume a run")
    return corpus


def _find_rate(
    recipe: str,
    corpus: Path,
    run: Path | None,
    settings: dict[str, Any],
    device_options: DeviceOptions,
    *,
    as_json: bool,
) -> None:
    """Print a learning rate for a training with these settings, and the command that trains with it."""
    from transformer_xl.run_folder import check_new_run
    from transformer_xl.training.find_rate import find_learning_rate
    from transformer_xl.training.train import complete_settings, ignore

    # what `find_learning_rate` does not take but the printed command will be refused for
    complete_settings(recipe, corpus, settings, ignore)
    if run is not None:
        check_new_run(run)
    given = {group: settings[group] for group in ("model", "train") if group in settings}
    result = find_learning_rate(recipe, corpus, **given, **vars(device_options))
    words = ["txl", "train", recipe, "--corpus", str(corpus)]
    words += ["--run", str(run)] if run else []
    words += as_flags(merge(settings, {"train": {"learning_rate": result.learning_rate}}))
    words += as_flags({name: value for name, value in vars(device_options).items() if value not in (None, "auto")})
    command = shlex.join(words)
    if as_json:
        trials = [asdict(trial) for trial in result.trials]
        print_json({**asdict(result), "trials": trials, "command": command})
        return
    rows = [
        [f"{trial.learning_rate:g}", f"{trial.steps:,}", "-" if nats is None else f"{nats:.4f}"]
        for trial in result.trials
        for nats in [trial.nats_per_token]
    ]
    print_table("short trainings", ["learning rate", "steps", "nats/token"], rows)
    print(f"learning rate {result.learning_rate:g}, found in {result.seconds:,.0f} s")
    print(f"next: {command}")


def print_result(result: TrainResult, *, as_json: bool) -> int:
    """Print what a training ended with and what to type next, and return the exit status."""
    from transformer_xl.evaluation.metrics import exp_nats
    from transformer_xl.run_folder import RunFolder

    status = 0 if result.finished else 128 + (result.stop_signal or signal.SIGTERM)
    if result.rank != 0:
        return status
    best, folder = result.best_nats_per_token, RunFolder.open(result.path)
    # twice the loss of guessing, which a training of a few steps does not reach
    has_diverged = result.finished and best is not None and best > 2 * math.log(folder.config.model.vocab_size)
    weights, losses = folder.choose_weights(), [asdict(loss) for loss in result.losses]
    if not result.finished:
        say(f"stopped and saved at step {result.step:,}; resume with: txl train --resume {quoted(result.path)}")
        say_weights(weights)
    if as_json:
        facts = {
            "run": str(result.path),
            "finished": result.finished,
            "step": result.step,
            "max_steps": result.max_steps,
            "best_valid_nats_per_token": best,
            **weights.as_dict(),
            "seconds": result.seconds,
        }
        finetune = folder.config.finetune
        print_json(facts if finetune is None else {**facts, "losses": losses, "kept_tokens": finetune.kept_tokens})
    elif result.finished:
        _print_losses(result)
        found = f"{best:.4f} nats per token (perplexity per token {exp_nats(best):.6g})" if best else ""
        valid = f", best validation loss {found}" if best else ""
        print(f"{result.path}: {result.step:,} steps in {result.seconds:,.0f} s{valid}")
        if not has_diverged:
            print(f"next: txl evaluate {quoted(result.path)}")
    if has_diverged:
        say("txl: error: worse than guessing: the training diverged; use a lower learning rate, in a new run")
    return 2 if has_diverged else status


def _print_losses(result: TrainResult) -> None:
    """Print what a run of fine-tuning gained on the new text and lost on that of its base."""
    rows = [
        [
            f"{loss.text} text, {loss.split}",
            f"{loss.num_tokens:,}",
            f"{loss.before:.4f}",
            f"{loss.after:.4f}",
            f"{'gained' if loss.after <= loss.before else 'lost'} {abs(loss.after - loss.before):.4f}",
        ]
        for loss in result.losses
    ]
    if rows:
        print_table("nats per token", ["text", "tokens", "before", "after", "change"], rows)
