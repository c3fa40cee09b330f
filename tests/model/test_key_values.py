"""A KV cache gives the numbers of kept hidden states, and is a value all the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import assert_same_tensors, copied_tensors

from transformer_xl.config import UserError
from transformer_xl.model.key_values import KeyValueMemory
from transformer_xl.model.memory import ContextLimits, Memory

EXACT = {"rtol": 0, "atol": 1e-11}
REACHES = {
    "as trained": ContextLimits(11),
    "clamp": ContextLimits(11, clamp_length=4),
    "window": ContextLimits(11, attention_window=6),
    "window and clamp": ContextLimits(13, attention_window=9, clamp_length=3),
    "clamp of one": ContextLimits(7, clamp_length=1),
    "no memory": ContextLimits(0),
}


def read(model, memory: Memory, *parts: torch.Tensor, lengths=None) -> tuple[torch.Tensor, Memory]:
    found = []
    for part_BT in parts:
        with torch.inference_mode():
            hidden_BTD, memory = model(part_BT, memory, lengths_B=lengths)
        found.append(hidden_BTD)
    return torch.cat(found, dim=1), memory


@pytest.mark.parametrize("context_limits", REACHES)
@pytest.mark.parametrize(
    "settings", [{}, {"norm_first": True}, {"tie_attention_biases": False}, {"attn_implementation": "sdpa"}]
)
@pytest.mark.parametrize("attended", [False, True])
def test_same_numbers_as_hidden_states(make_model, tokens, context_limits, settings, attended):
    model, context_limits = make_model(attend_empty_memory=attended, **settings), REACHES[context_limits]
    parts = tokens(2, 41).split([1, 5, 1, 13, 1, 1, 17, 2], dim=1)
    hidden_BTD, _ = read(model, model.initial_memory(2, context_limits), *parts)
    found_BTD, memory = read(model, model.inference_memory(2, context_limits), *parts)
    torch.testing.assert_close(found_BTD, hidden_BTD, **EXACT)
    assert isinstance(memory, KeyValueMemory) != (attended and settings.get("norm_first", False))
    assert memory.position_B.tolist() == [41, 41]


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_segments_of_any_lengths_equal_one_pass_with_keys_and_values(lengths):
    model = _small()
    text = torch.randint(0, 23, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    whole_BTD, _ = read(model, model.initial_memory(1, ContextLimits(80)), text)
    found_BTD, _ = read(model, model.inference_memory(1, ContextLimits(80)), *text.split(lengths, dim=1))
    torch.testing.assert_close(found_BTD, whole_BTD, **EXACT)


def test_successive_memories_share_storage_that_stays_small(make_model, tokens):
    model = make_model()
    memory = model.inference_memory(1, ContextLimits(200))
    storages = []
    for part_BT in tokens(1, 1500).split(12, dim=1):
        _, memory = read(model, memory, part_BT)
        storages.append(memory.layers[0].storage)
    assert max(storage.capacity for storage in storages) <= 300
    # 125 parts of 12 tokens, and storage of 200 tokens has room for 8 parts more
    assert len({id(storage) for storage in storages}) == 125 // 8 + 1
    assert memory.valid_B.tolist() == [200]


def test_two_continuations_of_one_memory_do_not_disturb_each_other(make_model, tokens):
    model = make_model()
    prompt, one, other = tokens(2, 7), tokens(2, 3, seed=5), tokens(2, 3, seed=6)
    _, memory = read(model, model.inference_memory(2), prompt)
    before = copied_tensors(memory)
    first, after_first = read(model, memory, one)
    second, after_second = read(model, memory, other)
    again, _ = read(model, memory, one)
    torch.testing.assert_close(again, first, **EXACT)
    assert_same_tensors(memory, before)
    for memory_after, text in ((after_first, one), (after_second, other)):
        wanted, _ = read(model, model.initial_memory(2), prompt, text, other)
        found, _ = read(model, memory_after, other)
        torch.testing.assert_close(found, wanted[:, -3:], **EXACT)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("attended", [False, True])
def test_batch_rows_are_reset_and_selected_by_themselves(make_model, tokens, attended):
    model = make_model(attend_empty_memory=attended)
    text, more = tokens(3, 17), tokens(3, 5, seed=9)
    kinds = (model.initial_memory(3), model.inference_memory(3))
    results = []
    for memory in kinds:
        _, memory = read(model, memory, text)
        changed, _ = read(model, memory.reset([1]), more)
        picked, _ = read(model, memory.select([2, 0, 2]), more)
        untouched, _ = read(model, memory, more)
        results.append({"reset": changed, "selected": picked, "untouched": untouched})
    assert_same_tensors(*results, **EXACT)
    alone, _ = read(model, model.inference_memory(1), more[1:2])
    torch.testing.assert_close(results[1]["reset"][1:2], alone, **EXACT)


@pytest.mark.parametrize("kind", ["initial_memory", "inference_memory"])
@pytest.mark.parametrize("attended", [False, True])
@pytest.mark.parametrize("context_limits", ["as trained", "window and clamp", "no memory"])
@pytest.mark.parametrize("kernel", ["auto", "sdpa", "reference"])
def test_padding_on_the_left_changes_nothing(make_model, tokens, kind, attended, context_limits, kernel):
    """A batch of unequal sequences, one of them all padding, after something read before: as each alone."""
    model, context_limits = (
        make_model(attn_implementation=kernel, attend_empty_memory=attended),
        REACHES[context_limits],
    )
    before, text, more = tokens(4, 5, seed=1), tokens(4, 6, seed=2), tokens(4, 3, seed=3)
    lengths = torch.tensor([6, 2, 0, 5])
    _, memory = read(model, getattr(model, kind)(4, context_limits), before)
    hidden, memory = read(model, memory, text, lengths=lengths)
    assert hidden.isfinite().all()
    after, last = read(model, memory, more)
    assert last.position_B.tolist() == [14, 10, 8, 13]
    for row, length in enumerate(lengths.tolist()):
        own = slice(row, row + 1)
        parts = [part for part in (before[own], text[own, 6 - length :], more[own]) if part.shape[1]]
        wanted, _ = read(model, model.initial_memory(1, context_limits), *parts)
        torch.testing.assert_close(hidden[own, 6 - length :], wanted[:, 5 : 5 + length], **EXACT)
        torch.testing.assert_close(after[own], wanted[:, 5 + length :], **EXACT)


def test_padding_gives_no_gradient_and_no_nan(make_model, tokens):
    model = make_model().train()
    text, lengths = tokens(3, 6), torch.tensor([6, 2, 0])
    hidden_BTD, _ = model(text, lengths_B=lengths)
    own_BT = torch.arange(6) >= 6 - lengths[:, None]
    gradients = torch.autograd.grad((hidden_BTD[own_BT] ** 2).sum(), list(model.parameters()), allow_unused=True)
    wanted = torch.autograd.grad(
        sum((model(text[row : row + 1, 6 - n :])[0] ** 2).sum() for row, n in enumerate([6, 2])),
        list(model.parameters()),
        allow_unused=True,
    )
    names = [name for name, _ in model.named_parameters()]
    found, right = ({n: g for n, g in zip(names, one, strict=True) if g is not None} for one in (gradients, wanted))
    assert_same_tensors(found, right, rtol=1e-7, atol=1e-7)


def test_loaded_moved_resized_and_concatenated(make_model, tokens):
    model = make_model()
    _, memory = read(model, model.inference_memory(2), tokens(2, 7))
    wanted, _ = read(model, memory, tokens(2, 4, seed=8))
    back = model.inference_memory(2).with_tensors(memory.tensors())
    joined = Memory.concatenate([memory.select([0]), memory.select([1])])
    for same in (back, joined, memory.to(dtype=torch.float64), memory.resized(20).resized(11)):
        torch.testing.assert_close(read(model, same, tokens(2, 4, seed=8))[0], wanted, **EXACT)
    short, _ = read(model, memory.resized(3), tokens(2, 4, seed=8))
    hidden = read(model, model.initial_memory(2), tokens(2, 7))[1].resized(3)
    torch.testing.assert_close(short, read(model, hidden, tokens(2, 4, seed=8))[0], **EXACT)
    with pytest.raises(UserError, match="another shape"):
        model.inference_memory(3).with_tensors(memory.tensors())


def test_under_autocast_the_cache_is_bfloat16(make_model, tokens):
    model = make_model().float()
    with torch.autocast("cpu", torch.bfloat16):
        found, memory = read(model, model.inference_memory(1), *tokens(1, 9).split(3, dim=1))
        wanted, _ = read(model, model.initial_memory(1), *tokens(1, 9).split(3, dim=1))
    assert memory.layers[0].storage.k_BNCH.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0.02, atol=0.02)


def test_it_passes_no_gradient(make_model, tokens):
    model = make_model()
    with pytest.raises(UserError, match="passes no gradient; use initial_memory"):
        model(tokens(1, 3), model.inference_memory(1))


def test_a_memory_of_another_model_is_refused(make_model, tokens):
    model = make_model()
    for other in (make_model(n_layers=2), make_model(d_head=7)):
        with pytest.raises(UserError, match="made by another model"):
            model(tokens(1, 3), other.inference_memory(1))
    with pytest.raises(UserError, match="lengths_B of shape"):
        model(tokens(2, 3), lengths_B=torch.tensor([1, 2, 3]))


def _small():
    from transformer_xl.config import TransformerXLConfig
    from transformer_xl.model.transformer_xl import TransformerXL

    torch.manual_seed(5)
    return (
        TransformerXL(
            TransformerXLConfig(vocab_size=23, n_layers=2, d_model=14, n_heads=2, d_head=5, d_ff=19, dropout=0.0)
        )
        .double()
        .eval()
    )
