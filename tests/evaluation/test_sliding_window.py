"""Sliding window: each token is predicted from exactly the tokens in its window, for any batch size.

The fixture make_model (tests/conftest.py) makes a small model with random weights and a vocabulary of 23.

Shape suffixes: B batch size (1), T tokens, D d_model, K tokens of a text, N documents.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from model_configs import small_model
from token_losses import BOS, CLOSE, nats_of_documents, random_tokens, token_nats

from transformer_xl.config import EvaluationConfig, UserError, run_settings
from transformer_xl.evaluation.evaluate import losses_in_order
from transformer_xl.evaluation.plan import EvaluationPlan, TokenizedText
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits


def sliding(window: int | None, batch_size: int | None = None, clamp_length: int | None = None) -> EvaluationPlan:
    # this method does not use the segment length, 7
    return EvaluationPlan(7, ContextLimits(0, window, clamp_length), batch_size, method="sliding-window")


def reference_losses(
    model: LanguageModel, tokens_K: npt.NDArray[np.uint8], window: int, clamp_length: int | None = None
) -> list[float]:
    """Follow the definition: a separate pass for each token, over the `window` tokens before it; BOS comes first."""
    inputs, losses = [BOS, *tokens_K.tolist()], []
    for position, target in enumerate(tokens_K.tolist()):
        inputs_BT = torch.tensor([inputs[max(0, position + 1 - window) : position + 1]])
        with torch.no_grad():
            hidden_BTD, _ = model(inputs_BT, model.initial_memory(1, ContextLimits(0, clamp_length=clamp_length)))
            losses.append(model.nats(hidden_BTD[:, -1:], torch.tensor([[target]])).item())
    return losses


@pytest.mark.parametrize("window", [1, 2, 5, 36, 37, 50])
@pytest.mark.parametrize("batch_size", [None, 1, 3, 100])
@pytest.mark.parametrize("clamp_length", [None, 3])
def test_each_token_is_predicted_from_its_window(make_model, window, batch_size, clamp_length) -> None:
    model, tokens_K = make_model(), random_tokens(37)
    nats_K = token_nats(model, tokens_K, BOS, sliding(window, batch_size, clamp_length))
    np.testing.assert_allclose(nats_K, reference_losses(model, tokens_K, window, clamp_length), **CLOSE)


@pytest.mark.parametrize("architecture", ["vaswani", "al-rfou", "lstm"])
def test_architectures_without_memory_or_attention_window(architecture: str) -> None:
    """In vaswani and al-rfou, positions count from the start of the window; the state of lstm is zero there."""
    positions = {"max_position_embeddings": 5} if architecture == "al-rfou" else {}
    model, tokens_K = small_model(architecture=architecture, **positions), random_tokens(37)
    nats_K = token_nats(model, tokens_K, BOS, sliding(5))
    np.testing.assert_allclose(nats_K, reference_losses(model, tokens_K, 5), **CLOSE)


def test_reset_memory_scores_each_document_as_a_text_of_its_own(make_model) -> None:
    model, tokens_K, progress = make_model(), random_tokens(61), []
    text = TokenizedText(tokens_K, BOS, document_starts_N=np.array([0, 2, 7, 40]))
    nats_K = losses_in_order(model, text, replace(sliding(5), reset_memory=True), progress.append)
    np.testing.assert_allclose(nats_K, nats_of_documents(model, tokens_K, [0, 2, 7, 40], sliding(5)), **CLOSE)
    assert sum(progress) == 61


def test_memory_or_missing_window_is_refused(make_model) -> None:
    model, tokens_K = make_model(), random_tokens(7)
    with pytest.raises(UserError, match=r"has no memory, but memory_length is 11.* give memory_length 0"):
        token_nats(model, tokens_K, BOS, replace(sliding(5), context_limits=ContextLimits(11, attention_window=5)))
    with pytest.raises(UserError, match="needs attention_window"):
        token_nats(model, tokens_K, BOS, sliding(None))


def test_its_memory_length_is_0_unless_one_is_given() -> None:
    config = run_settings({"train": {"memory_length": 11}}, "test")
    plan = EvaluationPlan.resolve(config, EvaluationConfig(method="sliding-window", attention_window=5))
    assert (plan.context_limits.memory_length, plan.memory_length_reason) == (0, "method sliding-window has none")
    given = EvaluationConfig(method="sliding-window", attention_window=5, memory_length=11)
    assert EvaluationPlan.resolve(config, given).context_limits.memory_length == 11  # which the method refuses
