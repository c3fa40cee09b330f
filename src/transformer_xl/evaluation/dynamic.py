"""Dynamic evaluation: the model learns from the text while it is scored (Krause et al., arXiv 1709.07432, 1904.08378).

Each segment is scored, then one gradient step is taken on it, so every token is predicted by weights that have seen
only the segments before its own. With theta the weights, theta_g the trained ones, g the gradient of the segment's mean
loss and eta the learning rate:

    sgd    theta <- theta - eta g                                  + decay (theta_g - theta)
    rms    theta <- theta - eta g / (rms + epsilon)                + min(1, decay rms / mean(rms)) (theta_g - theta)

where rms is the root of the mean squared gradient over segments of the training text. Memory continues from segment to
segment and holds hidden states, as in training: cached keys and values would belong to older weights.

Shape suffixes: B batch size (1), T new tokens, D model width, K tokens of a text.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from transformer_xl.config import DynamicConfig, UserError
from transformer_xl.evaluation.memory import TextSequence, segment_of
from transformer_xl.evaluation.method import CountedLosses, StepLosses, TokenizedText, compute_context
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.text.token_store import Tokens

if TYPE_CHECKING:
    from transformer_xl.evaluation.evaluate import EvaluationPlan

_LEARNING_RATES = {"rms": 1e-6, "sgd": 0.01}


@dataclass(frozen=True, eq=False)
class DynamicEvaluation:
    """Gradient steps on the text that is scored."""

    config: DynamicConfig
    train_tokens_K: Tokens | None = None
    """Token ids of the training text; the optimizer rms needs them."""
    name: str = "dynamic"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the optimizer uses."""
        unused = {"epsilon", "gradient_stats_tokens"} if self.config.optimizer == "sgd" else set[str]()
        return {**self.config.model_dump(exclude=unused), "learning_rate": self.learning_rate}

    @property
    def learning_rate(self) -> float:
        """The learning rate, with the optimizer's default where none is set."""
        rate = self.config.learning_rate
        return _LEARNING_RATES[self.config.optimizer] if rate is None else rate

    def steps(
        self, model: LanguageModel, text: TokenizedText, plan: EvaluationPlan
    ) -> Generator[StepLosses, None, None]:
        """Yield the loss of every token once, in text order. At the end the model has its own weights again.

        With `reset_memory` each document starts from the trained weights, too.

        Raises:
            UserError: a batch size above 1, a warm-up, no training text for rms, or losses that are not finite.
        """
        if plan.batch_size not in (None, 1):
            raise UserError(f"batch-size {plan.batch_size}: method dynamic reads one sequence; give 1")
        if plan.warmup_tokens is not None:
            raise UserError("method dynamic reads the text from its start and has no warm-up; leave out warmup-tokens")
        if self.config.optimizer == "rms" and (self.train_tokens_K is None or not len(self.train_tokens_K)):
            raise UserError(
                "method dynamic with the optimizer rms needs the training text (train_split); give it, or optimizer sgd"
            )
        return self._adapt(model, text, plan)

    def _adapt(
        self, model: LanguageModel, text: TokenizedText, plan: EvaluationPlan
    ) -> Generator[StepLosses, None, None]:
        weights = _AdaptedWeights(model)
        try:
            rms = self._gradient_rms(model, text.bos_token_id, plan) if self.config.optimizer == "rms" else None
            weights.set_step_sizes(self.learning_rate, self.config, rms)
            for start, end in pairwise(text.boundaries(reset_memory=plan.reset_memory).tolist()):
                weights.restore()
                position = start
                for nats_BT, gradients in _read_with_gradients(
                    model, text, TextSequence(start, start, end, True), plan
                ):
                    self._check_finite(nats_BT, position)
                    yield nats_BT, [CountedLosses(0, position, nats_BT.shape[1])]
                    weights.step(gradients)
                    position += nats_BT.shape[1]
        finally:
            weights.restore()

    def _check_finite(self, nats_BT: Tensor, position: int) -> None:
        odd = (~nats_BT[0].isfinite()).nonzero().flatten().tolist()
        if odd:
            raise UserError(
                f"dynamic.learning-rate {self.learning_rate:g}: too large, losses are not finite from token "
                f"{position + odd[0]:,} on; give a smaller one, or a larger dynamic.epsilon"
            )

    def _gradient_rms(self, model: LanguageModel, bos_token_id: int, plan: EvaluationPlan) -> list[Tensor]:
        """Return the root of the mean squared gradient on the training text, for each weight."""
        assert self.train_tokens_K is not None
        training = TokenizedText(self.train_tokens_K[: self.config.gradient_stats_tokens], bos_token_id)
        sequence = TextSequence(0, 0, len(training.tokens_K), starts_document=True)
        squares, count = [torch.zeros_like(weight) for weight in _trainable(model)], 0
        for _, gradients in _read_with_gradients(model, training, sequence, plan):
            for square, gradient in zip(squares, gradients, strict=True):
                square.add_(gradient.square())
            count += 1
        return [(square / count).sqrt() for square in squares]


def _read_with_gradients(
    model: LanguageModel, text: TokenizedText, sequence: TextSequence, plan: EvaluationPlan
) -> Generator[tuple[Tensor, list[Tensor]], None, None]:
    """Read a sequence segment by segment; yield its losses, and the gradient of their mean for each weight."""
    weights = _trainable(model)
    device = weights[0].device
    memory: Memory = model.initial_memory(1, plan.context_limits)
    for offset in range(0, sequence.length, plan.segment_length):
        inputs_BT, targets_BT = segment_of(text, [sequence], offset, min(plan.segment_length, sequence.length - offset))
        with compute_context(device, plan.dtype, gradients=True):
            hidden_BTD, memory = model(inputs_BT.to(device), memory)
            nats_BT = model.nats(hidden_BTD, targets_BT)
        # some weights may take no part, such as the tails of an adaptive softmax
        gradients = torch.autograd.grad(nats_BT.mean(), weights, allow_unused=True, materialize_grads=True)
        yield nats_BT.detach(), list(gradients)


class _AdaptedWeights:
    """The weights of a model, their trained values, and the step sizes of each."""

    def __init__(self, model: LanguageModel) -> None:
        self._weights = _trainable(model)
        self._trained = [weight.detach().clone() for weight in self._weights]
        self._rates: list[Tensor | float] = []
        self._decays: list[Tensor | float] = []

    def set_step_sizes(self, learning_rate: float, config: DynamicConfig, rms: list[Tensor] | None) -> None:
        """Set the learning rate and the decay of each weight; `rms` None: the same for all (sgd)."""
        if rms is None:
            self._rates = [learning_rate] * len(self._weights)
            self._decays = [config.decay] * len(self._weights)
            return
        self._rates = [learning_rate / (one + config.epsilon) for one in rms]
        mean = torch.cat([one.flatten() for one in rms]).mean()
        self._decays = [(one / mean * config.decay).clamp(max=1) if config.decay else 0.0 for one in rms]

    @torch.no_grad()
    def step(self, gradients: list[Tensor]) -> None:
        """Update all weights by the equations above."""
        columns = zip(self._weights, self._trained, gradients, self._rates, self._decays, strict=True)
        for weight, trained, gradient, rate, decay in columns:
            weight.add_((trained - weight) * decay - gradient * rate)

    @torch.no_grad()
    def restore(self) -> None:
        """Give all weights their trained values."""
        for weight, trained in zip(self._weights, self._trained, strict=True):
            weight.copy_(trained)


def _trainable(model: LanguageModel) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]
