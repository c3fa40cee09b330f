"""Absolute encodings: the oracle's numbers, a segment by itself, and the auxiliary losses of Al-Rfou et al."""

import pytest
import torch
from model_configs import model_config
from oracles import absolute, assert_same_gradients, auxiliary, copied, scores_of

from transformer_xl.config import UserError, load_recipe
from transformer_xl.model.build import build_model
from transformer_xl.model.memory import ContextLimits, Memory

BOTH = {"intermediate_layer_losses": True, "num_targets": 2}


@pytest.mark.parametrize("name", ["sinusoidal", "learned"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_equals_the_oracle(make_baseline, tokens, name, norm_first, window):
    """Scores and every gradient."""
    model, text = make_baseline(name, norm_first=norm_first), tokens(2, 7)
    hidden_BTD, memory = model(text, model.initial_memory(2, ContextLimits(0, window)))
    logits_BTV, weights = model.logits(hidden_BTD), copied(model)
    outputs = absolute(weights, text, layers=3, heads=2, pre_norm=norm_first, window=window)
    wanted = scores_of(weights, outputs[-1])
    torch.testing.assert_close(logits_BTV, wanted, rtol=0, atol=1e-10)
    assert memory.position_B.tolist() == [7, 7]
    weight = torch.randn(wanted.shape, dtype=torch.float64)
    assert_same_gradients(model, (logits_BTV * weight).sum(), weights, (wanted * weight).sum())


@pytest.mark.parametrize("settings", [BOTH, {"intermediate_layer_losses": True}, {"num_targets": 2}, {}])
@pytest.mark.parametrize("progress", [0.0, 0.17, 0.4, 0.7])
def test_auxiliary_losses_equal_the_oracle_s(make_baseline, tokens, settings, progress):
    """With three layers the first stops at a sixth of training, the second at a third, and the last never."""
    model = make_baseline("learned", **settings)
    text, targets = tokens(2, 5), tokens(2, 5, seed=4)
    nats_BT, extra_BT, _ = model.training_losses(text, targets, model.initial_memory(2), progress=progress)
    torch.testing.assert_close(nats_BT, model.nats(model(text)[0], targets), rtol=0, atol=1e-12)
    weights = copied(model)
    outputs = absolute(weights, text, layers=3, heads=2)
    wanted_B = auxiliary(weights, outputs, targets, progress)
    torch.testing.assert_close(extra_BT.sum(1), wanted_B, rtol=0, atol=1e-10)
    if wanted_B.requires_grad:
        factor_B = torch.tensor([0.7, -1.3], dtype=torch.float64)
        assert_same_gradients(model, (extra_BT.sum(1) * factor_B).sum(), weights, (wanted_B * factor_B).sum())


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_every_parameter_has_a_gradient_all_through_training(make_baseline, tokens, progress):
    """Also that of a loss whose time is over, or sharing gradients out over processes would wait for it."""
    model = make_baseline("learned", **BOTH)
    nats_BT, extra_BT, _ = model.training_losses(tokens(2, 5), tokens(2, 5), model.initial_memory(2), progress=progress)
    (nats_BT + extra_BT).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_a_loss_stands_where_its_target_does(make_baseline, tokens):
    """So that what does not count for training leaves out the auxiliary losses of the same targets."""
    model, text, targets = make_baseline("learned", **BOTH), tokens(1, 5), tokens(1, 5, seed=4)
    _, extra_BT, _ = model.training_losses(text, targets, model.initial_memory(1), progress=0.0)
    for place in range(5):
        other = targets.clone()
        other[0, place] = (other[0, place] + 1) % 23
        _, changed_BT, _ = model.training_losses(text, other, model.initial_memory(1), progress=0.0)
        assert (changed_BT != extra_BT)[0].tolist() == [index == place for index in range(5)]


def test_a_segment_stands_by_itself(make_baseline, tokens):
    for name in ("sinusoidal", "learned"):
        model, text = make_baseline(name), tokens(2, 7)
        first_BTD, memory = model(text)
        again_BTD, _ = model(text, memory)
        assert torch.equal(first_BTD, again_BTD)


def test_positions_matter(make_baseline):
    """The same token everywhere gives other hidden states at other positions."""
    for name in ("sinusoidal", "learned"):
        hidden_BTD, _ = make_baseline(name)(torch.full((1, 7), 5))
        assert (hidden_BTD[0, 1:] - hidden_BTD[0, :-1]).abs().amax(-1).min() > 1e-3


def test_without_auxiliary_losses_parameters_are_the_other_count_of_the_paper():
    """41M; the 44M with their heads are compared in the tests of recipes, and so are those of 64 layers."""
    settings = load_recipe("enwik8-al-rfou-12l").model | {"max_position_embeddings": 512}
    with torch.device("meta"):
        model = build_model(model_config(**settings | {"intermediate_layer_losses": False, "num_targets": 1}))
    assert model.num_parameters() == 41_212_160


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda model: model.initial_memory(2, ContextLimits(5)),
            "al-rfou has no memory; give memory_length 0",
        ),
        (
            lambda model: model.initial_memory(2, ContextLimits(0, None, 3)),
            "al-rfou has no clamp_length",
        ),
        (lambda model: model(torch.zeros(1, 18).long()), "segment_length 18 .* 17"),
        (lambda model: model(torch.zeros(1, 3).long(), model.initial_memory(2)), "batch size 2 .* batch size 1"),
        (lambda model: build_model(model_config(architecture="al-rfou")), "al-rfou needs max_position_embeddings"),
    ],
)
def test_wrong_calls_are_refused(make_baseline, call, text):
    with pytest.raises(UserError, match=text):
        call(make_baseline("learned"))


def test_a_memory_of_another_model_is_refused(make_baseline, tokens):
    for other in ("shaw", "lstm"):
        with pytest.raises(UserError, match="another model"):
            make_baseline("learned")(tokens(2, 3), make_baseline(other).initial_memory(2))


@pytest.mark.parametrize("name", ["sinusoidal", "learned"])
def test_generation_reads_the_last_segment_again_for_each_token(make_baseline, tokens, name):
    """The hidden state of each token is that of the last five tokens alone; a long prompt may come at once."""
    model, text = make_baseline(name), tokens(2, 17)
    memory = model.generation_memory(2, segment_length=5)
    assert memory.length == 4
    for place in range(17):
        hidden_B1D, memory = model(text[:, place : place + 1], memory)
        wanted_BTD, _ = model(text[:, max(0, place - 4) : place + 1])
        torch.testing.assert_close(hidden_B1D, wanted_BTD[:, -1:], rtol=0, atol=1e-12)
    at_once_BTD, after = model(text, model.generation_memory(2, segment_length=5))
    assert at_once_BTD.shape == (2, 17, 14)
    torch.testing.assert_close(at_once_BTD[:, -1], hidden_B1D[:, 0], rtol=0, atol=1e-12)
    assert torch.equal(after.tensors()["tokens_0"], memory.tensors()["tokens_0"])
    assert torch.equal(after.tensors()["tokens_0"], text[:, -4:])
    assert after.position_B.tolist() == [17, 17]


@pytest.mark.parametrize("lengths", [[3, 13], [0, 5], [9, 1], [12, 0]])
@pytest.mark.parametrize("began", [0, 2, 7])
def test_generation_after_prompts_of_unequal_lengths(make_baseline, tokens, lengths, began):
    model, text, more = make_baseline("learned"), tokens(2, 13), tokens(2, 3, seed=6)
    memory = model.generation_memory(2, segment_length=5)
    if began:
        _, memory = model(tokens(2, began, seed=2), memory)
    hidden_BTD, after = model(text, memory, lengths_B=torch.tensor(lengths))
    further_BTD, last = model(more, after)
    for row, length in enumerate(lengths):
        alone = memory.select([row])
        if length:
            alone_BTD, alone = model(text[row : row + 1, 13 - length :], alone)
            torch.testing.assert_close(hidden_BTD[row, -1], alone_BTD[0, -1], rtol=0, atol=1e-12)
        next_BTD, _ = model(more[row : row + 1], alone)
        torch.testing.assert_close(further_BTD[row : row + 1], next_BTD, rtol=0, atol=1e-12)
    assert last.position_B.tolist() == [began + length + 3 for length in lengths]


def test_a_memory_of_tokens_is_a_value(make_baseline, tokens):
    model = make_baseline("learned")
    _, memory = model(tokens(3, 4), model.generation_memory(3, segment_length=99))
    assert memory.length == 16  # what there are learned positions for
    text_BM = memory.tensors()["tokens_0"]
    assert torch.equal(text_BM[:, -4:], tokens(3, 4))
    emptied = memory.reset([1])
    assert emptied.valid_B.tolist() == [4, 0, 4]
    assert not emptied.tensors()["tokens_0"][1].any()
    joined = Memory.concatenate([memory.select([0, 2]), memory.select([1])])
    assert torch.equal(joined.tensors()["tokens_0"], text_BM[[0, 2, 1]])
    assert torch.equal(memory.resized(3).tensors()["tokens_0"], text_BM[:, -3:])
    assert memory.resized(20).valid_B.tolist() == [4, 4, 4]
    back = model.generation_memory(3, segment_length=99).with_tensors(memory.tensors())
    assert torch.equal(back.tensors()["tokens_0"], text_BM)
    with pytest.raises(UserError, match=r"no tokens .* give tokens"):
        model(inputs_BTD=torch.zeros(3, 2, 14).double(), memory=memory)
    with pytest.raises(UserError, match="memory of batch size 3"):
        model(tokens(2, 4), memory)
