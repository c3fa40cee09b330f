"""Memory is a value: it is never changed, and knows what of it is valid."""

import pytest
import torch

from transformer_xl.config import UserError
from transformer_xl.model.memory import ContextLimits, HiddenMemory, Memory

ROWS, LENGTH, WIDTH, LAYERS = 3, 5, 7, 2


def fresh() -> Memory:
    return HiddenMemory.empty(LAYERS, ROWS, WIDTH, ContextLimits(LENGTH), torch.zeros(1, dtype=torch.float64))


def rows_of(count: int, start: float = 0.0) -> list[torch.Tensor]:
    counted = torch.arange(ROWS * count * WIDTH, dtype=torch.float64).view(ROWS, count, WIDTH) + start
    return [counted + layer for layer in range(LAYERS)]


def test_it_has_its_full_length_from_the_start():
    memory = fresh()
    assert memory.length == LENGTH
    assert memory.layers_BMD[0].shape == (ROWS, LENGTH, WIDTH)
    assert memory.valid_B.tolist() == memory.position_B.tolist() == [0] * ROWS
    assert not memory.all_valid


@pytest.mark.parametrize("counts", [[2, 2, 2], [5], [13], [1, 7, 3], [4, 1]])
def test_it_holds_the_last_rows(counts):
    memory, read = fresh(), []
    for index, count in enumerate(counts):
        new = rows_of(count, 1000.0 * index)
        read.append(new[1])
        memory = memory.after(new)
    everything = torch.cat([torch.zeros(ROWS, LENGTH, WIDTH, dtype=torch.float64), *read], dim=1)
    assert torch.equal(memory.layers_BMD[1], everything[:, -LENGTH:])
    assert memory.valid_B.tolist() == [min(sum(counts), LENGTH)] * ROWS
    assert memory.position_B.tolist() == [sum(counts)] * ROWS
    assert memory.all_valid == (sum(counts) >= LENGTH)


def test_length_zero():
    memory = HiddenMemory.empty(LAYERS, ROWS, WIDTH, ContextLimits(0), torch.zeros(1, dtype=torch.float64)).after(
        rows_of(3)
    )
    assert memory.layers_BMD[0].shape == (ROWS, 0, WIDTH)
    assert memory.all_valid
    assert memory.position_B.tolist() == [3] * ROWS


def test_it_carries_no_gradient():
    new = [row.requires_grad_() for row in rows_of(3)]
    assert not any(layer.requires_grad for layer in fresh().after(new).layers_BMD)


@pytest.mark.parametrize("rows", [[1], torch.tensor([False, True, False])])
def test_reset_empties_rows_and_changes_nothing_else(rows):
    before = fresh().after(rows_of(7))
    kept = [layer.clone() for layer in before.layers_BMD]
    after = before.reset(rows)
    assert after.valid_B.tolist() == [5, 0, 5]
    assert after.position_B.tolist() == [7, 0, 7]
    assert not after.all_valid
    assert (after.layers_BMD[0][1] == 0).all()
    assert torch.equal(after.layers_BMD[0][[0, 2]], kept[0][[0, 2]])
    assert all(torch.equal(layer, old) for layer, old in zip(before.layers_BMD, kept, strict=True))
    assert before.valid_B.tolist() == [5, 5, 5]


def test_select_repeats_and_reorders():
    memory = fresh().after(rows_of(7)).reset([0]).select([2, 0, 0, 1])
    assert memory.batch_size == 4
    assert memory.valid_B.tolist() == [5, 0, 0, 5]
    assert torch.equal(memory.layers_BMD[0][0], rows_of(7)[0][2, -5:])


def test_to_another_dtype():
    memory = fresh().after(rows_of(2)).to(dtype=torch.float32)
    assert memory.layers_BMD[0].dtype == torch.float32
    assert memory.valid_B.dtype == torch.int64


def test_kept_and_brought_back():
    memory = fresh().after(rows_of(7)).reset([2])
    again = fresh().with_tensors(memory.tensors())
    assert again.least_valid == 0
    assert all(torch.equal(again.tensors()[name], tensor) for name, tensor in memory.tensors().items())
    with pytest.raises(UserError, match="another shape"):
        fresh().select([0]).with_tensors(memory.tensors())


@pytest.mark.parametrize(("settings", "text"), [({"memory": -1}, "memory -1"), ({"memory": 1, "window": 0}, "window 0"),
                                                ({"memory": 1, "clamp_length": 0}, "clamp_length 0")])  # fmt: skip
def test_impossible_reach(settings, text):
    with pytest.raises(UserError, match=text):
        ContextLimits(**settings)


def test_concatenate_puts_together_what_select_took_apart():
    whole = fresh().after(rows_of(3)).reset([1])
    whole = whole.after(rows_of(1, 100.0))
    parts = [whole.select([0]), whole.select([1, 2])]
    joined = Memory.concatenate(parts)
    assert all(torch.equal(one, other) for one, other in zip(joined.layers_BMD, whole.layers_BMD, strict=True))
    assert joined.valid_B.tolist() == [4, 1, 4]
    assert joined.position_B.tolist() == [4, 1, 4]
    assert joined.context_limits == whole.context_limits
    assert not joined.all_valid
    full, empty = fresh().after(rows_of(7)), fresh()
    assert Memory.concatenate([full, full]).all_valid
    assert not Memory.concatenate([full, empty]).all_valid
    with pytest.raises(AssertionError):
        Memory.concatenate([full, full.resized(4)])


@pytest.mark.parametrize("read", [0, 3, 7])
@pytest.mark.parametrize("length", [0, 2, 5, 11])
def test_resized_keeps_the_newest(read, length):
    before = fresh().after(rows_of(read)) if read else fresh()
    kept = [layer.clone() for layer in before.layers_BMD]
    after = before.resized(length)
    wanted = torch.cat([torch.zeros(ROWS, 11, WIDTH, dtype=torch.float64), before.layers_BMD[1]], dim=1)
    assert torch.equal(after.layers_BMD[1], wanted[:, 16 - length :])
    assert after.length == after.context_limits.memory_length == length
    assert after.valid_B.tolist() == [min(read, 5, length)] * ROWS
    assert after.position_B.tolist() == [read] * ROWS
    assert after.all_valid == (min(read, 5) >= length)
    assert all(torch.equal(one, other) for one, other in zip(before.layers_BMD, kept, strict=True))
    assert torch.equal(after.after(rows_of(11)).layers_BMD[0], rows_of(11)[0][:, 11 - length :])
