"""Trackers: programs such as W&B that also get the settings, metrics, results and a sample of a run (train.trackers).

`TrackerCallback` decides what is sent when; the classes below it say how each program takes it. Whatever a program
raises ends the sending, never the training. `trackers.json` in the run's folder has, for each, the id of the run there,
the last step that was sent, and the changes of settings, so a resumed run goes on in the same place and sends no line
twice.

Where each program keeps its data, and what it is called there, is left to its own environment variables.
"""

from __future__ import annotations

import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from importlib.util import find_spec
from os import environ
from typing import Any

from typing_extensions import override

from transformer_xl.config import TrainConfig, UserError, flatten
from transformer_xl.config.extras import install_command
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.files import parse_json, read_bytes, write_json
from transformer_xl.generation.generate import generate
from transformer_xl.run import load_run
from transformer_xl.run_folder import RunFolder, config_text
from transformer_xl.training.callbacks import Callback, Metrics, TrainerView

PROJECT = "transformer-xl"
"""Project or experiment of the runs in other programs, unless their environment variables name another."""
_SAMPLE_TOKENS = 200


class Tracker(ABC):
    """A program that shows the metrics of runs."""

    can_rewind = False
    """Whether `begin` removes what was sent of the step where training goes on, and of later ones."""

    def __init__(self, package: str) -> None:
        """Import the program's package."""
        self.package: Any = import_module(package)

    @abstractmethod
    def begin(self, folder: RunFolder, run_id: str | None, step: int) -> str:
        """Begin a run with the settings of a folder, or go on in the run of an id at a step; return the id."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add metrics of a step, by names such as `train/nats_per_token`."""

    @abstractmethod
    def report(self, values: Mapping[str, Any], sample: str) -> None:
        """Add the results of the whole training, and a text that its model wrote."""

    @abstractmethod
    def end(self, *, finished: bool) -> None:
        """Wait until all is stored; `finished` is false for a run that was stopped or failed."""


class TensorBoard(Tracker):
    """Writes event files to the folder tensorboard/ of the run."""

    can_rewind = True

    @override
    def begin(self, folder: RunFolder, run_id: str | None, step: int) -> str:
        path = folder.path / "tensorboard"
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(
            str(path), purge_step=None if run_id is None else step
        )
        self._writer.add_text("config", f"```yaml\n{config_text(folder.config)}```", step)
        return path.name

    @override
    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a killed run must not lose metrics from before its checkpoint

    @override
    def report(self, values: Mapping[str, Any], sample: str) -> None:
        rows = "".join(f"| {name} | {value} |\n" for name, value in values.items())
        self._writer.add_text("report", f"| | |\n|---|---|\n{rows}", values["step"])
        self._writer.add_text("sample", f"```\n{sample}\n```", values["step"])

    @override
    def end(self, *, finished: bool) -> None:
        self._writer.close()


class WandB(Tracker):
    """Weights & Biases: WANDB_MODE (`offline`), WANDB_PROJECT, WANDB_DIR and its other variables hold."""

    @override
    def begin(self, folder: RunFolder, run_id: str | None, step: int) -> str:
        self._run = self.package.init(
            project=environ.get("WANDB_PROJECT", PROJECT),
            name=environ.get("WANDB_NAME", folder.path.name),
            dir=environ.get("WANDB_DIR", str(folder.path)),
            config=folder.config.model_dump(mode="json"),
            id=run_id,
            resume="allow",
            reinit="create_new",  # a run that the caller's program has open is not touched
            settings=self.package.Settings(console="off"),  # it would copy each state of the progress bar
        )
        # wandb's own count of steps cannot go back, as training can
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    @override
    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    @override
    def report(self, values: Mapping[str, Any], sample: str) -> None:
        self._run.summary.update({**{f"report/{name}": value for name, value in values.items()}, "sample": sample})

    @override
    def end(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MLflow(Tracker):
    """MLflow: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and its other variables hold."""

    @override
    def begin(self, folder: RunFolder, run_id: str | None, step: int) -> str:
        # by default, a server that does not answer would hold up training for minutes before it is given up
        environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        self._client, entities = self.package.MlflowClient(), import_module("mlflow.entities")
        self._metric = entities.Metric
        if run_id is None:
            name = environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
            self._id = self._client.create_run(experiment_id, run_name=folder.path.name).info.run_id
            settings = flatten(folder.config.model_dump(mode="json")).items()
            params = [entities.Param(name, str(value)) for name, value in settings]
            for start in range(0, len(params), 100):  # as many as one call takes
                self._client.log_batch(self._id, params=params[start : start + 100])
        else:
            self._id = run_id
            self._client.update_run(run_id, status="RUNNING")
        self._client.log_text(self._id, config_text(folder.config), "config.yaml")  # parameters cannot change
        return self._id

    @override
    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(self._id, [self._metric(name, value, now, step) for name, value in values.items()])

    @override
    def report(self, values: Mapping[str, Any], sample: str) -> None:
        self._client.log_dict(self._id, dict(values), "report.json")
        self._client.log_text(self._id, sample, "sample.txt")

    @override
    def end(self, *, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


class Trackio(Tracker):
    """Trackio: TRACKIO_DIR, TRACKIO_SPACE_ID and its other variables hold."""

    @override
    def begin(self, folder: RunFolder, run_id: str | None, step: int) -> str:
        # a run is found again by its name, which another folder may have too
        name = run_id or f"{folder.path.name}-{uuid.uuid4().hex[:8]}"
        config = flatten(folder.config.model_dump(mode="json"))
        self._run = self.package.init(environ.get("TRACKIO_PROJECT", PROJECT), name, config=config, resume="allow")
        return name

    @override
    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step)

    @override
    def report(self, values: Mapping[str, Any], sample: str) -> None:
        entries = {f"report/{name}": value for name, value in values.items()}
        self._run.log({**entries, "sample": self.package.Markdown(sample)}, values["step"])

    @override
    def end(self, *, finished: bool) -> None:
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio}
"""The class of each name; the packages have the names too."""


def check_trackers(config: TrainConfig) -> None:
    """Check, before a run folder is created, that the packages of the trackers are installed.

    Raises:
        UserError: one is missing.
    """
    for name in config.trackers:
        if find_spec(name) is None:
            raise UserError(
                f"train.trackers {name} needs a package that is not installed; {install_command(name)}, or leave "
                f"{name} out (metrics.jsonl has the same values)"
            )


class TrackerCallback(Callback):
    """Sends a run to a tracker, from the first process."""

    def __init__(self, name: str) -> None:
        """Prepare the callback; the tracker is opened when training begins.

        Args:
            name: a key of TRACKERS.
        """
        self.name = name
        self._tracker: Tracker | None = None
        self._record: dict[str, Any] = {}

    @override
    def on_train_begin(self, trainer: TrainerView) -> None:
        if trainer.world.is_first:
            self._try(trainer, lambda: self._begin(trainer))

    @override
    def on_metrics(self, trainer: TrainerView, metrics: Metrics) -> None:
        if tracker := self._tracker:
            self._try(trainer, lambda: self._send(tracker, trainer.folder, [metrics]))

    def end(self, trainer: TrainerView, report: Mapping[str, Any] | None = None, sample: str = "") -> None:
        """End the run in the tracker, where a resumed training goes on.

        Args:
            trainer: the trainer.
            report: results of a finished training, `step` among them; None for one that was stopped or failed.
            sample: a text that the model wrote.
        """
        if (tracker := self._tracker) and report is not None:
            self._try(trainer, lambda: tracker.report(report, sample))
        if tracker := self._tracker:
            self._try(trainer, lambda: tracker.end(finished=report is not None))
        self._tracker = None

    def _begin(self, trainer: TrainerView) -> None:
        folder, step = trainer.folder, trainer.state.step
        self._record = _read_records(folder).get(self.name, {})
        if not self._record and self.name == "tensorboard" and (folder.path / self.name).exists():
            self._record = {"id": self.name, "train": step, "valid": step}  # of a version without records
        tracker = self._tracker = TRACKERS[self.name](self.name)
        self._record["id"] = tracker.begin(folder, self._record.get("id"), step)
        # lines that were sent and are trained again are the same, unless settings have changed
        changes = [str(change) for change in folder.config.history]
        earlier = [str(change) for change in folder.config.history if change.step < step]
        is_changed = self._record.get("changes", earlier) != changes  # earlier versions did not record them
        latest = step - 1 if tracker.can_rewind else step if is_changed else sys.maxsize
        self._record |= {split: min(self._record.get(split, -1), latest) for split in ("train", "valid")}
        self._record["changes"] = changes
        self._send(tracker, folder, folder.metrics())  # also those from before the tracker was named

    def _send(self, tracker: Tracker, folder: RunFolder, lines: Sequence[Metrics]) -> None:
        for line in lines:
            split, step = line["split"], line["step"]
            if step > self._record.get(split, -1):
                numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
                tracker.log({f"{split}/{name}": value for name, value in numbers.items() if name != "step"}, step)
                self._record[split] = step
        write_json(folder.path / "trackers.json", {**_read_records(folder), self.name: self._record})

    def _try(self, trainer: TrainerView, action: Callable[[], object]) -> None:
        """Do something with the tracker; if it fails, say so and do without the tracker from now on."""
        try:
            with redirect_stdout(sys.stderr):  # standard output is for the results of commands
                action()
        except Exception as error:  # whatever the program or its server raises
            tracker, self._tracker = self._tracker, None
            with suppress(Exception), redirect_stdout(sys.stderr):
                if tracker is not None:
                    tracker.end(finished=False)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            trainer.warn(f"{self.name} gets nothing more until the run is resumed, training goes on: {reason[:300]}")


def end_finished(trackers: Sequence[TrackerCallback], trainer: TrainerView) -> None:
    """Send the results of a finished training, and a sample of its best weights, and end the run in each tracker."""
    if not trackers or not trainer.world.is_first:
        return
    state = trainer.state
    report: dict[str, Any] = {
        "step": state.step,
        "best_nats_per_token": state.best_nats,
        "seconds": round(state.seconds, 3),
    }
    report["parameters"] = trainer.model.num_parameters()
    try:
        run = load_run(trainer.folder, trainer.model.device)
        report["memory_length"] = EvaluationPlan.of_run(run).context_limits.memory_length
        seed = trainer.config.seed
        sample = generate(run, max_new_tokens=_SAMPLE_TOKENS, seed=seed).text if run.tokenizer.is_text else ""
    except (UserError, RuntimeError) as error:  # such as no memory for a second model
        sample = f"no sample: {error}"
    for tracker in trackers:
        tracker.end(trainer, {name: value for name, value in report.items() if value is not None}, sample)


def _read_records(folder: RunFolder) -> dict[str, Any]:
    """Return what trackers.json has by tracker; empty if it is missing or damaged: then runs begin anew there."""
    with suppress(ValueError, AttributeError, TypeError):
        records = parse_json(read_bytes(folder.path / "trackers.json"))
        return {name: dict(record) for name, record in records.items()}
    return {}
