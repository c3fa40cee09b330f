"""Losses by distance from a document's start equal those of plain loops over documents.

10 is the id of the BOS token in all texts. The fixtures make_model and tokens (tests/conftest.py) make a small model
with random weights and random token ids.

Shape suffixes: N documents.
"""

from __future__ import annotations

import math
from statistics import mean, stdev

import numpy as np
import pytest
from token_losses import token_nats

from transformer_xl.apps.analyze.attention import loss_by_distance, with_documents
from transformer_xl.evaluation.plan import EvaluationPlan, TokenizedText
from transformer_xl.model.memory import ContextLimits

PLAN = EvaluationPlan(segment_length=5, context_limits=ContextLimits(memory_length=11))
STARTS = [0, 1, 20, 37]  # positions where documents start


@pytest.mark.parametrize("reset_memory", [True, False])
def test_groups_equal_plain_loops(make_model, tokens, reset_memory):
    model, ids, progress = make_model(), tokens(1, 53)[0].numpy().astype(np.uint8), []
    text = TokenizedText(ids, 10, np.array(STARTS))
    result = loss_by_distance(model, text, PLAN, reset_memory=reset_memory, progress=progress.append)
    continued = token_nats(model, ids, 10, PLAN)
    groups: dict[int, list[float]] = {}
    for start, end in zip(STARTS, [*STARTS[1:], 53], strict=True):
        losses = token_nats(model, ids[start:end], 10, PLAN) if reset_memory else continued[start:end]
        for distance, loss in enumerate(losses, start=1):
            # groups are distances 1, 2, 3 to 4, 5 to 8 and so on
            groups.setdefault((distance - 1).bit_length(), []).append(loss)
    assert sum(progress) == 53
    assert [row["up_to_distance"] for row in result] == [1, 2, 4, 8, 16, 32]
    assert sorted(groups) == list(range(6))
    for group, losses in groups.items():
        assert result[group]["tokens"] == len(losses)
        assert result[group]["nats_per_token"] == pytest.approx(mean(losses), rel=1e-10)
        assert result[group]["standard_error"] == pytest.approx(stdev(losses) / math.sqrt(len(losses)), rel=1e-6)


def test_text_without_documents_is_split_into_chunks(tokens):
    ids = tokens(1, 300)[0].numpy().astype(np.uint8)  # one row of 300 tokens
    split, length = with_documents(TokenizedText(ids, 10), PLAN)
    assert length == 32  # twice the sum of memory length and segment length
    assert split.document_starts_N.tolist() == list(range(0, 300, 32))
    # short texts have at least eight chunks, if they have eight tokens
    assert with_documents(TokenizedText(ids[:80], 10), PLAN)[1] == 10
    assert with_documents(TokenizedText(ids[:3], 10), PLAN)[1] == 1
    text = TokenizedText(ids, 10, np.array([0, 70]))
    assert with_documents(text, PLAN) == (text, None)


def test_single_token_has_no_standard_error(make_model, tokens):
    ids = tokens(1, 2)[0].numpy().astype(np.uint8)
    (first, second) = loss_by_distance(make_model(), TokenizedText(ids, 10), PLAN, reset_memory=True)
    assert first.keys() == {"up_to_distance", "tokens", "nats_per_token", "standard_error"}
    assert (first["tokens"], first["standard_error"], second["up_to_distance"]) == (1, None, 2)
