"""Dynamic evaluation: the model learns from the text while it is scored (Krause et al., arXiv 1709.07432, 1904.08378).

A segment is scored, then one gradient step is taken on it, so every token is predicted by weights that have seen only
what stands before its segment. With theta the weights, theta_g the trained ones and g the gradient of the segment's
mean loss:

    sgd    theta <- theta - rate g                                  + decay (theta_g - theta)
    rms    theta <- theta - rate g / (rms + epsilon)                + min(1, decay rms / mean(rms)) (theta_g - theta)

where rms is the root of the mean squared gradient over segments of the training text. Memory goes on and holds hidden
rows, as in training: keys and values of changed weights would be wrong.

Shape suffixes: B rows (one), T new tokens, D model width, K tokens of a text.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from transformer_xl.config import UserError
from transformer_xl.evaluation.plan import EvaluationPlan, Parts, Progress, Text
from transformer_xl.evaluation.scoring import Scored, Span, computing, fetched
from transformer_xl.evaluation.stretches import Stretch, segment_of
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.text.token_store import Tokens

_RATES = {"rms": 1e-6, "sgd": 0.01}


@dataclass(frozen=True, eq=False)
class DynamicEvaluation:
    """How the weights follow the text. The defaults of rms are those published for enwik8 (docs/evaluation.md)."""

    form: Literal["rms", "sgd"] = "rms"
    """Steps divided by the size gradients have on the training text, or plain ones."""
    rate: float | None = None
    """Size of a step; 0: the weights stay. None: 1e-6 for rms, 0.01 for sgd (ours)."""
    decay: float = 0.0
    """Share of the way back to the trained weights that each step goes."""
    epsilon: float = 8.5e-6
    """Added to rms, so that weights with hardly any gradient take no large steps."""
    training_K: Tokens | None = None
    """Ids of training text; rms needs them."""
    statistics_tokens: int = 17_920
    """How many of them are read for rms, from the start (140 segments of 128, as published for enwik8)."""
    name: str = "dynamic"

    def __post_init__(self) -> None:
        """Refuses what cannot be."""
        if not 0 <= self.step_size < math.inf:
            raise UserError(f"dynamic rate {self.rate}: wanted a number, 0 or more")
        if not 0 <= self.decay <= 1:
            raise UserError(f"dynamic decay {self.decay}: wanted a number from 0 to 1")
        if not 0 < self.epsilon < math.inf:
            raise UserError(f"dynamic epsilon {self.epsilon}: wanted a number above 0")
        if self.statistics_tokens < 1:
            raise UserError(f"dynamic statistics-tokens {self.statistics_tokens}: wanted 1 or more")

    @property
    def settings(self) -> dict[str, Any]:
        """All of them, without the training text."""
        common = {"form": self.form, "rate": self.step_size, "decay": self.decay}
        if self.form == "sgd":
            return common
        return {**common, "epsilon": self.epsilon, "statistics_tokens": self.statistics_tokens}

    @property
    def step_size(self) -> float:
        """The rate, always a number."""
        return self.rate if self.rate is not None else _RATES[self.form]

    def parts(self, model: LanguageModel, text: Text, plan: EvaluationPlan, progress: Progress | None = None) -> Parts:
        """The loss of every token, once, in text order. The model has its own weights again when it ends.

        Where documents are read by themselves, the weights begin anew with each of them too.

        Raises:
            UserError: several rows, no training text for the form `rms`, or steps so large that losses are no numbers.
        """
        if plan.rows not in (None, 1):
            raise UserError(f"rows {plan.rows}: dynamic evaluation reads one after another; give 1")
        if plan.warmup is not None:
            raise UserError(
                "dynamic evaluation reads one stream from its start, without warming up; leave out --warmup"
            )
        if self.form == "rms" and (self.training_K is None or not len(self.training_K)):
            raise UserError("dynamic evaluation of the form rms needs training text; give it, or take the form sgd")
        return self._finite(fetched(self._steps(model, text, plan, progress)))

    def _finite(self, parts: Parts) -> Parts:
        with closing(parts):
            for part in parts:
                odd = np.flatnonzero(~np.isfinite(part.nats_K))
                if len(odd):
                    place = part.begin + int(odd[0])
                    raise UserError(
                        f"dynamic rate {self.step_size:g}: too large, from token {place:,} on losses "
                        "are infinite or not numbers; give a lower rate, or a larger epsilon"
                    )
                yield part

    def _steps(
        self, model: LanguageModel, text: Text, plan: EvaluationPlan, progress: Progress | None
    ) -> Generator[Scored, None, None]:
        reader = _Reader(model, plan)
        weights = _Weights(model)
        try:
            weights.go_by(self, None if self.form == "sgd" else self._statistics(reader, text.bos_token_id))
            for begin, end in pairwise(text.edges(plan.documents).tolist()):
                weights.restore()
                document = Stretch(begin, begin, end, fresh=True)
                for nats_BT, gradients in reader.read(text, document):
                    yield nats_BT, [Span(0, slice(0, nats_BT.shape[1]), begin)]
                    weights.step(gradients)
                    begin += nats_BT.shape[1]
                    if progress:
                        progress(nats_BT.shape[1])
        finally:
            weights.restore()

    def _statistics(self, reader: _Reader, bos_token_id: int) -> list[Tensor]:
        """The root of the mean squared gradient, for each weight."""
        assert self.training_K is not None
        training = Text(self.training_K[: self.statistics_tokens], bos_token_id)
        squares, count = [torch.zeros_like(weight) for weight in reader.weights], 0
        for _, gradients in reader.read(training, Stretch(0, 0, len(training.tokens_K), fresh=True)):
            for square, gradient in zip(squares, gradients, strict=True):
                square.add_(gradient.square())
            count += 1
        return [(square / count).sqrt() for square in squares]


class _Reader:
    """Reads a text segment by segment, and gives losses and the gradient of their mean."""

    def __init__(self, model: LanguageModel, plan: EvaluationPlan) -> None:
        self._model, self._plan = model, plan
        self.weights = _trained(model)

    def read(self, text: Text, stretch: Stretch) -> Generator[tuple[Tensor, list[Tensor]], None, None]:
        device = self.weights[0].device
        memory: Memory = self._model.initial_memory(1, self._plan.context_limits)
        for offset in range(0, stretch.length, self._plan.segment):
            width = min(self._plan.segment, stretch.length - offset)
            inputs_BT, targets_BT = segment_of(text, [stretch], offset, width)
            with computing(device, self._plan.precision, gradients=True):
                hidden_BTD, memory = self._model(inputs_BT.to(device), memory)
                nats_BT = self._model.nats(hidden_BTD, targets_BT)
            # some weights may take no part, such as the tails of an adaptive softmax
            gradients = torch.autograd.grad(nats_BT.mean(), self.weights, allow_unused=True, materialize_grads=True)
            yield nats_BT.detach(), list(gradients)


class _Weights:
    """A model's weights, what they were, and how far each of them goes in a step."""

    def __init__(self, model: LanguageModel) -> None:
        self._weights = _trained(model)
        self._trained = [weight.detach().clone() for weight in self._weights]
        self._rates: list[Tensor | float] = []
        self._shares: list[Tensor | float] = []

    def go_by(self, how: DynamicEvaluation, rms: list[Tensor] | None) -> None:
        """Sets the rate of every weight, and how much of the way back to what it was it goes in a step."""
        if rms is None:
            self._rates = [how.step_size] * len(self._weights)
            self._shares = [how.decay] * len(self._weights)
            return
        self._rates = [how.step_size / (one + how.epsilon) for one in rms]
        mean = torch.cat([one.flatten() for one in rms]).mean()
        self._shares = [(one / mean * how.decay).clamp(max=1) if how.decay else 0.0 for one in rms]

    @torch.no_grad()
    def step(self, gradients: list[Tensor]) -> None:
        """Changes all weights by the equations above."""
        columns = zip(self._weights, self._trained, gradients, self._rates, self._shares, strict=True)
        for weight, trained, gradient, rate, share in columns:
            weight.add_((trained - weight) * share - gradient * rate)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back what they were."""
        for weight, trained in zip(self._weights, self._trained, strict=True):
            weight.copy_(trained)


def _trained(model: LanguageModel) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]
