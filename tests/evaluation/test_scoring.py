"""Scoring: every token once, in text order, the same however the text is cut; and nothing changed behind one's back."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from model_configs import model_config

from transformer_xl.config import UserError
from transformer_xl.evaluation import scoring
from transformer_xl.evaluation.plan import EvaluationPlan, Text
from transformer_xl.evaluation.scoring import ordered, score_parts, sum_nats, token_nats
from transformer_xl.model.build import build_model
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits

START = 10
CLOSE = {"rtol": 0, "atol": 1e-10}


def draw(length: int, vocab_size: int = 23, seed: int = 3) -> npt.NDArray[Any]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).astype(np.uint8)


def one_pass(
    model: LanguageModel, tokens_K: npt.NDArray[Any], context_limits: ContextLimits, before: int = START
) -> npt.NDArray[Any]:
    """The loss of every token, the text read at once with no memory at all."""
    inputs_1K = torch.tensor([[before, *tokens_K[:-1].tolist()]])
    with torch.no_grad():
        hidden_BTD, _ = model(inputs_1K, model.initial_memory(1, replace(context_limits, memory=0)))
        return model.nats(hidden_BTD, torch.tensor(tokens_K[None].astype(np.int64)))[0].numpy()


@pytest.mark.parametrize("style", [{}, {"norm_first": True}, {"kernel": "reference"}])
@pytest.mark.parametrize("segment", [1, 2, 7, 36, 37, 38, 101])
@pytest.mark.parametrize(("extra", "clamp"), [(0, None), (13, 5)])
def test_any_segment_equals_one_pass(make_model, style, segment, extra, clamp) -> None:
    """With a memory for the whole text, or more."""
    model, tokens_K = make_model(**style), draw(37)
    context_limits = ContextLimits(37 + extra, None, clamp)
    nats_K = token_nats(model, tokens_K, START, EvaluationPlan(segment, context_limits))
    assert nats_K.dtype == np.float64
    np.testing.assert_allclose(nats_K, one_pass(model, tokens_K, context_limits), **CLOSE)


def test_each_loss_is_that_of_its_token_after_those_before(make_model) -> None:
    """The definition, token by token: minus the log of the probability that the text so far gives to the next."""
    model, tokens_K = make_model(), draw(17)
    nats_K = token_nats(model, tokens_K, START, EvaluationPlan(5, ContextLimits(17)))
    for place in range(17):
        hidden_BTD, _ = model(
            torch.tensor([[START, *tokens_K[:place].tolist()]]), model.initial_memory(1, ContextLimits(0))
        )
        probability = model.logits(hidden_BTD)[0, -1].softmax(-1)[tokens_K[place]].item()
        assert nats_K[place] == pytest.approx(-math.log(probability), abs=1e-10)


@pytest.mark.parametrize("memory", [0, 3, 11, 37])
def test_memory_carries_what_the_segments_before_left(make_model, memory) -> None:
    """Also shorter than the text: the same as calling the model by hand, segment after segment."""
    model, tokens_K = make_model(), draw(37)
    inputs, targets = torch.tensor([[START, *tokens_K[:-1].tolist()]]), torch.tensor([tokens_K.tolist()])
    state, wanted = model.initial_memory(1, ContextLimits(memory)), []
    with torch.no_grad():
        for first in range(0, 37, 5):
            hidden_BTD, state = model(inputs[:, first : first + 5], state)
            wanted.append(model.nats(hidden_BTD, targets[:, first : first + 5])[0])
    found = token_nats(model, tokens_K, START, EvaluationPlan(5, ContextLimits(memory)))
    np.testing.assert_allclose(found, torch.cat(wanted).numpy(), **CLOSE)
    blind = token_nats(model, tokens_K, START, EvaluationPlan(5, ContextLimits(0)))
    assert (np.abs(found - blind)[:5] < 1e-10).all()
    assert bool((np.abs(found - blind)[5:] > 1e-6).any()) == (memory > 0)


@pytest.mark.parametrize("window", [1, 4, 9])
@pytest.mark.parametrize("segment", [1, 2, 3, 7, 37, 41])
@pytest.mark.parametrize("extra", [0, 5])
def test_with_a_window_the_segment_does_not_matter(make_model, window, segment, extra) -> None:
    """A memory of window - 1 slots is enough, and one slot less is not."""
    model, tokens_K = make_model(), draw(37)
    wanted_K = one_pass(model, tokens_K, ContextLimits(0, window))
    context_limits = ContextLimits(window - 1 + extra, window)
    np.testing.assert_allclose(
        token_nats(model, tokens_K, START, EvaluationPlan(segment, context_limits)), wanted_K, **CLOSE
    )
    if window > 1 and segment < 37 and not extra:
        short_K = token_nats(model, tokens_K, START, EvaluationPlan(segment, ContextLimits(window - 2, window)))
        assert np.abs(short_K - wanted_K).max() > 1e-6


def test_a_mixture_of_segments_equals_one_pass(make_model) -> None:
    """Lengths may change from one segment to the next, for each kind of memory."""
    model, tokens_K = make_model(), draw(37)
    inputs, targets = torch.tensor([[START, *tokens_K[:-1].tolist()]]), torch.tensor([tokens_K.tolist()])
    wanted_K = one_pass(model, tokens_K, ContextLimits(37))
    for kind in (model.initial_memory, model.inference_memory):
        memory, found = kind(1, ContextLimits(37)), []
        with torch.inference_mode():
            cut = (tensor.split([1, 11, 2, 19, 4], dim=1) for tensor in (inputs, targets))
            for inputs_BT, targets_BT in zip(*cut, strict=True):
                hidden_BTD, memory = model(inputs_BT, memory)
                found.append(model.nats(hidden_BTD, targets_BT)[0])
        np.testing.assert_allclose(torch.cat(found).numpy(), wanted_K, **CLOSE)


@pytest.mark.parametrize(("memory", "window"), [(0, 1), (5, 5), (5, 6), (1, 1), (1, 2), (9, 4)])
def test_how_many_keys_a_window_holds(make_model, memory, window) -> None:
    """Both conventions: M keys with the query's own, or M + 1; seen from what changes when a token is another."""
    model, tokens_K = make_model(layers=1), draw(23)
    plan, place = EvaluationPlan(3, ContextLimits(memory, window)), 20
    before = token_nats(model, tokens_K, START, plan)[place]
    seen = []
    for distance in range(1, place + 1):
        other_K = tokens_K.copy()
        other_K[place - distance] = (other_K[place - distance] + 1) % 23
        seen.append(abs(token_nats(model, other_K, START, plan)[place] - before) > 1e-9)
    assert seen == [distance <= window for distance in range(1, place + 1)]


WAYS = [
    # rows, segment, memory, window
    (2, 5, 11, None), (3, 7, 7, None), (5, 3, 4, None), (2, 7, 0, None), (3, 5, 9, 8), (4, 1, 3, 4), (2, 13, 5, 11),
    (3, 3, 5, 7), (3, 2, 3, 5),
    (97, 5, 3, None), (3, 101, 11, None),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "segment", "memory", "window"), WAYS)
@pytest.mark.parametrize("layers", [1, 3])
def test_rows_change_nothing(make_model, rows, segment, memory, window, layers) -> None:
    """Every token gets the very loss it has in one stream, also where the context is not limited by a window."""
    model, tokens_K = make_model(layers=layers), draw(229)
    plan = EvaluationPlan(segment, ContextLimits(memory, window))
    wanted_K = token_nats(model, tokens_K, START, plan)
    np.testing.assert_allclose(token_nats(model, tokens_K, START, replace(plan, rows=rows)), wanted_K, **CLOSE)


@pytest.mark.parametrize(("segment", "memory", "window"), [(5, 11, None), (5, 4, 5), (3, 7, 8), (7, 5, 11), (3, 5, 5)])
def test_the_warmup_is_no_longer_than_it_must_be(make_model, segment, memory, window) -> None:
    """One segment less, and some loss is another: of the first tokens of a row only."""
    model, tokens_K, plan = make_model(), draw(229), EvaluationPlan(segment, ContextLimits(memory, window), rows=2)
    wanted_K = token_nats(model, tokens_K, START, plan)
    short = replace(plan, warmup=plan.warmup_of(model) - segment)
    odd_K = np.abs(token_nats(model, tokens_K, START, short) - wanted_K) > 1e-9
    second = (-(-229 // segment) // 2) * segment
    assert odd_K.any()
    assert not odd_K[:second].any()
    assert odd_K[second : second + segment].any()


def test_without_warmup_rows_begin_empty(make_model) -> None:
    """After the token that stands before them."""
    model, tokens_K = make_model(), draw(70)
    found_K = token_nats(model, tokens_K, START, EvaluationPlan(5, ContextLimits(11), batch_size=2, warmup_steps=0))
    for begin, before in ((0, START), (35, int(tokens_K[34]))):
        alone_K = token_nats(model, tokens_K[begin : begin + 35], before, EvaluationPlan(5, ContextLimits(11)))
        np.testing.assert_allclose(found_K[begin : begin + 35], alone_K, **CLOSE)


@pytest.mark.parametrize("length", [1, 6, 7, 8, 13, 14, 37])
@pytest.mark.parametrize("rows", [None, 1, 2, 3, 5, 50])
@pytest.mark.parametrize("at_once", [1, 2, 512])
def test_every_token_counts_once(make_model, monkeypatch, length, rows, at_once) -> None:
    """The last, short segment and the last, short row included, whenever losses are fetched."""
    monkeypatch.setattr(scoring, "_STEPS_AT_ONCE", at_once)
    model, tokens_K, told = make_model(), draw(length), []
    plan = EvaluationPlan(7, ContextLimits(11), rows)
    parts = list(score_parts(model, Text(tokens_K, START), plan, told.append))
    places = np.concatenate([np.arange(part.begin, part.begin + len(part.nats_K)) for part in parts])
    assert sorted(places.tolist()) == list(range(length))
    assert sum(told) == length
    total = sum_nats(model, tokens_K, START, plan)
    assert total == pytest.approx(token_nats(model, tokens_K, START, plan).sum(), abs=1e-10)


# Documents.

STARTS = np.array([0, 3, 3, 4, 21, 22, 60, 61])  # one of them empty


@pytest.mark.parametrize("rows", [None, 1, 2, 5, 100])
@pytest.mark.parametrize(("segment", "memory", "window"), [(5, 11, None), (7, 0, None), (64, 11, None), (3, 4, 5)])
def test_documents_that_start_afresh_are_as_if_alone(make_model, rows, segment, memory, window) -> None:
    """Each from the start token on, with nothing of the one before; long ones shared out over several rows too."""
    model, tokens_K = make_model(), draw(97)
    plan = EvaluationPlan(segment, ContextLimits(memory, window))
    found_K = np.full(97, np.nan)
    text = Text(tokens_K, START, STARTS)
    total = ordered(score_parts(model, text, replace(plan, rows=rows, documents="reset")), found_K)
    edges = [*STARTS.tolist(), 97]
    alone = [token_nats(model, tokens_K[begin:end], START, plan) for begin, end in pairwise(edges) if begin < end]
    np.testing.assert_allclose(found_K, np.concatenate(alone), **CLOSE)
    assert total == pytest.approx(found_K.sum(), abs=1e-10)


def test_a_document_does_not_see_the_one_before(make_model) -> None:
    """Other tokens there, the same losses here; when memory goes on, others."""
    model, tokens_K = make_model(), draw(40)
    other_K = tokens_K.copy()
    other_K[:21] = draw(21, seed=8)
    found: dict[str, list[npt.NDArray[Any]]] = {"reset": [], "continue": []}
    for documents, losses in found.items():
        for ids_K in (tokens_K, other_K):
            nats_K = np.empty(40)
            text = Text(ids_K, START, STARTS)
            ordered(score_parts(model, text, EvaluationPlan(5, ContextLimits(11), documents=documents)), nats_K)
            losses.append(nats_K[21:])
    assert (found["reset"][0] == found["reset"][1]).all()
    assert np.abs(found["continue"][0] - found["continue"][1])[0] > 1e-6


def test_many_short_documents_are_read_side_by_side(make_model, monkeypatch) -> None:
    """Few steps, and no memory where no document is longer than a segment."""
    model = make_model(memory_length=11)
    starts_N = np.arange(0, 997, 7)
    text = Text(draw(997), START, starts_N)
    shapes, calls, call = [], [], type(model).forward

    def watched(self, tokens_BT, memory, **rest):
        shapes.append(tuple(tokens_BT.shape))
        calls.append(memory.length)
        return call(self, tokens_BT, memory, **rest)

    monkeypatch.setattr(type(model), "forward", watched)
    list(score_parts(model, text, EvaluationPlan(64, ContextLimits(11), documents="reset")))
    assert shapes == [(143, 7)]
    assert calls == [0]


def test_empty_slots_that_are_attended_are_kept(make_model) -> None:
    """With `attend_empty_memory` a document of any length sees all slots."""
    model, tokens_K = make_model(attend_empty_memory=True), draw(17)
    with torch.no_grad():
        inputs_1K = torch.tensor([[START, *tokens_K[:-1].tolist()]])
        hidden_BTD, _ = model(inputs_1K, model.initial_memory(1, ContextLimits(29)))
        wanted_K = model.nats(hidden_BTD, torch.tensor(tokens_K[None].astype(np.int64)))[0].numpy()
    np.testing.assert_allclose(
        token_nats(model, tokens_K, START, EvaluationPlan(17, ContextLimits(29))), wanted_K, **CLOSE
    )
    assert np.abs(token_nats(model, tokens_K, START, EvaluationPlan(17, ContextLimits(0))) - wanted_K).max() > 1e-6


# Other models behind the same contract.

BASELINES = [
    ({"architecture": "lstm", "n_layers": 1}, 11), ({"architecture": "qrnn", "n_layers": 2}, 11), ({"architecture": "lstm", "n_layers": 2}, 0),
    ({"architecture": "vaswani"}, 0), ({"architecture": "shaw", "max_relative_positions": 5}, 11),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "memory"), BASELINES, ids=str)
def test_other_models_are_read_the_same(settings: dict[str, Any], memory: int) -> None:
    """Rows where they can be exact, documents in any case; what keeps all it read says that rows cannot."""
    torch.manual_seed(7)
    sizes = {"vocab_size": 23, "n_layers": 2, "d_model": 14, "n_heads": 2, "d_ff": 19, "dropout": 0.0}
    model = build_model(model_config(**sizes | settings))
    model, tokens_K, plan = model.double().eval(), draw(97), EvaluationPlan(5, ContextLimits(memory))
    wanted_K = token_nats(model, tokens_K, START, plan)
    if memory and "kind" in settings:
        with pytest.raises(UserError, match=r"rows 3: kind \w+ keeps something of all it read, so rows .* give 1, or"):
            token_nats(model, tokens_K, START, replace(plan, rows=3))
        longer = replace(plan, batch_size=3, warmup_steps=97)
    else:
        longer = replace(plan, rows=3)
    np.testing.assert_allclose(token_nats(model, tokens_K, START, longer), wanted_K, **CLOSE)
    found_K = np.full(97, np.nan)
    text = Text(tokens_K, START, STARTS)
    ordered(score_parts(model, text, replace(plan, rows=5, documents="reset")), found_K)
    edges = [*STARTS.tolist(), 97]
    alone = [token_nats(model, tokens_K[begin:end], START, plan) for begin, end in pairwise(edges) if begin < end]
    np.testing.assert_allclose(found_K, np.concatenate(alone), **CLOSE)


# What is left behind, and what is refused.


@pytest.mark.parametrize("training", [True, False])
def test_scoring_leaves_the_mode_even_when_it_is_stopped(make_model, training) -> None:
    model, text = make_model(dropout=0.3).train(training), Text(draw(37), START)
    parts = score_parts(model, text, EvaluationPlan(5, ContextLimits(11)))
    next(parts)
    assert not model.training
    parts.close()
    assert all(module.training is training for module in model.modules())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_numbers_are_refused(make_model, value) -> None:
    """By the name of the tensor."""
    model = make_model()
    with torch.no_grad():
        model.layers[1].feedforward.up_proj.bias[3] = value
    message = r"the weights layers.1.feedforward.widen.bias hold numbers that are infinite or not numbers; train again"
    with pytest.raises(UserError, match=message):
        token_nats(model, draw(7), START, EvaluationPlan(5, ContextLimits(11)))
    with torch.no_grad():
        model.content_bias[0] = value
    with pytest.raises(UserError, match="the weights content_bias and 1 more tensors hold numbers"):
        token_nats(model, draw(7), START, EvaluationPlan(5, ContextLimits(11)))


def test_bfloat16_is_near(make_model) -> None:
    model, tokens_K = make_model().float(), draw(101)
    exact = sum_nats(model, tokens_K, START, EvaluationPlan(7, ContextLimits(11)))
    low = sum_nats(model, tokens_K, START, EvaluationPlan(7, ContextLimits(11), precision="bfloat16"))
    assert low != exact
    assert low == pytest.approx(exact, rel=0.02)
