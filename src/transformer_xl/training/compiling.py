"""torch.compile for each layer by itself: layers share the compiled code, and names of weights stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from transformer_xl.config import UserError
from transformer_xl.model.language_model import LanguageModel

# Shapes and modes of one run: empty or full memory, training or evaluation, two sizes of micro-batches, and the stages
# of the segment warm-up. torch's own limit, 8, is meant for shapes that keep changing.
_MAX_VARIANTS = 128


def compile_layers(model: LanguageModel, device: torch.device, mode: Literal["none", "layers", "cudagraphs"]) -> None:
    """Compile the layers at their first use; embedding and softmax are not compiled.

    Raises:
        UserError: CUDA graphs are asked for without CUDA, or this machine has no working compiler.
    """
    if mode == "none":
        return
    if mode == "cudagraphs" and device.type != "cuda":
        raise UserError(
            f"compile cudagraphs needs CUDA, and this run is on {device}; give --train.compile layers, or none"
        )
    _check_compiler(device)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_VARIANTS)
    for layer in model.layers:
        layer.forward = _Compiled(layer, "reduce-overhead" if mode == "cudagraphs" else None)


class _Compiled:
    """Replaces a layer's `forward`; a copy of the layer gets one of its own, which computes with the copy's weights.

    A bound method would be copied as it is, and compute with the weights of the layer that was copied.
    """

    def __init__(self, layer: nn.Module, mode: str | None) -> None:
        self.layer, self.mode = layer, mode

    def __call__(self, *args: Any) -> Any:
        # the function, not the module: the hooks of FSDP before and after it must not be compiled
        return _compiled(type(self.layer).forward, self.mode)(self.layer, *args)


@cache
def _compiled(function: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False, mode=mode)


def _check_compiler(device: torch.device) -> None:
    """Compile something small, so that a machine without a compiler is found out at the start."""
    try:
        torch.compile(torch.sin, fullgraph=True, dynamic=False)(torch.zeros(2, device=device))
    except Exception as error:  # torch has no single class of errors for it
        inner = getattr(error, "inner_exception", error)
        said = next(iter(str(inner).strip().splitlines()), "") or type(inner).__name__
        raise UserError(
            f"torch.compile does not work on this machine ({said}); install a C++ compiler (g++ or clang, and for "
            "CUDA triton), or give --train.compile none"
        ) from None
