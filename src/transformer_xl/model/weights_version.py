"""Numbers the contents of a model's weights, so that a KV cache of earlier ones is refused instead of used.

The number changes after an optimizer step, `load_state_dict` and any other change in place (torch counts those of each
tensor), when a parameter or a layer is replaced (an adapter is added, or merged and removed), and when another adapter
of peft is active or one is merged. torch's fused optimizers do not count their steps, so a hook does. Only a change
through `parameter.data` stays unseen.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

_numbers = itertools.count(1)


class WeightsVersion:
    """The current number of one model; it is found by comparing some hundred integers, without reading weights."""

    def __init__(self) -> None:
        self.number = 0
        """That of the weights when they were last looked at; 0 before."""
        self._seen = list[Any]()
        self._parameters: list[dict[str, nn.Parameter | None]] = []
        self._children: list[dict[str, nn.Module | None]] = []
        self._adapted: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightsVersion:
        return WeightsVersion()  # the weights of a copy change independently

    def of(self, model: nn.Module) -> int:
        """Return the number of the model's weights as they are now; equal numbers mean equal weights."""
        if not self.number or self._state() != self._seen:
            self.set(model, next(_numbers))
        return self.number

    def set(self, model: nn.Module, number: int) -> None:
        """Give the weights of a model, as they are now, a number."""
        count_optimizer_steps()
        modules = list(model.modules())
        self._parameters = [module._parameters for module in modules if module._parameters]
        self._children = [module._modules for module in modules if module._modules]
        self._adapted = [module for module in modules if hasattr(module, "merged_adapters")]  # layers of peft
        self.number, self._seen = number, self._state()

    def _state(self) -> list[Any]:
        parameters = [one for group in self._parameters for one in group.values() if one is not None]
        children = [child for group in self._children for child in group.values()]
        state: list[Any] = [*map(id, parameters), *map(id, children)]
        with suppress(RuntimeError):  # torch counts no changes of inference tensors
            state += [parameter._version for parameter in parameters]
        for layer in self._adapted:
            state += tuple(layer.active_adapters), tuple(layer.merged_adapters), layer.disable_adapters
        return state


@cache  # once in a process
def count_optimizer_steps() -> None:
    """Count each step of each optimizer as a change of the tensors that it trains."""

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            torch.autograd.graph.increment_version(group["params"])

    register_optimizer_step_post_hook(count)
