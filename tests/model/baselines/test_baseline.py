"""What every one of the systems keeps of the contract: exactness over segments, causality, padding, values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_configs import model_config
from systems import SYSTEMS, WITH_MEMORY
from tensors import assert_same_tensors, copied_tensors

from transformer_xl.config import UserError
from transformer_xl.model.build import build_model
from transformer_xl.model.memory import ContextLimits


@pytest.mark.parametrize("name", WITH_MEMORY)
@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_segments_of_any_lengths_equal_one_pass(name, lengths):
    """With memory for all that came before, cutting a text changes nothing (up to float64 rounding)."""
    torch.manual_seed(5)
    small = {"vocab_size": 23, "n_layers": 3, "d_model": 14, "n_heads": 2, "d_ff": 19, "dropout": 0.0}
    model = build_model(model_config(**{**small, **SYSTEMS[name]})).double().eval()
    text, targets = (torch.randint(0, 23, (2, sum(lengths))) for _ in range(2))
    whole_BT = model.nats(model(text, model.initial_memory(2, ContextLimits(sum(lengths))))[0], targets)
    memory, parts, start = model.initial_memory(2, ContextLimits(sum(lengths))), [], 0
    for length in lengths:
        hidden_BTD, memory = model(text[:, start : start + length], memory)
        parts.append(model.nats(hidden_BTD, targets[:, start : start + length]))
        start += length
    torch.testing.assert_close(torch.cat(parts, dim=1), whole_BT, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_token_by_token_equals_the_full_pass(make_baseline, tokens, name):
    """With the memory that generation uses, which may be of another kind."""
    model, text = make_baseline(name, memory_length=13), tokens(2, 13)
    whole_BTD, _ = model(text)
    memory, parts = model.inference_memory(2), []
    with torch.inference_mode():
        for part in text.split(1, dim=1):
            hidden_B1D, memory = model(part, memory)
            parts.append(hidden_B1D)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole_BTD, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", SYSTEMS)
def test_with_memory_length_0_generation_sees_a_segment(make_baseline, tokens, name):
    """Else each token would follow from the one before alone, after training that had a segment."""
    model, text = make_baseline(name, memory_length=0), tokens(2, 5)
    whole_BTD, _ = model(text)
    memory, parts = model.generation_memory(2, segment_length=5), []
    assert memory.length == 4
    with torch.inference_mode():
        for part in text.split(1, dim=1):
            hidden_B1D, memory = model(part, memory)
            parts.append(hidden_B1D)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole_BTD, rtol=0, atol=1e-10)
    if name in WITH_MEMORY:
        assert model.generation_memory(2, ContextLimits(3), segment_length=5).length == 3


@pytest.mark.parametrize("name", SYSTEMS)
def test_causality_by_gradient(make_baseline, name):
    """The output at a position depends on all inputs up to it, and on none after it."""
    model = make_baseline(name)
    inputs_BTD = torch.randn(1, 7, 14, dtype=torch.float64, requires_grad=True)
    hidden_BTD, _ = model(inputs_BTD=inputs_BTD)
    for position in range(7):
        (slope_BTD,) = torch.autograd.grad(hidden_BTD[:, position].square().sum(), inputs_BTD, retain_graph=True)
        touched = slope_BTD[0].abs().sum(-1) > 0
        assert touched.tolist() == [index <= position for index in range(7)]


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_sequence_does_not_depend_on_the_others_of_its_batch(make_baseline, tokens, name):
    model = make_baseline(name)
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
@pytest.mark.parametrize("began", [False, True])
def test_padding_is_neither_attended_nor_remembered(make_baseline, tokens, name, began):
    """Sequences of unequal lengths, an empty one among them, give and remember what each gives alone."""
    model, text, lengths = make_baseline(name), tokens(5, 7), [7, 3, 0, 1, 5]
    memory = model(tokens(5, 4, seed=2))[1] if began else model.initial_memory(5)
    lengths_B = torch.tensor(lengths)
    hidden_BTD, after = model(text, memory, lengths_B=lengths_B)
    other = torch.where(torch.arange(7) < (7 - lengths_B)[:, None], 0, text)
    changed_BTD, _ = model(other, memory, lengths_B=lengths_B)
    assert hidden_BTD.isfinite().all()
    assert after.position_B.tolist() == [length + 4 * began for length in lengths]
    further_BTD, _ = model(tokens(5, 3, seed=6), after)
    for row, length in enumerate(lengths):
        alone = memory.select([row])
        if length:
            alone_BTD, alone = model(text[row : row + 1, 7 - length :], alone)
            for found_BTD in (hidden_BTD, changed_BTD):
                torch.testing.assert_close(found_BTD[row : row + 1, 7 - length :], alone_BTD, rtol=0, atol=1e-12)
        next_BTD, _ = model(tokens(5, 3, seed=6)[row : row + 1], alone)
        torch.testing.assert_close(further_BTD[row : row + 1], next_BTD, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SYSTEMS)
def test_padding_gives_no_gradient(make_baseline, tokens, name):
    model = make_baseline(name)
    inputs_BTD = torch.randn(2, 5, 14, dtype=torch.float64, requires_grad=True)
    hidden_BTD, _ = model(inputs_BTD=inputs_BTD, lengths_B=torch.tensor([2, 5]))
    own_BTD = torch.cat([hidden_BTD[0, 3:], hidden_BTD[1]])
    (slope_BTD,) = torch.autograd.grad(model.nats(own_BTD[None], tokens(1, 7)).sum(), inputs_BTD)
    assert slope_BTD.isfinite().all()
    assert not slope_BTD[0, :3].any()


@pytest.mark.parametrize("name", SYSTEMS)
def test_neither_inputs_nor_memory_change(make_baseline, tokens, name):
    model, text = make_baseline(name, dropout=0.2).train(), tokens(2, 5)
    _, memory = model(tokens(2, 7))
    before = copied_tensors(memory)
    kept = text.clone()
    nats_BT, extra_BT, after = model.training_losses(text, text, memory, progress=0.0)
    (nats_BT + extra_BT).sum().backward()
    assert torch.equal(text, kept)
    assert_same_tensors(memory, before)
    assert not any(tensor.requires_grad for tensor in after.tensors().values())
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", SYSTEMS)
def test_activation_checkpointing_gives_the_same_gradients(make_baseline, tokens, name):
    """With dropout, whose random numbers must be the same in both passes."""
    grads = []
    for checkpointing in (False, True):
        model = make_baseline(name, dropout=0.3, **({"zoneout": 0.3} if name.startswith("qrnn") else {})).train()
        model.activation_checkpointing = checkpointing
        torch.manual_seed(3)
        model.nats(model(tokens(2, 5))[0], tokens(2, 5)).sum().backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_same_tensors(*grads, atol=1e-12)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_softmax_is_transformer_xl_s(make_baseline, tokens, name):
    """Clusters, losses in input order, and the most likely tokens without all logits."""
    model, text = make_baseline(name, cutoffs=(5, 11), div_val=2), tokens(2, 5)
    hidden_BTD, _ = model(text)
    logits_BTV = model.logits(hidden_BTD).log_softmax(-1)
    wanted_BT = -logits_BTV.gather(-1, text[..., None])[..., 0]
    torch.testing.assert_close(model.nats(hidden_BTD, text), wanted_BT, rtol=0, atol=1e-10)
    torch.testing.assert_close(model.topk(hidden_BTD, 3)[1], logits_BTV.topk(3).indices)


@pytest.mark.parametrize("name", SYSTEMS)
def test_continuous_inputs_equal_the_embedding(make_baseline, tokens, name):
    model, text = make_baseline(name), tokens(2, 5)
    inputs_BTD = model.embedding(text) * 14**0.5
    assert torch.equal(model(inputs_BTD=inputs_BTD)[0], model(text)[0])


@pytest.mark.parametrize("name", ["lstm", "learned"])
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda model: model(), "either tokens_BT or inputs_BTD"),
        (lambda model: model(torch.zeros(2, 3)), "expected integers"),
        (lambda model: model(torch.zeros(2, 0, dtype=torch.int64)), "expected integers"),
        (lambda model: model(inputs_BTD=torch.zeros(2, 3, 5)), r"expected \(batch, tokens, 14\)"),
        (lambda model: model(torch.zeros(2, 3).long(), model.initial_memory(3)), "batch size 3 .* batch size 2"),
        (lambda model: model(torch.zeros(2, 3).long(), lengths_B=torch.ones(3).long()), "lengths_B"),
    ],
)
def test_wrong_calls_are_refused(make_baseline, name, call, text):
    with pytest.raises(UserError, match=text):
        call(make_baseline(name))
