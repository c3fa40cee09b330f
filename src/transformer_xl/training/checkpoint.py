"""Checkpoints that training resumes from bit for bit: weights, optimizer, data position, memory, random state, metrics.

A checkpoint is a folder `checkpoints/step-N` that is written atomically. Several processes write it together, each its
shard of the tensors, with `torch.distributed.checkpoint` (DCP); a different number of processes can load and reshard
them. Files are safetensors and JSON; no pickle is written or read. What is in them is a matter of those who give and
take the state (`Stepper` names the tensors).

When a run goes back to an earlier checkpoint, later ones are kept aside as `step-N.aside`, which no longer count, until
new ones overtake them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor

from transformer_xl.checkpoint_record import CheckpointRecord, Numerics, file_digest
from transformer_xl.config import UserError
from transformer_xl.files import as_user_error, atomic_folder, remove_leftovers
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.run_folder import RunFolder, read_weights
from transformer_xl.tensor_file import DAMAGED, save_tensors
from transformer_xl.training.distributed import DistributedContext, gather_weights, load_gathered

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_NUM_KEPT = 2  # the newest checkpoint, and the previous one in case the newest is damaged
_ASIDE = ".aside"


def save_checkpoint(
    folder: RunFolder,
    model: LanguageModel,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    numerics: Numerics,
    world: DistributedContext,
    *,
    good_step: int,
) -> Path:
    """Write a checkpoint of a step, and delete the oldest ones. All processes must take part.

    Args:
        folder: folder of the run, with the settings that it is trained with.
        model: the model, for its weights.
        tensors: all other tensors by name, or this process's shards of them.
        state: for `training.json`, with the `step`.
        numerics: what the run is trained with.
        world: the processes that train together.
        good_step: the last checkpoint that is not after this step is kept too, to return to if training diverges, which
            may become clear only after later checkpoints.

    Returns:
        Folder of the checkpoint.

    Raises:
        UserError: a file cannot be written; older checkpoints are unchanged. All processes raise the same error.
    """
    path = folder.path / "checkpoints" / f"step-{state['step']:08}"
    # After a stop during validation, this step may have a checkpoint already; it is deleted when the new one is
    # complete. `remove_leftovers` deletes files with `.partial-` in their names after a crash.
    new = path.with_name(f".{path.name}.partial-new")
    weights = gather_weights(model, world)
    with world.raise_together(), ExitStack() as stack:
        temporary = path
        with world.raise_together():
            if world.is_first:
                remove_leftovers(path.parent)
                new = new if path.exists() else path
                temporary = stack.enter_context(atomic_folder(new))
                save_tensors(temporary / folder.weights_name, weights)
        temporary = world.gather(temporary)[0]
        _write(dict(tensors), temporary / "training", world)
        # DCP names the files of each process shard-N-..., where N is its rank + 1
        shard_files = [*(temporary / "training").glob(f"shard-{world.rank + 1:05}-*")]
        with world.raise_together(), as_user_error(f"reading {temporary / 'training'}"):
            digests = {file.name: file_digest(file) for file in shard_files}
        files = {name: digest for process_digests in world.gather(digests) for name, digest in process_digests.items()}
        if world.is_first:
            CheckpointRecord(
                num_processes=world.size,
                state=dict(state),
                files=files,
                config=folder.config.model_dump(mode="json"),
                **numerics.model_dump(),
            ).write(temporary)
    world.in_first(_put_in_place, folder, new, path, good_step)
    return path


def load_checkpoint(
    path: Path,
    folder: RunFolder,
    model: LanguageModel,
    allocate: Callable[[Mapping[str, TensorStorageMetadata], int], dict[str, Tensor]],
    world: DistributedContext,
) -> tuple[CheckpointRecord, dict[str, Tensor], int]:
    """Load the weights of a checkpoint into the model, and return the rest. All processes must take part.

    Args:
        path: folder of the checkpoint.
        folder: folder of its run.
        model: the model.
        allocate: gets shape and dtype of each tensor by name and the number of processes that wrote them, and returns
            the tensors to read, with space for their values.
        world: the processes that train together.

    Returns:
        The record; the tensors by name; and the number of batch rows that the checkpoint was written with.

    Raises:
        UserError: it is damaged or does not fit the model and memory length. All processes raise the same error.
    """
    with world.raise_together():
        record = CheckpointRecord.read(path)
        record.verify(path, rank=world.rank, size=world.size)
        weights = read_weights(model, path / folder.weights_name)
        saved = _read_shapes(path / "training")
        tensors = allocate(saved, record.num_processes)
        if missing := sorted(tensors.keys() - saved.keys()):
            raise UserError(f"{path} lacks {missing[0]}; delete it to resume from the previous checkpoint")
    load_gathered(model, weights)
    _read(tensors, path / "training", world)
    return record, tensors, saved["memory/valid"].size[0]


def checkpoint_at(folder: RunFolder, step: int | None = None) -> Path | None:
    """Return the checkpoint of a step, or the newest; None of a run that was killed before its first, at step 0.

    Raises:
        UserError: there is none of this step, or none at all although the run has weights or was trained.
    """
    by_step = {step_of(path): path for path in folder.checkpoints()}
    if step is not None and step not in by_step:
        known = " and ".join(f"{known:,}" for known in by_step) or "none"
        raise UserError(f"{folder.path} has no checkpoint of step {step:,}; it has those of the steps {known}")
    # A converted run has only weights, and the first weights of a fine-tuned run are in its first checkpoint.
    has_weights = (folder.path / folder.weights_name).exists() or folder.config.finetune is not None
    if not by_step and (has_weights or folder.metrics()):
        advice = folder.advice_if_stopped_early() or (
            "start a new run with 'txl train --run DIR' (the weights of a converted or saved run are trained further "
            "by 'txl finetune')"
        )
        raise UserError(f"{folder.path / 'checkpoints'} contains no checkpoint; {advice}")
    return folder.latest_checkpoint() if step is None else by_step[step]


def checkpoint_before(folder: RunFolder, step: int) -> Path | None:
    """Return the newest checkpoint that is not after a step, or the oldest of all if there is none before."""
    checkpoints = folder.checkpoints()
    earlier = [path for path in checkpoints if step_of(path) <= step]
    return (earlier[-1:] or checkpoints[:1] or [None])[0]


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint, also of one that is kept aside."""
    return int(checkpoint.stem.removeprefix("step-"))


def set_aside_after(folder: RunFolder, step: int) -> list[Path]:
    """Keep the checkpoints after a step aside, and return their new paths.

    Raises:
        UserError: the file system refuses.
    """
    kept_aside: list[Path] = []
    with as_user_error(f"renaming checkpoints in {folder.path / 'checkpoints'}"):
        for path in reversed(folder.checkpoints()):
            if step_of(path) > step:
                aside = path.with_name(path.name + _ASIDE)
                if aside.exists():  # an earlier one of the same step, which `path` has overtaken
                    _delete(aside)
                kept_aside.append(path.rename(aside))
    return kept_aside


def returned_unsaved(path: Path) -> bool:
    """Return whether training went back to a checkpoint and was stopped before the next one."""
    saved = path.stat().st_mtime
    return any(aside.stat().st_mtime > saved for aside in path.parent.glob(f"step-*{_ASIDE}"))


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


def _put_in_place(folder: RunFolder, new: Path, path: Path, good_step: int) -> None:
    """Rename the new checkpoint to its final path, and delete those that it replaces.

    These are the one that was there, the oldest except the good one, and those kept aside that it has overtaken.
    """
    good = checkpoint_before(folder, good_step)
    with as_user_error(f"deleting old checkpoints in {path.parent}"):
        if new != path:
            replaced = path.rename(_deletion_path(path))
            new.rename(path)
            shutil.rmtree(replaced)
        for old in folder.checkpoints()[:-_NUM_KEPT]:
            if old != good:
                _delete(old)
        for aside in path.parent.glob(f"step-*{_ASIDE}"):
            if aside.stem.removeprefix("step-").isdecimal() and step_of(aside) <= step_of(path):
                _delete(aside)


def _delete(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint.rename(_deletion_path(checkpoint)))


def _deletion_path(path: Path) -> Path:
    """Return the path to rename a checkpoint to before deletion; `remove_leftovers` completes an interrupted
    deletion."""
    return path.with_name(f".{path.name}.partial-old")


def _write(tensors: dict[str, Tensor], folder: Path, world: DistributedContext) -> None:
    from torch.distributed import checkpoint

    writer = checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True)  # writes safetensors
    with _as_user_error(f"writing {folder}"):
        checkpoint.save(tensors, storage_writer=writer, no_dist=world.size == 1)


def _read(tensors: dict[str, Tensor], folder: Path, world: DistributedContext) -> None:
    from torch.distributed import checkpoint

    reader = checkpoint.HuggingFaceStorageReader(str(folder))
    with _damage_reported(folder), _as_user_error(f"reading {folder}"):
        checkpoint.load(tensors, storage_reader=reader, no_dist=world.size == 1)


def _read_shapes(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return the shape and dtype of each tensor of a checkpoint, by name."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    with _damage_reported(folder), as_user_error(f"reading {folder}"):
        return dict(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)  # pyrefly: ignore


@contextmanager
def _damage_reported(folder: Path) -> Iterator[None]:
    """Convert what torch's reader raises on a header that is not its own, which can be anything, to a UserError."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (UserError, MemoryError):
        raise
    except (Exception, CheckpointException) as error:
        raise UserError(
            DAMAGED.format(folder, f"torch cannot read it: {' '.join(str(error).split())[:200]}")
        ) from error


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
