"""Checkpoints training can go on from, bit for bit: weights, optimiser, data position, memory, random state, sums.

A checkpoint is a folder `checkpoints/step-N` that appears whole or not at all. Several processes write it together, each its
share, through `torch.distributed.checkpoint`; it can be read by another number of processes, which share the tensors
out anew. Files are safetensors and JSON; no pickle is written or read.

Names of tensors: `optimizer/PARAMETER/KEY`, `memory/NAME` (all rows), `average/PARAMETER`, `random/PROCESS/KIND`.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import Tensor

from transformer_xl.config import Settings, UserError, check_settings
from transformer_xl.files import as_user_error, atomic_folder, remove_leftovers
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.run_folder import RunFolder, StateRecord, file_digest, read_weights
from transformer_xl.tensor_file import save_tensors
from transformer_xl.text.segments import DatasetPosition
from transformer_xl.training.averaging import WeightAverage
from transformer_xl.training.distributed import ALONE, DistributedContext
from transformer_xl.training.step import chunks_of, whole_weights

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_KEPT = 2  # checkpoints kept: the newest, and one to go back to


class TrainerState(Settings):
    """How far training is, the same in all processes; with the tensors, all that is needed to go on."""

    step: int = Field(default=0, ge=0)
    """Optimiser steps done."""
    position: DatasetPosition = DatasetPosition()
    """The next segment."""
    piece: int = Field(default=0, ge=0)
    """Pieces of that segment that were read, in the length warm-up."""
    validated: int = Field(default=0, ge=0)
    """Step of the last validation."""
    best_nats: float | None = None
    """Lowest validation loss so far, in nats per token."""
    best_of: str | None = None
    """The validation text that it is a loss of (see `loop.validation_text`); none: not known, from an older version."""
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
    optimizers: tuple[torch.optim.Optimizer, ...]
    memories: tuple[Memory, ...]
    """One for each chunk of the rows of this process, in their order."""
    progress: TrainerState
    average: WeightAverage | None = None


def save_state(folder: RunFolder, state: TrainingState, world: DistributedContext = ALONE) -> Path:
    """Writes a checkpoint of this step, and deletes the oldest ones. All processes must take part.

    Raises:
        UserError: the file system refuses; older checkpoints stay. The same in all processes.
    """
    path = folder.path / "checkpoints" / f"step-{state.progress.step:08}"
    # one that is there already, from a stop in a validation that is done now, goes only once the new one is whole
    new = path.with_name(f".{path.name}.partial-new")
    weights, tensors = whole_weights(state.model, world), _tensors(state, folder.config.train.batch_size, world)
    with world.together(), ExitStack() as stack:
        aside = path
        with world.together():
            if world.is_first:
                remove_leftovers(path.parent)
                new = new if path.exists() else path
                aside = stack.enter_context(atomic_folder(new))
                save_tensors(aside / "model.safetensors", weights)
        aside = Path(world.gather(str(aside))[0])
        _write(tensors, aside / "training", world)
        own = [*(aside / "training").glob(f"shard-{world.rank + 1:05}-*")]
        with world.together(), as_user_error(f"reading {aside / 'training'}"):
            written = json.dumps({file.name: file_digest(file) for file in own})
        files = {name: digest for part in world.gather(written) for name, digest in json.loads(part).items()}
        progress = state.progress.model_dump(mode="json")
        if world.is_first:
            StateRecord(processes=world.size, progress=progress, files=files).write(aside)
    with world.together():
        if world.is_first:
            _put_in_place(folder, new, path)
    return path


def _put_in_place(folder: RunFolder, new: Path, path: Path) -> None:
    with as_user_error(f"deleting old checkpoints in {path.parent}"):
        if new != path:
            before = path.rename(_aside(path))
            new.rename(path)
            shutil.rmtree(before)
        for old in folder.checkpoints()[:-_KEPT]:
            shutil.rmtree(old.rename(_aside(old)))


def _aside(path: Path) -> Path:
    """A name under which a killed deletion leaves no half checkpoint: `remove_leftovers` takes it away."""
    return path.with_name(f".{path.name}.partial-old")


def load_state(folder: RunFolder, state: TrainingState, world: DistributedContext = ALONE) -> list[str]:
    """Sets `state` to the newest checkpoint of a run, torch's random state too. All processes must take part.

    Returns:
        what the user should know: each a line on something that cannot go on as it was.

    Raises:
        UserError: there is none, it is damaged, or it is not of this model and memory length. The same in all.
    """
    train = folder.config.train
    with world.together():
        path = folder.latest_checkpoint()
        if path is None:
            raise UserError(
                f"{folder.path / 'state'} holds no checkpoint; start anew with 'txl train --run DIR' (the weights of a "
                "converted run can be used, but not trained on)"
            )
        record = StateRecord.read(path)
        record.verify(path, rank=world.rank, size=world.size)
        state.progress = check_settings(TrainerState, record.progress, str(path / "training.json"))
        weights = read_weights(state.model, path / "model.safetensors")
        saved = _shapes(path / "training")
        rows, memory = _memory_for(saved, state, folder)
        targets = _optimizer_targets(state, saved, path)
        if rows == train.batch_size:
            targets |= _prefixed("memory", _shared(memory.tensors(), rows, world))
        if state.average is not None:
            kept = {name: torch.zeros_like(tensor) for name, tensor in state.average.tensors().items()}
            targets |= _prefixed("average", kept)
        if record.processes == world.size:
            own = _prefixed(f"random/{world.rank}", _random_state(memory.valid_B.device))
            targets |= {name: tensor for name, tensor in own.items() if name in saved}
        if missing := sorted(targets.keys() - saved.keys()):
            raise UserError(f"{path} lacks {missing[0]}; go back to another checkpoint")
    _set_weights(state.model, weights)
    _read(targets, path / "training", world)
    _set_optimizers(state, targets)
    if state.average is not None:
        state.average = state.average.with_tensors(_without_prefix("average", targets))
    remarks: list[str] = []
    if rows == train.batch_size:
        memory = memory.with_tensors({name: _local(t) for name, t in _without_prefix("memory", targets).items()})
        parts = chunks_of(memory.batch_size, train, world.size)
        state.memories = tuple(memory.select(part) for part in parts) if len(parts) > 1 else (memory,)
    else:
        remarks.append(_read_on_with_other_rows(state, rows, train.batch_size))
    if record.processes == world.size:
        _set_random_state(_without_prefix(f"random/{world.rank}", targets), memory.valid_B.device)
    else:
        world.seed(train.seed, state.progress.step)
        before = "1 process" if record.processes == 1 else f"{record.processes} processes"
        there = "is 1" if world.size == 1 else f"are {world.size}"
        remarks.append(f"the checkpoint was written by {before}, now there {there}: dropout is drawn anew")
    return remarks


def _read_on_with_other_rows(state: TrainingState, old: int, new: int) -> str:
    """Puts the position so that about the same share of the epoch is read; memory stays empty."""
    position = state.progress.position
    position = position.model_copy(update={"segment_index": position.segment_index * old // new})
    state.progress = state.progress.model_copy(update={"position": position, "piece": 0})
    return f"the checkpoint is of {old} rows, now there are {new}: memory begins empty, at about the same place"


def _tensors(state: TrainingState, batch_size: int, world: DistributedContext) -> dict[str, Tensor]:
    """All that this process writes, or its share of it."""
    tensors: dict[str, Tensor] = {}
    named = {id(parameter): name for name, parameter in state.model.named_parameters()}
    for optimizer in state.optimizers:
        for parameter, kept in optimizer.state.items():
            tensors |= _prefixed(f"optimizer/{named[id(parameter)]}", kept)
    memory = Memory.concatenate(state.memories)
    tensors |= _prefixed("memory", _shared(memory.tensors(), batch_size, world))
    if state.average is not None:
        tensors |= _prefixed("average", state.average.tensors())
    return tensors | _prefixed(f"random/{world.rank}", _random_state(memory.valid_B.device))


def _shared(tensors: Mapping[str, Tensor], batch_size: int, world: DistributedContext) -> dict[str, Tensor]:
    """The rows of all processes as one tensor each, of which each process has its own rows."""
    if world.size == 1:
        return dict(tensors)
    from torch.distributed.tensor import DTensor, Shard

    assert world.mesh is not None
    shared: dict[str, Tensor] = {}
    for name, own in tensors.items():
        shape = torch.Size((batch_size, *own.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        shared[name] = DTensor.from_local(own, world.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return shared


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _memory_for(
    saved: Mapping[str, TensorStorageMetadata], state: TrainingState, folder: RunFolder
) -> tuple[int, Memory]:
    """How many rows the kept memory has, and a memory of this process's rows to put it in."""
    memory = Memory.concatenate(state.memories).resized(folder.config.train.memory_length)
    wanted = {f"memory/{name}": tensor.shape[1:] for name, tensor in memory.tensors().items()}
    found = {name: one.size for name, one in saved.items() if name.startswith("memory/")}
    if {name: size[1:] for name, size in found.items()} != wanted:
        raise UserError("the kept memory has another shape than this model and memory length need; start a new run")
    return found["memory/valid"][0], memory


def _optimizer_targets(
    state: TrainingState, saved: Mapping[str, TensorStorageMetadata], path: Path
) -> dict[str, Tensor]:
    """Tensors for the kept state of the optimisers to be read into, shared out as the parameters are."""
    named = {id(parameter): name for name, parameter in state.model.named_parameters()}
    targets: dict[str, Tensor] = {}
    for optimizer in state.optimizers:
        found: set[frozenset[str]] = set()
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            start = f"optimizer/{named[id(parameter)]}/"
            kept = {name: saved[name] for name in saved if name.startswith(start)}
            found.add(frozenset(name.removeprefix(start) for name in kept))
            for name, one in kept.items():
                like = one.size == parameter.shape
                dtype = one.properties.dtype
                targets[name] = torch.zeros_like(parameter, dtype=dtype) if like else torch.zeros(one.size, dtype=dtype)
        if len(found) > 1:
            raise UserError(f"{path} lacks part of the optimiser; go back to another checkpoint")
    return targets


def _set_optimizers(state: TrainingState, targets: Mapping[str, Tensor]) -> None:
    named = {id(parameter): name for name, parameter in state.model.named_parameters()}
    for optimizer in state.optimizers:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        kept = {
            index: _without_prefix(f"optimizer/{named[id(parameter)]}", targets)
            for index, parameter in enumerate(parameters)
        }
        by_index = {index: tensors for index, tensors in kept.items() if tensors}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": by_index, "param_groups": groups})


def _set_weights(model: LanguageModel, weights: dict[str, Any]) -> None:
    if not any(hasattr(parameter, "placements") for parameter in model.parameters()):
        model.load_state_dict(weights)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


def _write(tensors: dict[str, Tensor], place: Path, world: DistributedContext) -> None:
    from torch.distributed import checkpoint

    writer = checkpoint.HuggingFaceStorageWriter(str(place), save_distributed=True)
    with _refusals_of_all(f"writing {place}"):
        checkpoint.save(tensors, storage_writer=writer, no_dist=world.size == 1)


def _read(tensors: dict[str, Tensor], place: Path, world: DistributedContext) -> None:
    from torch.distributed import checkpoint

    with _refusals_of_all(f"reading {place}"):
        checkpoint.load(
            tensors, storage_reader=checkpoint.HuggingFaceStorageReader(str(place)), no_dist=world.size == 1
        )


def _shapes(place: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of each tensor kept, by name."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    with as_user_error(f"reading {place}"):
        return dict(HuggingFaceStorageReader(str(place)).read_metadata().state_dict_metadata)  # pyrefly: ignore


@contextmanager
def _refusals_of_all(doing: str) -> Iterator[None]:
    """Turns what the operating system refused to any process into one clear line in all of them."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # with one process, as it should be
            yield
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, OSError):
                with as_user_error(doing):
                    raise cause from error
        raise


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
