"""Means and terms of attention are those of plain loops over a text, and nothing of a long text is kept."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
import torch
from attention_oracle import attention_of

from transformer_xl.analysis.attention_maps import (
    TERMS,
    AttentionMeans,
    TermMaps,
    num_visible_distances,
    read_attention,
    require_attention_terms,
    terms_of,
)
from transformer_xl.config import LSTMConfig, ShawConfig, UserError, VaswaniConfig
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.model.build import build_model
from transformer_xl.model.memory import ContextLimits

SHAW = ShawConfig(
    vocab_size=23, architecture="shaw", max_relative_positions=6, n_layers=2, d_model=14, n_heads=2, d_head=5, d_ff=19
)


@pytest.fixture
def text(tokens):
    return tokens(1, 53)[0]


@pytest.fixture
def shaw():
    torch.manual_seed(5)
    model = build_model(SHAW).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


CASES = [
    (5, ContextLimits(11), 47),
    (7, ContextLimits(11, 9), 53),  # a window shorter than memory
    (13, ContextLimits(3, None, 4), 47),  # a clamp, and segments longer than memory
    (4, ContextLimits(0), 31),
    (1, ContextLimits(6, 7), 29),
    (7, ContextLimits(41), 29),  # memory is never full, so all count
    (5, ContextLimits(10), 11),  # one query counts
]


@pytest.mark.parametrize(("segment", "context_limits", "length"), CASES)
def test_means_are_those_of_a_plain_loop(make_model, text, segment, context_limits, length):
    model, plan = make_model(n_layers=2, tie_attention_biases=False), EvaluationPlan(segment, context_limits)
    means = AttentionMeans(model, plan, length)
    read_attention(model, text[:length].numpy(), plan, [means.add])
    counted = [i for i in range(length) if i - i % segment >= context_limits.memory_length]
    assert means.fills_memory == bool(counted)
    counted = counted or list(range(length))
    assert means.num_queries == len(counted)
    for (layer, head), seen in attention_of(model, text[:length], segment, context_limits).items():
        total, count, far, entropy = {}, {}, 0.0, 0.0
        for (i, j), p in seen.probability.items():
            if i in counted:
                total[i - j] = total.get(i - j, 0.0) + p
                count[i - j] = count.get(i - j, 0) + 1
                far += p * (i - j)
                entropy -= p * math.log(p)
        assert len(means.count_P) == min(num_visible_distances(plan), length)
        for distance in range(len(means.count_P)):
            assert int(means.count_P[distance]) == count.get(distance, 0)
            wanted = total[distance] / count[distance] if distance in count else math.nan
            found = means.mean_LNP(distance)[layer, head, distance]
            assert found == pytest.approx(wanted, abs=1e-12, nan_ok=True)
        assert means.distance_LN[layer, head] == pytest.approx(far / len(counted), abs=1e-10)
        assert means.entropy_LN[layer, head] == pytest.approx(entropy / len(counted), abs=1e-10)


def check_terms(model, text, segment, context_limits, length):
    maps, plan = TermMaps(model, length), EvaluationPlan(segment, context_limits)
    read_attention(model, text.numpy(), plan, [maps.callback(plan)])
    for (layer, head), seen in attention_of(model, text, segment, context_limits).items():
        wanted = {name: np.full((length, length), np.nan) for name in TERMS}
        for (i, j), four in seen.terms.items():
            if i < length:
                for name, term in zip(("content", "position", "content_bias", "position_bias"), four, strict=True):
                    wanted[name][i, j] = term
                wanted["score"][i, j] = sum(four)
                wanted["probability"][i, j] = seen.probability[i, j]
        for name in maps.terms:
            np.testing.assert_allclose(maps.map_QQ(name, layer, head), wanted[name], atol=1e-10, err_msg=name)


@pytest.mark.parametrize(("segment", "context_limits", "length"), [*CASES[:5], (53, ContextLimits(0), 19)])
def test_terms_are_the_papers(make_model, text, segment, context_limits, length):
    """Also where the last segment reaches beyond what is shown."""
    check_terms(make_model(n_layers=2, tie_attention_biases=False), text, segment, context_limits, length - length % 3)


def test_shaws_terms(shaw, text):
    assert list(terms_of(shaw)) == ["probability", "score", "content", "position"]
    check_terms(shaw, text, 7, ContextLimits(11), 31)


def test_probabilities_of_all_keys_add_up(make_model, text):
    model, plan = make_model(), EvaluationPlan(5, ContextLimits(11))
    maps = TermMaps(model, 31)
    read_attention(model, text.numpy(), plan, [maps.callback(plan)])
    for layer, head in np.ndindex(maps.shape):
        assert np.nansum(maps.map_QQ("probability", layer, head), -1) == pytest.approx(np.ones(31), abs=1e-12)


def test_empty_slots_that_are_attended_keep_their_share(make_model, text):
    """Then a query's probabilities of the tokens add up to less than 1, and are still the model's."""
    model, plan = make_model(attend_empty_memory=True), EvaluationPlan(7, ContextLimits(11))
    maps, means = TermMaps(model, 7), AttentionMeans(model, plan, 7)
    read_attention(model, text[:7].numpy(), plan, [maps.callback(plan), means.add])
    traced = list(model.trace(text[None, :7], model.initial_memory(1, plan.context_limits)))
    for layer, trace in enumerate(traced):
        for head in range(2):
            wanted = trace.terms.probabilities_BNTS[0, head, :, 11:].detach().tril().numpy()
            found = np.nan_to_num(maps.map_QQ("probability", layer, head))
            np.testing.assert_allclose(found, wanted, atol=1e-12)
            assert found.sum(-1).max() < 0.99
            own = means.mean_LNP(0)[layer, head, 0]
            assert own == pytest.approx(wanted.diagonal().mean(), abs=1e-12)


def test_nothing_of_a_long_text_is_kept(make_model, tokens):
    """As many numbers live in large tensors at the end of a long text as at the end of a short one."""
    model, plan = make_model(), EvaluationPlan(17, ContextLimits(19))
    smallest = 2 * 17 * (17 + 19)  # the numbers of one term of one layer

    def living(length: int) -> int:
        means, most = AttentionMeans(model, plan, length), 0

        def watch(attention):
            nonlocal most
            if attention.layer == 2 and attention.start >= length - 3 * 17:
                large = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.numel() >= smallest]
                most = max(most, sum(each.numel() for each in large))

        read_attention(model, tokens(1, length)[0].numpy(), plan, [means.add, watch])
        return most

    short, long = living(17 * 4), living(17 * 24)
    assert 0 < long == short


@pytest.mark.parametrize("attended", [False, True])
def test_slots_that_are_never_filled_are_not_kept(make_model, text, attended):
    """A memory far longer than the text gives the numbers of one just long enough, except where empty slots count."""
    model, length, found = make_model(attend_empty_memory=attended), 29, []
    for slots in (28, 997):
        plan, keys = EvaluationPlan(7, ContextLimits(slots)), []
        means, maps = AttentionMeans(model, plan, length), TermMaps(model, length)

        def watch(attention, keys=keys):
            keys.append(attention.terms.content_BNTS.shape[-1])

        read_attention(model, text[:length].numpy(), plan, [means.add, maps.callback(plan), watch])
        assert max(keys) == 7 + (slots if attended else 28)
        assert means.fills_memory == (slots == 28)
        found.append([maps.map_QQ(term, layer, head) for term in TERMS for layer, head in np.ndindex(maps.shape)])
        assert len(means.count_P) == length  # no token of it looks farther
    if not attended:
        np.testing.assert_allclose(found[1], found[0], atol=1e-12)


@pytest.mark.parametrize("weight", ["q_proj", "r_proj", "o_proj"])
def test_weights_too_large_for_their_products_are_refused(make_model, text, weight):
    model = make_model().float()
    with torch.no_grad():
        getattr(model.layers[1].attention, weight).weight.fill_(3e38)
    plan, taken = EvaluationPlan(7, ContextLimits(11)), []
    with pytest.raises(UserError, match=r"^layer 1 gives values that are not finite: .* lower learn"):
        read_attention(model, text.numpy(), plan, [lambda attention: taken.append(attention.layer)])
    assert taken == [0]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (LSTMConfig, "lstm has no attention to show; use a run of transformer-xl or shaw"),
        (VaswaniConfig, "vaswani has no attention terms and memory"),
    ],
)
def test_other_models_are_refused(kind, message):
    heads = {} if kind is LSTMConfig else {"n_heads": 2, "d_ff": 19}
    with pytest.raises(UserError, match=message):
        require_attention_terms(build_model(kind(vocab_size=23, n_layers=1, d_model=14, **heads)))
