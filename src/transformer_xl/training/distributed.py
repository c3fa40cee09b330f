"""Distributed training: joining the processes that torchrun started, communication between them, DDP and FSDP.

Each process has a part of the batch rows, with the memory of these rows. Losses and counts are summed over all
processes before they are divided. `torchrun` starts the processes, sets the rank of each in its environment, and
restarts all of them if one dies. With a single process, all functions in this file work without communication.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from transformer_xl.config import UserError
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.lora import saved_weights
from transformer_xl.text.segments import Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # with CUDA, gloo sums the tensors that are on the CPU

_group_indices = itertools.count()  # a program can create several process groups, one after another

_USE_TORCHRUN = "start several processes with torchrun, or unset WORLD_SIZE for a single one"


@dataclass(frozen=True)
class DistributedContext:
    """One process of a training run, and its communication with the other processes."""

    rank: int = 0
    """Index of this process, from 0."""
    size: int = 1
    """Number of processes."""
    device: torch.device = field(default=torch.device("cpu"))
    """The device this process computes on."""
    mesh: DeviceMesh | None = None
    """One-dimensional device mesh of the processes, or None for a single process."""

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints, and writes the files that are the same for all processes."""
        return self.rank == 0

    @property
    def shard(self) -> Shard:
        """The batch rows of this process."""
        return Shard(self.rank, self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the processes' tensors, in every process. Does not wait for the device."""
        if self.size == 1:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Return, in every process, whether the flag is true in any process. Waits for all processes."""
        return bool(self.sum(torch.tensor(int(flag))))

    def barrier(self) -> None:
        """Wait until every process has called this."""
        self.any(False)

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        """Raise a UserError of one process in all of them, so that no process waits for a failed one.

        Raises:
            UserError: the block raised it in any process; all processes raise the same error.
        """
        local_error: UserError | None = None
        try:
            yield
        except UserError as error:
            if self.size == 1:
                raise
            local_error = error
        for message in self.gather(str(local_error) if local_error else None):
            if message is not None:
                raise UserError(message) from local_error

    def in_first(self, function: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Call a function in the first process; a UserError that it raises is raised in all."""
        with self.raise_together():
            if self.is_first:
                function(*arguments, **options)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes in the order of ranks, in every process; for small Python objects."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def wrap(self, module: nn.Module, parallelism: str) -> nn.Module:
        """Wrap a module so that its gradients are sums over all processes (not means).

        With `ddp` each process has all weights. With `fsdp` each process has a part (shard) of every weight: the
        weights of a layer are gathered before the layer is used and resharded afterwards, and so is the rest of the
        model.
        """
        if self.size == 1:
            return module
        if parallelism == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
            # Replaces DDP's mean by a sum. The hook is a lambda, because DDP checks a hook's annotations, but cannot
            # resolve annotations that are strings, as those of this file are.
            wrapped.register_comm_hook(None, lambda _, bucket: _all_reduce(bucket))  # pyrefly: ignore
            return wrapped
        from torch.distributed.fsdp import FSDPModule, fully_shard

        language_model = next(part for part in module.modules() if isinstance(part, LanguageModel))
        for part in (*language_model.layers, module):
            fully_shard(part, mesh=self.mesh)
            assert isinstance(part, FSDPModule)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot scale a sum
        module.register_forward_hook(_reshard_after_forward)
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing writes to the view
        return module

    def set_gradient_sync(self, module: nn.Module, enabled: bool) -> None:
        """Set whether the next backward pass sums gradients over the processes, or accumulates them locally."""
        if self.size > 1:
            from torch.distributed.fsdp import FSDPModule
            from torch.nn.parallel import DistributedDataParallel

            if isinstance(module, DistributedDataParallel):
                module.require_backward_grad_sync = enabled
            elif isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(enabled)

    def seed(self, seed: int, step: int) -> None:
        """Seed torch from a seed and a step, differently in each process."""
        state = np.random.SeedSequence((seed, step, self.rank)).generate_state(1, np.uint64)
        torch.manual_seed(int(state[0]) >> 1)


SINGLE_PROCESS = DistributedContext()
"""The context of a program that torchrun did not start."""


@contextmanager
def process_group(choose: Callable[[], torch.device]) -> Iterator[DistributedContext]:
    """Join the processes that torchrun started, for the duration of the block; without torchrun, use a single process.

    Objects created in the block must be unreachable when it ends (create them in a function), because a process group
    can only be destroyed safely when nothing uses it.

    Args:
        choose: returns the device to compute on; for CUDA, each process uses the GPU of its local rank.

    Raises:
        UserError: torchrun's environment variables are missing or invalid, the device cannot be shared, another process
            has ended, or a process raised UserError in the block. Only the first process to fail raises it; the others
            end silently, with SystemExit.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield DistributedContext(device=choose())
        return
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    except (KeyError, ValueError) as error:
        raise UserError(f"the variables of torchrun are missing or wrong ({error}); {_USE_TORCHRUN}") from None
    store: dist.Store | None = None
    group_name = f"start {num_restarts()}, group {next(_group_indices)}"
    try:
        store = _rendezvous(rank, size)
        device = _local_device(choose(), local_rank)
        # a prefix, because torchrun's store may still contain the addresses of an earlier group
        group_store = dist.PrefixStore(group_name, store)
        with _default_signal_handlers():
            dist.init_process_group(_BACKENDS[device.type], store=group_store, rank=rank, world_size=size)
            mesh = dist.device_mesh.init_device_mesh(device.type, (size,))
        world = DistributedContext(rank, size, device, mesh)
        yield world
        world.barrier()
        _destroy_process_group()
    except BaseException as error:
        # torchrun sends SIGTERM to the other processes after one has ended, but this one is ending already
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        final_error = _final_error(error, store, group_name)  # before other processes notice that this one ends
        traceback.clear_frames(error.__traceback__)
        _destroy_process_group()
        raise final_error from error.__cause__


def _destroy_process_group() -> None:
    """Destroy the process group, after all processes have finished and after the objects that use the group.

    gloo's threads abort the process at exit if an object that uses them (a model or its optimizers) outlives the group.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_restartable() -> bool:
    """Return whether torchrun started this process; torchrun restarts the program if a process dies."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def num_restarts() -> int:
    """Return how often torchrun has restarted the program, with the same arguments."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _rendezvous(rank: int, size: int) -> dist.Store:
    """Wait for all processes to connect, and return the key-value store that they share."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        if not 0 <= rank < size:  # rendezvous would wait for ever
            raise ValueError(f"RANK {rank} is not below WORLD_SIZE {size}")
        with _default_signal_handlers():
            store, *_ = next(iter(dist.rendezvous("env://", rank, size)))
    except (RuntimeError, ValueError, OSError) as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise UserError(f"the {size} processes could not connect at {address} ({reason}); {_USE_TORCHRUN}") from error
    return store


@contextmanager
def _default_signal_handlers() -> Iterator[None]:
    """Let SIGTERM and SIGINT end the process at once: Python's handlers do not run while torch waits in C++.

    Only the main thread can say so; in others, as of a program that trains in one, signals stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _final_error(error: BaseException, store: dist.Store | None, group_name: str) -> BaseException:
    """Return the exception to end this process with: the error in one process, a silent exit in the others.

    A UserError is raised only once, even if torchrun restarts the processes. Counters in the processes' shared store
    determine which process raises it.
    """
    if store is None:  # the processes never connected
        return error
    num_ended = num_reports = 0
    with suppress(RuntimeError):  # the process that hosts the store has ended, and has raised the error
        num_ended = store.add(f"{group_name}/ended", 1)
        num_reports = store.add(f"reported/{error}", 1)
    if isinstance(error, UserError):
        return error if num_reports == 1 else SystemExit(2)
    if isinstance(error, KeyboardInterrupt) and num_ended != 1:
        return SystemExit(130)  # the usual exit status after Ctrl-C
    if not isinstance(error, RuntimeError) or not _is_connection_error(error):
        return error
    if num_ended != 1:
        return SystemExit(2)
    return UserError(
        "another process of this run has ended, so this one must end too; the same command under torchrun, or "
        f"txl train --resume RUN, resumes from the newest checkpoint ({str(error).splitlines()[0][:200]})"
    )


def _is_connection_error(error: RuntimeError) -> bool:
    """Return whether the error means that another process cannot be reached any more."""
    words = ("gloo", "NCCL", "Connection", "Broken pipe")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def _local_device(device: torch.device, local_rank: int) -> torch.device:
    """Return the device for this process, whose index among the processes of this computer is `local_rank`."""
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise UserError(f"several processes cannot share device={device.type}; use cpu or cuda, or start one process")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local process {local_rank + 1} has no GPU, this computer has {torch.cuda.device_count()}; start at most "
            "that many processes with --nproc-per-node, or use device=cpu"
        )
    local_device = torch.device("cuda", local_rank)
    torch.cuda.set_device(local_device)
    return local_device


def gather_weights(model: LanguageModel, world: DistributedContext) -> dict[str, Tensor]:
    """Return what is saved of the weights, by the names in files: all, or those of an adapter if the model has one.

    They are gathered from all processes if they are sharded.

    Every process must call this; the first process gets the weights.
    """
    if world.size == 1:
        return saved_weights(model.state_dict())
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return saved_weights({name: tensor for name, tensor in gathered.items() if isinstance(tensor, Tensor)})


def load_gathered(model: LanguageModel, weights: dict[str, Any]) -> None:
    """Load whole weights, as `gather_weights` returned them, into a model that may be sharded; all processes do."""
    if not any(hasattr(parameter, "placements") for parameter in model.parameters()):
        model.load_state_dict(weights, strict=False)  # of a model with an adapter, these are the adapter's
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, strict=False))


def shard_rows(tensors: Mapping[str, Tensor], batch_size: int, world: DistributedContext) -> dict[str, Tensor]:
    """Return each tensor, which has the batch rows of this process, as a DTensor with those of all processes."""
    if world.size == 1:
        return dict(tensors)
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as ShardOf

    assert world.mesh is not None
    sharded: dict[str, Tensor] = {}
    for name, local in tensors.items():
        shape = torch.Size((batch_size, *local.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        sharded[name] = DTensor.from_local(local, world.mesh, [ShardOf(0)], run_check=False, shape=shape, stride=stride)
    return sharded


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's random generators: `cpu`, and `device` for that of a GPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.mps.get_rng_state()
    return states


def set_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore what `random_state` returned, on the same kind of device or another."""
    torch.set_rng_state(states["cpu"])
    if "device" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["device"], device)
    elif "device" in states and device.type == "mps":
        torch.mps.set_rng_state(states["device"])


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered from all processes if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _reshard_after_forward(module: nn.Module, *_: object) -> None:
    """Reshard after a forward pass without gradients; otherwise the next pass would use the weights gathered now."""
    from torch.distributed.fsdp import FSDPModule

    if not torch.is_grad_enabled():
        assert isinstance(module, FSDPModule)
        module.reshard()


def _all_reduce(bucket: dist.GradBucket) -> Future[Tensor]:
    """Sum a bucket of gradients over all processes, instead of averaging it as DDP does."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(_first_result)


def _first_result(done: Future[list[Tensor]]) -> Tensor:
    return done.value()[0]
