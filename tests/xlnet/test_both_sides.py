"""Scores given both sides: normalized, equal to a plain reading of the definition, the same for any batch size.

Shape suffixes: B batch rows, T tokens, Q targets, K tokens of the text, O orders.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from model_configs import small_model

from transformer_xl.config import UserError, run_settings
from transformer_xl.evaluation.evaluate import losses_in_order
from transformer_xl.evaluation.plan import EvaluationPlan, TokenizedText
from transformer_xl.model.memory import ContextLimits
from transformer_xl.xlnet.two_streams import XLNet

VOCAB_SIZE, BLOCK = 3, 8


def xlnet(**settings: Any) -> XLNet:
    sizes = {"vocab_size": VOCAB_SIZE, "n_layers": 2, "perm_size": BLOCK, "max_gram": 2}
    model = small_model(architecture="xlnet", **sizes, **settings)
    assert isinstance(model, XLNet)
    return model


def plan_of(**settings: Any) -> EvaluationPlan:
    limits = ContextLimits(settings.pop("memory_length", 6))
    return EvaluationPlan(4, limits, method="both-sides", **settings)


def text_of(num_tokens: int, **others: Any) -> TokenizedText:
    return TokenizedText(np.random.default_rng(3).integers(0, VOCAB_SIZE, num_tokens), 0, **others)


@torch.no_grad()
def plain_nats(model: XLNet, ids: list[int], span: range, memory_length: int, segment: int) -> list[float]:
    """Return the losses of a span from left to right, token by token, with the later ones cut out by their mask."""
    first = span.start // segment * segment
    memory = model.initial_memory(1, ContextLimits(memory_length))
    for start in range(0, first, segment):
        memory = model.two_streams([ids[start : start + segment]], memory).memory
    read, nats = ids[first : max(first + BLOCK, span.stop)], []
    for place in span:
        visible_1TT = torch.ones(1, len(read), len(read), dtype=torch.bool)
        for i, j in product(range(len(read)), repeat=2):
            if first + j in span:
                visible_1TT[0, i, j] = first + i in span and first + j < min(first + i, place)
        targets_11 = torch.tensor([[place - first]])
        streams = model.two_streams([read], memory, visible=visible_1TT, targets=targets_11)
        nats.append(float(model.nats(streams.query_BQD, [[ids[place]]])))
    return nats


def test_losses_equal_the_definition_for_any_batch_size() -> None:
    model, text = xlnet(), text_of(19, span_K=np.array([0, 0, 1, 2, 2, 2, 3, 4, 5, 5, 5, 5, 6, 7, 7, 8, 9, 9, 10]))
    ids = text.tokens_K.tolist()
    wanted = [nats for span in text.spans() for nats in plain_nats(model, ids, span, 6, 4)]
    for batch_size in (None, 1, 3):
        nats_K = losses_in_order(model, text, plan_of(batch_size=batch_size))
        np.testing.assert_allclose(nats_K, wanted, atol=1e-9)
    alone_K = losses_in_order(model, text_of(19), plan_of())  # each token is a span
    np.testing.assert_allclose(
        alone_K[[2, 3, 18]], [plain_nats(model, ids, range(i, i + 1), 6, 4)[0] for i in (2, 3, 18)]
    )


@pytest.mark.parametrize("orders", [1, 3])
def test_probabilities_of_all_contents_of_a_span_add_up_to_1(orders: int) -> None:
    model, span = xlnet(), [9, 10, 11]
    span_K = np.array([index if index < 9 else max(9, index - 2) for index in range(16)])
    totals_O = np.zeros(orders)
    for content in product(range(VOCAB_SIZE), repeat=3):
        text = text_of(16, span_K=span_K)
        text.tokens_K[span] = content
        plan = plan_of(num_orders=orders, keep_orders=True)
        nats_KO = losses_in_order(model, text, plan, columns=(orders,))
        totals_O += np.exp(-nats_KO[span].sum(0))
    np.testing.assert_allclose(totals_O, 1, atol=1e-9)
    means_K = losses_in_order(model, text, replace(plan, keep_orders=False))
    np.testing.assert_allclose(means_K, nats_KO.mean(-1), atol=1e-9)
    assert orders == 1 or np.ptp(nats_KO[span].sum(0)) > 1e-3  # other orders, other estimates
    np.testing.assert_allclose(np.ptp(nats_KO[:9], axis=-1), 0, atol=1e-9)  # of one token there is one order


def test_documents_and_long_spans() -> None:
    model, text = xlnet(), text_of(15, document_starts_N=np.array([0, 5]))
    nats_K = losses_in_order(model, text, plan_of(reset_memory=True))
    parts = [losses_in_order(model, TokenizedText(part_K, 0), plan_of()) for part_K in np.split(text.tokens_K, [5])]
    np.testing.assert_allclose(nats_K, np.concatenate(parts), atol=1e-9)
    long = text_of(15, span_K=np.array([0, *[1] * 12, 2, 2]))  # longer than a block
    wanted = plain_nats(model, long.tokens_K.tolist(), range(1, 13), 6, 4)
    np.testing.assert_allclose(losses_in_order(model, long, plan_of())[1:13], wanted, atol=1e-9)


def test_memory_holds_no_more_slots_than_the_text_fills() -> None:
    model, text = xlnet(), text_of(19)
    nats_K = losses_in_order(model, text, plan_of(memory_length=2**31 - 1))
    np.testing.assert_allclose(nats_K, losses_in_order(model, text, plan_of(memory_length=19)), atol=1e-9)


def test_empty_slots_that_are_attended_to_all_count() -> None:
    model, text = xlnet(attend_empty_memory=True), text_of(11)
    wanted = [plain_nats(model, text.tokens_K.tolist(), range(i, i + 1), 20, 4)[0] for i in range(11)]
    np.testing.assert_allclose(losses_in_order(model, text, plan_of(memory_length=20)), wanted, atol=1e-9)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="segment_length 9 is above perm_size 8"):
        losses_in_order(xlnet(), text_of(4), replace(plan_of(), segment_length=9))
    with pytest.raises(UserError, match="leave out warmup_tokens"):
        losses_in_order(xlnet(), text_of(4), plan_of(warmup_tokens=3))


def test_a_run_that_reads_to_the_left_cannot_have_the_method() -> None:
    """It is refused before training, and not after it."""
    with pytest.raises(UserError, match="needs a model that reads to both sides, and this is transformer-xl"):
        run_settings({"evaluation": {"method": "both-sides"}}, "test")
