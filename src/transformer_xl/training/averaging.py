"""An average of the weights over the steps: often better than the weights of any one step, and nearly free.

`uniform`, the plain mean, is stochastic weight averaging (Izmailov et al. 2018); `ema`, an exponential moving average,
forgets older weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy

import torch
from torch import Tensor, nn

from transformer_xl.config import TrainConfig, UserError
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.training.distributed import local_tensor


class WeightAverage:
    """The average of a model's weights, on their device, and sharded over the processes where they are."""

    def __init__(self, model: LanguageModel, config: TrainConfig) -> None:
        """Start with the weights as they are."""
        self.config = config
        self.count = 0
        """Steps whose weights are in the average; 0: it has not begun, and is the weights themselves."""
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._means: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights as they are after a step; before `average_start_step` steps are done this does nothing.

        An exponential average of n steps weighs the k-th last of them decay^k, and divides by the sum of these weights,
        so that it is not biased towards the weights it started with.

        Args:
            step: number of steps done.
        """
        if step <= self.config.average_start_step:
            return
        self.count += 1
        decay = self.config.ema_decay
        share = 1 / self.count if self.config.weight_average == "uniform" else (1 - decay) / (1 - decay**self.count)
        torch._foreach_lerp_(_local(self._means.values()), _local(self._parameters.values()), share)

    @contextmanager
    def in_place_of(self, model: LanguageModel) -> Iterator[None]:
        """For the time of the block the model has the average, afterwards its own weights again, bit for bit.

        The model must not be trained in the block.
        """
        assert all(
            own is parameter for own, parameter in zip(model.parameters(), self._parameters.values(), strict=True)
        )
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs: the means by parameter name, and the `count`."""
        return {**self._means, "count": torch.tensor(self.count)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> WeightAverage:
        """Return an average of the same model's weights that holds what `tensors()` returned.

        Raises:
            UserError: names or shapes are not those of this model's weights.
        """
        if tensors.keys() != {*self._means, "count"} or any(
            tensors[name].shape != mean.shape for name, mean in self._means.items()
        ):
            raise UserError("the saved average of the weights is not one of this model's; start a new run")
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
            own = weight.clone()
            weight.copy_(mean)
            mean.copy_(own)


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local_tensor(tensor).detach() for tensor in tensors]
