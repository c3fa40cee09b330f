"""Checkpoints that training resumes from bit for bit: weights, optimizer, data position, memory, random state, sums.

A checkpoint is a folder `checkpoints/step-N` that appears whole or not at all. Several processes write it together,
each its shard, through `torch.distributed.checkpoint`; another number of processes can read it, and shards the tensors
anew. Files are safetensors and JSON; no pickle is written or read.

Names of tensors: `optimizer/PARAMETER/KEY`, `memory/NAME` (all rows), `average/PARAMETER`, `random/PROCESS/KIND`.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from pydantic import Field
from torch import Tensor

from transformer_xl.config import Settings, UserError, check_settings
from transformer_xl.files import as_user_error, atomic_folder, remove_leftovers
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.run_folder import CheckpointRecord, RunFolder, file_digest, read_weights
from transformer_xl.tensor_file import save_tensors
from transformer_xl.text.segments import DatasetPosition
from transformer_xl.training.averaging import WeightAverage
from transformer_xl.training.distributed import SINGLE_PROCESS, DistributedContext, gather_weights, local_tensor
from transformer_xl.training.step import micro_batches

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_NUM_KEPT = 2  # checkpoints kept: the newest, and one to go back to


class TrainerState(Settings):
    """How far training is, the same in all processes; with the tensors, all that is needed to resume."""

    step: int = Field(default=0, ge=0)
    """Optimizer steps done."""
    position: DatasetPosition = DatasetPosition()
    """The segment that is read next."""
    part: int = Field(default=0, ge=0)
    """Parts of that segment already read, in the segment warm-up."""
    validation_step: int = Field(default=0, ge=0)
    """Step of the last validation."""
    best_nats: float | None = None
    """Lowest validation loss so far, in nats per token."""
    validation_text: str | None = None
    """The validation text that it is a loss of (see `Validator.text_id`)."""
    interval_nats: float = 0.0
    """Loss summed since the last line of training metrics, in nats."""
    interval_tokens: int = 0
    """Targets counted since the last line of training metrics."""
    seconds: float = 0.0
    """Time spent in training so far."""


class Checkpointable(Protocol):
    """What a checkpoint holds of a `Trainer`."""

    model: LanguageModel
    optimizers: tuple[torch.optim.Optimizer, ...]
    memories: tuple[Memory, ...]
    """One for each micro-batch of the rows of this process, in their order."""
    weight_average: WeightAverage | None
    state: TrainerState


def save_checkpoint(folder: RunFolder, trainer: Checkpointable, world: DistributedContext = SINGLE_PROCESS) -> Path:
    """Write a checkpoint of this step, and delete the oldest ones. All processes must take part.

    Returns:
        Folder of the checkpoint.

    Raises:
        UserError: the file system refuses; older checkpoints stay. The same error in all processes.
    """
    path = folder.path / "checkpoints" / f"step-{trainer.state.step:08}"
    # one of this step may exist, from a stop in a validation that is done now: it goes only once the new one is whole
    new = path.with_name(f".{path.name}.partial-new")
    weights, tensors = gather_weights(trainer.model, world), _tensors(trainer, folder.config.train.batch_size, world)
    with world.raise_together(), ExitStack() as stack:
        aside = path
        with world.raise_together():
            if world.is_first:
                remove_leftovers(path.parent)
                new = new if path.exists() else path
                aside = stack.enter_context(atomic_folder(new))
                save_tensors(aside / "model.safetensors", weights)
        aside = Path(world.gather_texts(str(aside))[0])
        _write(tensors, aside / "training", world)
        own = [*(aside / "training").glob(f"shard-{world.rank + 1:05}-*")]
        with world.raise_together(), as_user_error(f"reading {aside / 'training'}"):
            written = json.dumps({file.name: file_digest(file) for file in own})
        files = {name: digest for part in world.gather_texts(written) for name, digest in json.loads(part).items()}
        state = trainer.state.model_dump(mode="json")
        if world.is_first:
            CheckpointRecord(num_processes=world.size, state=state, files=files).write(aside)
    with world.raise_together():
        if world.is_first:
            _put_in_place(folder, new, path)
    return path


def _put_in_place(folder: RunFolder, new: Path, path: Path) -> None:
    with as_user_error(f"deleting old checkpoints in {path.parent}"):
        if new != path:
            before = path.rename(_aside(path))
            new.rename(path)
            shutil.rmtree(before)
        for old in folder.checkpoints()[:-_NUM_KEPT]:
            shutil.rmtree(old.rename(_aside(old)))


def _aside(path: Path) -> Path:
    """Return a name under which a killed deletion leaves no half checkpoint: `remove_leftovers` deletes it."""
    return path.with_name(f".{path.name}.partial-old")


def load_checkpoint(
    folder: RunFolder, trainer: Checkpointable, world: DistributedContext = SINGLE_PROCESS
) -> list[str]:
    """Set a trainer to the newest checkpoint of a run, and torch's random state too. All processes must take part.

    Returns:
        What the user should know: a line on each thing that cannot continue as it was.

    Raises:
        UserError: there is none, it is damaged, or it is not of this model and memory length. The same error in all
            processes.
    """
    train = folder.config.train
    with world.raise_together():
        path = folder.latest_checkpoint()
        if path is None:
            raise UserError(
                f"{folder.path / 'checkpoints'} holds no checkpoint; start a new run with 'txl train --run DIR' (the "
                "weights of a converted or saved run can be used, but not trained further)"
            )
        record = CheckpointRecord.read(path)
        record.verify(path, rank=world.rank, size=world.size)
        trainer.state = check_settings(TrainerState, record.state, str(path / "training.json"))
        weights = read_weights(trainer.model, path / "model.safetensors")
        saved = _read_shapes(path / "training")
        rows, memory = _memory_for(saved, trainer, folder)
        targets = _optimizer_targets(trainer, saved, path)
        if rows == train.batch_size:
            targets |= _prefixed("memory", _sharded(memory.tensors(), rows, world))
        if trainer.weight_average is not None:
            means = {name: torch.zeros_like(tensor) for name, tensor in trainer.weight_average.tensors().items()}
            targets |= _prefixed("average", means)
        if record.num_processes == world.size:
            own = _prefixed(f"random/{world.rank}", _random_state(memory.valid_B.device))
            targets |= {name: tensor for name, tensor in own.items() if name in saved}
        if missing := sorted(targets.keys() - saved.keys()):
            raise UserError(f"{path} lacks {missing[0]}; delete it to resume from the checkpoint before")
    _set_weights(trainer.model, weights)
    _read(targets, path / "training", world)
    _set_optimizers(trainer, targets)
    if trainer.weight_average is not None:
        trainer.weight_average = trainer.weight_average.with_tensors(_without_prefix("average", targets))
    notes: list[str] = []
    if rows == train.batch_size:
        memory = memory.with_tensors({name: local_tensor(t) for name, t in _without_prefix("memory", targets).items()})
        parts = micro_batches(memory.batch_size, train, world.size)
        trainer.memories = tuple(memory.select(part) for part in parts) if len(parts) > 1 else (memory,)
    else:
        notes.append(_move_to_other_rows(trainer, rows, train.batch_size))
    if record.num_processes == world.size:
        _set_random_state(_without_prefix(f"random/{world.rank}", targets), memory.valid_B.device)
    else:
        world.seed(train.seed, trainer.state.step)
        before = "1 process" if record.num_processes == 1 else f"{record.num_processes} processes"
        now = "is 1" if world.size == 1 else f"are {world.size}"
        notes.append(f"the checkpoint was written by {before}, now there {now}: dropout draws other random numbers")
    return notes


def _move_to_other_rows(trainer: Checkpointable, old: int, new: int) -> str:
    """Set the position so that about the same share of the epoch is read; memory stays empty."""
    position = trainer.state.position
    position = position.model_copy(update={"segment_index": position.segment_index * old // new})
    trainer.state = trainer.state.model_copy(update={"position": position, "part": 0})
    return f"the checkpoint has batch size {old}, now it is {new}: memory starts empty, at about the same position"


def _tensors(trainer: Checkpointable, batch_size: int, world: DistributedContext) -> dict[str, Tensor]:
    """Return all tensors that this process writes, or its shard of them."""
    tensors: dict[str, Tensor] = {}
    names = _parameter_names(trainer)
    for optimizer in trainer.optimizers:
        for parameter, values in optimizer.state.items():
            tensors |= _prefixed(f"optimizer/{names[id(parameter)]}", values)
    memory = Memory.concatenate(trainer.memories)
    tensors |= _prefixed("memory", _sharded(memory.tensors(), batch_size, world))
    if trainer.weight_average is not None:
        tensors |= _prefixed("average", trainer.weight_average.tensors())
    return tensors | _prefixed(f"random/{world.rank}", _random_state(memory.valid_B.device))


def _parameter_names(trainer: Checkpointable) -> dict[int, str]:
    return {id(parameter): name for name, parameter in trainer.model.named_parameters()}


def _sharded(tensors: Mapping[str, Tensor], batch_size: int, world: DistributedContext) -> dict[str, Tensor]:
    """Return the rows of all processes as one tensor each, of which each process has its own rows."""
    if world.size == 1:
        return dict(tensors)
    from torch.distributed.tensor import DTensor, Shard

    assert world.mesh is not None
    sharded: dict[str, Tensor] = {}
    for name, own in tensors.items():
        shape = torch.Size((batch_size, *own.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        sharded[name] = DTensor.from_local(own, world.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return sharded


def _memory_for(
    saved: Mapping[str, TensorStorageMetadata], trainer: Checkpointable, folder: RunFolder
) -> tuple[int, Memory]:
    """Return how many rows the saved memory has, and a memory of this process's rows to load it into."""
    memory = Memory.concatenate(trainer.memories).resized(folder.config.train.memory_length)
    wanted = {f"memory/{name}": tensor.shape[1:] for name, tensor in memory.tensors().items()}
    found = {name: one.size for name, one in saved.items() if name.startswith("memory/")}
    if {name: size[1:] for name, size in found.items()} != wanted:
        raise UserError("the saved memory has another shape than this model and memory_length need; start a new run")
    return found["memory/valid"][0], memory


def _optimizer_targets(
    trainer: Checkpointable, saved: Mapping[str, TensorStorageMetadata], path: Path
) -> dict[str, Tensor]:
    """Return tensors for the saved state of the optimizers to be read into, sharded as the parameters are."""
    names = _parameter_names(trainer)
    targets: dict[str, Tensor] = {}
    for optimizer in trainer.optimizers:
        found: set[frozenset[str]] = set()
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            start = f"optimizer/{names[id(parameter)]}/"
            values = {name: saved[name] for name in saved if name.startswith(start)}
            found.add(frozenset(name.removeprefix(start) for name in values))
            for name, one in values.items():
                like = one.size == parameter.shape
                dtype = one.properties.dtype
                targets[name] = torch.zeros_like(parameter, dtype=dtype) if like else torch.zeros(one.size, dtype=dtype)
        if len(found) > 1:
            raise UserError(f"{path} lacks part of the optimizer state; delete it to resume from the one before")
    return targets


def _set_optimizers(trainer: Checkpointable, targets: Mapping[str, Tensor]) -> None:
    names = _parameter_names(trainer)
    for optimizer in trainer.optimizers:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        values = {
            index: _without_prefix(f"optimizer/{names[id(parameter)]}", targets)
            for index, parameter in enumerate(parameters)
        }
        by_index = {index: tensors for index, tensors in values.items() if tensors}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": by_index, "param_groups": groups})


def _set_weights(model: LanguageModel, weights: dict[str, Any]) -> None:
    if not any(hasattr(parameter, "placements") for parameter in model.parameters()):
        model.load_state_dict(weights)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


def _write(tensors: dict[str, Tensor], folder: Path, world: DistributedContext) -> None:
    from torch.distributed import checkpoint

    writer = checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _as_user_error(f"writing {folder}"):
        checkpoint.save(tensors, storage_writer=writer, no_dist=world.size == 1)


def _read(tensors: dict[str, Tensor], folder: Path, world: DistributedContext) -> None:
    from torch.distributed import checkpoint

    with _as_user_error(f"reading {folder}"):
        checkpoint.load(
            tensors, storage_reader=checkpoint.HuggingFaceStorageReader(str(folder)), no_dist=world.size == 1
        )


def _read_shapes(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return shape and dtype of each saved tensor, by name."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    with as_user_error(f"reading {folder}"):
        return dict(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)  # pyrefly: ignore


@contextmanager
def _as_user_error(doing: str) -> Iterator[None]:
    """Turn what the operating system refused to any process into one clear line in all of them."""
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
