"""What the folder of a run has recorded, read without its weights: `RunRecord`, and `list_runs` for all of a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from transformer_xl.architectures import build_model
from transformer_xl.checkpoint_record import CheckpointRecord, MemoryLengths
from transformer_xl.config import ModelConfig, RunConfig, UserError, check_settings, nearest
from transformer_xl.display import Displayed
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.files import as_path, parse_json
from transformer_xl.model.lora import ADAPTER_FILE
from transformer_xl.run_folder import list_checkpoints, read_config, read_last_start, read_metrics
from transformer_xl.tensor_file import read_metadata
from transformer_xl.training.callbacks import Metrics

COLUMNS = (
    *("run", "recipe", "architecture", "parameters", "step", "max_steps", "tokens", "train_nats_per_token"),
    *("valid_nats_per_token", "valid_bits_per_byte", "memory_length", "seconds", "device", "processor", "commit"),
    *("finished", "problem"),
)
"""Names of the values of a run in `list_runs`."""

_WEIGHTS = "model.safetensors", ADAPTER_FILE
_OF_RUNS = {"config.yaml", "txl_tokenizer.json", "metrics.jsonl", "starts.jsonl", "checkpoints", *_WEIGHTS}
_OF_OTHERS = {"corpus.json", "config.json"}  # a corpus, and a model of transformers
_WITHOUT_RUNS = {"checkpoints", "tensorboard", "wandb", "mlruns"}


@dataclass(frozen=True, repr=False)
class RunRecord(Displayed):
    """What the folder of a run has recorded of its training."""

    path: Path
    config: RunConfig
    metrics: list[Metrics]
    """The lines of metrics.jsonl."""
    start: Mapping[str, Any]
    """Where training was last started: commit, device, processor and others; empty if that is not recorded."""
    step: int
    """Training steps done, as far as they were saved or logged."""
    seconds: float
    """Training time."""
    parameters: int
    memory_length: int
    """Memory slots in evaluation, in tokens."""
    best: Mapping[str, Mapping[str, float]]
    """By split, the lowest loss (of train, the mean of the steps between two lines): at least nats_per_token."""
    finished: bool | None
    """Whether all steps are done; None for weights that were saved or converted."""

    @staticmethod
    def read(path: Path | str) -> RunRecord:
        """Read the records in the folder of a run.

        Raises:
            UserError: it is no run, or a file is damaged.
        """
        path = as_path(path, "run", "give the folder of a run")
        config, metrics, checkpoints = read_config(path), read_metrics(path), list_checkpoints(path)
        state = CheckpointRecord.read(checkpoints[-1]).state if checkpoints else {}
        file = next((path / name for name in _WEIGHTS if (path / name).is_file()), None)
        saved, start = read_metadata(file) if file else {}, read_last_start(path)
        try:
            entry = saved.get("memory_lengths")
            lengths = None if entry is None else check_settings(MemoryLengths, parse_json(entry), str(file))
            best = _best_losses(metrics, saved.get("nats_per_token"))
            step = max(int(state.get("step", 0)), *(line["step"] for line in metrics), 0)
            seconds = max([float(state.get("seconds", 0)), *(float(line.get("seconds", 0)) for line in metrics)])
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}); copy it again") from None
        return RunRecord(
            path=path,
            config=config,
            metrics=metrics,
            start=start if isinstance(start, dict) else {},
            step=step,
            seconds=seconds,
            parameters=_num_parameters(config.model),
            memory_length=EvaluationPlan.resolve(config, memory_lengths=lengths).context_limits.memory_length,
            best=best,
            finished=step >= config.train.max_steps if step else None if file else False,
        )

    @property
    def tokens(self) -> int:
        """Number of tokens that training has read, also where the batch size was changed on the way."""
        total, end, train = 0, self.step, self.config.train
        batch_size = train.batch_size
        for change in reversed(self.config.history):
            start = min(change.step, end)
            total, end = total + (end - start) * batch_size, start
            batch_size = change.before.get("batch_size", batch_size)
        return (total + end * batch_size) * train.segment_length

    def as_dict(self) -> dict[str, Any]:
        """Return the values of a row of `list_runs`, by COLUMNS."""
        train, valid = self.best.get("train", {}), self.best.get("valid", {})
        values = {
            "run": str(self.path),
            "recipe": self.config.recipe,
            "architecture": self.config.model.architecture,
            "max_steps": self.config.train.max_steps,
            "train_nats_per_token": train.get("nats_per_token"),
            "valid_nats_per_token": valid.get("nats_per_token"),
            "valid_bits_per_byte": valid.get("bits_per_byte"),
            **{name: self.start.get(name) for name in ("device", "processor", "commit")},
        }
        return {name: values[name] if name in values else getattr(self, name, None) for name in COLUMNS}


def list_runs(folder: Path | str, *, sort: str = "run", reverse: bool = False) -> list[dict[str, Any]]:
    """Return what each run in a folder and below it has recorded; no weights are loaded.

        pandas.DataFrame(list_runs("runs", sort="valid_nats_per_token"))

    Args:
        folder: the folder.
        sort: the value to sort by, one of COLUMNS; runs without it are last.
        reverse: sort from high to low.

    Returns:
        For each run its values by COLUMNS. A damaged one has only `run` and `problem`, which says what is wrong.

    Raises:
        UserError: there is no such folder or value, or no run below the folder.
    """
    folder = as_path(folder, "folder")
    if sort not in COLUMNS:
        raise UserError(f"no column '{sort}'{nearest(sort, COLUMNS)}; the columns are {', '.join(COLUMNS)}")
    rows = list[dict[str, Any]]()
    for path in run_folders(folder):
        try:
            rows.append(RunRecord.read(path).as_dict())
        except UserError as error:
            if not (_OF_RUNS - {"config.yaml"}) & set(os.listdir(path)):  # the settings of some other program
                continue
            problem = str(error) if str(path) in str(error) else f"{path}: {error}"
            rows.append(dict.fromkeys(COLUMNS) | {"run": str(path), "problem": problem})
    if not rows:
        problem = "no run below" if folder.is_dir() else "no folder"
        raise UserError(f"{problem} {folder}; give a folder with runs in it, such as those of txl train --run DIR")
    known = sorted((row for row in rows if row[sort] is not None), key=lambda row: row[sort], reverse=reverse)
    return known + [row for row in rows if row[sort] is None]


def run_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs in a folder and below it, in order of names; also of damaged ones that lack files."""
    for place, folders, files in os.walk(folder):
        names = {*folders, *files}
        if (len(_OF_RUNS & names) >= 2 or "config.yaml" in names) and not _OF_OTHERS & names:
            yield Path(place)
        folders[:] = sorted(name for name in folders if name not in _WITHOUT_RUNS and not name.startswith("."))


@cache
def _num_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):  # parameters without storage
        return build_model(config).num_parameters()


def _best_losses(metrics: list[Metrics], saved_nats: str | None) -> dict[str, Mapping[str, float]]:
    """Return the line with the lowest loss of each split; that of the saved weights holds, which may be older."""
    lines = sorted(metrics, key=lambda line: line["nats_per_token"], reverse=True)
    best: dict[str, Mapping[str, float]] = {line["split"]: line for line in lines}
    if saved_nats is not None:
        valid, nats = best.get("valid", {}), float(saved_nats)
        bits = {"bits_per_byte": valid["bits_per_byte"] * nats / valid["nats_per_token"]} if valid else {}
        best["valid"] = {"nats_per_token": nats, **bits}
    return best
