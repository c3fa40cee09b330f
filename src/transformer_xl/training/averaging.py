"""The average of the weights over training steps: often better than the last weights, at almost no cost.

`uniform`, the plain mean, is stochastic weight averaging (Izmailov et al. 2018); `ema`, an exponential moving average,
forgets older weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from transformer_xl.config import TrainConfig, UserError
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.training.distributed import local_tensor


class WeightAverage:
    """The average of a model's weights, on their device; if they are divided among processes (sharded), so is it."""

    def __init__(self, model: LanguageModel, config: TrainConfig) -> None:
        """Initialize the average with the current weights; those that are not trained have none."""
        self.config = config
        self.count = 0
        """Number of steps in the average; while it is 0, `applied` does not change the weights."""
        self._parameters: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self._means: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the current weights to the average; does nothing in the first `average_start_step` steps.

        An exponential average of n steps weights the step k steps ago by decay^k and divides by the sum of these
        factors, so that it is not biased towards the initial weights.

        Args:
            step: number of training steps done.
        """
        if step <= self.config.average_start_step:
            return
        self.count += 1
        decay = self.config.ema_decay
        is_uniform = self.config.weight_average == "uniform"
        new_weight = 1 / self.count if is_uniform else (1 - decay) / (1 - decay**self.count)
        torch._foreach_lerp_(_local(self._means.values()), _local(self._parameters.values()), new_weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the model's weights by the average within the block, and restore them bit for bit afterwards.

        The model must not be trained in the block.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint: the means by parameter name, and the `count`."""
        return {**self._means, "count": torch.tensor(self.count)}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors()` returned.

        Raises:
            UserError: names or shapes differ from those of the model's weights.
        """
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if shapes != {name: tensor.shape for name, tensor in self.tensors().items()}:
            raise UserError("the saved weight average does not fit this model; start a new run")
        self.count = int(tensors["count"])
        for name, mean in self._means.items():
            mean.copy_(tensors[name])

    @torch.no_grad()
    def _swap(self) -> None:
        if not self.count:
            return
        for mean, weight in zip(_local(self._means.values()), _local(self._parameters.values()), strict=True):
            original = weight.clone()
            weight.copy_(mean)
            mean.copy_(original)


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local_tensor(tensor).detach() for tensor in tensors]
