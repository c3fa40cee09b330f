"""Absolute position encodings: they equal the oracle, use one segment only, and have the losses of Al-Rfou et al.

Architecture vaswani has sinusoids, al-rfou learned position vectors (17 for each layer in these models).

Shape suffixes: B batch size, T new tokens, M cached tokens, D model width, V vocabulary.
"""

import pytest
import torch
from model_configs import model_config
from oracles import absolute, assert_same_gradients, auxiliary, copied_weights
from reference import logits
from systems import make_system

from transformer_xl.architectures import build_model
from transformer_xl.config import UserError, load_recipe
from transformer_xl.model.memory import ContextLimits, Memory

# each layer predicts the next token (intermediate_layer_losses), and the token after the next too (num_targets 2)
BOTH_AUXILIARY_LOSSES = {"intermediate_layer_losses": True, "num_targets": 2}


@pytest.mark.parametrize("name", ["vaswani", "al-rfou"])
@pytest.mark.parametrize(("norm_first", "window"), [(False, None), (True, None), (False, 3)])
def test_segment_equals_oracle(tokens, name, norm_first, window):
    """Compares logits and the gradient of every parameter, for a second segment, which does not depend on the first."""
    model, text = make_system(name, norm_first=norm_first), tokens(2, 7)
    _, memory = model(tokens(2, 5, seed=8), model.initial_memory(2, ContextLimits(0, attention_window=window)))
    hidden_BTD, memory = model(text, memory)
    logits_BTV, weights = model.logits(hidden_BTD), copied_weights(model)
    outputs = absolute(weights, text, layers=3, heads=2, pre_norm=norm_first, window=window)
    expected_BTV = logits(weights, outputs[-1])
    torch.testing.assert_close(logits_BTV, expected_BTV, rtol=0, atol=1e-10)
    assert memory.position_B.tolist() == [12, 12]  # tokens of both segments, 5 + 7
    weight = torch.randn(expected_BTV.shape, dtype=torch.float64)
    assert_same_gradients(model, (logits_BTV * weight).sum(), weights, (expected_BTV * weight).sum())


@pytest.mark.parametrize("settings", [BOTH_AUXILIARY_LOSSES, {"intermediate_layer_losses": True}, {"num_targets": 2}])
@pytest.mark.parametrize("progress", [0.0, 0.17, 0.4, 1.0])  # fraction of the training steps that are done
def test_auxiliary_losses_equal_oracle(tokens, settings, progress):
    """With three layers, the loss of the first stops at 1/6 of training, that of the second at 1/3, of the last never.

    Every parameter gets a gradient, even those of a stopped loss, because data-parallel training would wait for it.
    """
    model = make_system("al-rfou", **settings)
    text, targets = tokens(2, 5), tokens(2, 5, seed=4)
    losses_BT, auxiliary_BT, _ = model.training_losses(text, targets, model.initial_memory(2), progress=progress)
    torch.testing.assert_close(losses_BT, model.nats(model(text)[0], targets), rtol=0, atol=1e-12)
    weights = copied_weights(model)
    expected_B = auxiliary(weights, absolute(weights, text, layers=3, heads=2), targets, progress)
    torch.testing.assert_close(auxiliary_BT.sum(1), expected_B, rtol=0, atol=1e-10)
    if expected_B.requires_grad:
        factor_B = torch.tensor([0.7, -1.3], dtype=torch.float64)
        assert_same_gradients(model, (auxiliary_BT.sum(1) * factor_B).sum(), weights, (expected_B * factor_B).sum())
    losses_BT, auxiliary_BT, _ = model.training_losses(text, targets, model.initial_memory(2), progress=progress)
    (losses_BT + auxiliary_BT).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_auxiliary_losses_are_at_the_position_of_their_target(tokens):
    """Therefore training can mask auxiliary losses by the same positions as the main losses."""
    model, text, targets = make_system("al-rfou", **BOTH_AUXILIARY_LOSSES), tokens(1, 5), tokens(1, 5, seed=4)
    _, auxiliary_BT, _ = model.training_losses(text, targets, model.initial_memory(1), progress=0.0)
    for position in range(5):
        changed_targets = targets.clone()
        changed_targets[0, position] = (changed_targets[0, position] + 1) % 23
        _, changed_BT, _ = model.training_losses(text, changed_targets, model.initial_memory(1), progress=0.0)
        assert (changed_BT != auxiliary_BT)[0].tolist() == [index == position for index in range(5)]


def test_parameter_count_without_auxiliary_losses():
    """The paper states 44M, which includes the linear layers of the auxiliary losses; without them our count is 41M.

    Tests of the recipes compare the count with them, and that of the model with 64 layers."""
    settings = load_recipe("enwik8-al-rfou-12l").model | {"max_position_embeddings": 512}
    with torch.device("meta"):
        model = build_model(model_config(**settings | {"intermediate_layer_losses": False, "num_targets": 1}))
    assert model.num_parameters() == 41_212_160


@pytest.mark.parametrize(
    ("call", "text"),  # `text`: a regular expression for the message
    [
        (lambda model: model.initial_memory(2, ContextLimits(5)), "al-rfou has no memory; give memory_length 0"),
        (lambda model: model.initial_memory(2, ContextLimits(0, clamp_length=3)), "al-rfou has no clamp_length"),
        (lambda model: model(torch.zeros(1, 18).long()), "18 tokens at once .* 17 positions"),
        (lambda model: build_model(model_config(architecture="al-rfou")), "al-rfou needs max_position_embeddings"),
    ],
)
def test_invalid_calls_raise(call, text):
    with pytest.raises(UserError, match=text):
        call(make_system("al-rfou"))


@pytest.mark.parametrize("name", ["vaswani", "al-rfou"])
def test_generation_recomputes_the_last_segment_for_each_token(tokens, name):
    """The hidden state of each token depends on the last five tokens only; a long prompt may come in one call."""
    model, text = make_system(name), tokens(2, 17)
    memory = model.generation_memory(2, segment_length=5)
    for position in range(17):
        hidden_B1D, memory = model(text[:, position : position + 1], memory)
        expected_BTD, _ = model(text[:, max(0, position - 4) : position + 1])
        torch.testing.assert_close(hidden_B1D, expected_BTD[:, -1:], rtol=0, atol=1e-12)
    hidden_BTD, after = model(text, model.generation_memory(2, segment_length=5))
    assert hidden_BTD.shape == (2, 17, 14)
    torch.testing.assert_close(hidden_BTD[:, -1], hidden_B1D[:, 0], rtol=0, atol=1e-12)
    assert torch.equal(after.tensors()["tokens_0"], memory.tensors()["tokens_0"])
    assert torch.equal(after.tensors()["tokens_0"], text[:, -4:])
    assert after.position_B.tolist() == [17, 17]


# numbers of prompt tokens of the two batch rows, after padding to 13, and of tokens that are cached before them
@pytest.mark.parametrize("lengths", [[3, 13], [0, 5], [9, 1]])
@pytest.mark.parametrize("num_before", [0, 2, 7])
def test_generation_with_prompts_of_different_lengths(tokens, lengths, num_before):
    model, text, more = make_system("al-rfou"), tokens(2, 13), tokens(2, 3, seed=6)
    memory = model.generation_memory(2, segment_length=5)
    if num_before:
        _, memory = model(tokens(2, num_before, seed=2), memory)
    hidden_BTD, after = model(text, memory, lengths=torch.tensor(lengths))
    next_BTD, last = model(more, after)
    for row, length in enumerate(lengths):
        alone = memory.select([row])
        if length:
            alone_BTD, alone = model(text[row : row + 1, 13 - length :], alone)
            torch.testing.assert_close(hidden_BTD[row, -1], alone_BTD[0, -1], rtol=0, atol=1e-12)
        alone_BTD, _ = model(more[row : row + 1], alone)
        torch.testing.assert_close(next_BTD[row : row + 1], alone_BTD, rtol=0, atol=1e-12)
    assert last.position_B.tolist() == [num_before + length + 3 for length in lengths]


def test_token_memory_can_be_reset_selected_concatenated_resized_and_restored(tokens):
    model = make_system("al-rfou")
    _, memory = model(tokens(3, 4), model.generation_memory(3, segment_length=99))
    assert memory.length == 16  # one less than the number of learned positions
    text_BM = memory.tensors()["tokens_0"]
    assert torch.equal(text_BM[:, -4:], tokens(3, 4))
    emptied = memory.reset([1])
    assert emptied.valid_B.tolist() == [4, 0, 4]
    assert not emptied.tensors()["tokens_0"][1].any()
    joined = Memory.concatenate([memory.select([0, 2]), memory.select([1])])
    assert torch.equal(joined.tensors()["tokens_0"], text_BM[[0, 2, 1]])
    assert torch.equal(memory.resized(3).tensors()["tokens_0"], text_BM[:, -3:])
    restored = model.generation_memory(3, segment_length=99).with_tensors(memory.tensors())
    assert torch.equal(restored.tensors()["tokens_0"], text_BM)
    with pytest.raises(UserError, match=r"inputs for a memory .* give tokens"):
        model(inputs=torch.zeros(3, 2, 14).double(), memory=memory)
    with pytest.raises(UserError, match="memory of batch size 3"):
        model(tokens(2, 4), memory)
