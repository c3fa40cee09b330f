"""Shaw's relative encoding: the oracle's numbers under every reach, and nothing left of u, w and WkR."""

import pytest
import torch
from oracles import assert_same_gradients, copied, shaw
from tensors import assert_drawn_from_normal, authors_mean_std

from transformer_xl.config import ShawConfig, UserError
from transformer_xl.model.build import build_model
from transformer_xl.model.memory import ContextLimits


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    ("context_limits", "segments"),
    [
        (ContextLimits(0), [5]),
        (ContextLimits(3), [5, 2]),
        (ContextLimits(9), [3, 3, 5]),
        (ContextLimits(9, attention_window=4), [3, 3]),
    ],
)
def test_equals_the_oracle(make_baseline, tokens, norm_first, context_limits, segments):
    """Scores and every gradient of a model read segment by segment; five distances have a vector."""
    model = make_baseline("shaw", norm_first=norm_first)
    weights, memory = copied(model), model.initial_memory(2, context_limits)
    kept = [torch.zeros(2, 0, 14, dtype=torch.float64)] * 3
    for index, length in enumerate(segments):
        text = tokens(2, length, seed=index)
        hidden_BTD, memory = model(text, memory)
        logits_BTV = model.logits(hidden_BTD)
        wanted, kept = shaw(
            weights,
            text,
            kept,
            heads=2,
            slots=context_limits.memory_length,
            pre_norm=norm_first,
            window=context_limits.attention_window,
        )
        torch.testing.assert_close(logits_BTV, wanted, rtol=0, atol=1e-10)
    weight = torch.randn(wanted.shape, dtype=torch.float64)
    assert_same_gradients(model, (logits_BTV * weight).sum(), weights, (wanted * weight).sum())


@pytest.mark.parametrize("kernel", ["cpu", "sdpa", "reference"])
def test_kernels_agree(make_baseline, tokens, kernel):
    model, other, text = make_baseline("shaw"), make_baseline("shaw", attn_implementation=kernel), tokens(2, 13)
    torch.testing.assert_close(other(text)[0], model(text)[0], rtol=0, atol=1e-10)


def test_a_clamp_below_the_largest_distance_counts(make_baseline, tokens):
    """Distances above it then share its vector."""
    model, text = make_baseline("shaw"), tokens(2, 9)
    clamped_BTD, _ = model(text, model.initial_memory(2, ContextLimits(0, None, 2)))
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.distance_keys[3:] = layer.attention.distance_keys[2]
    torch.testing.assert_close(
        model(text, model.initial_memory(2, ContextLimits(0)))[0], clamped_BTD, rtol=0, atol=1e-12
    )


def test_it_has_distances_and_no_biases(make_baseline):
    names = dict(make_baseline("shaw").named_parameters())
    assert names["layers.2.attention.distance_keys"].shape == (5, 2, 5)
    assert not [name for name in names if "content_bias" in name or "position" in name]
    assert make_baseline("shaw").state_dict().keys() == names.keys()


def test_initial_weights():
    torch.manual_seed(0)
    model = build_model(ShawConfig(max_relative_positions=64, d_model=128, n_heads=4, n_layers=2))
    assert_drawn_from_normal(model, authors_mean_std)
    assert not model.content_bias.any()
    assert not model.position_bias.any()


def test_training_in_bfloat16_products_gives_finite_gradients(make_baseline, tokens):
    model = make_baseline("shaw", n_layers=1).float().train()
    with torch.autocast("cpu", torch.bfloat16):
        hidden_BTD, memory = model(tokens(1, 3))
        hidden_BTD, _ = model(tokens(1, 3), memory)
        model.nats(hidden_BTD, tokens(1, 3)).sum().backward()
    gradient = model.layers[0].attention.distance_keys.grad
    assert gradient.isfinite().all()
    assert gradient.abs().amax() > 0


def test_max_relative_positions_is_needed():
    with pytest.raises(UserError, match="shaw needs max_relative_positions"):
        build_model(ShawConfig())
