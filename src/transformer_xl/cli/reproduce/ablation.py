"""`txl reproduce ablation`: the ten systems of the paper's ablation at any scale, beside the paper's figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from transformer_xl.cli.options import Json, whole_numbers
from transformer_xl.cli.reproduce.workshop import Scale, Workshop

if TYPE_CHECKING:
    pass

_DEFAULT = Scale()


def ablation(
    *,
    scale: Annotated[Scale, Parameter(name="*")] = _DEFAULT,
    lengths: str | None = None,
    json: Json = False,
) -> None:
    """Train the ten systems of the paper's ablation, and score each over a sweep of attention lengths.

    Two more are trained without recurrence at equal memory. About two hours on two CPU cores; when stopped, the same
    command goes on. Any setting of 'txl train' may be given.

    Parameters
    ----------
    scale
        How large all of it is.
    lengths
        Attention lengths at which each system is scored, in tokens. [default: from half a segment to six segments]
    """
    wanted = None if lengths is None else whole_numbers("--lengths", lengths)
    from transformer_xl.analysis.systems import ABLATION, EQUAL_MEMORY

    systems = (*ABLATION, *EQUAL_MEMORY)
    with Workshop.opened(scale) as workshop:
        windows = {system.name: workshop.windows(system, wanted) for system in systems}
        workshop.finish(systems, windows)
