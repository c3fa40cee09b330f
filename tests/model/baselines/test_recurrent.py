"""LSTM and QRNN: the oracles' numbers, torch's own LSTM, and what a state is."""

import pytest
import torch
from oracles import assert_same_gradients, copied, lstm, qrnn
from tensors import assert_same_tensors

from transformer_xl.config import LSTMConfig, QRNNConfig, UserError
from transformer_xl.model.baselines.recurrent import LSTMLayer, QRNNLayer
from transformer_xl.model.build import build_model
from transformer_xl.model.memory import ContextLimits, Memory
from transformer_xl.model.precision import with_matrices_in

QRNNS = ["qrnn, window 1", "qrnn, window 2"]


def nothing(name):
    """The states before a text, of two rows."""

    def zeros(*shape):
        return torch.zeros(2, *shape, 14, dtype=torch.float64)

    return [(zeros(), zeros()) if name == "lstm" else (zeros(), zeros(int(name[-1]) - 1)) for _ in range(3)]


@pytest.mark.parametrize("name", ["lstm", *QRNNS])
def test_equals_the_oracle(make_baseline, tokens, name):
    """Scores, states and every gradient of a model that reads segment by segment."""
    model, states = make_baseline(name), nothing(name)
    weights, memory = copied(model), model.initial_memory(2)
    for index, length in enumerate((5, 1, 7)):
        text = tokens(2, length, seed=index)
        hidden_BTD, memory = model(text, memory)
        logits_BTV = model.logits(hidden_BTD)
        wanted, states = (lstm if name == "lstm" else qrnn)(weights, text, states, layers=3)
        torch.testing.assert_close(logits_BTV, wanted, rtol=0, atol=1e-10)
        for cache, (first, second) in zip(memory.layers, states, strict=True):
            kept = torch.cat([first[:, None], second[:, None] if name == "lstm" else second], dim=1)
            torch.testing.assert_close(cache.state_BXD, kept, rtol=0, atol=1e-10)
            assert not cache.state_BXD.requires_grad
    weight = torch.randn(wanted.shape, dtype=torch.float64)
    assert_same_gradients(model, (logits_BTV * weight).sum(), weights, (wanted * weight).sum())


def test_equals_torch_s_lstm(make_baseline, tokens):
    """With the same weights; torch has a second bias, which is 0 here."""
    model, text = make_baseline("lstm"), tokens(2, 9)
    theirs = torch.nn.LSTM(14, 14, num_layers=3, batch_first=True).double()
    with torch.no_grad():
        for index, layer in enumerate(model.layers):
            getattr(theirs, f"weight_ih_l{index}").copy_(layer.input_weight)
            getattr(theirs, f"weight_hh_l{index}").copy_(layer.recurrent_weight)
            getattr(theirs, f"bias_ih_l{index}").copy_(layer.bias)
            getattr(theirs, f"bias_hh_l{index}").zero_()
    hidden_BTD, memory = model(text)
    wanted_BTD, (h, c) = theirs(model.embedding(text) * 14**0.5)
    torch.testing.assert_close(hidden_BTD, wanted_BTD, rtol=0, atol=1e-12)
    states_LBXD = torch.stack([cache.state_BXD for cache in memory.layers])
    torch.testing.assert_close(states_LBXD, torch.stack([h, c], 2), rtol=0, atol=1e-12)


def test_zoneout_keeps_what_was_in_training_alone(make_baseline, tokens, monkeypatch):
    model, text = make_baseline("qrnn, window 2", zoneout=0.4), tokens(2, 9)
    plain, _ = qrnn(copied(model), text, nothing("qrnn, window 2"), layers=3)
    torch.testing.assert_close(model.logits(model(text)[0]), plain, rtol=0, atol=1e-10)
    drawn = torch.rand(3, 2, 9, 14, dtype=torch.float64)
    left = iter(drawn)
    monkeypatch.setattr(torch, "rand_like", lambda _: next(left))
    hidden_BTD, _ = model.train()(text)
    weights = copied(model)
    wanted, _ = qrnn(
        weights, text, nothing("qrnn, window 2"), layers=3,
        forgets=lambda index, f: torch.where(drawn[index] < 0.4, torch.ones_like(f), f),
    )  # fmt: skip
    torch.testing.assert_close(model.logits(hidden_BTD), wanted, rtol=0, atol=1e-10)
    assert (wanted - plain).abs().max() > 0.01


def test_dropout_on_the_embedding_and_each_layer_s_output(make_baseline, tokens, monkeypatch):
    model, dropped = make_baseline("lstm", dropout=0.5), []
    monkeypatch.setattr(model.dropout, "forward", lambda x: dropped.append(tuple(x.shape)) or x)
    model(tokens(3, 5))
    assert dropped == [(3, 5, 14)] * 4
    assert model.dropout.p == 0.5


@pytest.mark.parametrize("name", ["lstm", *QRNNS])
def test_memory_0_begins_each_segment_anew(make_baseline, tokens, name):
    model, text = make_baseline(name), tokens(2, 5)
    fresh_BTD, memory = model(text, model.initial_memory(2, ContextLimits(0)))
    again_BTD, after = model(text, memory)
    assert torch.equal(again_BTD, fresh_BTD)
    assert after.position_B.tolist() == [10, 10]
    carried_BTD, _ = model(text, model(text, model.initial_memory(2, ContextLimits(1)))[1])
    assert (carried_BTD - fresh_BTD).abs().max() > 0.01


def test_a_state_is_a_value(make_baseline, tokens):
    model = make_baseline("qrnn, window 2")
    _, memory = model(tokens(3, 5))
    assert memory.valid_B.tolist() == memory.position_B.tolist() == [5, 5, 5]
    emptied = memory.reset([1])
    assert emptied.position_B.tolist() == emptied.valid_B.tolist() == [5, 0, 5]
    assert not any(cache.state_BXD[1].any() for cache in emptied.layers)
    assert_same_tensors(emptied.select([0, 2]), memory.select([0, 2]))
    assert all(cache.state_BXD[1].any() for cache in memory.layers)
    joined = Memory.concatenate([memory.select([0, 2]), memory.select([1])])
    assert_same_tensors(joined, {name: kept[[0, 2, 1]] for name, kept in memory.tensors().items()})
    assert_same_tensors(model.initial_memory(3).with_tensors(memory.tensors()), memory)
    shorter = memory.resized(3)
    assert (shorter.length, shorter.valid_B.tolist()) == (3, [3, 3, 3])
    assert_same_tensors(shorter.cache_tensors(), memory.cache_tensors())
    assert not any(kept.any() for kept in memory.resized(0).cache_tensors().values())
    assert {kept.dtype for kept in memory.to(dtype=torch.float32).cache_tensors().values()} == {torch.float32}


def test_a_new_model_remembers():
    """Forget gates begin with bias 1, all other biases with 0."""
    for config, layer, count in ((LSTMConfig(d_model=32), LSTMLayer, 4), (QRNNConfig(d_model=32), QRNNLayer, 3)):
        model = build_model(config)
        for one in model.layers:
            assert isinstance(one, layer)
            bias = one.bias if isinstance(one, LSTMLayer) else one.gates.bias
            wanted = torch.zeros(count, 32)
            wanted[1] = 1
            assert torch.equal(bias.detach().view(count, 32), wanted)
            weight = one.input_weight if isinstance(one, LSTMLayer) else one.gates.weight
            if isinstance(one, LSTMLayer):
                assert 0.9 * 32**-0.5 < one.recurrent_weight.abs().max() <= 32**-0.5
            bound = (3 / weight.shape[1]) ** 0.5
            assert 0.9 * bound < weight.abs().max() <= bound


@pytest.mark.parametrize("embedding", [{}, {"d_embed": 16}, {"cutoffs": (50, 100), "div_val": 2}])
def test_what_goes_in_has_variance_1(embedding):
    """No LayerNorm would bring it there, and a layer gives less than it gets."""
    torch.manual_seed(0)
    model = build_model(LSTMConfig(d_model=64, n_layers=1, **embedding))
    inputs_BTD = model.embed_inputs(torch.arange(256).view(1, -1), None)
    assert 0.85 < inputs_BTD.std() < 1.15


@pytest.mark.parametrize("name", ["lstm", *QRNNS])
@pytest.mark.parametrize("embedding", [{}, {"d_embed": 6}])
def test_products_in_bfloat16(make_baseline, tokens, name, embedding):
    """On any CPU, side by side too; weights rounded once give the same, and states stay exact."""
    model, text = make_baseline(name, **embedding).float(), tokens(2, 7)
    exact_BTD, _ = model(text)
    ready = with_matrices_in(model, torch.bfloat16)
    for lengths_B in (None, torch.tensor([7, 7])):
        results = []
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            for one in (model, ready):
                hidden_BTD, memory = one(text, one.inference_memory(2), lengths_B=lengths_B)
                assert {cache.state_BXD.dtype for cache in memory.layers} == {torch.float32}
                results.append(torch.cat([hidden_BTD, one(text, memory)[0]], dim=1))
        assert torch.equal(*results)
        torch.testing.assert_close(results[0][:, :7].float(), exact_BTD, rtol=0, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        model(text)[0].sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.layers.parameters())


@pytest.mark.parametrize(
    ("context_limits", "text"),
    [
        (ContextLimits(5, attention_window=3), "lstm has no attention_window; give none"),
        (ContextLimits(5, clamp_length=3), "lstm has no clamp_length; give none"),
    ],
)
def test_a_limit_without_meaning_is_refused(make_baseline, context_limits, text):
    with pytest.raises(UserError, match=text):
        make_baseline("lstm").initial_memory(2, context_limits)


def test_a_memory_of_another_model_is_refused(make_baseline, tokens):
    model = make_baseline("qrnn, window 2")
    for other in (make_baseline("lstm", n_layers=2), make_baseline("qrnn, window 1"), make_baseline("shaw")):
        with pytest.raises(UserError, match="another model"):
            model(tokens(2, 3), other.initial_memory(2))
