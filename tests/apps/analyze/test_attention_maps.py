"""Means and terms of attention equal those of plain loops over a text, and memory use does not grow with the text.

The arguments of EvaluationPlan are the segment length and ContextLimits, whose arguments are memory length, attention
window and clamp length. The fixtures make_model and tokens (tests/conftest.py) make a small model with random weights
and random token ids; `attention_of` computes its attention in loops over queries and keys.

Shape suffixes: L layers, N heads, P distances, B batch size, T queries, S keys (memory slots and queries), Q tokens as
queries and as keys.
"""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
import torch
from attention_oracle import attention_of
from model_configs import small_model

from transformer_xl.apps.analyze.attention_maps import (
    TERMS,
    AttentionMeans,
    TermMaps,
    num_visible_distances,
    trace_attention,
)
from transformer_xl.config import UserError
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.model.memory import ContextLimits


@pytest.fixture
def text(tokens):
    """53 random token ids."""
    return tokens(1, 53)[0]


# columns: segment length; ContextLimits (memory length, attention window, clamp length); length of the text
CASES = [
    (5, ContextLimits(11), 47),
    (7, ContextLimits(11, 9), 53),  # an attention window shorter than memory
    (13, ContextLimits(3, None, 4), 47),  # a clamp length, and segments longer than memory
    (4, ContextLimits(0), 31),
    (1, ContextLimits(6, 7), 29),
    (7, ContextLimits(41), 29),  # memory is never full, so all queries are included
    (5, ContextLimits(10), 11),  # one query is included
]


@pytest.mark.parametrize(("segment", "context_limits", "length"), CASES)
def test_means_equal_plain_loops(make_model, text, segment, context_limits, length):
    model, plan = make_model(n_layers=2, tie_attention_biases=False), EvaluationPlan(segment, context_limits)
    means = AttentionMeans(model, plan, length)
    trace_attention(model, text[:length].numpy(), plan, [means.add])
    included = [i for i in range(length) if i - i % segment >= context_limits.memory_length]
    assert means.fills_memory == bool(included)
    included = included or list(range(length))
    assert means.num_queries == len(included)
    num_distances = min(num_visible_distances(plan), length)
    for (layer, head), seen in attention_of(model, text[:length], segment, context_limits).items():
        probabilities = {(i, j): p for (i, j), p in seen.probability.items() if i in included}
        by_distance = [[p for (i, j), p in probabilities.items() if i - j == d] for d in range(num_distances)]
        assert means.count_P.tolist() == [len(values) for values in by_distance]
        expected = [sum(values) / len(values) if values else math.nan for values in by_distance]
        np.testing.assert_allclose(means.mean_LNP(num_distances)[layer, head], expected, atol=1e-12)
        distance = sum(p * (i - j) for (i, j), p in probabilities.items()) / len(included)
        entropy = -sum(p * math.log(p) for p in probabilities.values()) / len(included)
        assert means.distance_LN[layer, head] == pytest.approx(distance, abs=1e-10)
        assert means.entropy_LN[layer, head] == pytest.approx(entropy, abs=1e-10)


def test_queries_count_by_what_sinks_leave(text):
    """Mean distance and entropy are of the probabilities divided by their sum, which is below 1 with sinks."""
    model, context_limits = small_model(n_layers=2, tie_attention_biases=False, attention_sinks=True), ContextLimits(11)
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.sinks.copy_(torch.tensor([0.3, 0.2]))  # scores of 4.8 and 3.2
    check_terms(model, text, 5, context_limits, 31)
    plan = EvaluationPlan(5, context_limits)
    means = AttentionMeans(model, plan, 47)
    trace_attention(model, text[:47].numpy(), plan, [means.add])
    included = [i for i in range(47) if i - i % 5 >= 11]
    for (layer, head), seen in attention_of(model, text[:47], 5, context_limits).items():
        p = {(i, j): value for (i, j), value in seen.probability.items() if i in included}
        kept = {i: sum(value for (query, _), value in p.items() if query == i) for i in included}
        assert min(kept.values()) < 0.9
        distance = sum(value * (i - j) for (i, j), value in p.items()) / sum(kept.values())
        entropy = -sum(value / kept[i] * math.log(value / kept[i]) for (i, _), value in p.items()) / len(included)
        assert means.distance_LN[layer, head] == pytest.approx(distance, abs=1e-10)
        assert means.entropy_LN[layer, head] == pytest.approx(entropy, abs=1e-10)


def trace_maps(model, text, plan, num_tokens):
    maps = TermMaps(model, plan, num_tokens)
    trace_attention(model, text.numpy(), plan, [maps.add])
    return maps


def check_terms(model, text, segment, context_limits, length):
    maps = trace_maps(model, text, EvaluationPlan(segment, context_limits), length)
    for (layer, head), seen in attention_of(model, text, segment, context_limits).items():
        expected = {name: np.full((length, length), np.nan) for name in TERMS}
        for (i, j), terms in seen.terms.items():
            if i < length:
                values = (*terms, sum(terms), seen.probability[i, j])
                names = ("content", "position", "content_bias", "position_bias", "score", "probability")
                for name, value in zip(names, values, strict=True):
                    expected[name][i, j] = value
        for name in maps.terms:
            np.testing.assert_allclose(maps.map_QQ(name, layer, head), expected[name], atol=1e-10, err_msg=name)
    return maps


@pytest.mark.parametrize(("segment", "context_limits", "length"), [*CASES[:5], (53, ContextLimits(0), 19)])
def test_terms_equal_those_of_the_papers_formula(make_model, text, segment, context_limits, length):
    """The maps cover the length rounded down to a multiple of 3, so that they may end within a segment."""
    check_terms(make_model(n_layers=2, tie_attention_biases=False), text, segment, context_limits, length - length % 3)


def test_terms_of_shaw_are_content_and_position(text):
    shaw = small_model(architecture="shaw", max_relative_positions=6, n_layers=2)
    assert list(check_terms(shaw, text, 7, ContextLimits(11), 31).terms) == [
        "probability", "score", "content", "position"
    ]  # fmt: skip


def test_attended_empty_slots_keep_their_probability(make_model, text):
    """With `attend_empty_memory`, queries also attend to memory slots that no token has filled yet. A query's
    probabilities of the tokens then sum to less than 1, and still equal the model's."""
    model, plan = make_model(attend_empty_memory=True), EvaluationPlan(7, ContextLimits(11))
    maps, means = TermMaps(model, plan, 7), AttentionMeans(model, plan, 7)
    trace_attention(model, text[:7].numpy(), plan, [maps.add, means.add])
    for layer, trace in enumerate(model.trace(text[None, :7], model.initial_memory(1, plan.context_limits))):
        for head in range(2):
            # the first 11 keys are the empty memory slots
            expected = trace.terms.probabilities_BNTS[0, head, :, 11:].detach().tril().numpy()
            actual = np.nan_to_num(maps.map_QQ("probability", layer, head))
            np.testing.assert_allclose(actual, expected, atol=1e-12)
            assert actual.sum(-1).max() < 0.99
            assert means.mean_LNP(0)[layer, head, 0] == pytest.approx(expected.diagonal().mean(), abs=1e-12)


def test_memory_use_is_the_same_for_a_long_text(make_model, tokens):
    """Large tensors have as many elements at the end of a long text as at the end of a short one."""
    model, plan = make_model(), EvaluationPlan(17, ContextLimits(19))
    term_size = 2 * 17 * (17 + 19)  # elements of one term of one layer

    def max_elements(length: int) -> int:
        means, counts = AttentionMeans(model, plan, length), []

        def count(attention):
            # in the last layer, from the third segment before the end of the text on
            if attention.layer == 2 and attention.start >= length - 3 * 17:
                sizes = [item.numel() for item in gc.get_objects() if type(item) is torch.Tensor]
                counts.append(sum(size for size in sizes if size >= term_size))

        trace_attention(model, tokens(1, length)[0].numpy(), plan, [means.add, count])
        return max(counts)

    assert 0 < max_elements(17 * 4) == max_elements(17 * 16)


def test_n_grams_reach_into_the_segment_before(make_model, text):
    """With memory for the whole text, segments have the attention of one pass."""
    model = make_model(n_layers=2, max_ngram=4, ngram_buckets=31, d_ngram=5)
    segments, whole = (
        trace_maps(model, text, EvaluationPlan(length, ContextLimits(memory)), 53)
        for length, memory in ((5, 60), (53, 0))
    )
    for layer, head in np.ndindex(whole.shape):
        maps = [one.map_QQ("probability", layer, head) for one in (segments, whole)]
        np.testing.assert_allclose(*maps, atol=1e-10)


@pytest.mark.parametrize("attend_empty", [False, True])
def test_slots_that_are_never_filled_are_omitted(make_model, text, attend_empty):
    """A memory far longer than the text gives the values of one just long enough, unless empty slots are attended."""
    model, length, values = make_model(attend_empty_memory=attend_empty), 29, []
    # segments of 7 tokens: 28 tokens are in memory when the last segment, of one token, is read
    for num_slots in (28, 997):
        plan, num_keys = EvaluationPlan(7, ContextLimits(num_slots)), []
        means, maps = AttentionMeans(model, plan, length), TermMaps(model, plan, length)

        def record(attention, num_keys=num_keys):
            num_keys.append(attention.terms.content_BNTS.shape[-1])

        trace_attention(model, text[:length].numpy(), plan, [means.add, maps.add, record])
        assert max(num_keys) == 7 + (num_slots if attend_empty else 28)
        assert means.fills_memory == (num_slots == 28)
        values.append([maps.map_QQ(term, layer, head) for term in TERMS for layer, head in np.ndindex(maps.shape)])
        assert len(means.count_P) == length  # no larger distance occurs in the text
    if not attend_empty:
        np.testing.assert_allclose(values[1], values[0], atol=1e-12)


@pytest.mark.parametrize("weight", ["q_proj", "r_proj", "o_proj"])
def test_too_large_weights_are_refused(make_model, text, weight):
    model = make_model().float()
    with torch.no_grad():
        # near the maximum of float32, so that sums overflow
        getattr(model.layers[1].attention, weight).weight.fill_(3e38)
    plan, layers = EvaluationPlan(7, ContextLimits(11)), []
    with pytest.raises(UserError, match=r"^layer 1 .*not finite: .* lower learn"):
        trace_attention(model, text.numpy(), plan, [lambda attention: layers.append(attention.layer)])
    assert layers == [0]
