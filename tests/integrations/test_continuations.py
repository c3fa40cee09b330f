"""Continuations have the losses that the scorer of whole texts gives, whoever shares their context.

The fixtures make_model and tokens are in tests/conftest.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from forced_tokens import RecordedModel
from model_configs import small_model
from token_losses import BOS, CLOSE, token_nats

from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.inference import InferenceModel, prepare_inference
from transformer_xl.integrations.lm_eval.continuations import Continuation, score_continuations
from transformer_xl.model.memory import ContextLimits

PLAN = EvaluationPlan(segment_length=7, context_limits=ContextLimits(memory_length=11))
MODELS = {
    "transformer-xl": {},
    "n-grams": {"max_ngram": 3, "d_ngram": 5, "ngram_buckets": 31},
    "window": {"attention_window": 9},
    "value embeddings": {"value_embeddings": True},
    "key offset": {"key_offset": True, "attention_sinks": True},
    "adaptive": {"cutoffs": (5, 11), "div_val": 2},
    "empty memory attended": {"attend_empty_memory": True},
    "empty memory attended, pre-norm": {"attend_empty_memory": True, "norm_first": True},
    "xlnet": {"architecture": "xlnet"},
    "shaw": {"architecture": "shaw", "max_relative_positions": 6},
    "lstm": {"architecture": "lstm"},
    "qrnn": {"architecture": "qrnn", "qrnn_kernel_size": 2},
}


def make(settings, memory_length: int = 11) -> InferenceModel:
    """A small model in float64 with large weights, so that what it attends to matters, prepared for inference."""
    return prepare_inference(small_model(memory_length=memory_length, **settings))


def requests() -> list[Continuation]:
    """Continuations of contexts that end before, at and after the end of a segment; some contexts are shared."""
    random = np.random.default_rng(3)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(random.integers(0, 23, length).tolist())

    contexts = [(BOS,), *((BOS, *draw(length)) for length in (1, 5, 6, 7, 12, 13, 20, 31))]
    lengths = {0: (1, 9), 3: (1, 2, 4), 5: (16, 3), 8: (1, 30, 1)}
    pairs = [(context, length) for row, context in enumerate(contexts) for length in lengths.get(row, (3,))]
    return [Continuation(context, draw(length)) for context, length in pairs]


@pytest.mark.parametrize("batch_size", [None, 1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_whole_texts(name: str, batch_size: int | None) -> None:
    model, plan = make(MODELS[name]), replace(PLAN, batch_size=batch_size)
    window = MODELS[name].get("attention_window")
    plan = replace(plan, context_limits=ContextLimits(11, window))
    for continuation, score in zip(requests(), score_continuations(model, requests(), plan), strict=True):
        text_K = np.array([*continuation.context_ids[1:], *continuation.token_ids], dtype=np.uint8)
        expected_K = token_nats(model, text_K, BOS, replace(plan, batch_size=None))[-len(continuation.token_ids) :]
        np.testing.assert_allclose(score.nats, expected_K.sum(), **CLOSE)


@pytest.mark.parametrize("memory_length", [1, 2])
def test_ngrams_with_a_shorter_memory_see_no_more_than_it_holds(memory_length: int) -> None:
    model = make({"max_ngram": 5, "d_ngram": 5, "ngram_buckets": 31})
    plan = replace(PLAN, context_limits=ContextLimits(memory_length))
    for continuation, score in zip(requests(), score_continuations(model, requests(), plan), strict=True):
        text_K = np.array([*continuation.context_ids[1:], *continuation.token_ids], dtype=np.uint8)
        expected_K = token_nats(model, text_K, BOS, plan)[-len(continuation.token_ids) :]
        np.testing.assert_allclose(score.nats, expected_K.sum(), **CLOSE)


@pytest.mark.parametrize("name", ["transformer-xl", "adaptive"])
def test_greedy_continuations_are_found(name: str) -> None:
    """Of the most likely continuation of a context, and of the same with its last or first token changed."""
    model, context = make(MODELS[name]), [BOS, 3, 1, 4, 1, 5, 9, 2]
    text = list(context)
    for _ in range(9):
        hidden_BTD, _ = model(torch.tensor([text]), model.initial_memory(1, ContextLimits(len(text))))
        text.append(int(model.logits(hidden_BTD)[0, -1].argmax()))
    best = tuple(text[len(context) :])
    first, last = ((best[0] + 1) % 23, *best[1:]), (*best[:-1], (best[-1] + 1) % 23)
    plan = replace(PLAN, segment_length=5, context_limits=ContextLimits(40))
    scores = score_continuations(model, [Continuation(tuple(context), ids) for ids in (last, best, first)], plan)
    assert [score.is_greedy for score in scores] == [False, True, False]


def test_a_shared_context_is_read_once() -> None:
    model, context = RecordedModel(make({})), (BOS, *range(16))
    score_continuations(model, [Continuation(context, (token,)) for token in range(23)], PLAN)
    assert model.lengths == [len(context)]  # single tokens are predicted from the context's last state
    model.lengths.clear()
    score_continuations(model, [Continuation(context, (token, 1, 2)) for token in range(4)], PLAN)
    assert model.lengths == [len(context), 2]  # of four rows


@pytest.mark.parametrize("architecture", ["vaswani", "al-rfou"])
def test_models_without_memory_predict_from_as_much_as_fits_a_segment(architecture: str) -> None:
    settings = {"architecture": architecture} | ({"max_position_embeddings": 7} if architecture == "al-rfou" else {})
    model, plan = make(settings, memory_length=0), replace(PLAN, context_limits=ContextLimits(0), batch_size=4)
    for continuation, score in zip(requests(), score_continuations(model, requests(), plan), strict=True):
        text, start = [*continuation.context_ids, *continuation.token_ids], len(continuation.context_ids)
        expected = 0.0
        for position in range(start, len(text)):
            hidden_BTD, _ = model(torch.tensor([text[max(0, position - 7) : position]]))
            expected += float(model.nats(hidden_BTD[:, -1:], [[text[position]]]))
        np.testing.assert_allclose(score.nats, expected, **CLOSE)


def test_transformer_xl_without_memory_sees_as_much_as_fits_a_segment() -> None:
    """In each layer, wherever a token is in its text, as if the tokens were read one by one."""
    model, plan = make({}, memory_length=0), replace(PLAN, context_limits=ContextLimits(0), batch_size=4)
    for continuation, score in zip(requests(), score_continuations(model, requests(), plan), strict=True):
        text, expected = [*continuation.context_ids, *continuation.token_ids], 0.0
        memory = model.generation_memory(1, ContextLimits(0), segment_length=7)  # of 6 slots
        for position in range(len(text) - 1):
            hidden_BTD, memory = model([[text[position]]], memory)
            if position + 1 >= len(continuation.context_ids):
                expected += float(model.nats(hidden_BTD, [[text[position + 1]]]))
        np.testing.assert_allclose(score.nats, expected, **CLOSE)
