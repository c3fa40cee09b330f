"""Options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from transformer_xl.config import UserError

if TYPE_CHECKING:
    import torch

Json = Annotated[bool, Parameter(negative=(), help="Print one JSON object and nothing else on standard output.")]


@dataclass(frozen=True)
class Machine:
    """What computes."""

    device: str = "auto"
    """auto, cuda, mps or cpu."""
    threads: int | None = None
    """CPU threads of one operation."""

    def choose(self) -> torch.device:
        """The device, with the threads set.

        Raises:
            UserError: there is no such device here, or fewer than one thread.
        """
        from transformer_xl.device import choose_device, set_threads

        set_threads(self.threads)
        return choose_device(self.device)


MachineOptions = Annotated[Machine, Parameter(name="*")]
ANY_MACHINE = Machine()


def whole_numbers(flag: str, given: str, *, least: int = 1) -> tuple[int, ...]:
    """Numbers that were typed as one word, 800,1800.

    Raises:
        UserError: something else was typed.
    """
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isascii() and part.isdecimal() and least <= int(part) < 10**7 for part in parts):
        raise UserError(f"{flag} {given}: wanted whole numbers from {least} on with commas between, such as 800,1800")
    return tuple(int(part) for part in parts)
