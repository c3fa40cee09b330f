"""Losses by distance from a document's start are those of plain loops over documents."""

from __future__ import annotations

import math

import numpy as np
import pytest
from token_losses import token_nats

from transformer_xl.analysis.loss_by_distance import loss_by_distance, with_chunks
from transformer_xl.evaluation.plan import EvaluationPlan, TokenizedText
from transformer_xl.model.memory import ContextLimits

PLAN = EvaluationPlan(5, ContextLimits(11))
STARTS = [0, 1, 20, 37]


@pytest.mark.parametrize("reset_memory", [True, False])
def test_groups_are_those_of_a_plain_loop(make_model, tokens, reset_memory):
    model, ids = make_model(), tokens(1, 53)[0].numpy().astype(np.uint8)
    read = []
    found = loss_by_distance(
        model, TokenizedText(ids, 10, np.array(STARTS)), PLAN, reset_memory=reset_memory, progress=read.append
    )
    whole = token_nats(model, ids, 10, PLAN)
    losses: dict[int, list[float]] = {}
    for begin, end in zip(STARTS, [*STARTS[1:], 53], strict=True):
        alone = token_nats(model, ids[begin:end], 10, PLAN)
        for place in range(begin, end):
            group = 0
            while 2**group < place - begin + 1:
                group += 1
            losses.setdefault(group, []).append(alone[place - begin] if reset_memory else whole[place])
    assert sum(read) == 53
    assert found.last_G.tolist() == [1, 2, 4, 8, 16, 32]
    for group, nats in losses.items():
        mean = sum(nats) / len(nats)
        spread = math.sqrt(sum((each - mean) ** 2 for each in nats) / (len(nats) - 1) / len(nats))
        assert found.count_G[group] == len(nats)
        assert found.nats_G[group] == pytest.approx(mean, rel=1e-10)
        assert found.error_G[group] == pytest.approx(spread, rel=1e-6)
    assert len(losses) == len(found.last_G)


def test_a_text_without_documents_is_cut(tokens):
    ids = tokens(1, 300)[0].numpy().astype(np.uint8)
    cut, length = with_chunks(TokenizedText(ids, 10), PLAN)
    assert length == 32  # twice memory and segment
    assert cut.document_starts_N.tolist() == list(range(0, 300, 32))
    assert with_chunks(TokenizedText(ids[:80], 10), PLAN)[1] == 10  # eight of them
    assert with_chunks(TokenizedText(ids[:3], 10), PLAN)[1] == 1
    whole = TokenizedText(ids, 10, np.array([0, 70]))
    assert with_chunks(whole, PLAN) == (whole, None)


def test_a_single_token_has_no_standard_error(make_model, tokens):
    ids = tokens(1, 2)[0].numpy().astype(np.uint8)
    (first, second) = loss_by_distance(make_model(), TokenizedText(ids, 10), PLAN, reset_memory=True).as_dicts()
    assert first.keys() == {"up_to_distance", "tokens", "nats_per_token", "standard_error"}
    assert (first["tokens"], first["standard_error"], second["up_to_distance"]) == (1, None, 2)
