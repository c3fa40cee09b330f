"""The processes that train one model together, or a single process.

Each process has its own rows of the batch and their memory. Sums are taken over all processes before anything is
divided. `torchrun` starts the processes, restarts all of them if one dies, and sets the rank of each.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from transformer_xl.config import UserError
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.text.segments import Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # with CUDA, gloo sums the tensors that are on the CPU

_group_indices = itertools.count()  # a program may create several process groups, one after another

_USE_TORCHRUN = "start several processes with torchrun, or unset WORLD_SIZE for a single one"


@dataclass(frozen=True)
class DistributedContext:
    """The processes that train one run, seen from one of them."""

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
        """Whether this is the process that prints and writes everything that is the same in all processes."""
        return self.rank == 0

    @property
    def shard(self) -> Shard:
        """Which rows of the batch this process reads."""
        return Shard(self.rank, self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes, in every process. Does not wait for the device."""
        if self.size == 1:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Return, in every process, whether the flag is true in any. Waits for all processes, not for the device."""
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
        if self.size > 1 and (first := next((text for text in self.gather_texts(str(local_error or "")) if text), "")):
            raise UserError(first) from local_error

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all processes in their order, in every process."""
        if self.size == 1:
            return [text]
        local = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        lengths = [torch.zeros((), dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor(len(local)))
        longest = max(map(int, lengths))
        padded = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(padded, nn.functional.pad(local, (0, longest - len(local))))
        return [bytes(one.tolist()).rstrip(b"\0").decode() for one in padded]

    def wrap(self, module: nn.Module, parallelism: str) -> nn.Module:
        """Wrap a module so that its gradients are sums over all processes (not means).

        With `ddp` each process has all weights. With `fsdp` each has a shard of them: each layer is gathered when it is
        used and resharded after it, and the rest of the model is another FSDP unit.
        """
        if self.size == 1:
            return module
        if parallelism == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
            # replaces DDP's mean; a lambda, because DDP cannot parse postponed annotations
            wrapped.register_comm_hook(None, lambda _, bucket: _all_reduce(bucket))  # pyrefly: ignore
            return wrapped
        from torch.distributed.fsdp import FSDPModule, fully_shard

        for part in (*_layers(module), module):
            fully_shard(part, mesh=self.mesh)
            assert isinstance(part, FSDPModule)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
        module.register_forward_hook(_reshard_after_forward)
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # the view is never written to
        return module

    def set_gradient_sync(self, module: nn.Module, wanted: bool) -> None:
        """Set whether the next backward pass sums gradients over the processes, or accumulates them locally."""
        if self.size == 1:
            return
        from torch.distributed.fsdp import FSDPModule
        from torch.nn.parallel import DistributedDataParallel

        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = wanted
        elif isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(wanted)

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
        UserError: the environment is not as torchrun sets it, the device cannot be shared, another process has ended,
            or a process raised it in the block. Only the first process to fail raises it; the others end silently, with
            SystemExit.
    """
    rank, size, local = _read_environment()
    if size == 1:
        yield DistributedContext(device=choose())
        return
    store: dist.Store | None = None
    group_name = f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}, group {next(_group_indices)}"
    try:
        store = _rendezvous(rank, size)
        device = _local_device(choose(), local)
        # a prefix, because torchrun's store may still contain the addresses of an earlier group
        group_store = dist.PrefixStore(group_name, store)
        with _default_signal_handlers():
            dist.init_process_group(_BACKENDS[device.type], store=group_store, rank=rank, world_size=size)
            mesh = dist.device_mesh.init_device_mesh(device.type, (size,))
        world = DistributedContext(rank, size, device, mesh)
        yield world
        world.barrier()
        shutdown()
    except BaseException as error:
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # torchrun sends it after one process has ended, but this one is ending already
        end = _final_error(error, store, group_name)  # before other processes notice that this one ends
        traceback.clear_frames(error.__traceback__)
        shutdown()
        raise end from error.__cause__


def shutdown() -> None:
    """Destroy the process group.

    The order matters: gloo's threads abort the process at exit if an object that uses them outlives the group. So
    all processes finish first, then the model and its optimizers are deleted, then the group.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_restartable() -> bool:
    """Return whether torchrun started this process, and so may restart the program after a process died."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _read_environment() -> tuple[int, int, int]:
    """Return rank, world size and local rank from the environment.

    Raises:
        UserError: the environment is not as torchrun sets it.
    """
    size = _environment_int("WORLD_SIZE", "1", 1, None)
    if size == 1:
        return 0, 1, 0
    rank, local = _environment_int("RANK", None, 0, size - 1), _environment_int("LOCAL_RANK", "0", 0, size - 1)
    _environment_int("MASTER_PORT", None, 1, 65535)
    if not os.environ.get("MASTER_ADDR"):
        raise UserError(f"WORLD_SIZE is {size} in the environment and MASTER_ADDR is missing; {_USE_TORCHRUN}")
    return rank, size, local


def _environment_int(name: str, default: str | None, minimum: int, maximum: int | None) -> int:
    """Read an integer from the environment, from `minimum` to `maximum`."""
    value = os.environ.get(name, default)
    if value is not None and value.isdecimal() and minimum <= int(value) and (maximum is None or int(value) <= maximum):
        return int(value)
    problem = "is missing from the environment" if value is None else f"is {value!r} in the environment"
    allowed = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    raise UserError(f"{name} {problem}, must be an integer {allowed}; {_USE_TORCHRUN}")


def _rendezvous(rank: int, size: int) -> dist.Store:
    """Wait for all processes, and return the store that they share."""
    try:
        with _default_signal_handlers():
            store, *_ = next(iter(dist.rendezvous("env://", rank, size)))
    except (RuntimeError, ValueError, OSError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = (str(error).splitlines() or [""])[0][:200]
        raise UserError(f"the {size} processes could not connect at {address} ({reason}); {_USE_TORCHRUN}") from error
    return store


@contextmanager
def _default_signal_handlers() -> Iterator[None]:
    """Let SIGTERM and SIGINT end the process at once, because Python handlers do not run while torch waits."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _final_error(error: BaseException, store: dist.Store | None, group_name: str) -> BaseException:
    """Return the exception to end this process with: the error in one process, a silent exit in the others.

    A UserError is raised only once, even if torchrun restarts the processes.
    """
    if store is None:  # the rendezvous failed
        return error
    num_ended = num_reports = 0
    with suppress(RuntimeError):  # the process that hosts the store has ended, and has raised the error
        num_ended = store.add(f"{group_name}/ended", 1)
        num_reports = store.add(f"told/{error}", 1)
    if isinstance(error, UserError):
        return error if num_reports == 1 else SystemExit(2)
    if isinstance(error, KeyboardInterrupt) and num_ended != 1:
        return SystemExit(130)
    if not isinstance(error, RuntimeError) or not _is_connection_error(error):
        return error
    if num_ended != 1:
        return SystemExit(2)
    return UserError(
        "another process of this run has ended, so this one must end too; the same command under torchrun, or "
        f"--resume RUN, resumes from the newest checkpoint ({str(error).splitlines()[0][:200]})"
    )


def _is_connection_error(error: RuntimeError) -> bool:
    """Return whether the error says that another process can no longer be reached."""
    words = ("gloo", "NCCL", "Connection", "Broken pipe")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def _local_device(device: torch.device, local: int) -> torch.device:
    """Return the device of the process with this local rank."""
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise UserError(f"several processes cannot share --device {device.type}; use cpu or cuda, or start one process")
    if local >= torch.cuda.device_count():
        raise UserError(
            f"local process {local + 1} has no GPU, this computer has {torch.cuda.device_count()}; start at most that "
            "many processes with --nproc-per-node, or use --device cpu"
        )
    local_device = torch.device("cuda", local)
    torch.cuda.set_device(local_device)
    return local_device


def gather_weights(model: LanguageModel, world: DistributedContext) -> dict[str, Tensor]:
    """Return all weights by name, gathered from all processes if they are sharded.

    Every process must call this; the first process gets the weights.
    """
    if world.size == 1:
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: tensor for name, tensor in gathered.items() if isinstance(tensor, Tensor)}


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered from all processes if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _layers(module: nn.Module) -> nn.ModuleList:
    return next(part for part in module.modules() if isinstance(part, LanguageModel)).layers


def _reshard_after_forward(module: nn.Module, *_: object) -> None:
    """Reshard after a pass without backward pass; otherwise the next pass would use these gathered weights."""
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
