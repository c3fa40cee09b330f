"""Dynamic evaluation against a slow loop written from its equations; learning rate 0, repeats, restored weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tensors import assert_same_tensors, copied_tensors
from token_losses import token_nats

from transformer_xl.config import DynamicConfig, UserError
from transformer_xl.evaluation.evaluate import losses_in_order, stream_losses
from transformer_xl.evaluation.plan import EvaluationPlan, TokenizedText
from transformer_xl.model.memory import ContextLimits

START, LIMITS = 10, ContextLimits(11)
CLOSE = {"rtol": 0, "atol": 1e-10}


def draw(length: int, seed: int = 3) -> npt.NDArray[Any]:
    return np.random.default_rng(seed).integers(0, 23, length).astype(np.uint8)


def dynamic(train_tokens_K: npt.NDArray[Any] | None = None, /, **settings: Any) -> EvaluationPlan:
    config = DynamicConfig(**settings)
    return EvaluationPlan(5, LIMITS, method="dynamic", dynamic=config, train_tokens_K=train_tokens_K)


def segments(tokens_K: npt.NDArray[Any], length: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs, targets = torch.tensor([[START, *tokens_K[:-1].tolist()]]), torch.tensor([tokens_K.tolist()])
    return list(zip(inputs.split(length, dim=1), targets.split(length, dim=1), strict=True))


def slowly(model, tokens_K, how: DynamicConfig, training_K=None) -> list[float]:
    """The equations of the papers, with one flat vector of all weights."""
    weights = list(model.parameters())

    def flat_gradient(loss: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss.backward()
        return torch.cat([torch.zeros_like(w).flatten() if w.grad is None else w.grad.flatten() for w in weights])

    def put(vector: torch.Tensor) -> None:
        torch.nn.utils.vector_to_parameters(vector.clone(), weights)

    trained = torch.nn.utils.parameters_to_vector(weights).detach().clone()
    current, rms = trained.clone(), None
    if how.optimizer == "rms":
        squares, memory = [], model.initial_memory(1, LIMITS)
        for inputs_BT, targets_BT in segments(training_K):
            hidden_BTD, memory = model(inputs_BT, memory)
            squares.append(flat_gradient(model.nats(hidden_BTD, targets_BT).mean()) ** 2)
        rms = torch.stack(squares).mean(0).sqrt()
    losses, memory = [], model.initial_memory(1, LIMITS)
    for inputs_BT, targets_BT in segments(tokens_K):
        put(current)
        hidden_BTD, memory = model(inputs_BT, memory)
        nats_BT = model.nats(hidden_BTD, targets_BT)
        losses += nats_BT[0].tolist()
        gradient = flat_gradient(nats_BT.mean())
        if rms is None:
            current = current - how.learning_rate * gradient + how.decay * (trained - current)
        else:
            back = torch.minimum(how.decay * rms / rms.mean(), torch.ones_like(rms))
            current = current - how.learning_rate * gradient / (rms + how.epsilon) + back * (trained - current)
    put(trained)
    model.zero_grad()
    return losses


HOW = [
    {"optimizer": "sgd", "learning_rate": 0.03},
    {"optimizer": "sgd", "learning_rate": 0.03, "decay": 0.2},
    {"optimizer": "rms", "learning_rate": 1e-3, "epsilon": 1e-4},
    {"optimizer": "rms", "learning_rate": 1e-3, "epsilon": 1e-2, "decay": 0.4},  # some weights go all the way back
]


@pytest.mark.parametrize("settings", HOW, ids=str)
@pytest.mark.parametrize("model_settings", [{}, {"cutoffs": (7, 13), "div_val": 2}], ids=str)
def test_it_follows_the_equations(make_model, settings, model_settings) -> None:
    model, tokens_K, training_K = make_model(**model_settings), draw(38), draw(43, seed=8)
    settings |= {"gradient_stats_tokens": 41} if settings["optimizer"] == "rms" else {}
    how = dynamic(training_K, **settings)
    wanted = slowly(model, tokens_K, how.dynamic, training_K[:41])
    found_K = token_nats(model, tokens_K, START, how)
    np.testing.assert_allclose(found_K, wanted, **CLOSE)
    assert np.abs(found_K - token_nats(model, tokens_K, START, EvaluationPlan(5, LIMITS)))[5:].max() > 1e-3


@pytest.mark.parametrize("optimizer", ["sgd", "rms"])
def test_learning_rate_0_is_plain_evaluation(make_model, optimizer) -> None:
    """For any decay: weights that never moved have nothing to decay to."""
    model, tokens_K = make_model(), draw(38)
    how = dynamic(draw(43), optimizer=optimizer, learning_rate=0.0, decay=0.5)
    plain_K = token_nats(model, tokens_K, START, EvaluationPlan(5, LIMITS))
    np.testing.assert_allclose(token_nats(model, tokens_K, START, how), plain_K, **CLOSE)


def test_the_first_segment_is_scored_before_anything_is_learned(make_model) -> None:
    model, tokens_K = make_model(), draw(38)
    found_K = token_nats(model, tokens_K, START, dynamic(optimizer="sgd", learning_rate=0.1))
    plain_K = token_nats(model, tokens_K, START, EvaluationPlan(5, LIMITS))
    np.testing.assert_allclose(found_K[:5], plain_K[:5], **CLOSE)
    assert abs(found_K[5] - plain_K[5]) > 1e-6


def test_a_repeated_text_becomes_easier(make_model) -> None:
    """Even without memory, because the weights learn the text."""
    model, tokens_K = make_model(), np.tile(draw(20), 10)
    plan = replace(dynamic(optimizer="sgd", learning_rate=0.1), context_limits=ContextLimits(0))
    first, *_, last = np.split(token_nats(model, tokens_K, START, plan), 10)
    assert last.mean() < first.mean() - 0.5
    blind = np.split(token_nats(model, tokens_K, START, replace(plan, method="memory")), 10)
    assert abs(blind[-1].mean() - blind[1].mean()) < 1e-9


@pytest.mark.parametrize("stop_after", [None, 1, 3])
def test_the_model_has_its_own_weights_again(make_model, stop_after) -> None:
    """Bit for bit, also after an error halfway, and without leftover gradients."""
    model = make_model()
    before = copied_tensors(model)
    calls = []

    def tell(_: int) -> None:
        calls.append(any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()))
        if len(calls) == stop_after:
            raise KeyboardInterrupt

    chunks = stream_losses(model, TokenizedText(draw(38), START), dynamic(optimizer="sgd", learning_rate=0.1), tell)
    if stop_after is None:
        list(chunks)
    else:
        with pytest.raises(KeyboardInterrupt):
            list(chunks)
    assert any(calls) or stop_after == 1  # they were others meanwhile
    assert_same_tensors(model, before)
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())


def test_reset_documents_start_from_the_trained_weights(make_model) -> None:
    model, tokens_K, how = make_model(), draw(61), dynamic(optimizer="sgd", learning_rate=0.1)
    text = TokenizedText(tokens_K, START, np.array([0, 17, 20]))
    found_K = losses_in_order(model, text, replace(how, reset_memory=True))
    edges = [(0, 17), (17, 20), (20, 61)]
    alone = [token_nats(model, tokens_K[begin:end], START, how) for begin, end in edges]
    np.testing.assert_allclose(found_K, np.concatenate(alone), **CLOSE)


def test_each_optimizer_has_a_learning_rate_of_its_own(make_model) -> None:
    rates = [dynamic(**each).learning_rate for each in ({}, {"optimizer": "sgd"}, {"learning_rate": 0.0})]
    assert rates == [1e-6, 0.01, 0]
    model, tokens_K = make_model(), draw(38)
    found_K = token_nats(model, tokens_K, START, dynamic(optimizer="sgd"))
    wanted = slowly(model, tokens_K, DynamicConfig(optimizer="sgd", learning_rate=0.01))
    np.testing.assert_allclose(found_K, wanted, **CLOSE)


def test_what_it_cannot_do_is_refused(make_model) -> None:
    model, tokens_K = make_model(), draw(38)
    with pytest.raises(UserError, match="batch-size 2: method dynamic reads one sequence; give 1"):
        token_nats(model, tokens_K, START, replace(dynamic(optimizer="sgd"), batch_size=2))
    with pytest.raises(UserError, match="rms needs the training text"):
        token_nats(model, tokens_K, START, dynamic())


def test_steps_that_are_too_large_are_refused(make_model) -> None:
    """The message has the position; the model has its own weights again."""
    model = make_model()
    before = copied_tensors(model)
    with pytest.raises(
        UserError, match=r"dynamic.learning-rate 1e\+300: too large, losses are not finite from token 5 on"
    ):
        token_nats(model, draw(38), START, dynamic(optimizer="sgd", learning_rate=1e300))
    assert_same_tensors(model, before)
