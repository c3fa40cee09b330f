"""What every architecture guarantees: segments equal one pass, causality, no effect of padding, immutable memory.

Models are those of systems.py: 23 tokens in the vocabulary, width 14, 3 layers.

Shape suffixes: B batch size, T new tokens, D model width.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from systems import SYSTEMS, WITH_MEMORY, make_system
from tensors import assert_same_tensors, copied_tensors, run_parts

from transformer_xl.config import UserError
from transformer_xl.inference import prepare_inference
from transformer_xl.model.memory import ContextLimits


@pytest.mark.parametrize("name", WITH_MEMORY)
@settings(max_examples=10, deadline=None)
# `clamp`: the limit clamp_length, above which all distances use the position encoding of this one
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), clamp=st.none() | st.integers(1, 40))
def test_segments_of_any_lengths_equal_one_pass(name, lengths, clamp):
    """With a memory that holds all earlier tokens, splitting a text has no effect (up to float64 rounding)."""
    model = make_system(name)
    limits = ContextLimits(sum(lengths), clamp_length=clamp if hasattr(model.config, "clamp_length") else None)
    text = torch.randint(0, 23, (2, sum(lengths)), generator=torch.Generator().manual_seed(1))
    whole_BTD, _ = run_parts(model, model.initial_memory(2, limits), text)
    for reading in (model, prepare_inference(model)):
        parts_BTD, _ = run_parts(reading, reading.initial_memory(2, limits), *text.split(lengths, dim=1))
        torch.testing.assert_close(parts_BTD, whole_BTD, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", SYSTEMS)
def test_generation_without_memory_attends_to_one_segment(tokens, name):
    """Otherwise each token would be predicted from the previous one only, unlike in training."""
    model, text = make_system(name, memory_length=0), tokens(2, 5)
    whole_BTD, _ = model(text)
    memory = model.generation_memory(2, segment_length=5)
    assert memory.length == 4  # with the newest token, one segment
    parts_BTD, _ = run_parts(model, memory, *text.split(1, dim=1))
    torch.testing.assert_close(parts_BTD, whole_BTD, rtol=0, atol=1e-10)
    if name in WITH_MEMORY:
        # a memory length above 0 is kept
        assert model.generation_memory(2, ContextLimits(3), segment_length=5).length == 3


@pytest.mark.parametrize("name", SYSTEMS)
def test_causality_by_gradient(name):
    """The output at a position depends on all inputs up to it, and on none after it."""
    model = make_system(name)
    inputs_BTD = torch.randn(1, 7, 14, dtype=torch.float64, requires_grad=True)
    hidden_BTD, _ = model(inputs=inputs_BTD)
    for position in range(7):
        (grad_BTD,) = torch.autograd.grad(hidden_BTD[:, position].square().sum(), inputs_BTD, retain_graph=True)
        has_effect = grad_BTD[0].abs().sum(-1) > 0
        assert has_effect.tolist() == [index <= position for index in range(7)]


@pytest.mark.parametrize("name", SYSTEMS)
def test_batch_rows_are_independent(tokens, name):
    """Rows do not depend on their order or on other rows' valid slots; a reset row is like one of a new memory."""
    model = make_system(name)
    text, more = tokens(5, 7), tokens(5, 6, seed=8)
    _, memory = model(text)
    memory = memory.reset([1, 3])
    hidden_BTD, after = model(more, memory)
    order = [4, 1, 0, 3, 2]
    shuffled_BTD, _ = model(more[order], memory.select(order))
    torch.testing.assert_close(shuffled_BTD, hidden_BTD[order], rtol=0, atol=1e-12)
    for row in range(5):
        alone_BTD, alone = model(more[row : row + 1], memory.select([row]))
        torch.testing.assert_close(alone_BTD, hidden_BTD[row : row + 1], rtol=0, atol=1e-12)
        assert_same_tensors(alone, after.select([row]), atol=1e-12)
    fresh_BTD, _ = model(more)
    torch.testing.assert_close(hidden_BTD[[1, 3]], fresh_BTD[[1, 3]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("has_context", [False, True])
def test_padding_is_neither_attended_nor_cached(tokens, name, has_context):
    """Sequences of different lengths, one of them empty, give the results and memories of each sequence alone."""
    model, text, lengths = make_system(name), tokens(5, 7), [7, 3, 0, 1, 5]
    memory = model(tokens(5, 4, seed=2))[1] if has_context else model.initial_memory(5)
    lengths_B = torch.tensor(lengths)
    hidden_BTD, after = model(text, memory, lengths=lengths_B)
    # padding comes first in each batch row
    changed_padding = torch.where(torch.arange(7) < (7 - lengths_B)[:, None], 0, text)
    changed_BTD, _ = model(changed_padding, memory, lengths=lengths_B)
    assert hidden_BTD.isfinite().all()
    assert after.position_B.tolist() == [length + 4 * has_context for length in lengths]
    next_BTD, _ = model(tokens(5, 3, seed=6), after)
    for row, length in enumerate(lengths):
        alone = memory.select([row])
        if length:
            alone_BTD, alone = model(text[row : row + 1, 7 - length :], alone)
            for padded_BTD in (hidden_BTD, changed_BTD):
                torch.testing.assert_close(padded_BTD[row : row + 1, 7 - length :], alone_BTD, rtol=0, atol=1e-12)
        alone_BTD, _ = model(tokens(5, 3, seed=6)[row : row + 1], alone)
        torch.testing.assert_close(next_BTD[row : row + 1], alone_BTD, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SYSTEMS)
def test_padding_gets_no_gradient_and_contributes_none(tokens, name):
    model = make_system(name)
    inputs_BTD = torch.randn(2, 5, 14, dtype=torch.float64, requires_grad=True)
    hidden_BTD, _ = model(inputs=inputs_BTD, lengths=torch.tensor([2, 5]))
    unpadded_BTD = torch.cat([hidden_BTD[0, 3:], hidden_BTD[1]])[None]
    alone_BTD = torch.cat([model(inputs=part)[0] for part in (inputs_BTD[:1, 3:], inputs_BTD[1:])], dim=1)
    results = []
    for states_BTD in (unpadded_BTD, alone_BTD):
        named = {"inputs": inputs_BTD, **dict(model.layers.named_parameters())}
        losses = model.nats(states_BTD, tokens(1, 7)).sum()
        results.append(dict(zip(named, torch.autograd.grad(losses, named.values()), strict=True)))
    assert_same_tensors(*results, atol=1e-9)
    assert not results[0]["inputs"][0, :3].any()


@pytest.mark.parametrize("name", SYSTEMS)
def test_inputs_and_memory_are_not_changed(tokens, name):
    """Also, no tensor of the memory requires gradients, and every parameter gets one."""
    model, text = make_system(name, dropout=0.2).train(), tokens(2, 5)
    _, memory = model(tokens(2, 7))
    before, text_before = copied_tensors(memory), text.clone()
    order_B2T = torch.stack([torch.arange(5).expand(2, -1), text % 2], 1) if model.config.orders else None
    losses_BT, auxiliary_BT, after = model.training_losses(text, text, memory, progress=0.0, order=order_B2T)
    (losses_BT + auxiliary_BT).sum().backward()
    assert torch.equal(text, text_before)
    assert_same_tensors(memory, before)
    assert not any(tensor.requires_grad for tensor in after.tensors().values())
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", SYSTEMS)
def test_activation_checkpointing_gives_the_same_gradients(tokens, name):
    """Tested with dropout, because the recomputation must draw the same random numbers."""
    grads = []
    for activation_checkpointing in (False, True):
        model = make_system(name, dropout=0.3, **({"zoneout": 0.3} if name.startswith("qrnn") else {})).train()
        model.activation_checkpointing = activation_checkpointing
        torch.manual_seed(3)
        model.nats(model(tokens(2, 5))[0], tokens(2, 5)).sum().backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_same_tensors(*grads, atol=1e-12)


@pytest.mark.parametrize("name", SYSTEMS)
def test_continuous_inputs_equal_the_embedding(tokens, name):
    model, text = make_system(name), tokens(2, 5)
    # the scaled embedding, and that of n-grams, is the input to the first layer
    inputs_BTD = (
        model.embedding(text) * model.config.embedding_scale
        if model.ngrams is None
        else model.embed(text, None, None, None)[0]
    )
    assert torch.equal(model(inputs=inputs_BTD)[0], model(text)[0])


@pytest.mark.parametrize(
    ("call", "text"),  # `text`: a regular expression for the message
    [
        (lambda model: model(), "either tokens or inputs"),
        (lambda model: model(torch.zeros(2, 3)), "expected integers"),
        (lambda model: model(torch.zeros(2, 0).long()), "expected integers"),
        (lambda model: model(inputs=torch.zeros(2, 3, 5)), r"expected \(batch, tokens, 14\)"),
        (lambda model: model(torch.zeros(2, 3).long(), model.initial_memory(3)), "batch size 3 .* batch size 2"),
        (lambda model: model(torch.zeros(2, 3).long(), lengths=torch.ones(3).long()), "lengths"),
        (lambda model: model(torch.zeros(2, 3).long(), lengths=torch.tensor([1, 4])), r"lengths \[1, 4\].* 0 to 3"),
        (
            lambda model: model(torch.zeros(2, 3).long(), lengths=torch.tensor([1.0, 3.0])),
            "dtype torch.float32; give integers",
        ),
    ],
)
def test_invalid_calls_raise(call, text):
    with pytest.raises(UserError, match=text):
        call(make_system("al-rfou"))


@pytest.mark.parametrize(
    ("name", "other", "settings"),  # the model, and the model that made the memory with its changed settings
    [
        ("transformer-xl", "transformer-xl", {"n_layers": 2}),
        ("transformer-xl", "transformer-xl", {"d_head": 7}),
        ("transformer-xl", "transformer-xl", {"d_model": 16}),
        ("transformer-xl", "qrnn, kernel 1", {}),
        ("qrnn, kernel 2", "lstm", {"n_layers": 2}),
        ("qrnn, kernel 2", "qrnn, kernel 1", {}),
        ("qrnn, kernel 2", "shaw", {}),
        ("al-rfou", "shaw", {}),
        ("lstm, n-grams", "lstm", {}),
        ("lstm", "lstm, n-grams", {}),
    ],
)
def test_memory_of_another_model_raises(tokens, name, other, settings):
    """A KV cache depends on the width of the heads (d_head), cached hidden states on that of the model (d_model)."""
    model, other_model = make_system(name), make_system(other, **settings)
    if "d_head" in settings:
        model, other_model = prepare_inference(model), prepare_inference(other_model)
    with pytest.raises(UserError, match="another model"):
        model(tokens(2, 3), other_model.initial_memory(2))
