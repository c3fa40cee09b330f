"""Memory is immutable, and contains the right slots, valid_B and position_B after every operation.

valid_B is the number of filled slots of each batch row, position_B the number of tokens it has read.

Shape suffixes: B batch size, T new tokens, M memory slots, S memory slots and new tokens, D width.
"""

import pytest
import torch
from tensors import assert_same_tensors

from transformer_xl.config import UserError
from transformer_xl.inference import prepare_inference
from transformer_xl.model.memory import ContextLimits, HiddenCache, HiddenMemory, Memory

BATCH, LENGTH, WIDTH, LAYERS = 3, 5, 7, 2  # LENGTH: number of memory slots


def empty(length: int = LENGTH) -> HiddenMemory:
    zeros_BMD = torch.zeros(BATCH, length, WIDTH, dtype=torch.float64)
    return HiddenMemory.empty([HiddenCache(zeros_BMD)] * LAYERS, BATCH, ContextLimits(length), zeros_BMD.device)


def layer_inputs(num_new: int, start: float = 0.0) -> list[torch.Tensor]:
    """Return inputs (B, T, D) of each layer; their elements all differ and are `start` or more."""
    first_BTD = torch.arange(BATCH * num_new * WIDTH, dtype=torch.float64).view(BATCH, num_new, WIDTH) + start
    return [first_BTD + layer / LAYERS for layer in range(LAYERS)]


def append(memory: HiddenMemory, inputs: list[torch.Tensor], lengths_B: torch.Tensor | None = None) -> HiddenMemory:
    caches = [cache.append(x_BTD, lengths_B) for cache, x_BTD in zip(memory.layers, inputs, strict=True)]
    return memory.advance(caches, inputs[0].shape[1], lengths_B)


# `slots`: number of memory slots; `lengths`: number of tokens of each segment that the memory reads in turn
@pytest.mark.parametrize("slots", [0, LENGTH])
@pytest.mark.parametrize("lengths", [[], [2, 2, 2], [5], [13], [1, 7, 3]])
def test_memory_contains_the_last_inputs(slots, lengths):
    memory, parts = empty(slots), []
    for index, length in enumerate(lengths):
        parts.append(layer_inputs(length, 1000.0 * index))
        memory = append(memory, parts[-1])
    zeros = torch.zeros(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    for layer, cache in enumerate(memory.layers):
        all_BSD = torch.cat([zeros, *(part[layer] for part in parts)], dim=1)
        assert torch.equal(cache.hidden_BMD, all_BSD[:, all_BSD.shape[1] - slots :])
        assert cache.hidden_BMD.untyped_storage().nbytes() == cache.hidden_BMD.nbytes  # no whole segment stays
    assert memory.valid_B.tolist() == [min(sum(lengths), slots)] * BATCH
    assert memory.position_B.tolist() == [sum(lengths)] * BATCH
    assert memory.all_valid == (sum(lengths) >= slots)


def test_dtype_conversion_keeps_integers():
    memory = append(empty(), layer_inputs(2)).to(dtype=torch.float32)
    assert [cache.hidden_BMD.dtype for cache in memory.layers] == [torch.float32] * LAYERS
    assert memory.valid_B.dtype == memory.position_B.dtype == torch.int64


def test_restored_from_tensors():
    memory = append(empty(), layer_inputs(7)).reset([2])
    restored = empty().with_tensors(memory.tensors())
    assert restored.min_valid == 0  # the fewest filled slots of a batch row: row 2 was reset
    assert_same_tensors(restored, memory)
    with pytest.raises(UserError, match="another shape"):
        empty().select([0]).with_tensors(memory.tensors())


@pytest.mark.parametrize(
    ("limits", "message"),
    [  # memory_length, attention_window, clamp_length
     ((-1,), "memory_length -1 .* 0 or more"), ((1, 0), "attention_window 0 .* 1 or more"),
     ((1, None, 0), "clamp_length 0 .* 1 or more"), ((2**31,), "memory_length .* too large")],
)  # fmt: skip
def test_invalid_limits_raise(limits, message):
    with pytest.raises(UserError, match=message):
        ContextLimits(*limits)


def test_rows_are_selected_by_a_mask():
    whole = append(empty(), layer_inputs(3)).reset([1])
    assert_same_tensors(whole.select(torch.tensor([True, False, True])), whole.select([0, 2]))


def test_concatenate_is_the_inverse_of_select():
    whole = append(append(empty(), layer_inputs(3)).reset([1]), layer_inputs(1, 100.0))
    joined = Memory.concatenate([whole.select([0]), whole.select([1, 2])])
    assert_same_tensors(joined, whole)
    assert joined.context_limits == whole.context_limits
    full = append(empty(), layer_inputs(7))  # more tokens than slots
    assert Memory.concatenate([full, full]).all_valid
    assert not Memory.concatenate([full, empty()]).all_valid
    for memories in ([full, full.resized(4)], []):  # different numbers of slots, and none
        with pytest.raises(UserError, match="these memories cannot be one"):
            Memory.concatenate(memories)


@pytest.mark.parametrize("num_tokens", [0, 3, 7])
@pytest.mark.parametrize("length", [0, 2, 5, 11])
def test_resized_keeps_the_newest_slots(num_tokens, length):
    before = append(empty(), layer_inputs(num_tokens))
    after = before.resized(length)
    zeros = torch.zeros(BATCH, 11, WIDTH, dtype=torch.float64)  # as many as the largest `length`
    for old, new in zip(before.layers, after.layers, strict=True):
        # the last slots of 11 zeros and the old 5 slots
        assert torch.equal(new.hidden_BMD, torch.cat([zeros, old.hidden_BMD], dim=1)[:, 16 - length :])
    assert after.length == after.context_limits.memory_length == length
    assert after.valid_B.tolist() == [min(num_tokens, 5, length)] * BATCH
    assert after.position_B.tolist() == [num_tokens] * BATCH
    assert after.all_valid == (min(num_tokens, 5) >= length)


@pytest.mark.parametrize(
    "settings", [{"max_ngram": 5, "ngram_buckets": 97, "d_ngram": 3}, {"value_embeddings": True}, {"key_offset": True}]
)
def test_stacked_tensors_have_the_tokens_of_other_embeddings(make_model, tokens, settings):
    model = make_model(**settings)
    _, memory = model(tokens(2, 6))
    restored = model.initial_memory(2).with_stacked(memory.stacked())
    assert_same_tensors(restored.tensors(), memory.tensors())


@pytest.mark.parametrize("prepared", [False, True])
def test_memory_of_a_model_with_other_embeddings_is_refused(make_model, tokens, prepared):
    """Also where both remember as many tokens."""
    with_ngrams = make_model(max_ngram=2, ngram_buckets=97, d_ngram=3)
    models = [with_ngrams, make_model(max_ngram=2, ngram_buckets=97, d_ngram=3, value_embeddings=True)]
    for model, other in (models, models[::-1]):
        used = prepare_inference(other) if prepared else other
        _, memory = model(tokens(2, 6))
        with pytest.raises(UserError, match="made by another model"):
            used(tokens(2, 3), memory)
