"""Sliding window: each token from exactly the tokens before it that the window holds, for any batch size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from model_configs import model_config
from token_losses import token_nats

from transformer_xl.config import UserError
from transformer_xl.evaluation.evaluate import losses_in_order
from transformer_xl.evaluation.plan import EvaluationPlan, TokenizedText
from transformer_xl.model.build import build_model
from transformer_xl.model.memory import ContextLimits

START = 10
CLOSE = {"rtol": 0, "atol": 1e-10}


def draw(length: int) -> npt.NDArray[Any]:
    return np.random.default_rng(3).integers(0, 23, length).astype(np.uint8)


def sliding(window: int | None, batch_size: int | None = None, clamp_length: int | None = None) -> EvaluationPlan:
    return EvaluationPlan(7, ContextLimits(0, window, clamp_length), batch_size, method="sliding-window")


@pytest.mark.parametrize("window", [1, 2, 5, 36, 37, 50])
@pytest.mark.parametrize("batch_size", [None, 1, 3, 100])
@pytest.mark.parametrize("clamp", [None, 3])
def test_each_token_is_predicted_from_its_window_alone(make_model, window, batch_size, clamp) -> None:
    """The definition: a separate pass for each token, over the `window` tokens before it; BOS comes first."""
    model, tokens_K = make_model(), draw(37)
    before = [START, *tokens_K.tolist()]
    wanted = []
    for position in range(37):
        inputs_BT = torch.tensor([before[max(0, position + 1 - window) : position + 1]])
        with torch.no_grad():
            hidden_BTD, _ = model(inputs_BT, model.initial_memory(1, ContextLimits(0, None, clamp)))
            wanted.append(model.nats(hidden_BTD[:, -1:], torch.tensor([[tokens_K[position].item()]])).item())
    found_K = token_nats(model, tokens_K, START, sliding(window, batch_size, clamp_length=clamp))
    np.testing.assert_allclose(found_K, wanted, **CLOSE)


@pytest.mark.parametrize("window", [1, 4, 11])
@pytest.mark.parametrize("segment", [1, 5, 64])
def test_one_layer_with_memory_sees_the_same(make_model, window, segment) -> None:
    """Where both see the same context, memory gives the very losses of the sliding window."""
    model, tokens_K = make_model(n_layers=1), draw(61)
    read_on_K = token_nats(model, tokens_K, START, EvaluationPlan(segment, ContextLimits(window - 1, window)))
    np.testing.assert_allclose(token_nats(model, tokens_K, START, sliding(window)), read_on_K, **CLOSE)


@pytest.mark.parametrize(
    "settings", [{"architecture": "vaswani"}, {"architecture": "al-rfou"}, {"architecture": "lstm"}], ids=str
)
def test_models_that_know_no_memory_or_no_window(settings: dict[str, Any]) -> None:
    """The paper's vanilla models: positions count from the start of the window; a recurrent state starts empty."""
    torch.manual_seed(7)
    sizes = {"vocab_size": 23, "n_layers": 2, "d_model": 14, "n_heads": 2, "d_ff": 19, "dropout": 0.0}
    sizes |= {"max_position_embeddings": 5} if settings["architecture"] == "al-rfou" else {}
    model, tokens_K = build_model(model_config(**sizes | settings)).double().eval(), draw(37)
    before, wanted = [START, *tokens_K.tolist()], []
    for position in range(37):
        inputs_BT = torch.tensor([before[max(0, position - 4) : position + 1]])
        with torch.no_grad():
            hidden_BTD, _ = model(inputs_BT, model.initial_memory(1, ContextLimits(0)))
            wanted.append(model.nats(hidden_BTD[:, -1:], torch.tensor([[tokens_K[position].item()]])).item())
    np.testing.assert_allclose(token_nats(model, tokens_K, START, sliding(5)), wanted, **CLOSE)


def test_reset_documents_are_scored_as_if_alone(make_model) -> None:
    model, tokens_K, told = make_model(), draw(61), []
    text = TokenizedText(tokens_K, START, np.array([0, 2, 7, 40]))
    found_K = losses_in_order(model, text, replace(sliding(5), reset_memory=True), told.append)
    edges = [(0, 2), (2, 7), (7, 40), (40, 61)]
    alone = [token_nats(model, tokens_K[begin:end], START, sliding(5)) for begin, end in edges]
    np.testing.assert_allclose(found_K, np.concatenate(alone), **CLOSE)
    assert sum(told) == 61


def test_a_model_with_memory_is_refused(make_model) -> None:
    plan = replace(sliding(5), context_limits=ContextLimits(11, 5))
    with pytest.raises(UserError, match=r"has no memory, but memory-length is 11.* give memory-length 0"):
        token_nats(make_model(), draw(7), START, plan)


def test_a_window_without_length_is_refused(make_model) -> None:
    with pytest.raises(UserError, match="needs attention-window"):
        token_nats(make_model(), draw(7), START, sliding(None))
