"""Checkpoints training can go on from, bit for bit: weights, optimiser, data position, memory, random state, sums.

A checkpoint is a folder `state/step-N` that appears whole or not at all. No pickle is written or read.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from transformer_xl.config import Settings, UserError, check_settings, read_yaml
from transformer_xl.files import explained, remove_leftovers, whole_folder
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.run_folder import RunFolder, load_weights
from transformer_xl.tensor_file import load_tensors, save_tensors
from transformer_xl.text.segments import StreamPosition

_KEPT = 2  # checkpoints kept: the newest, and one to go back to


class Progress(Settings):
    """How far training is; with the tensors, all that is needed to go on."""

    step: int = Field(default=0, ge=0)
    """Optimiser steps done."""
    position: StreamPosition = StreamPosition()
    """The next segment."""
    validated: int = Field(default=0, ge=0)
    """Step of the last validation."""
    best_nats: float | None = None
    """Lowest validation loss so far, in nats per token."""
    interval_nats: float = 0.0
    """Loss summed since the last line of figures, in nats."""
    interval_tokens: int = 0
    """Targets counted since the last line of figures."""
    seconds: float = 0.0
    """Time spent in training so far."""


@dataclass
class TrainingState:
    """Everything that changes while training."""

    model: LanguageModel
    optimizer: torch.optim.Optimizer
    memory: Memory
    progress: Progress


def save_state(folder: RunFolder, state: TrainingState) -> Path:
    """Writes a checkpoint of this step, and deletes the oldest ones.

    Raises:
        UserError: the file system refuses; older checkpoints stay.
    """
    path = folder.path / "state" / f"step-{state.progress.step:08}"
    remove_leftovers(folder.path / "state")
    # one that is there already, from a stop in a validation that is done now, goes only once the new one is whole
    new = path.with_name(f".{path.name}.partial-new") if path.exists() else path
    device = state.memory.valid_B.device
    tensors = {
        **_prefixed("optimizer", _optimizer_tensors(state)),
        **_prefixed("memory", state.memory.tensors()),
        **_prefixed("random", _random_state(device)),
    }
    with whole_folder(new) as aside:
        save_tensors(aside / "model.safetensors", state.model.state_dict())
        save_tensors(aside / "training.safetensors", tensors, {"progress": state.progress.model_dump_json()})
    with explained(f"deleting old checkpoints in {path.parent}"):
        if new != path:
            shutil.rmtree(path)
            new.rename(path)
        for old in folder.states()[:-_KEPT]:
            shutil.rmtree(old)
    return path


def load_state(folder: RunFolder, state: TrainingState) -> None:
    """Sets `state` to the newest checkpoint of a run, torch's random state too.

    Raises:
        UserError: there is none, it is damaged, or it is not of this model, row count and memory length.
    """
    path = folder.newest_state()
    if path is None:
        raise UserError(f"{folder.path / 'state'} holds no checkpoint; start anew with 'txl train --run DIR'")
    file = path / "training.safetensors"
    tensors, notes = load_tensors(file)
    load_weights(state.model, path / "model.safetensors")
    state.progress = check_settings(Progress, read_yaml(notes.get("progress", ""), str(file)), str(file))
    _set_optimizer(state, _without_prefix("optimizer", tensors), file)
    state.memory = state.memory.with_tensors(_without_prefix("memory", tensors))
    _set_random_state(_without_prefix("random", tensors), state.memory.valid_B.device)


def _optimizer_tensors(state: TrainingState) -> dict[str, Tensor]:
    kept = state.optimizer.state
    named = state.model.named_parameters()
    return {f"{name}/{key}": value for name, parameter in named for key, value in kept[parameter].items()}


def _set_optimizer(state: TrainingState, tensors: Mapping[str, Tensor], file: Path) -> None:
    by_index: dict[int, dict[str, Tensor]] = {}
    for index, (name, _) in enumerate(state.model.named_parameters()):
        # clone: tensors in a file lie at odd addresses, which can change the last bit of what is computed from them
        found = {
            key: tensors[f"{name}/{key}"].clone()
            for key in ("step", "exp_avg", "exp_avg_sq")
            if f"{name}/{key}" in tensors
        }
        if found:
            by_index[index] = found
    if by_index and len(by_index) != len(list(state.model.parameters())):
        raise UserError(f"{file} lacks part of the optimiser; go back to another checkpoint")
    groups = state.optimizer.state_dict()["param_groups"]
    state.optimizer.load_state_dict({"state": by_index, "param_groups": groups})


def _random_state(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        states["device"] = torch.mps.get_rng_state()
    return states


def _set_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if "device" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["device"], device)
    elif "device" in states and device.type == "mps":
        torch.mps.set_rng_state(states["device"])


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def _without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
