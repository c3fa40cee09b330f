"""The relative encoding of Shaw et al. 2018, a learned vector for each distance (distances above the largest share it).

It equals the oracle for all context limits, and has neither attention biases nor r_proj, the projection of sinusoidal
encodings. `make_system("shaw")` builds a model with 3 layers, width 14 and five vectors.

Shape suffixes: B batch size, T new tokens, D model width, V vocabulary.
"""

import pytest
import torch
from oracles import assert_same_gradients, copied_weights, shaw
from systems import make_system
from tensors import assert_drawn_from_normal, authors_mean_std

from transformer_xl.architectures import build_model
from transformer_xl.config import ShawConfig, UserError
from transformer_xl.model.memory import ContextLimits


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    ("context_limits", "segments"),
    [  # the first argument is the number of memory slots
        (ContextLimits(3), [5, 2]),
        (ContextLimits(9), [3, 3, 5]),
        (ContextLimits(9, attention_window=4), [3, 3]),
    ],
)
def test_segments_equal_oracle(tokens, norm_first, context_limits, segments):
    """Compares logits and the gradient of every parameter; only five of the distances have their own vector."""
    model = make_system("shaw", norm_first=norm_first)
    weights, memory = copied_weights(model), model.initial_memory(2, context_limits)
    # of each layer: the inputs at the cached positions, none at first
    states, options = [torch.zeros(2, 0, 14, dtype=torch.float64)] * 3, {"pre_norm": norm_first}
    options |= {"slots": context_limits.memory_length, "window": context_limits.attention_window}
    for index, length in enumerate(segments):
        text = tokens(2, length, seed=index)
        hidden_BTD, memory = model(text, memory)
        logits_BTV = model.logits(hidden_BTD)
        expected_BTV, states = shaw(weights, text, states, **options)
        torch.testing.assert_close(logits_BTV, expected_BTV, rtol=0, atol=1e-10)
    weight = torch.randn(expected_BTV.shape, dtype=torch.float64)
    assert_same_gradients(model, (logits_BTV * weight).sum(), weights, (expected_BTV * weight).sum())


def test_clamp_length_makes_larger_distances_share_a_vector(tokens):
    model, text = make_system("shaw"), tokens(2, 9)
    clamped_BTD, _ = model(text, model.initial_memory(2, ContextLimits(0, clamp_length=2)))
    with torch.no_grad():
        for layer in model.layers:  # the vectors of distances above 2 become that of distance 2
            layer.attention.distance_keys[3:] = layer.attention.distance_keys[2]
    hidden_BTD, _ = model(text, model.initial_memory(2, ContextLimits(0)))
    torch.testing.assert_close(hidden_BTD, clamped_BTD, rtol=0, atol=1e-12)


def test_parameters_and_initial_weights():
    torch.manual_seed(0)
    model = build_model(ShawConfig(max_relative_positions=64, d_model=128, n_heads=4, n_layers=2))
    assert_drawn_from_normal(model, authors_mean_std)
    assert not any(biases.content_NH.any() or biases.position_NH.any() for biases in model.layer_biases())
    names = dict(model.named_parameters())
    assert names["layers.1.attention.distance_keys"].shape == (64, 4, 32)
    assert not [name for name in names if "_bias" in name or "r_proj" in name]
    assert model.state_dict().keys() == names.keys()
    with pytest.raises(UserError, match="shaw needs max_relative_positions"):
        build_model(ShawConfig())


def test_training_with_bfloat16_autocast_gives_finite_gradients(tokens):
    model = make_system("shaw", n_layers=1).float().train()
    with torch.autocast("cpu", torch.bfloat16):
        hidden_BTD, memory = model(tokens(1, 3))
        hidden_BTD, _ = model(tokens(1, 3), memory)
        model.nats(hidden_BTD, tokens(1, 3)).sum().backward()
    gradient = model.layers[0].attention.distance_keys.grad
    assert gradient.isfinite().all()
    assert gradient.abs().amax() > 0
