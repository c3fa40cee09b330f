"""Memory is a value: it is never changed, and knows which of its slots are valid."""

import pytest
import torch
from tensors import assert_same_tensors, copied_tensors

from transformer_xl.config import UserError
from transformer_xl.model.memory import ContextLimits, HiddenCache, HiddenMemory, Memory

BATCH, LENGTH, WIDTH, LAYERS = 3, 5, 7, 2


def empty(length: int = LENGTH) -> HiddenMemory:
    zeros_BMD = torch.zeros(BATCH, length, WIDTH, dtype=torch.float64)
    return HiddenMemory.empty([HiddenCache(zeros_BMD)] * LAYERS, BATCH, ContextLimits(length), zeros_BMD.device)


def inputs(num_new: int, start: float = 0.0) -> list[torch.Tensor]:
    """Different numbers everywhere: those of a layer are one more than those of the layer before."""
    first_BTD = torch.arange(BATCH * num_new * WIDTH, dtype=torch.float64).view(BATCH, num_new, WIDTH) + start
    return [first_BTD + layer for layer in range(LAYERS)]


def read(memory: HiddenMemory, layers_BTD: list[torch.Tensor], lengths_B: torch.Tensor | None = None) -> HiddenMemory:
    caches = [cache.append(x_BTD, lengths_B) for cache, x_BTD in zip(memory.layers, layers_BTD, strict=True)]
    return memory.advance(caches, layers_BTD[0].shape[1], lengths_B)


def test_it_has_its_full_length_from_the_start():
    memory = empty()
    assert memory.length == LENGTH
    assert [cache.hidden_BMD.shape for cache in memory.layers] == [(BATCH, LENGTH, WIDTH)] * LAYERS
    assert memory.valid_B.tolist() == memory.position_B.tolist() == [0] * BATCH
    assert not memory.all_valid


@pytest.mark.parametrize("lengths", [[2, 2, 2], [5], [13], [1, 7, 3], [4, 1]])
def test_it_holds_the_last_inputs(lengths):
    memory, parts = empty(), []
    for index, length in enumerate(lengths):
        parts.append(inputs(length, 1000.0 * index))
        memory = read(memory, parts[-1])
    zeros = torch.zeros(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    for layer, cache in enumerate(memory.layers):
        everything = torch.cat([zeros, *(part[layer] for part in parts)], dim=1)
        assert torch.equal(cache.hidden_BMD, everything[:, -LENGTH:])
    assert memory.valid_B.tolist() == [min(sum(lengths), LENGTH)] * BATCH
    assert memory.position_B.tolist() == [sum(lengths)] * BATCH
    assert memory.all_valid == (sum(lengths) >= LENGTH)


def test_padding_is_not_kept():
    before, new, lengths = read(empty(), inputs(4)), inputs(6, 1000.0), [6, 0, 2]
    after = read(before, new, torch.tensor(lengths))
    for layer, cache in enumerate(after.layers):
        for row, length in enumerate(lengths):
            kept_SD = torch.cat([before.layers[layer].hidden_BMD[row], new[layer][row, 6 - length :]])
            assert torch.equal(cache.hidden_BMD[row], kept_SD[-LENGTH:])
    assert after.valid_B.tolist() == [5, 4, 5]
    assert after.position_B.tolist() == [10, 4, 6]


def test_length_zero():
    memory = read(empty(0), inputs(3))
    assert [cache.hidden_BMD.shape for cache in memory.layers] == [(BATCH, 0, WIDTH)] * LAYERS
    assert memory.all_valid
    assert memory.position_B.tolist() == [3] * BATCH


def test_it_carries_no_gradient():
    memory = read(empty(), [x_BTD.requires_grad_() for x_BTD in inputs(3)])
    assert [cache.hidden_BMD.requires_grad for cache in memory.layers] == [False] * LAYERS


@pytest.mark.parametrize("rows", [[1], torch.tensor([False, True, False])])
def test_reset_empties_some_batch_rows_and_changes_nothing_else(rows):
    before = read(empty(), inputs(7))
    kept = copied_tensors(before)
    after = before.reset(rows)
    assert not after.all_valid
    assert not any(tensor[1].any() for tensor in after.tensors().values())
    assert_same_tensors(after.select([0, 2]), before.select([0, 2]))
    assert_same_tensors(before, kept)


def test_select_repeats_and_reorders():
    before, order = read(empty(), inputs(7)).reset([0]), [2, 0, 0, 1]
    after = before.select(order)
    assert after.batch_size == 4
    assert_same_tensors(after, {name: kept[order] for name, kept in before.tensors().items()})


def test_to_another_dtype():
    memory = read(empty(), inputs(2)).to(dtype=torch.float32)
    assert [cache.hidden_BMD.dtype for cache in memory.layers] == [torch.float32] * LAYERS
    assert memory.valid_B.dtype == memory.position_B.dtype == torch.int64


def test_saved_and_loaded():
    memory = read(empty(), inputs(7)).reset([2])
    again = empty().with_tensors(memory.tensors())
    assert again.min_valid == 0
    assert_same_tensors(again, memory)
    with pytest.raises(UserError, match="another shape"):
        empty().select([0]).with_tensors(memory.tensors())


@pytest.mark.parametrize(
    ("limits", "message"),
    [((-1,), "memory_length -1 .* 0 or more"), ((1, 0), "attention_window 0 .* 1 or more"),
     ((1, None, 0), "clamp_length 0 .* 1 or more"), ((2**31,), "memory_length .* too large")],
)  # fmt: skip
def test_impossible_limits(limits, message):
    with pytest.raises(UserError, match=message):
        ContextLimits(*limits)


def test_concatenate_joins_what_select_took_apart():
    whole = read(read(empty(), inputs(3)).reset([1]), inputs(1, 100.0))
    joined = Memory.concatenate([whole.select([0]), whole.select([1, 2])])
    assert_same_tensors(joined, whole)
    assert joined.valid_B.tolist() == [4, 1, 4]
    assert joined.context_limits == whole.context_limits
    assert not joined.all_valid
    full = read(empty(), inputs(7))
    assert Memory.concatenate([full, full]).all_valid
    assert not Memory.concatenate([full, empty()]).all_valid
    with pytest.raises(AssertionError):
        Memory.concatenate([full, full.resized(4)])


@pytest.mark.parametrize("num_read", [0, 3, 7])
@pytest.mark.parametrize("length", [0, 2, 5, 11])
def test_resized_keeps_the_newest(num_read, length):
    before = read(empty(), inputs(num_read)) if num_read else empty()
    kept = copied_tensors(before)
    after = before.resized(length)
    zeros = torch.zeros(BATCH, 11, WIDTH, dtype=torch.float64)
    for old, new in zip(before.layers, after.layers, strict=True):
        assert torch.equal(new.hidden_BMD, torch.cat([zeros, old.hidden_BMD], dim=1)[:, 16 - length :])
    assert after.length == after.context_limits.memory_length == length
    assert after.valid_B.tolist() == [min(num_read, 5, length)] * BATCH
    assert after.position_B.tolist() == [num_read] * BATCH
    assert after.all_valid == (min(num_read, 5) >= length)
    assert_same_tensors(before, kept)
