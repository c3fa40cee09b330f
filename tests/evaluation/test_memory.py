"""Evaluation with memory: every token once, with the same loss for any segment length and batch size."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from model_configs import model_config
from token_losses import token_nats

from transformer_xl.config import UserError
from transformer_xl.evaluation import evaluate as harness
from transformer_xl.evaluation.evaluate import losses_in_order, stream_losses
from transformer_xl.evaluation.memory import receptive_field, warmup_length
from transformer_xl.evaluation.plan import EvaluationPlan, TokenizedText
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
    """The loss of every token, the text read as one segment without memory."""
    inputs_1K = torch.tensor([[before, *tokens_K[:-1].tolist()]])
    with torch.no_grad():
        hidden_BTD, _ = model(inputs_1K, model.initial_memory(1, replace(context_limits, memory_length=0)))
        return model.nats(hidden_BTD, torch.tensor(tokens_K[None].astype(np.int64)))[0].numpy()


@pytest.mark.parametrize("style", [{}, {"norm_first": True}, {"attn_implementation": "reference"}])
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
    for position in range(17):
        hidden_BTD, _ = model(
            torch.tensor([[START, *tokens_K[:position].tolist()]]), model.initial_memory(1, ContextLimits(0))
        )
        probability = model.logits(hidden_BTD)[0, -1].softmax(-1)[tokens_K[position]].item()
        assert nats_K[position] == pytest.approx(-math.log(probability), abs=1e-10)


@pytest.mark.parametrize("memory", [0, 3, 11, 37])
def test_memory_carries_what_the_segments_before_left(make_model, memory) -> None:
    """Also shorter than the text: the same as calling the model directly, segment after segment."""
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


@pytest.mark.parametrize(("memory", "window"), [(0, 1), (5, 5), (5, 6), (1, 1), (1, 2), (9, 4)])
def test_how_many_keys_a_window_holds(make_model, memory, window) -> None:
    """Count the keys by changing one token at a time and comparing the loss."""
    model, tokens_K = make_model(n_layers=1), draw(23)
    plan, position = EvaluationPlan(3, ContextLimits(memory, window)), 20
    before = token_nats(model, tokens_K, START, plan)[position]
    seen = []
    for distance in range(1, position + 1):
        other_K = tokens_K.copy()
        other_K[position - distance] = (other_K[position - distance] + 1) % 23
        seen.append(abs(token_nats(model, other_K, START, plan)[position] - before) > 1e-9)
    assert seen == [distance <= window for distance in range(1, position + 1)]


WAYS = [
    # batch_size, segment, memory, window
    (2, 5, 11, None), (3, 7, 7, None), (5, 3, 4, None), (2, 7, 0, None), (3, 5, 9, 8), (4, 1, 3, 4), (2, 13, 5, 11),
    (3, 3, 5, 7), (3, 2, 3, 5),
    (97, 5, 3, None), (3, 101, 11, None),
]  # fmt: skip


@pytest.mark.parametrize(("batch_size", "segment", "memory", "window"), WAYS)
@pytest.mark.parametrize("layers", [1, 3])
def test_batch_size_changes_nothing(make_model, batch_size, segment, memory, window, layers) -> None:
    """Every token gets the same loss as in one sequence, with and without a window."""
    model, tokens_K = make_model(n_layers=layers), draw(229)
    plan = EvaluationPlan(segment, ContextLimits(memory, window))
    wanted_K = token_nats(model, tokens_K, START, plan)
    np.testing.assert_allclose(
        token_nats(model, tokens_K, START, replace(plan, batch_size=batch_size)), wanted_K, **CLOSE
    )


@pytest.mark.parametrize(("segment", "memory", "window"), [(5, 11, None), (5, 4, 5), (3, 7, 8), (7, 5, 11), (3, 5, 5)])
def test_the_warmup_is_no_longer_than_it_must_be(make_model, segment, memory, window) -> None:
    """With one segment less, some losses change, and only of the first tokens of a sequence."""
    model, tokens_K, plan = (
        make_model(),
        draw(229),
        EvaluationPlan(segment, ContextLimits(memory, window), batch_size=2),
    )
    wanted_K = token_nats(model, tokens_K, START, plan)
    short = replace(plan, warmup_tokens=warmup_length(model, plan) - segment)
    odd_K = np.abs(token_nats(model, tokens_K, START, short) - wanted_K) > 1e-9
    second = (-(-229 // segment) // 2) * segment
    assert odd_K.any()
    assert not odd_K[:second].any()
    assert odd_K[second : second + segment].any()


def test_without_warmup_sequences_start_with_empty_memory(make_model) -> None:
    """Their first input is the token before them."""
    model, tokens_K = make_model(), draw(70)
    found_K = token_nats(model, tokens_K, START, EvaluationPlan(5, ContextLimits(11), batch_size=2, warmup_tokens=0))
    for begin, before in ((0, START), (35, int(tokens_K[34]))):
        alone_K = token_nats(model, tokens_K[begin : begin + 35], before, EvaluationPlan(5, ContextLimits(11)))
        np.testing.assert_allclose(found_K[begin : begin + 35], alone_K, **CLOSE)


@pytest.mark.parametrize("length", [1, 6, 7, 8, 13, 14, 37])
@pytest.mark.parametrize("batch_size", [None, 1, 2, 3, 5, 50])
@pytest.mark.parametrize("at_once", [1, 2, 512])
def test_every_token_counts_once(make_model, monkeypatch, length, batch_size, at_once) -> None:
    """Including the last, short segment and sequence, whenever losses are copied from the device."""
    monkeypatch.setattr(harness, "_MAX_STEPS_ON_DEVICE", at_once)
    model, tokens_K, told = make_model(), draw(length), []
    plan = EvaluationPlan(7, ContextLimits(11), batch_size)
    chunks = list(stream_losses(model, TokenizedText(tokens_K, START), plan, told.append))
    positions = np.concatenate([np.arange(chunk.position, chunk.position + len(chunk.nats_K)) for chunk in chunks])
    assert sorted(positions.tolist()) == list(range(length))
    assert sum(told) == length
    assert sum(chunk.sum for chunk in chunks) == pytest.approx(
        token_nats(model, tokens_K, START, plan).sum(), abs=1e-10
    )


# Documents.

STARTS = np.array([0, 3, 3, 4, 21, 22, 60, 61])  # one of them empty


@pytest.mark.parametrize("batch_size", [None, 1, 2, 5, 100])
@pytest.mark.parametrize(("segment", "memory", "window"), [(5, 11, None), (7, 0, None), (64, 11, None), (3, 4, 5)])
def test_reset_documents_are_scored_as_if_alone(make_model, batch_size, segment, memory, window) -> None:
    """Each starts from the BOS token and an empty memory; long ones are divided into several sequences, too."""
    model, tokens_K = make_model(), draw(97)
    plan = EvaluationPlan(segment, ContextLimits(memory, window))
    text = TokenizedText(tokens_K, START, STARTS)
    found_K = losses_in_order(model, text, replace(plan, batch_size=batch_size, reset_memory=True))
    edges = [*STARTS.tolist(), 97]
    alone = [token_nats(model, tokens_K[begin:end], START, plan) for begin, end in pairwise(edges) if begin < end]
    np.testing.assert_allclose(found_K, np.concatenate(alone), **CLOSE)


def test_a_document_does_not_see_the_one_before(make_model) -> None:
    """Changing the document before changes no loss if memory is reset, and some loss if it continues."""
    model, tokens_K = make_model(), draw(40)
    other_K = tokens_K.copy()
    other_K[:21] = draw(21, seed=8)
    found: dict[bool, list[npt.NDArray[Any]]] = {True: [], False: []}
    for reset_memory, losses in found.items():
        for ids_K in (tokens_K, other_K):
            plan = EvaluationPlan(5, ContextLimits(11), reset_memory=reset_memory)
            losses.append(losses_in_order(model, TokenizedText(ids_K, START, STARTS), plan)[21:])
    assert (found[True][0] == found[True][1]).all()
    assert np.abs(found[False][0] - found[False][1])[0] > 1e-6


def test_many_short_documents_are_one_batch(make_model, monkeypatch) -> None:
    """Few steps, and no memory where no document is longer than a segment."""
    model = make_model(memory_length=11)
    starts_N = np.arange(0, 997, 7)
    text = TokenizedText(draw(997), START, starts_N)
    shapes, calls, call = [], [], type(model).forward

    def watched(self, tokens_BT, memory, **rest):
        shapes.append(tuple(tokens_BT.shape))
        calls.append(memory.length)
        return call(self, tokens_BT, memory, **rest)

    monkeypatch.setattr(type(model), "forward", watched)
    list(stream_losses(model, text, EvaluationPlan(64, ContextLimits(11), reset_memory=True)))
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
    ({"architecture": "lstm", "n_layers": 1}, 11), ({"architecture": "qrnn", "n_layers": 2}, 11),
    ({"architecture": "lstm", "n_layers": 2}, 0), ({"architecture": "vaswani"}, 0),
    ({"architecture": "shaw", "max_relative_positions": 5}, 11),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "memory"), BASELINES, ids=str)
def test_other_models_are_read_the_same(settings: dict[str, Any], memory: int) -> None:
    """Larger batches where they are exact, documents always; recurrent models refuse batches that are not exact."""
    torch.manual_seed(7)
    sizes = {"vocab_size": 23, "n_layers": 2, "d_model": 14, "n_heads": 2, "d_ff": 19, "dropout": 0.0}
    model = build_model(model_config(**sizes | settings))
    model, tokens_K, plan = model.double().eval(), draw(97), EvaluationPlan(5, ContextLimits(memory))
    wanted_K = token_nats(model, tokens_K, START, plan)
    if memory and settings["architecture"] in ("lstm", "qrnn"):
        with pytest.raises(
            UserError,
            match=r"batch-size 3: the state of \w+ depends on all .* give batch-size 1 or enough warmup-tokens",
        ):
            token_nats(model, tokens_K, START, replace(plan, batch_size=3))
        longer = replace(plan, batch_size=3, warmup_tokens=97)
    else:
        longer = replace(plan, batch_size=3)
    np.testing.assert_allclose(token_nats(model, tokens_K, START, longer), wanted_K, **CLOSE)
    text = TokenizedText(tokens_K, START, STARTS)
    found_K = losses_in_order(model, text, replace(plan, batch_size=5, reset_memory=True))
    edges = [*STARTS.tolist(), 97]
    alone = [token_nats(model, tokens_K[begin:end], START, plan) for begin, end in pairwise(edges) if begin < end]
    np.testing.assert_allclose(found_K, np.concatenate(alone), **CLOSE)


# What is left behind, and what is refused.


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_restored_even_when_scoring_is_stopped(make_model, training) -> None:
    model, text = make_model(dropout=0.3).train(training), TokenizedText(draw(37), START)
    chunks = stream_losses(model, text, EvaluationPlan(5, ContextLimits(11)))
    next(chunks)
    assert not model.training
    chunks.close()
    assert all(module.training is training for module in model.modules())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(make_model, value) -> None:
    """The message names the tensor."""
    model = make_model()
    name, weight = next((name, weight) for name, weight in model.named_parameters() if name.startswith("layers.1."))
    with torch.no_grad():
        weight.flatten()[3] = value
    with pytest.raises(UserError, match=f"the weights {re.escape(name)} are not finite"):
        token_nats(model, draw(7), START, EvaluationPlan(5, ContextLimits(11)))
    with torch.no_grad():
        model.content_bias[0] = value
    with pytest.raises(UserError, match="and 1 more tensors are not finite"):
        token_nats(model, draw(7), START, EvaluationPlan(5, ContextLimits(11)))


def test_bfloat16_is_near(make_model) -> None:
    model, tokens_K = make_model().float(), draw(101)
    exact = token_nats(model, tokens_K, START, EvaluationPlan(7, ContextLimits(11))).mean()
    low = token_nats(model, tokens_K, START, EvaluationPlan(7, ContextLimits(11), dtype="bfloat16")).mean()
    assert low != exact
    assert low == pytest.approx(exact, rel=0.02)


# receptive field


@pytest.mark.parametrize(
    ("segment", "context_limits", "layers", "context"),
    [
        (7, ContextLimits(0), 3, 0),
        (7, ContextLimits(11), 1, 11),
        (7, ContextLimits(11), 3, 11 + 14 + 14),
        (7, ContextLimits(14), 3, 42),
        (80, ContextLimits(2100), 12, 2100 + 11 * 2160),
        (7, ContextLimits(4, 5), 3, 12),  # four tokens back in each layer
        (7, ContextLimits(99, 5), 3, 12),
        (7, ContextLimits(3, 5), 3, 12),  # also where memory is too short for the window
        (7, ContextLimits(3, 99), 3, 3 + 7 + 7),
    ],
)
def test_how_far_back_losses_depend(
    make_model, segment: int, context_limits: ContextLimits, layers: int, context: int
) -> None:
    plan, model = EvaluationPlan(segment, context_limits), make_model(n_layers=layers)
    assert receptive_field(model, plan) == context
    assert warmup_length(model, plan) == -(-context // segment) * segment
    assert warmup_length(model, replace(plan, warmup_tokens=segment + 1)) == 2 * segment
