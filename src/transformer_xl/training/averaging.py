"""An average of the weights over the steps: often better than the weights of any one step, and free of charge.

Uniform, the plain mean, is stochastic weight averaging (Izmailov et al. 2018); exponential forgets older weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy

import torch
from torch import Tensor, nn

from transformer_xl.config import TrainConfig, UserError
from transformer_xl.model.language_model import LanguageModel


class WeightAverage:
    """The average of a model's weights, on their device, and in shares over the processes where they are."""

    def __init__(self, model: LanguageModel, config: TrainConfig) -> None:
        """Begins with the weights as they are."""
        self.config = config
        self.count = 0
        """Steps whose weights are in it; 0: it has not begun, and stands for the weights themselves."""
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._means: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights as they are after so many steps; before `average_from` steps are over it does nothing.

        An exponential average of n steps weighs the k-th last of them decay^k, and divides by the sum of these weights,
        so that where it began is not held against it.
        """
        if step <= self.config.average_start_step:
            return
        self.count += 1
        decay = self.config.ema_decay
        share = 1 / self.count if self.config.weight_average == "uniform" else (1 - decay) / (1 - decay**self.count)
        torch._foreach_lerp_(_local(self._means.values()), _local(self._parameters.values()), share)

    @contextmanager
    def in_place_of(self, model: LanguageModel) -> Iterator[None]:
        """The model has the average for weights, and afterwards its own again, bit for bit; nothing may train it."""
        assert all(
            own is parameter for own, parameter in zip(model.parameters(), self._parameters.values(), strict=True)
        )
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def tensors(self) -> dict[str, Tensor]:
        """What is needed to go on with it: the means by parameter name, and the `count`."""
        return {**self._means, "count": torch.tensor(self.count)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> WeightAverage:
        """An average of the same model's weights that holds what `tensors()` gave.

        Raises:
            UserError: names or shapes are not those of this model's weights.
        """
        if tensors.keys() != {*self._means, "count"} or any(
            tensors[name].shape != mean.shape for name, mean in self._means.items()
        ):
            raise UserError("the kept average of the weights is not one of this model's; start a new run")
        new = copy(self)
        new.count = int(tensors["count"])
        # clone: tensors read from a file may lie at odd addresses, which can change the last bit of what is computed
        new._means = {name: tensors[name].to(mean.device, mean.dtype).clone() for name, mean in self._means.items()}
        return new

    @torch.no_grad()
    def _swap(self) -> None:
        if not self.count:
            return
        for mean, weight in zip(_local(self._means.values()), _local(self._parameters.values()), strict=True):
            kept = weight.clone()
            weight.copy_(mean)
            mean.copy_(kept)


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors themselves, or this process's shares of them."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach() for tensor in tensors]
