"""This package in `equal_time.py`: `train` with a recipe for a number of steps, then `evaluate`.

Settings: `recipe`, and optionally `model` and `train`, settings that replace single ones of the recipe. A tenth of the
steps warm up.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from implementations.competitor import Assignment, mean_of_tens
from trainee import StepTimer
from typing_extensions import override

from transformer_xl import Callback, Corpus, EvaluationConfig, Run, __version__, evaluate, train
from transformer_xl.cli.main import keep_freed_memory
from transformer_xl.config import RelativeConfig
from transformer_xl.training.trainer import Trainer

_MANY_STEPS = 100_000  # of which a measurement runs the first


class Clock(StepTimer):
    """Measures the steps, and stops training when the time is over."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    @override
    def on_step(self, trainer: Trainer, num_tokens: int) -> None:
        super().on_step(trainer, num_tokens)
        if sum(self.step_seconds) >= self.seconds and len(self.step_seconds) >= 10:
            trainer.stop()


def fit(assignment: Assignment, steps: int, callbacks: list[Callback], folder: str) -> Run:
    """Train for so many steps, and return the run."""
    settings = assignment.settings
    replaced = {
        "max_steps": steps,
        "warmup_steps": max(1, round(0.1 * steps)),
        "seed": assignment.seed,
        "dtype": assignment.dtype,
        "eval_interval": steps,
        "eval_tokens": 4096,  # chooses nothing: the last weights are used
        "checkpoint_interval": steps,
        "log_interval": max(1, steps // 10),
        **settings.get("train", {}),
    }
    return train(
        *(settings["recipe"], assignment.corpus, Path(folder) / "run"),
        model=settings.get("model"), train=replaced, callbacks=callbacks, progress=False,
    ).run  # fmt: skip


def compete(assignment: Assignment) -> dict[str, Any]:
    """Train and score, or measure steps; see `implementations.competitor.compete`."""
    keep_freed_memory()  # as `txl train` does
    with tempfile.TemporaryDirectory() as folder:
        if assignment.steps is None:
            clock = Clock(assignment.seconds)
            fit(assignment, _MANY_STEPS, [clock], folder)
            return {"step_seconds": mean_of_tens(clock.step_seconds)}
        run = fit(assignment, assignment.steps, [], folder)
    corpus, trained = Corpus.open(assignment.corpus), run.config.train.memory_length
    lengths = {split: len(assignment.tokens(split)) for split in ("valid", "test")}

    def nats(split: Any, memory_length: int) -> float:
        config = EvaluationConfig(memory_length=memory_length)
        return evaluate(run, corpus.split(split), config, max_tokens=lengths[split]).nats_per_token

    factors = (1, 2, 4) if isinstance(run.config.model, RelativeConfig) else (1,)  # nothing limits an LSTM's memory
    valid = {factor * trained: nats("valid", factor * trained) for factor in factors}
    best = min(valid, key=lambda length: valid[length])
    return {
        "parameters": run.model.num_parameters(),
        "note": "the memory length of scoring chosen on the validation text",
        "versions": {"transformer_xl": __version__},
        "steps": run.config.train.max_steps,  # fewer where max_epochs limits them
        "valid_nats_per_token": valid[best],
        "valid_nats_per_token_by_context": {str(length): loss for length, loss in valid.items()},
        "context": best,
        "test_nats_per_token": nats("test", best),
    }
