"""Dynamic evaluation: the model learns from the text while it is scored (Krause et al., arXiv 1709.07432, 1904.08378).

Each segment is scored, then one gradient step is taken on it, so every token is predicted by weights that have seen
only the segments before its own. With theta the weights, theta_g the trained ones, g the gradient of the segment's mean
loss and eta the learning rate:

    sgd    theta <- theta - eta g                                  + decay (theta_g - theta)
    rms    theta <- theta - eta g / (rms + epsilon)                + min(1, decay rms / mean(rms)) (theta_g - theta)

where rms is the root of the mean squared gradient over segments of the training text, and epsilon and decay are
settings (`DynamicConfig`). Memory continues from segment to segment and holds hidden states, as in training: cached
keys and values would have been computed with older weights.

Shape suffixes: B batch size (1), T new tokens, X = T and their extended context, D model width, K tokens of a text.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from itertools import pairwise

import torch
from torch import Tensor, nn

from transformer_xl.config import UserError
from transformer_xl.device import autocast, require_memory
from transformer_xl.evaluation.plan import EvaluationPlan, ScoredSpan, StepLosses, TokenizedText
from transformer_xl.evaluation.with_memory import TextSequence, segment_tensors
from transformer_xl.inference import TokenModel
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.model.sizes import min_activations, min_cache


def losses(model: TokenModel, text: TokenizedText, plan: EvaluationPlan) -> Generator[StepLosses, None, None]:
    """Yield the loss of every token once, in text order; a copy of the model learns.

    With `reset_memory` the trained weights are restored at the start of each document. If no weight of the model is
    trainable, all are in the copy.

    Raises:
        UserError: the weights are those of `to_int8`, the batch size is above 1, `warmup_tokens` is set, the training
            text for rms is missing, losses are not finite, or it is called within `torch.inference_mode`.
    """
    assert isinstance(model, LanguageModel), "the weights of a prepared model are fixed"
    if plan.batch_size not in (None, 1):
        raise UserError(f"batch_size {plan.batch_size}: method dynamic reads one sequence; give 1")
    if plan.warmup_tokens is not None:
        raise UserError("method dynamic reads the text from its start and has no warm-up; leave out warmup_tokens")
    if torch.is_inference_mode_enabled():
        raise UserError("method dynamic computes gradients; leave torch.inference_mode out")
    model.check_not_quantized("changed, as method dynamic does")
    num_new, num_slots = min(plan.num_inputs, len(text.tokens_K)), plan.context_limits.memory_length
    # a copy of the weights and their gradients; the memory before and after a step; activations, 2 bytes in bfloat16
    num_bytes = 2 * sum(weight.nbytes for weight in model.parameters())
    num_bytes += 8 * min_cache(model.config, num_slots, training=True)
    num_bytes += 2 * min_activations(model.config, segment_length=num_new, memory_length=0)
    task = f"method dynamic with segments of {num_new:,} tokens and a memory of {num_slots:,}"
    require_memory(task, num_bytes, model.device, "lower memory_length or segment_length, or use another method")
    adapted = copy.deepcopy(model)
    if not _trainable_weights(adapted):
        adapted.requires_grad_(True)
    names = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    weights, trained_weights = _trainable_weights(adapted), [model.get_parameter(name).detach() for name in names]
    learning_rates, decays = _step_sizes(adapted, text.bos_token_id, plan)
    for start, end in pairwise(text.boundaries(reset_memory=plan.reset_memory).tolist()):
        _restore(weights, trained_weights)
        position, document = start, TextSequence(first=start, start=start, end=end, document_start=start)
        for nats_BT, gradients in _read_with_gradients(adapted, text, document, plan):  # B is 1
            _check_finite(nats_BT, position, plan.learning_rate)
            yield nats_BT, [ScoredSpan(row=0, position=position, length=nats_BT.shape[1])]
            columns = zip(weights, trained_weights, gradients, learning_rates, decays, strict=True)
            with torch.no_grad():
                for weight, trained, gradient, learning_rate, decay in columns:
                    weight.add_((trained - weight) * decay - gradient * learning_rate)
            position += nats_BT.shape[1]


def _trainable_weights(model: LanguageModel) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


@torch.no_grad()
def _restore(weights: list[nn.Parameter], trained_weights: list[Tensor]) -> None:
    for weight, trained in zip(weights, trained_weights, strict=True):
        weight.copy_(trained)


def _check_finite(nats_BT: Tensor, position: int, learning_rate: float) -> None:
    if non_finite := (~nats_BT[0].isfinite()).nonzero().flatten().tolist():
        raise UserError(
            f"dynamic.learning_rate {learning_rate:g}: too large, losses are not finite from token "
            f"{position + non_finite[0]:,} on; give a smaller one, or a larger dynamic.epsilon"
        )


def _step_sizes(
    model: LanguageModel, bos_token_id: int, plan: EvaluationPlan
) -> tuple[list[Tensor | float], list[Tensor | float]]:
    """Return the learning rate and the decay of each weight; with the optimizer sgd they are the same for all weights.

    Raises:
        UserError: the optimizer is rms, and there is no training text.
    """
    config, weights = plan.dynamic, _trainable_weights(model)
    if config.optimizer == "sgd":
        return [plan.learning_rate] * len(weights), [config.decay] * len(weights)
    if plan.train_tokens_K is None or not len(plan.train_tokens_K):
        raise UserError(
            "method dynamic with the optimizer rms needs the training text (train_split); give it, or optimizer sgd"
        )
    train_text = TokenizedText(plan.train_tokens_K[: config.gradient_stats_tokens], bos_token_id)
    sequence = TextSequence(first=0, start=0, end=len(train_text.tokens_K), document_start=0)
    square_sums, num_segments = [torch.zeros_like(weight) for weight in weights], 0
    for _, gradients in _read_with_gradients(model, train_text, sequence, plan):
        for square_sum, gradient in zip(square_sums, gradients, strict=True):
            square_sum.add_(gradient.square())
        num_segments += 1
    rms = [(square_sum / num_segments).sqrt() for square_sum in square_sums]
    mean = torch.cat([weight_rms.flatten() for weight_rms in rms]).mean()
    return (
        [plan.learning_rate / (weight_rms + config.epsilon) for weight_rms in rms],
        [(weight_rms / mean * config.decay).clamp(max=1) if config.decay else 0.0 for weight_rms in rms],
    )


def _read_with_gradients(
    model: LanguageModel, text: TokenizedText, sequence: TextSequence, plan: EvaluationPlan
) -> Generator[tuple[Tensor, tuple[Tensor, ...]], None, None]:
    """Read a sequence segment by segment; yield the losses and the gradient of their mean by each weight."""
    weights = _trainable_weights(model)
    device = weights[0].device
    memory: Memory = model.initial_memory(1, plan.context_limits)
    for offset in range(0, sequence.length, plan.segment_length):
        length = min(plan.segment_length, sequence.length - offset)
        context_length = min(plan.extended_context_length, offset)
        inputs_BX, targets_BT = segment_tensors(text, [sequence], offset, length, context_length=context_length)
        with torch.enable_grad(), autocast(device, plan.dtype):
            hidden_BXD, memory = model(inputs_BX.to(device), memory)
            nats_BT = model.nats(hidden_BXD[:, -length:], targets_BT, temperature=plan.softmax_temperature)
            # allow_unused: some weights may not affect the loss, such as those of an adaptive softmax's tails
            gradients = torch.autograd.grad(nats_BT.mean(), weights, allow_unused=True, materialize_grads=True)
        yield nats_BT.detach(), gradients
