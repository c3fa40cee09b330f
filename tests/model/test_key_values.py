"""A KV cache gives the same results as cached hidden states, and is immutable although memories share storage.

`initial_memory` of a prepared model makes a KV cache, that of a model a memory of hidden states. `attend_empty` is the
setting attend_empty_memory: slots that are not filled yet take part in attention as zeros, as in the authors' code.

Shape suffixes: B batch size, T new tokens, D model width, N heads, H head width, C rows of a cache's storage.
"""

from dataclasses import replace

import pytest
import torch
from tensors import assert_same_tensors, copied_tensors, run_parts

from transformer_xl.config import UserError
from transformer_xl.inference import prepare_inference
from transformer_xl.model.key_values import KeyValueMemory
from transformer_xl.model.memory import ContextLimits, Memory

EXACT = {"rtol": 0, "atol": 1e-11}
LIMITS = {  # the first argument is the number of memory slots
    "as in training": ContextLimits(11),  # the memory length of the models that make_model builds
    "clamp": ContextLimits(11, clamp_length=4),
    "window and clamp": ContextLimits(13, attention_window=9, clamp_length=3),
    "clamp of one": ContextLimits(7, clamp_length=1),
    "no memory": ContextLimits(0),
}


@pytest.mark.parametrize("context_limits", LIMITS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"norm_first": True},
        {"tie_attention_biases": False},
        {"attn_implementation": "sdpa"},
        {"qk_norm": True, "max_ngram": 4},
        {"value_embeddings": True, "norm_first": True},
        {"key_offset": True},
        {"key_offset": True, "attention_sinks": True, "norm_first": True, "qk_norm": True, "d_head": 5},
    ],
)
@pytest.mark.parametrize("attend_empty", [False, True])
def test_same_results_as_with_hidden_states(make_model, tokens, context_limits, settings, attend_empty):
    attend_empty &= not settings.get("key_offset")
    model, limits = make_model(attend_empty_memory=attend_empty, **settings), LIMITS[context_limits]
    parts = tokens(2, 41).split([1, 5, 1, 13, 1, 1, 17, 2], dim=1)  # segment lengths, whose sum is 41
    expected_BTD, _ = run_parts(model, model.initial_memory(2, limits), *parts)
    prepared = prepare_inference(model)
    hidden_BTD, memory = run_parts(prepared, prepared.initial_memory(2, limits), *parts)
    torch.testing.assert_close(hidden_BTD, expected_BTD, **EXACT)
    # with pre-norm, LayerNorm changes the zeros of empty slots, so their keys are not 0: hidden states are cached
    assert isinstance(memory, KeyValueMemory) != (attend_empty and settings.get("norm_first", False))
    assert memory.position_B.tolist() == [41, 41]


def test_successive_memories_share_storage_that_stays_small(make_model, tokens):
    model = prepare_inference(make_model())
    memory = model.initial_memory(1, ContextLimits(200))
    storages = []
    for part_BT in tokens(1, 1500).split(12, dim=1):
        _, memory = run_parts(model, memory, part_BT)
        storages.append(memory.layers[0].storage)
    assert max(storage.capacity for storage in storages) <= 300  # 200 slots, and room for half as many more rows
    # 125 parts of 12 tokens; storage with 200 slots has room for 8 more parts before the next copy
    assert len({id(storage) for storage in storages}) == 125 // 8 + 1
    assert memory.valid_B.tolist() == [200]


@pytest.mark.parametrize("settings", [{}, {"key_offset": True}, {"key_offset": True, "d_head": 5}])
def test_two_continuations_of_one_memory_are_independent(make_model, tokens, settings):
    plain = make_model(**settings)
    model = prepare_inference(plain)
    prompt, first_text, second_text = tokens(2, 7), tokens(2, 3, seed=5), tokens(2, 3, seed=6)
    _, memory = run_parts(model, model.initial_memory(2), prompt)
    before = copied_tensors(memory)
    continuations = [run_parts(model, memory, text) for text in (first_text, second_text)]
    model(first_text, memory, visible=torch.tensor([[1, 2, 3]] * 2))  # its first token sees none before it
    continuations.append(run_parts(model, memory, first_text))
    torch.testing.assert_close(continuations[2][0], continuations[0][0], **EXACT)
    assert_same_tensors(memory, before)
    # the third continuation repeats the first, so it is left out
    for text, (_, after) in zip((first_text, second_text), continuations, strict=False):
        expected_BTD, _ = run_parts(plain, plain.initial_memory(2), prompt, text, second_text)
        hidden_BTD, _ = run_parts(model, after, second_text)
        torch.testing.assert_close(hidden_BTD, expected_BTD[:, -3:], **EXACT)


@pytest.mark.parametrize("attend_empty", [False, True])
def test_batch_rows_are_reset_and_selected_independently(make_model, tokens, attend_empty):
    model = make_model(attend_empty_memory=attend_empty)
    text, more = tokens(3, 17), tokens(3, 5, seed=9)
    results = []
    for reading in (model, prepare_inference(model)):
        _, memory = run_parts(reading, reading.initial_memory(3), text)
        variants = {"reset": memory.reset([1]), "reset by a mask": memory.reset(torch.tensor([False, True, False]))}
        variants |= {"selected": memory.select([2, 0, 2]), "unchanged": memory}
        results.append({name: run_parts(reading, variant, more)[0] for name, variant in variants.items()})
    assert_same_tensors(*results, **EXACT)
    fresh_BTD, _ = run_parts(model, model.initial_memory(1), more[1:2])
    torch.testing.assert_close(results[1]["reset"][1:2], fresh_BTD, **EXACT)
    torch.testing.assert_close(results[1]["reset by a mask"], results[1]["reset"], **EXACT)


@pytest.mark.parametrize("kernel", ["sdpa", "native"])
def test_reset_row_has_nothing_of_a_text_that_was_not_finite(make_model, tokens, kernel):
    model = prepare_inference(make_model(attn_implementation=kernel), "float32")
    _, memory = run_parts(model, model.initial_memory(2), tokens(2, 9))
    memory = memory.map(lambda tensor: tensor.masked_fill(torch.tensor([True, False])[:, None, None, None], torch.nan))
    after = memory.reset([0])
    for text in (tokens(2, 1), tokens(2, 9)):
        hidden_BTD, after = run_parts(model, after, text)
        assert hidden_BTD.isfinite().all()


def test_position_keys_that_another_thread_projects_meanwhile_stay(make_model, tokens):
    """Two threads continue one memory: the larger number of distances is kept, and each gets as many as it needs."""
    model = prepare_inference(make_model())
    _, memory = run_parts(model, model.initial_memory(1), tokens(1, 3))
    cache = replace(memory.layers[0], position_keys=type(memory.layers[0].position_keys)())
    keys_PNH = {number: torch.arange(number).flip(0)[:, None, None] + torch.zeros(2, 3) for number in (4, 9)}

    def project():
        cache.keys_of_positions(9, lambda: keys_PNH[9])  # the other thread
        return keys_PNH[4]

    assert torch.equal(cache.keys_of_positions(4, project), keys_PNH[4])
    assert torch.equal(cache.keys_of_positions(9, pytest.fail), keys_PNH[9])


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("attend_empty", [False, True])
@pytest.mark.parametrize(
    ("context_limits", "kernel"), [("as in training", "auto"), ("window and clamp", "sdpa"), ("no memory", "reference")]
)
def test_padding_has_no_effect(make_model, tokens, is_prepared, attend_empty, context_limits, kernel):
    """Each row of a batch with different lengths, one of them 0, gives the same results as without the others."""
    model, limits = make_model(attn_implementation=kernel, attend_empty_memory=attend_empty), LIMITS[context_limits]
    before, text, more = tokens(4, 5, seed=1), tokens(4, 6, seed=2), tokens(4, 3, seed=3)
    lengths_B = torch.tensor([6, 2, 0, 5])  # tokens of each row of `text` that are not padding, which comes first
    reading = prepare_inference(model) if is_prepared else model
    _, memory = run_parts(reading, reading.initial_memory(4, limits), before)
    hidden_BTD, memory = run_parts(reading, memory, text, lengths=lengths_B)
    assert hidden_BTD.isfinite().all()
    next_BTD, last = run_parts(reading, memory, more)
    assert last.position_B.tolist() == [14, 10, 8, 13]  # 5 tokens before, those of lengths_B, 3 more
    for row, length in enumerate(lengths_B.tolist()):
        rows = slice(row, row + 1)
        parts = [part for part in (before[rows], text[rows, 6 - length :], more[rows]) if part.shape[1]]
        alone_BTD, _ = run_parts(model, model.initial_memory(1, limits), *parts)
        torch.testing.assert_close(hidden_BTD[rows, 6 - length :], alone_BTD[:, 5 : 5 + length], **EXACT)
        torch.testing.assert_close(next_BTD[rows], alone_BTD[:, 5 + length :], **EXACT)


@pytest.mark.parametrize("settings", [{}, {"key_offset": True, "norm_first": True}])
def test_kv_cache_can_be_restored_converted_resized_and_concatenated(make_model, tokens, settings):
    plain, text = make_model(**settings), tokens(2, 4, seed=8)
    model = prepare_inference(plain)
    _, memory = run_parts(model, model.initial_memory(2), tokens(2, 7))
    expected_BTD, _ = run_parts(model, memory, text)
    restored = model.initial_memory(2).with_tensors(memory.tensors())
    joined = Memory.concatenate([memory.select([0]), memory.select([1])])
    for same in (restored, joined, memory.to(dtype=torch.float64), memory.resized(20).resized(11)):  # it has 11 slots
        torch.testing.assert_close(run_parts(model, same, text)[0], expected_BTD, **EXACT)
    short_BTD, _ = run_parts(model, memory.resized(3), text)
    hidden_memory = run_parts(plain, plain.initial_memory(2), tokens(2, 7))[1].resized(3)
    torch.testing.assert_close(short_BTD, run_parts(plain, hidden_memory, text)[0], **EXACT)
    with pytest.raises(UserError, match="another shape"):
        model.initial_memory(3).with_tensors(memory.tensors())


def test_key_of_which_half_is_known_has_nothing_of_released_tokens(make_model, tokens):
    """Such a key is saved with a state, which must not depend on who used the storage before."""
    model = prepare_inference(make_model(key_offset=True))
    _, memory = model(tokens(1, 4))
    model(tokens(1, 3, seed=1), memory)
    for cache in memory.layers:
        cache.release_later()
    _, after = model(tokens(1, 1), memory)
    for cache in after.layers:
        keys_BNMH = cache.tensors()["keys"]
        own_BNH, of_newest_BNH = keys_BNMH[:, :, -1].split([3, 2], dim=-1)
        assert of_newest_BNH.all()
        assert not own_BNH.any()


def test_in_bfloat16_the_cache_is_too(make_model, tokens):
    model, parts = make_model().float(), tokens(1, 9).split(3, dim=1)
    low = prepare_inference(model, "bfloat16")
    hidden_BTD, memory = run_parts(low, low.initial_memory(1), *parts)
    with torch.autocast("cpu", torch.bfloat16):
        expected_BTD, _ = run_parts(model, model.initial_memory(1), *parts)
    assert memory.layers[0].storage.k_BNCH.dtype == torch.bfloat16
    torch.testing.assert_close(hidden_BTD.float(), expected_BTD.float(), rtol=0.02, atol=0.02)


def test_training_with_a_cache_raises(make_model, tokens):
    model = make_model()
    memory = prepare_inference(model).initial_memory(1)
    model.owner = memory.owner
    with pytest.raises(UserError, match="passes no gradient; train the model itself"):
        model(tokens(1, 3), memory)
