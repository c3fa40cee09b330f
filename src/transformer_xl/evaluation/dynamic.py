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
    """Evaluation with a gradient step after each scored segment."""

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
        """The learning rate that is set, or else the optimizer's default."""
        rate = self.config.learning_rate
        return _LEARNING_RATES[self.config.optimizer] if rate is None else rate

    def steps(
        self, model: LanguageModel, text: TokenizedText, plan: EvaluationPlan
    ) -> Generator[StepLosses, None, None]:
        """Yield the loss of every token once, in text order; the trained weights are restored at the end.

        With `reset_memory` the trained weights are also restored at the start of each document.

        Raises:
            UserError: the batch size is above 1, a warm-up is set, the training text for rms is missing, or losses are
                not finite.
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
        non_finite = (~nats_BT[0].isfinite()).nonzero().flatten().tolist()
        if non_finite:
            raise UserError(
                f"dynamic.learning-rate {self.learning_rate:g}: too large, losses are not finite from token "
                f"{position + non_finite[0]:,} on; give a smaller one, or a larger dynamic.epsilon"
            )

    def _gradient_rms(self, model: LanguageModel, bos_token_id: int, plan: EvaluationPlan) -> list[Tensor]:
        """Return the root of the mean squared gradient on the training text, for each weight."""
        assert self.train_tokens_K is not None
        train_text = TokenizedText(self.train_tokens_K[: self.config.gradient_stats_tokens], bos_token_id)
        sequence = TextSequence(0, 0, len(train_text.tokens_K), starts_document=True)
        square_sums, num_segments = [torch.zeros_like(weight) for weight in _trainable(model)], 0
        for _, gradients in _read_with_gradients(model, train_text, sequence, plan):
            for square_sum, gradient in zip(square_sums, gradients, strict=True):
                square_sum.add_(gradient.square())
            num_segments += 1
        return [(square_sum / num_segments).sqrt() for square_sum in square_sums]


def _read_with_gradients(
    model: LanguageModel, text: TokenizedText, sequence: TextSequence, plan: EvaluationPlan
) -> Generator[tuple[Tensor, list[Tensor]], None, None]:
    """Read a sequence segment by segment; yield the losses and the gradient of their mean by each weight."""
    weights = _trainable(model)
    device = weights[0].device
    memory: Memory = model.initial_memory(1, plan.context_limits)
    for offset in range(0, sequence.length, plan.segment_length):
        inputs_BT, targets_BT = segment_of(text, [sequence], offset, min(plan.segment_length, sequence.length - offset))
        with compute_context(device, plan.dtype, gradients=True):
            hidden_BTD, memory = model(inputs_BT.to(device), memory)
            nats_BT = model.nats(hidden_BTD, targets_BT)
        # allow_unused: some weights may not affect the loss, such as those of an adaptive softmax's tails
        gradients = torch.autograd.grad(nats_BT.mean(), weights, allow_unused=True, materialize_grads=True)
        yield nats_BT.detach(), list(gradients)


class _AdaptedWeights:
    """The trainable weights of a model with their trained values and step sizes."""

    def __init__(self, model: LanguageModel) -> None:
        self._weights = _trainable(model)
        self._trained = [weight.detach().clone() for weight in self._weights]
        self._rates: list[Tensor | float] = []
        self._decays: list[Tensor | float] = []

    def set_step_sizes(self, learning_rate: float, config: DynamicConfig, rms: list[Tensor] | None) -> None:
        """Set the learning rate and the decay of each weight, which are the same for all weights if `rms` is None."""
        if rms is None:
            self._rates = [learning_rate] * len(self._weights)
            self._decays = [config.decay] * len(self._weights)
            return
        self._rates = [learning_rate / (weight_rms + config.epsilon) for weight_rms in rms]
        mean = torch.cat([weight_rms.flatten() for weight_rms in rms]).mean()
        self._decays = [(weight_rms / mean * config.decay).clamp(max=1) if config.decay else 0.0 for weight_rms in rms]

    @torch.no_grad()
    def step(self, gradients: list[Tensor]) -> None:
        """Update all weights by the equations in the module's docstring."""
        columns = zip(self._weights, self._trained, gradients, self._rates, self._decays, strict=True)
        for weight, trained, gradient, rate, decay in columns:
            weight.add_((trained - weight) * decay - gradient * rate)

    @torch.no_grad()
    def restore(self) -> None:
        """Reset all weights to their trained values."""
        for weight, trained in zip(self._weights, self._trained, strict=True):
            weight.copy_(trained)


def _trainable(model: LanguageModel) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]
