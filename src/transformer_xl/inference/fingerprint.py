"""Finds whether a model still has the weights that something was made from, whoever changed them and however.

torch counts changes of a parameter in place, but not those by its fused optimizers or through `parameter.data`, so a
few elements of each parameter are compared too: only an uncounted change that spares all of them stays unseen, and so
does another `forward` or `eps` of a module. A layer
of PEFT also computes something else when another adapter is active, or one is merged, disabled or scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

_NUM_ELEMENTS = 16  # that are compared of each parameter


class Fingerprint:
    """The weights of a model as they were when it was made; comparing takes some hundred microseconds."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        # the dictionaries of the modules themselves, so that what is replaced in them is seen
        names = ("_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks")
        self._contents = [getattr(module, name) for module in modules for name in names]
        self._adapted: list[Any] = [module for module in modules if hasattr(module, "merged_adapters")]  # by PEFT
        # those of other classes (8-bit weights) are only compared as objects
        self._parameters = [parameter for parameter in model.parameters() if type(parameter.data) is Tensor]
        # views, which keep the memory of the parameters: while it is not freed, no others get the same address
        self._elements: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in self._parameters:
            self._elements.setdefault((parameter.device, parameter.dtype), []).append(_some_elements(parameter))
        self._model, self._objects = model, list(self._current_objects())
        self._numbers, self._values = self._current_numbers(), self._current_values()

    def matches(self, model: nn.Module) -> bool:
        """Return whether this is the model, and its weights are what they were."""
        objects = list(self._current_objects())
        return (
            model is self._model
            and len(objects) == len(self._objects)
            and all(map(is_, objects, self._objects))
            and self._current_numbers() == self._numbers
            and all(map(torch.equal, self._current_values(), self._values))
        )

    def _current_objects(self) -> Iterator[object]:
        for contents in self._contents:
            yield from contents.values()

    def _current_numbers(self) -> list[object]:
        """Return where the parameters are, how often torch saw them change, and which adapters are in use."""
        numbers: list[object] = [parameter.data_ptr() for parameter in self._parameters]
        # of inference tensors torch counts no changes
        numbers += [parameter.is_inference() or parameter._version for parameter in self._parameters]
        for layer in self._adapted:
            scaling = getattr(layer, "scaling", None)
            numbers += list(layer.active_adapters), list(layer.merged_adapters), layer.disable_adapters
            numbers.append(dict(scaling) if isinstance(scaling, dict) else None)
        return numbers

    def _current_values(self) -> list[Tensor]:
        """Return the elements that are compared, as bytes, where NaN equals itself."""
        return [torch.cat(views).view(torch.uint8) for views in self._elements.values()]


@torch.no_grad()
def sample_of(model: nn.Module) -> Tensor:
    """Return a few elements of each parameter, as float32 on the CPU, which a copy of the model has too."""
    plain = (parameter for parameter in model.parameters() if type(parameter.data) is Tensor)  # not of 8 bits
    return torch.cat([_some_elements(parameter).float().cpu() for parameter in plain])


@torch.no_grad()
def _some_elements(parameter: Tensor) -> Tensor:
    """Return a view of a few elements; an odd distance leads to other columns in each row."""
    flat = parameter.detach()
    flat = flat.view(-1) if flat.is_contiguous() else flat[(0,) * (flat.ndim - 1)]
    return flat[:: (len(flat) // _NUM_ELEMENTS) | 1]
