"""Dynamic evaluation against a slow loop written from its equations; the model itself never changes.

The equations are at the top of `dynamic.py`. The fixture make_model (tests/conftest.py) makes a small model with random
weights and a vocabulary of 23.

Shape suffixes: B batch size (1), T tokens of a segment, D d_model, K tokens of a text, N documents.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tensors import assert_same_tensors, copied_tensors
from token_losses import BOS, CLOSE, nats_of_documents, random_tokens, token_nats

from transformer_xl.config import DynamicConfig, EvaluationConfig, UserError, run_settings
from transformer_xl.evaluation.evaluate import losses_in_order, stream_losses
from transformer_xl.evaluation.plan import EvaluationPlan, TokenizedText
from transformer_xl.inference.fingerprint import Fingerprint
from transformer_xl.model.memory import ContextLimits

LIMITS = ContextLimits(memory_length=11)


def dynamic_plan(train_tokens_K: npt.NDArray[Any] | None = None, /, **settings: Any) -> EvaluationPlan:
    """Return a plan of method dynamic with segments of 5 tokens; `settings` are those of DynamicConfig."""
    config = DynamicConfig(**settings)
    return EvaluationPlan(5, LIMITS, method="dynamic", dynamic=config, train_tokens_K=train_tokens_K)


def segments(tokens_K: npt.NDArray[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return inputs and targets of segments of 5 tokens."""
    inputs, targets = torch.tensor([[BOS, *tokens_K[:-1].tolist()]]), torch.tensor([tokens_K.tolist()])
    return list(zip(inputs.split(5, dim=1), targets.split(5, dim=1), strict=True))


def reference_losses(model, tokens_K, plan: EvaluationPlan, train_tokens_K) -> list[float]:
    """Follow the equations of the papers, with one flat vector of all weights."""
    weights, config = list(model.parameters()), plan.dynamic

    def flat_gradient(loss: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss.backward()
        return torch.cat([torch.zeros_like(w).flatten() if w.grad is None else w.grad.flatten() for w in weights])

    trained = torch.nn.utils.parameters_to_vector(weights).detach().clone()
    current, rms = trained.clone(), None
    if config.optimizer == "rms":
        squares, memory = [], model.initial_memory(1, LIMITS)
        for inputs_BT, targets_BT in segments(train_tokens_K):
            hidden_BTD, memory = model(inputs_BT, memory)
            squares.append(flat_gradient(model.nats(hidden_BTD, targets_BT).mean()) ** 2)
        rms = torch.stack(squares).mean(0).sqrt()
    losses, memory = [], model.initial_memory(1, LIMITS)
    for inputs_BT, targets_BT in segments(tokens_K):
        torch.nn.utils.vector_to_parameters(current.clone(), weights)
        hidden_BTD, memory = model(inputs_BT, memory)
        nats_BT = model.nats(hidden_BTD, targets_BT)
        losses += nats_BT[0].tolist()
        gradient = flat_gradient(nats_BT.mean())
        if rms is None:
            current = current - plan.learning_rate * gradient + config.decay * (trained - current)
        else:
            decay = torch.minimum(config.decay * rms / rms.mean(), torch.ones_like(rms))
            current = current - plan.learning_rate * gradient / (rms + config.epsilon) + decay * (trained - current)
    torch.nn.utils.vector_to_parameters(trained.clone(), weights)
    model.zero_grad()
    return losses


RMS = {"optimizer": "rms", "learning_rate": 1e-3, "gradient_stats_tokens": 41}


@pytest.mark.parametrize(
    ("settings", "model_settings"),
    [
        ({"optimizer": "sgd"}, {}),
        ({"optimizer": "sgd", "learning_rate": 0.03, "decay": 0.2}, {"cutoffs": (7, 13), "div_val": 2}),
        ({**RMS, "epsilon": 1e-4}, {}),
        ({**RMS, "epsilon": 1e-2, "decay": 0.4}, {}),  # the decay of some weights is bounded by 1
        ({**RMS, "epsilon": 1e-2, "decay": 0.4}, {"cutoffs": (7, 13), "div_val": 2}),
    ],
    ids=str,
)
def test_losses_equal_the_reference(make_model, settings, model_settings) -> None:
    model, tokens_K, train_tokens_K = make_model(**model_settings), random_tokens(38), random_tokens(43, seed=8)
    plan = dynamic_plan(train_tokens_K, **settings)
    nats_K = token_nats(model, tokens_K, BOS, plan)
    # rms reads only the first gradient_stats_tokens = 41 tokens of the training text
    np.testing.assert_allclose(nats_K, reference_losses(model, tokens_K, plan, train_tokens_K[:41]), **CLOSE)
    # from the second segment on, the losses differ from those of the trained weights
    assert np.abs(nats_K - token_nats(model, tokens_K, BOS, EvaluationPlan(5, LIMITS)))[5:].max() > 1e-3


def test_default_learning_rate_of_each_optimizer() -> None:
    plans = [dynamic_plan(), dynamic_plan(optimizer="sgd"), dynamic_plan(learning_rate=0.0)]
    assert [plan.learning_rate for plan in plans] == [1e-6, 0.01, 0]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_model_itself_is_left_as_it_is(make_model, is_frozen) -> None:
    """Also meanwhile: what was prepared of it stays valid, and no gradients are left."""
    model = make_model().requires_grad_(not is_frozen)
    before, fingerprint = copied_tensors(model), Fingerprint(model)
    plan = dynamic_plan(optimizer="sgd", learning_rate=0.1)
    for _ in stream_losses(model, TokenizedText(random_tokens(38), BOS), plan):
        assert_same_tensors(model, before)
        assert fingerprint.matches(model)
    assert all(weight.grad is None and weight.requires_grad != is_frozen for weight in model.parameters())
    adapted_K = token_nats(model, random_tokens(38), BOS, plan)
    assert np.abs(adapted_K - token_nats(model, random_tokens(38), BOS, EvaluationPlan(5, LIMITS))).max() > 1e-3


def test_without_gradients_it_is_refused(make_model) -> None:
    with torch.inference_mode(), pytest.raises(UserError, match=r"leave torch\.inference_mode out"):
        token_nats(make_model(), random_tokens(8), BOS, dynamic_plan(optimizer="sgd"))


def test_another_optimizer_leaves_the_settings_of_that_of_the_run() -> None:
    recorded = {"optimizer": "rms", "epsilon": 1e-3, "learning_rate": 1e-5, "decay": 0.1}
    run = run_settings({"evaluation": {"method": "dynamic", "dynamic": recorded}}, "test")
    given = EvaluationConfig(dynamic=DynamicConfig(optimizer="sgd"))
    assert EvaluationPlan.resolve(run, given).dynamic == DynamicConfig(optimizer="sgd", decay=0.1)
    given = EvaluationConfig(dynamic=DynamicConfig(decay=0.2))
    assert EvaluationPlan.resolve(run, given).dynamic == DynamicConfig(**{**recorded, "decay": 0.2})


def test_reset_memory_restores_trained_weights_at_each_document(make_model) -> None:
    model, tokens_K, plan = make_model(), random_tokens(61), dynamic_plan(optimizer="sgd", learning_rate=0.1)
    text = TokenizedText(tokens_K, BOS, document_starts_N=np.array([0, 17, 20]))
    nats_K = losses_in_order(model, text, replace(plan, reset_memory=True))
    np.testing.assert_allclose(nats_K, nats_of_documents(model, tokens_K, [0, 17, 20], plan), **CLOSE)


def test_too_large_learning_rate_is_refused(make_model) -> None:
    """The message contains the position, the start of the second segment, and the trained weights are restored."""
    model = make_model()
    before = copied_tensors(model)
    with pytest.raises(UserError, match=r"learning_rate 1e\+300: too large, losses are not finite from token 5"):
        token_nats(model, random_tokens(38), BOS, dynamic_plan(optimizer="sgd", learning_rate=1e300))
    assert_same_tensors(model, before)
