"""LSTM and QRNN: they equal the oracles and torch's LSTM, and their states are memories like any other.

The oracles are `lstm` and `qrnn` of oracles.py.

Shape suffixes: B batch size, T new tokens, D model width (14), V vocabulary, X vectors of a layer's state: h and c of
an LSTM; c and the previous kernel size - 1 inputs of a QRNN.
"""

import pytest
import torch
from oracles import assert_same_gradients, copied_weights, lstm, qrnn
from systems import make_system
from tensors import assert_same_tensors

from transformer_xl.architectures import build_model
from transformer_xl.baselines.recurrent import LSTMLayer
from transformer_xl.config import LSTMConfig, QRNNConfig
from transformer_xl.inference import prepare_inference
from transformer_xl.model.memory import ContextLimits, Memory

QRNNS = ["qrnn, kernel 1", "qrnn, kernel 2"]


def empty_states(name):
    """Return the oracle's states of two batch rows before the first token: h and c, or c and the previous inputs."""

    def zeros(*shape):
        return torch.zeros(2, *shape, 14, dtype=torch.float64)

    # the name of a QRNN ends with its kernel size
    return [(zeros(), zeros()) if name == "lstm" else (zeros(), zeros(int(name[-1]) - 1)) for _ in range(3)]


@pytest.mark.parametrize("name", ["lstm", *QRNNS])
def test_segments_equal_oracle(tokens, name):
    """Compares logits, states and the gradient of every parameter."""
    model, states = make_system(name), empty_states(name)
    weights, memory = copied_weights(model), model.initial_memory(2)
    for index, length in enumerate((5, 1, 7)):
        text = tokens(2, length, seed=index)
        hidden_BTD, memory = model(text, memory)
        logits_BTV = model.logits(hidden_BTD)
        expected_BTV, states = (lstm if name == "lstm" else qrnn)(weights, text, states, layers=3)
        torch.testing.assert_close(logits_BTV, expected_BTV, rtol=0, atol=1e-10)
        for cache, (first, second) in zip(memory.layers, states, strict=True):
            state_BXD = torch.cat([first[:, None], second[:, None] if name == "lstm" else second], dim=1)
            torch.testing.assert_close(cache.state_BXD, state_BXD, rtol=0, atol=1e-10)
    weight = torch.randn(expected_BTV.shape, dtype=torch.float64)
    assert_same_gradients(model, (logits_BTV * weight).sum(), weights, (expected_BTV * weight).sum())


def test_lstm_equals_torch_s(tokens):
    """torch's LSTM gets the same weights; its second bias is set to 0."""
    model, text = make_system("lstm"), tokens(2, 9)
    torch_lstm = torch.nn.LSTM(14, 14, num_layers=3, batch_first=True).double()
    with torch.no_grad():
        for index, layer in enumerate(model.layers):
            getattr(torch_lstm, f"weight_ih_l{index}").copy_(layer.input_weight)
            getattr(torch_lstm, f"weight_hh_l{index}").copy_(layer.recurrent_weight)
            getattr(torch_lstm, f"bias_ih_l{index}").copy_(layer.bias)
            getattr(torch_lstm, f"bias_hh_l{index}").zero_()
    expected_BTD, _ = torch_lstm(model.embedding(text) * 14**0.5)
    torch.testing.assert_close(model(text)[0], expected_BTD, rtol=0, atol=1e-12)


def test_zoneout_keeps_elements_of_the_state_in_training_only(tokens, monkeypatch):
    """Zoneout sets random forget gates to 1, with probability 0.4 here."""
    model, text, states = make_system("qrnn, kernel 2", zoneout=0.4), tokens(2, 9), empty_states("qrnn, kernel 2")
    without_zoneout, _ = qrnn(copied_weights(model), text, states, layers=3)
    torch.testing.assert_close(model.logits(model(text)[0]), without_zoneout, rtol=0, atol=1e-10)
    # the random numbers that the three layers draw
    random = torch.rand(3, 2, 9, 14, dtype=torch.float64)
    remaining = iter(random)
    monkeypatch.setattr(torch, "rand_like", lambda _: next(remaining))
    hidden_BTD, _ = model.train()(text)

    def zone_out(index, f):
        return torch.where(random[index] < 0.4, torch.ones_like(f), f)

    expected, _ = qrnn(copied_weights(model), text, states, layers=3, change_forget_gates=zone_out)
    torch.testing.assert_close(model.logits(hidden_BTD), expected, rtol=0, atol=1e-10)
    assert (expected - without_zoneout).abs().max() > 0.01


def test_dropout_is_applied_to_the_embedding_and_each_layer_s_output(tokens, monkeypatch):
    model, dropped = make_system("lstm", dropout=0.5, output_dropout=0.3), []
    for dropout in (model.input_dropout, model.dropout, model.output_dropout):
        monkeypatch.setattr(dropout, "forward", lambda x, p=dropout.p: dropped.append((tuple(x.shape), p)) or x)
    model(tokens(3, 5))
    # the embedding and three layers
    assert dropped == [((3, 5, 14), p) for p in (0.5, 0.5, 0.5, 0.3)]


@pytest.mark.parametrize("name", ["lstm", *QRNNS])
def test_memory_length_0_starts_each_segment_from_empty_states(tokens, name):
    model, text = make_system(name), tokens(2, 5)
    first_BTD, memory = model(text, model.initial_memory(2, ContextLimits(0)))
    second_BTD, after = model(text, memory)
    assert torch.equal(second_BTD, first_BTD)
    assert after.position_B.tolist() == [10, 10]  # tokens are still counted
    # with any other memory_length, the second segment continues from the states after the first
    continued_BTD, _ = model(text, model(text, model.initial_memory(2, ContextLimits(1)))[1])
    assert (continued_BTD - first_BTD).abs().max() > 0.01


def test_states_can_be_reset_selected_concatenated_resized_and_restored(tokens):
    model = make_system("qrnn, kernel 2")
    _, memory = model(tokens(3, 5))
    emptied = memory.reset([1])
    assert emptied.position_B.tolist() == emptied.valid_B.tolist() == [5, 0, 5]
    assert not any(cache.state_BXD[1].any() for cache in emptied.layers)
    assert_same_tensors(emptied.select([0, 2]), memory.select([0, 2]))
    joined = Memory.concatenate([memory.select([0, 2]), memory.select([1])])
    assert_same_tensors(joined, {name: tensor[[0, 2, 1]] for name, tensor in memory.tensors().items()})
    assert_same_tensors(model.initial_memory(3).with_tensors(memory.tensors()), memory)
    shorter = memory.resized(3)  # a state has no slots: only memory_length 0 changes it
    assert (shorter.length, shorter.valid_B.tolist()) == (3, [3, 3, 3])
    assert_same_tensors(shorter.cache_tensors(), memory.cache_tensors())
    assert not any(tensor.any() for tensor in memory.resized(0).cache_tensors().values())
    assert {tensor.dtype for tensor in memory.to(dtype=torch.float32).cache_tensors().values()} == {torch.float32}


@pytest.mark.parametrize(("config", "num_gates"), [(LSTMConfig(d_model=32), 4), (QRNNConfig(d_model=32), 3)])
def test_initial_weights_of_layers(config, num_gates):
    """Uniform weights of variance 1 / width; forget gates start with bias 1, so that a new model remembers."""
    for layer in build_model(config).layers:
        is_lstm = isinstance(layer, LSTMLayer)
        weight, bias = (layer.input_weight, layer.bias) if is_lstm else (layer.gates.weight, layer.gates.bias)
        expected_bias = torch.zeros(num_gates, 32)
        expected_bias[1] = 1  # gates are in the order i, f, z, o or z, f, o
        assert torch.equal(bias.detach().view(num_gates, 32), expected_bias)
        bounds = [(weight, (3 / weight.shape[1]) ** 0.5)]
        bounds += [(layer.recurrent_weight, 32**-0.5)] if is_lstm else []
        for tensor, bound in bounds:
            assert 0.9 * bound < tensor.abs().max() <= bound


@pytest.mark.parametrize("embedding", [{}, {"d_embed": 16}, {"cutoffs": (50, 100), "div_val": 2}])
def test_embedded_inputs_have_variance_1(embedding):
    """Smaller inputs would vanish: no LayerNorm rescales them, and each layer's output is smaller than its input."""
    torch.manual_seed(0)
    model = build_model(LSTMConfig(d_model=64, n_layers=1, **embedding))
    inputs_BTD, _ = model.embed(torch.arange(256).view(1, -1), None, None, None)
    assert 0.85 < inputs_BTD.std() < 1.15  # 256 tokens of 64 elements


@pytest.mark.parametrize("name", ["lstm", *QRNNS])
@pytest.mark.parametrize("embedding", [{}, {"d_embed": 6}])
def test_bfloat16_autocast_keeps_states_in_float32(tokens, name, embedding):
    """Tested with and without padding; a model whose weights are converted once gives the same results."""
    model, text = make_system(name, **embedding).float(), tokens(2, 7)
    exact_BTD, _ = model(text)
    converted = prepare_inference(model, "bfloat16").model
    for lengths_B in (None, torch.tensor([7, 7])):  # with lengths, the code for padding runs although there is none
        results = []
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            for one in (model, converted):
                hidden_BTD, memory = one(text, one.initial_memory(2), lengths=lengths_B)
                assert {cache.state_BXD.dtype for cache in memory.layers} == {torch.float32}
                results.append(torch.cat([hidden_BTD, one(text, memory)[0]], dim=1))
        assert torch.equal(*results)
        torch.testing.assert_close(results[0][:, :7].float(), exact_BTD, rtol=0, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        model(text)[0].sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.layers.parameters())
