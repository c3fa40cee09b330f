"""Search settings of training with Optuna, which ends trials early whose validation loss is behind those of others.

    pip install optuna
    python examples/sweep_optuna.py CORPUS FOLDER --trials 20     # FOLDER gets a run for each trial, and study.db
    txl runs FOLDER --sort valid_nats_per_token

A second call goes on with the study: with more trials, or in several processes at once.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import optuna

import transformer_xl as txl


class Prune(txl.Callback):
    """Reports each validation loss to a trial, and stops training when Optuna gives the trial up."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial
        self.is_pruned = False

    def on_metrics(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Look at the newest line of metrics."""
        if metrics["split"] == "valid" and not self.is_pruned:
            self.trial.report(metrics["nats_per_token"], metrics["step"])
            self.is_pruned = self.trial.should_prune()
            if self.is_pruned:
                trainer.stop(skip_validation=True)


def main(
    corpus: Path, folder: Path, trials: int = 20, recipe: str = "fast-tiny", settings: dict[str, Any] | None = None
) -> optuna.Study:
    """Train a run for each trial, and print the best settings.

    Args:
        corpus: folder that `txl prepare` created, with a validation split.
        folder: folder of the runs and of the study, new or of an earlier call.
        trials: number of trials of this call.
        recipe: the recipe whose settings are varied.
        settings: further settings of training for all trials, such as {"max_steps": 200}.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def objective(trial: optuna.Trial) -> float:
        train = {
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
            "weight_decay": trial.suggest_float("weight_decay", 1e-3, 0.3, log=True),
            "warmup_steps": trial.suggest_int("warmup_steps", 10, 100),
            **(settings or {}),
        }
        model = {"dropout": trial.suggest_float("dropout", 0.0, 0.3)}
        prune = Prune(trial)
        run = folder / f"trial-{trial.number:03}"
        result = txl.train(recipe, corpus, run, model=model, train=train, callbacks=[prune], progress=False)
        if prune.is_pruned:
            raise optuna.TrialPruned
        assert result.best_nats_per_token is not None, "the corpus needs a validation split"
        return result.best_nats_per_token

    study = optuna.create_study(
        storage=f"sqlite:///{folder / 'study.db'}",
        study_name="sweep",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=1),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1),
    )
    study.optimize(objective, n_trials=trials)
    states = [trial.state.name.lower() for trial in study.trials]
    print(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
    print(f"best: trial-{study.best_trial.number:03}, {study.best_value:.4f} nats per token")
    print(json.dumps(study.best_params))
    return study


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--recipe", default="fast-tiny")
    arguments = parser.parse_args()
    main(arguments.corpus, arguments.folder, arguments.trials, arguments.recipe)
