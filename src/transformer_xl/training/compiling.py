"""torch.compile for the layers, each by itself: they share what is compiled, and names of weights stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from transformer_xl.config import UserError
from transformer_xl.model.language_model import LanguageModel

# Shapes and modes of one run: empty or full memory, training or evaluation, two sizes of chunks, and the stages of the
# length warm-up. torch's own limit, 8, is meant for shapes that never end.
_MOST_VARIANTS = 128


def compile_layers(model: LanguageModel, device: torch.device, how: Literal["none", "layers", "cudagraphs"]) -> None:
    """Compiles the layers at their first use; what stands between them (embedding, softmax) is left as it is.

    Raises:
        UserError: CUDA graphs are wanted and there is no CUDA, or this machine cannot compile.
    """
    if how == "none":
        return
    if how == "cudagraphs" and device.type != "cuda":
        raise UserError(
            f"compile cudagraphs needs CUDA, and this run is on {device}; give --train.compile layers, or none"
        )
    _try(device)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VARIANTS)
    for layer in model.layers:
        layer.forward = _Compiled(layer, "reduce-overhead" if how == "cudagraphs" else None)


class _Compiled:
    """Stands in the place of a layer's forward; a copy of the layer gets one of its own, which computes with the copy.

    A bound method would go into the copy as it is, and there compute with the weights of the layer that was copied.
    """

    def __init__(self, layer: nn.Module, mode: str | None) -> None:
        self.layer, self.mode = layer, mode

    def __call__(self, *args: Any) -> Any:
        # the function, not the module: what sharing the weights out hangs before and after it is not for compiling
        return _compiled(type(self.layer).forward, self.mode)(self.layer, *args)


@cache
def _compiled(function: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False, mode=mode)


def _try(device: torch.device) -> None:
    """Compiles something small, so that a machine that cannot is found out at the start."""
    try:
        torch.compile(torch.sin, fullgraph=True, dynamic=False)(torch.zeros(2, device=device))
    except Exception as error:  # torch has no one kind of error for it
        inner = getattr(error, "inner_exception", error)
        said = next(iter(str(inner).strip().splitlines()), "") or type(inner).__name__
        raise UserError(
            f"torch.compile does not work on this machine ({said}); install a C++ compiler (g++ or clang, and for "
            "CUDA triton), or give --train.compile none"
        ) from None
