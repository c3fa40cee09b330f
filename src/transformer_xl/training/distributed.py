"""The processes that train one model together; one process alone is a world of its own.

Each process has its own rows and their memory. Sums are added up over all of them before anything is divided.
`torchrun` starts the processes, starts them anew when one dies, and tells each its number.
"""

from __future__ import annotations

import gc
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

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # with CUDA, what lies on the CPU is summed up there

_BY_TORCHRUN = "start several processes by torchrun, or take WORLD_SIZE out of the environment for one alone"


@dataclass(frozen=True)
class DistributedContext:
    """The processes of one training, seen from one of them."""

    rank: int = 0
    """Number of this process, from 0."""
    size: int = 1
    """Number of processes."""
    device: torch.device = field(default=torch.device("cpu"))
    """What this process computes on."""
    mesh: DeviceMesh | None = None
    """The processes as torch's sharded tensors know them, in one dimension; none for one process alone."""

    @property
    def is_first(self) -> bool:
        """Whether this is the process that shows, logs and writes what is the same in all."""
        return self.rank == 0

    @property
    def shard(self) -> Shard:
        """Which of the rows are read here."""
        return Shard(self.rank, self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes; every process gets it. Nothing waits for the device."""
        if self.size == 1:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Whether it is true in some process; every process gets the same answer. Waits for all, not for the device."""
        return bool(self.sum(torch.tensor(int(flag))))

    def barrier(self) -> None:
        """Waits until every process is here."""
        self.any(False)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What the user must know of one process, all raise: none goes on to wait for another that has given up.

        Raises:
            UserError: the block raised it, here or in another process; the same one in all.
        """
        own: UserError | None = None
        try:
            yield
        except UserError as error:
            if self.size == 1:
                raise
            own = error
        if self.size > 1 and (first := next((text for text in self.gather(str(own or "")) if text), "")):
            raise UserError(first) from own

    def gather(self, text: str) -> list[str]:
        """The texts of all processes in their order; every process gets them."""
        if self.size == 1:
            return [text]
        own = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        lengths = [torch.zeros((), dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor(len(own)))
        longest = max(map(int, lengths))
        padded = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(padded, nn.functional.pad(own, (0, longest - len(own))))
        return [bytes(one.tolist()).rstrip(b"\0").decode() for one in padded]

    def wrap(self, module: nn.Module, parallel: str) -> nn.Module:
        """The module whose gradients are sums over all processes (not means), whole (`ddp`) or in shares (`fsdp`).

        With fsdp each layer is gathered when it is used and let go again; the rest of the model is a part by itself.
        """
        if self.size == 1:
            return module
        if parallel == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
            # in place of DDP's mean; a lambda, as DDP does not understand postponed annotations
            wrapped.register_comm_hook(None, lambda _, bucket: _summed(bucket))  # pyrefly: ignore
            return wrapped
        from torch.distributed.fsdp import FSDPModule, fully_shard

        for part in (*_layers(module), module):
            fully_shard(part, mesh=self.mesh)
            assert isinstance(part, FSDPModule)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
        module.register_forward_hook(_let_go)
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing writes into it
        return module

    def sync_gradients(self, module: nn.Module, wanted: bool) -> None:
        """Whether the next forward and backward pass adds gradients up over the processes, or leaves it to a later."""
        if self.size == 1:
            return
        from torch.distributed.fsdp import FSDPModule
        from torch.nn.parallel import DistributedDataParallel

        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = wanted
        elif isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(wanted)

    def seed(self, seed: int, step: int) -> None:
        """Sets torch's random state to one that follows from seed and step, another one in each process."""
        drawn = np.random.SeedSequence((seed, step, self.rank)).generate_state(1, np.uint64)
        torch.manual_seed(int(drawn[0]) >> 1)


ALONE = DistributedContext()


@contextmanager
def process_group(choose: Callable[[], torch.device]) -> Iterator[DistributedContext]:
    """The world of the processes that torchrun started, for the time of the block; without torchrun, this one alone.

    `choose` says what to compute on; of several GPUs each process takes its own.

    What the block made must be out of reach when it ends (let a function make it): process groups can only be taken
    down safely when nothing uses them any more.

    Raises:
        UserError: the environment is not as torchrun sets it, the device cannot be shared so, another process has
            ended, or one raised it in the block. Of all processes that have met the first to raise does; the others
            end silently, with SystemExit.
    """
    rank, size, local = _started_as()
    if size == 1:
        yield DistributedContext(device=choose())
        return
    store: dist.Store | None = None
    try:
        store = _met(rank, size)
        device = _own_device(choose(), local)
        own = dist.PrefixStore(_attempt(), store)  # torchrun's store may still hold the addresses of those that ended
        with _ended_by_signals():
            dist.init_process_group(_BACKENDS[device.type], store=own, rank=rank, world_size=size)
            mesh = dist.device_mesh.init_device_mesh(device.type, (size,))
        world = DistributedContext(rank, size, device, mesh)
        yield world
        world.barrier()
        shutdown()
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when one process has ended; this one does so
        end = _end_of(error, store)  # before the others can notice that this process goes
        traceback.clear_frames(error.__traceback__)
        shutdown()
        raise end from error.__cause__


def shutdown() -> None:
    """Takes the process group down.

    The order matters: gloo's threads abort the process at its end if something that uses them outlives their group. So
    first all processes are done, then the model and its optimisers are gone, then the group.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_restartable() -> bool:
    """Whether torchrun watches over this process: the same command line may then come again, after one has died."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _attempt() -> str:
    """A name for this start of the processes, which another one after a failure does not share."""
    return f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _started_as() -> tuple[int, int, int]:
    """Number of this process, number of processes, and number on its machine, as the environment says.

    Raises:
        UserError: the environment is not as torchrun sets it.
    """
    size = _number("WORLD_SIZE", "1", 1, None)
    if size == 1:
        return 0, 1, 0
    rank, local = _number("RANK", None, 0, size - 1), _number("LOCAL_RANK", "0", 0, size - 1)
    _number("MASTER_PORT", None, 1, 65535)
    if not os.environ.get("MASTER_ADDR"):
        raise UserError(f"WORLD_SIZE is {size} in the environment and MASTER_ADDR is missing; {_BY_TORCHRUN}")
    return rank, size, local


def _number(name: str, default: str | None, least: int, most: int | None) -> int:
    """A whole number from the environment, from `least` to `most`."""
    given = os.environ.get(name, default)
    if given is not None and given.isdecimal() and least <= int(given) and (most is None or int(given) <= most):
        return int(given)
    found = "is missing from the environment" if given is None else f"is {given!r} in the environment"
    wanted = f"at least {least}" if most is None else f"from {least} to {most}"
    raise UserError(f"{name} {found}, wanted a whole number {wanted}; {_BY_TORCHRUN}")


def _met(rank: int, size: int) -> dist.Store:
    """What all processes can reach; waits for them."""
    try:
        with _ended_by_signals():
            store, *_ = next(iter(dist.rendezvous("env://", rank, size)))
    except (RuntimeError, ValueError, OSError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        why = (str(error).splitlines() or [""])[0][:200]
        raise UserError(f"the {size} processes did not meet at {place} ({why}); {_BY_TORCHRUN}") from error
    return store


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT end the process at once: Python hears of no signal while torch waits for other processes."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _end_of(error: BaseException, store: dist.Store | None) -> BaseException:
    """What this process ends with: the error in one process, a silent exit in the others.

    What a user can put right is told once, however often torchrun starts the processes anew.
    """
    if store is None:  # the processes have not met
        return error
    first = told = 0
    with suppress(RuntimeError):  # the store has gone with the process that kept it: that one has told it
        first = store.add(f"{_attempt()}/ended", 1)
        told = store.add(f"told/{error}", 1)
    if isinstance(error, UserError):
        return error if told == 1 else SystemExit(2)
    if isinstance(error, KeyboardInterrupt) and first != 1:
        return SystemExit(130)
    if not isinstance(error, RuntimeError) or not _is_lost(error):
        return error
    if first != 1:
        return SystemExit(2)
    return UserError(
        "another process of this training has ended, so this one cannot go on; the same command under torchrun, or "
        f"--resume RUN, goes on from the newest checkpoint ({str(error).splitlines()[0][:200]})"
    )


def _is_lost(error: RuntimeError) -> bool:
    """Whether it says that another process can no longer be reached."""
    words = ("gloo", "NCCL", "Connection", "Broken pipe")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def _own_device(device: torch.device, local: int) -> torch.device:
    """The device of the process with this number on its machine."""
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise UserError(
            f"several processes cannot share --device {device.type}; give cpu or cuda, or start one process"
        )
    if local >= torch.cuda.device_count():
        raise UserError(
            f"process {local + 1} of this machine has no GPU, there are {torch.cuda.device_count()}; start no more "
            "processes with --nproc-per-node, or give --device cpu"
        )
    own = torch.device("cuda", local)
    torch.cuda.set_device(own)
    return own


def _layers(module: nn.Module) -> nn.ModuleList:
    return next(part for part in module.modules() if isinstance(part, LanguageModel)).layers


def _let_go(module: nn.Module, *_: object) -> None:
    """After a pass that no backward pass follows: else the next pass would use the weights that were gathered here."""
    from torch.distributed.fsdp import FSDPModule

    if not torch.is_grad_enabled():
        assert isinstance(module, FSDPModule)
        module.reshard()


def _summed(bucket: dist.GradBucket) -> Future[Tensor]:
    """The sum over all processes of some of the gradients."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(_first_result)


def _first_result(done: Future[list[Tensor]]) -> Tensor:
    return done.value()[0]
