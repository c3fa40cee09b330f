"""Applies torch.compile to each layer separately: layers share the compiled code, and weights keep their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from transformer_xl.config import UserError
from transformer_xl.model.language_model import LanguageModel

# How often torch may recompile a layer. A run needs one version for each combination of empty or full memory, training
# or evaluation, and two sizes of micro-batches (the last may be smaller); all of these are fewer than this limit.
# torch's default limit, 8, is for programs whose shapes never stop changing.
_MAX_VARIANTS = 128


def compile_layers(model: LanguageModel, device: torch.device, mode: Literal["none", "layers", "cudagraphs"]) -> None:
    """Compile each layer of the model at its first use; embedding and softmax are not compiled.

    Args:
        model: the model, whose layers are changed.
        device: device that the model computes on.
        mode: none: compile nothing; layers: compile each layer; cudagraphs: also replay it as a CUDA graph.

    Raises:
        UserError: CUDA graphs are requested without CUDA, or no working compiler is installed.
    """
    if mode == "none":
        return
    if mode == "cudagraphs" and device.type != "cuda":
        raise UserError(f"compile cudagraphs needs CUDA, and this run is on {device}; set train.compile=layers or none")
    _check_compiler(device)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_VARIANTS)
    for layer in model.layers:
        layer.forward = _Compiled(layer, "reduce-overhead" if mode == "cudagraphs" else None)


class _Compiled:
    """The compiled `forward` of a layer; after a deep copy of the layer it computes with the weights of the copy.

    A deep copy of a compiled bound method would still compute with the weights of the original layer.
    """

    def __init__(self, layer: nn.Module, mode: str | None) -> None:
        self.layer, self.mode = layer, mode

    def __call__(self, *args: Any) -> Any:
        # compiles the class's function, not the module, because FSDP's hooks must not be compiled
        return _compiled(type(self.layer).forward, self.mode)(self.layer, *args)


@cache
def _compiled(function: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False, mode=mode)


def _check_compiler(device: torch.device) -> None:
    """Compile a small function, so that a missing compiler is reported before training."""
    try:
        torch.compile(torch.sin, fullgraph=True, dynamic=False)(torch.zeros(2, device=device))
    except Exception as error:  # torch raises various exceptions without a common base class
        inner = getattr(error, "inner_exception", error)
        reason = next(iter(str(inner).strip().splitlines()), "") or type(inner).__name__
        raise UserError(
            f"torch.compile does not work on this computer ({reason}); install a C++ compiler (g++ or clang, and for "
            "CUDA triton), or set train.compile=none"
        ) from None
