"""Checkpoints that training resumes from bit for bit: weights, optimizer, data position, memory, random state, metrics.

A checkpoint is a folder `checkpoints/step-N` that is written atomically. Several processes write it together, each its
shard of the tensors, with `torch.distributed.checkpoint` (DCP); a different number of processes can load and reshard
them. Files are safetensors and JSON; no pickle is written or read.

Names of tensors: `optimizer/PARAMETER/KEY`, `memory/NAME` (of all batch rows), `average/PARAMETER`,
`random/RANK/DEVICE`, where DEVICE is `cpu` or, for the GPU, `device`. Shape suffix: B batch rows of this process.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from warnings import catch_warnings, filterwarnings

import torch
from pydantic import Field
from torch import Tensor, nn

from transformer_xl.checkpoint_record import CheckpointRecord, file_digest
from transformer_xl.config import Settings, UserError, check_settings
from transformer_xl.files import as_user_error, atomic_folder, remove_leftovers
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.run_folder import RunFolder, read_weights
from transformer_xl.tensor_file import save_tensors
from transformer_xl.text.segments import DatasetPosition
from transformer_xl.training.distributed import SINGLE_PROCESS, DistributedContext, gather_weights, local_tensor
from transformer_xl.training.divergence import DivergenceState
from transformer_xl.training.step import micro_batches

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from transformer_xl.training.trainer import Trainer

# Number of checkpoints that are kept: the newest, and the previous one in case the newest is damaged. While training
# diverges, the last good one is kept too.
_NUM_KEPT = 2

_Value = TypeVar("_Value")


class TrainerState(Settings):
    """The progress of training, the same in all processes; with the tensors of a checkpoint, all that resuming
    needs."""

    step: int = Field(default=0, ge=0)
    """Optimizer steps done."""
    position: DatasetPosition = DatasetPosition()
    """The segment that is trained on next."""
    part: int = Field(default=0, ge=0)
    """Number of parts of that segment already trained on, in the segment warm-up."""
    validation_step: int = Field(default=0, ge=0)
    """Step of the last validation."""
    validation_nats: float | None = None
    """Loss of the last validation, in nats per token."""
    best_nats: float | None = None
    """Lowest validation loss so far, in nats per token."""
    validation_text: str | None = None
    """Identifies the validation text of `best_nats` (see `Validator.text_id`)."""
    interval_nats: float = 0.0
    """Sum of the losses since the last line of training metrics, in nats."""
    interval_tokens: int = 0
    """Number of targets since the last line of training metrics."""
    interval_grad_norm: float = 0.0
    """Largest gradient norm since the last line of training metrics."""
    divergence: DivergenceState = DivergenceState()
    """Statistics that show whether training diverges."""
    seconds: float = 0.0
    """Total training time so far, in seconds."""


def save_checkpoint(folder: RunFolder, trainer: Trainer, world: DistributedContext = SINGLE_PROCESS) -> Path:
    """Write a checkpoint of this step, and delete the oldest ones. All processes must take part.

    Returns:
        Folder of the checkpoint.

    Raises:
        UserError: a file cannot be written; older checkpoints are unchanged. All processes raise the same error.
    """
    path = folder.path / "checkpoints" / f"step-{trainer.state.step:08}"
    # After a stop during validation, this step may have a checkpoint already; it is deleted when the new one is
    # complete. `remove_leftovers` deletes files with `.partial-` in their names after a crash.
    new = path.with_name(f".{path.name}.partial-new")
    weights, tensors = gather_weights(trainer.model, world), _tensors(trainer, folder.config.train.batch_size, world)
    with world.raise_together(), ExitStack() as stack:
        temporary = path
        with world.raise_together():
            if world.is_first:
                remove_leftovers(path.parent)
                new = new if path.exists() else path
                temporary = stack.enter_context(atomic_folder(new))
                save_tensors(temporary / folder.weights_name, weights)
        temporary = world.gather(temporary)[0]
        _write(tensors, temporary / "training", world)
        # DCP names the files of each process shard-N-..., where N is its rank + 1
        shard_files = [*(temporary / "training").glob(f"shard-{world.rank + 1:05}-*")]
        with world.raise_together(), as_user_error(f"reading {temporary / 'training'}"):
            digests = {file.name: file_digest(file) for file in shard_files}
        files = {name: digest for process_digests in world.gather(digests) for name, digest in process_digests.items()}
        state = trainer.state.model_dump(mode="json")
        if world.is_first:
            config = folder.config.model_dump(mode="json")
            CheckpointRecord(
                num_processes=world.size,
                state=state,
                files=files,
                attn_implementation=trainer.attn_implementation,
                matmul_library=trainer.matmul_library,
                dropout_kernel=trainer.dropout_kernel,
                config=config,
            ).write(temporary)
    with world.raise_together():
        if world.is_first:
            # to return to if training diverges, which may become clear only after later checkpoints
            kept = checkpoint_before(folder, trainer.state.divergence.lowest_step)
            _put_in_place(folder, new, path, kept)
    return path


def checkpoint_before(folder: RunFolder, step: int) -> Path | None:
    """Return the newest checkpoint that is not after a step, or the oldest of all if there is none before."""
    checkpoints = folder.checkpoints()
    earlier = [path for path in checkpoints if path.name <= f"step-{step:08}"]
    return (earlier[-1:] or checkpoints[:1] or [None])[0]


def delete_checkpoints_after(folder: RunFolder, kept: Path) -> None:
    """Delete all checkpoints that are newer than `kept`.

    Raises:
        UserError: the file system refuses.
    """
    with as_user_error(f"deleting checkpoints in {kept.parent}"):
        for path in reversed(folder.checkpoints()):
            if path.name > kept.name:
                shutil.rmtree(path.rename(_deletion_path(path)))


def update_record(folder: RunFolder, *, state: Mapping[str, Any] | None = None, **changes: Any) -> None:
    """Replace fields of the newest checkpoint's record, and those fields of its state that are given.

    Its tensors are unchanged.

    Raises:
        UserError: a file cannot be written; the checkpoint is unchanged.
    """
    path = folder.latest_checkpoint()
    assert path is not None
    record = CheckpointRecord.read(path)
    record.model_copy(update={**changes, "state": {**record.state, **(state or {})}}).write(path)


def _put_in_place(folder: RunFolder, new: Path, path: Path, kept: Path | None) -> None:
    """Rename the new checkpoint to its final path, and delete the one that was there and the oldest, except `kept`."""
    with as_user_error(f"deleting old checkpoints in {path.parent}"):
        if new != path:
            replaced = path.rename(_deletion_path(path))
            new.rename(path)
            shutil.rmtree(replaced)
        for old in folder.checkpoints()[:-_NUM_KEPT]:
            if old != kept:
                shutil.rmtree(old.rename(_deletion_path(old)))


def _deletion_path(path: Path) -> Path:
    """Return the path to rename a checkpoint to before deletion; `remove_leftovers` completes an interrupted
    deletion."""
    return path.with_name(f".{path.name}.partial-old")


def load_checkpoint(folder: RunFolder, trainer: Trainer, world: DistributedContext = SINGLE_PROCESS) -> list[str]:
    """Restore a trainer and torch's random state from the newest checkpoint. All processes must take part.

    Returns:
        Warnings for the user: one line for each part of the state that cannot be restored exactly.

    Raises:
        UserError: the run has no checkpoint, or it is damaged or does not fit the model and memory length. All
            processes raise the same error.
    """
    train = folder.config.train
    with world.raise_together():
        path = folder.latest_checkpoint()
        if path is None:
            advice = "start a new run with 'txl train --run DIR' (the weights of a converted or saved run are trained "
            advice += "further by 'txl finetune')"
            advice = folder.advice_if_stopped_early() or advice
            raise UserError(f"{folder.path / 'checkpoints'} contains no checkpoint; {advice}")
        record = CheckpointRecord.read(path)
        record.verify(path, rank=world.rank, size=world.size)
        trainer.state = check_settings(TrainerState, record.state, str(path / "training.json"))
        weights = read_weights(trainer.model, path / folder.weights_name)
        saved = _read_shapes(path / "training")
        # rows: the batch size with which the checkpoint was written
        rows, memory = _allocate_memory(saved, trainer, train.memory_length)
        # the tensors to load into, by their names in the checkpoint
        buffers = _allocate_optimizer_state(saved, trainer, path)
        if rows == train.batch_size:
            buffers |= _prefixed("memory", _sharded(memory.tensors(), rows, world))
        if trainer.weight_average is not None:
            means = {name: torch.zeros_like(tensor) for name, tensor in trainer.weight_average.tensors().items()}
            buffers |= _prefixed("average", means)
        if record.num_processes == world.size:
            random_state = _prefixed(f"random/{world.rank}", _random_state(memory.valid_B.device))
            buffers |= {name: tensor for name, tensor in random_state.items() if name in saved}
        if missing := sorted(buffers.keys() - saved.keys()):
            raise UserError(f"{path} lacks {missing[0]}; delete it to resume from the previous checkpoint")
    _set_weights(trainer.model, weights)
    _read(buffers, path / "training", world)
    _set_optimizers(trainer, buffers)
    if trainer.weight_average is not None:
        trainer.weight_average.load_tensors(_without_prefix("average", buffers))
    warnings: list[str] = []
    if rows == train.batch_size:
        memory = memory.with_tensors({name: local_tensor(t) for name, t in _without_prefix("memory", buffers).items()})
        parts = micro_batches(memory.batch_size, train, world.size)
        trainer.memories = tuple(memory.select(part) for part in parts) if len(parts) > 1 else (memory,)
    else:
        warnings.append(_change_batch_size(trainer, rows, train.batch_size))
    warnings += trainer.use_recorded_kernels(record)
    if record.num_processes == world.size:
        _set_random_state(_without_prefix(f"random/{world.rank}", buffers), memory.valid_B.device)
    else:
        world.seed(train.seed, trainer.state.step)
        before = "1 process" if record.num_processes == 1 else f"{record.num_processes} processes"
        now = "is 1" if world.size == 1 else f"are {world.size}"
        warnings.append(f"the checkpoint was written by {before}, now there {now}: dropout masks will differ")
    return warnings


def _change_batch_size(trainer: Trainer, old: int, new: int) -> str:
    """Move to about the same position in the epoch with another number of batch rows; memory starts empty.

    Returns:
        A warning for the user.
    """
    position = trainer.state.position
    position = position.model_copy(update={"segment_index": position.segment_index * old // new})
    trainer.state = trainer.state.model_copy(update={"position": position, "part": 0})
    return f"the batch size changed from {old} to {new}: memory starts empty, at about the same position"


def _tensors(trainer: Trainer, batch_size: int, world: DistributedContext) -> dict[str, Tensor]:
    """Return all tensors of the checkpoint except the weights, or this process's shard of them."""
    tensors: dict[str, Tensor] = {}
    for optimizer in trainer.optimizers:
        for prefix, parameter in _named_parameters(optimizer, trainer.model):
            tensors |= _prefixed(prefix, optimizer.state.get(parameter, {}))
    memory = Memory.concatenate(trainer.memories)
    tensors |= _prefixed("memory", _sharded(memory.tensors(), batch_size, world))
    if trainer.weight_average is not None:
        tensors |= _prefixed("average", trainer.weight_average.tensors())
    return tensors | _prefixed(f"random/{world.rank}", _random_state(memory.valid_B.device))


def _named_parameters(optimizer: torch.optim.Optimizer, model: LanguageModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the optimizer's parameters in its order, each with the name prefix of its state in a checkpoint."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield f"optimizer/{names[id(parameter)]}", parameter


def _sharded(tensors: Mapping[str, Tensor], batch_size: int, world: DistributedContext) -> dict[str, Tensor]:
    """Return each tensor, which has the batch rows of this process, as a DTensor with those of all processes."""
    if world.size == 1:
        return dict(tensors)
    from torch.distributed.tensor import DTensor, Shard

    assert world.mesh is not None
    sharded: dict[str, Tensor] = {}
    for name, local in tensors.items():
        shape = torch.Size((batch_size, *local.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        sharded[name] = DTensor.from_local(local, world.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return sharded


def _allocate_memory(saved: Mapping[str, TensorStorageMetadata], trainer: Trainer, length: int) -> tuple[int, Memory]:
    """Return the number of batch rows of the saved memory, and a memory for those of this process to load into."""
    memory = Memory.concatenate(trainer.memories).resized(length)
    sizes = {name: entry.size for name, entry in _without_prefix("memory", saved).items()}
    if {name: size[1:] for name, size in sizes.items()} != {name: t.shape[1:] for name, t in memory.tensors().items()}:
        raise UserError("the saved memory does not fit this model and memory_length; start a new run")
    return sizes["valid"][0], memory


def _allocate_optimizer_state(
    saved: Mapping[str, TensorStorageMetadata], trainer: Trainer, path: Path
) -> dict[str, Tensor]:
    """Allocate tensors to load the saved optimizer state into, sharded like the parameters."""
    tensors: dict[str, Tensor] = {}
    for optimizer in trainer.optimizers:
        key_sets: set[frozenset[str]] = set()
        for prefix, parameter in _named_parameters(optimizer, trainer.model):
            entries = _without_prefix(prefix, saved)
            key_sets.add(frozenset(entries))
            for key, entry in entries.items():
                shape_like = parameter if entry.size == parameter.shape else torch.empty(entry.size)
                tensors[f"{prefix}/{key}"] = torch.zeros_like(shape_like, dtype=entry.properties.dtype)
        if len(key_sets) > 1:
            raise UserError(f"{path} lacks part of the optimizer state; delete it to resume from the previous one")
    return tensors


def _set_optimizers(trainer: Trainer, tensors: Mapping[str, Tensor]) -> None:
    for optimizer in trainer.optimizers:
        prefixes = [prefix for prefix, _ in _named_parameters(optimizer, trainer.model)]
        states = {index: _without_prefix(prefix, tensors) for index, prefix in enumerate(prefixes)}
        states = {index: state for index, state in states.items() if state}  # empty before the first step
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def _set_weights(model: LanguageModel, weights: dict[str, Any]) -> None:
    if not any(hasattr(parameter, "placements") for parameter in model.parameters()):
        model.load_state_dict(weights, strict=False)  # of a model with an adapter, these are the adapter's
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, strict=False))


def _write(tensors: dict[str, Tensor], folder: Path, world: DistributedContext) -> None:
    from torch.distributed import checkpoint

    writer = checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True)  # writes safetensors
    with _as_user_error(f"writing {folder}"):
        checkpoint.save(tensors, storage_writer=writer, no_dist=world.size == 1)


def _read(tensors: dict[str, Tensor], folder: Path, world: DistributedContext) -> None:
    from torch.distributed import checkpoint

    reader = checkpoint.HuggingFaceStorageReader(str(folder))
    with _as_user_error(f"reading {folder}"):
        checkpoint.load(tensors, storage_reader=reader, no_dist=world.size == 1)


def _read_shapes(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return the shape and dtype of each tensor of a checkpoint, by name."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    with as_user_error(f"reading {folder}"):
        return dict(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)  # pyrefly: ignore


@contextmanager
def _as_user_error(action: str) -> Iterator[None]:
    """Convert an OSError, which DCP wraps in a CheckpointException in all processes, to a UserError."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with catch_warnings(), torch.no_grad():
            filterwarnings("ignore", "torch.distributed is disabled")  # expected with one process
            yield
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, OSError):
                with as_user_error(action):
                    raise cause from error
        raise


def _random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's random generators: that of the CPU, and that of the GPU if there is one."""
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


def _without_prefix(prefix: str, values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return the values whose names have the prefix, by the rest of their names."""
    return {name[len(prefix) + 1 :]: value for name, value in values.items() if name.startswith(f"{prefix}/")}
