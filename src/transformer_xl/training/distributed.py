"""The processes that train one model together; one process alone is a world of its own.

Each process has its own rows and their memory. Sums are added up over all of them before anything is divided.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from transformer_xl.text.segments import Shard


@dataclass(frozen=True)
class World:
    """The processes of one training, seen from one of them."""

    rank: int = 0
    """Number of this process, from 0."""
    size: int = 1
    """Number of processes."""

    @property
    def is_first(self) -> bool:
        """Whether this is the process that shows, logs and writes what is the same in all."""
        return self.rank == 0

    @property
    def shard(self) -> Shard:
        """Which of the rows are read here."""
        return Shard(self.rank, self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes; every process gets it."""
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether it is true in some process; every process gets the same answer."""
        return flag

    def barrier(self) -> None:
        """Waits until every process is here."""

    def wrap(self, module: nn.Module, parallel: str) -> nn.Module:
        """The module whose gradients are sums over all processes (not means), whole (`ddp`) or in shares (`fsdp`)."""
        return module

    def sync_gradients(self, module: nn.Module, wanted: bool) -> None:
        """Whether the next backward pass adds gradients up over the processes, or leaves that to a later one."""


ALONE = World()
