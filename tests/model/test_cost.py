"""The cutoffs that are found, and the cost of a step that is counted."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from transformer_xl.config import TransformerXLConfig
from transformer_xl.model.cost import find_cutoffs, step_cost
from transformer_xl.model.transformer_xl import TransformerXL

ZIPF = (1e9 / (np.arange(10_007) + 2.7) ** 1.2).astype(np.int64)


def work(counts: np.ndarray, cutoffs: tuple[int, ...]) -> float:
    """Expected number of scores for one word of the text."""
    edges = (*cutoffs, len(counts))
    tails = (counts[start:stop].sum() / counts.sum() * (stop - start) for start, stop in pairwise(edges))
    return cutoffs[0] + len(cutoffs) + sum(tails)


def head_share(counts: np.ndarray, cutoffs: tuple[int, ...]) -> float:
    return counts[: cutoffs[0]].sum() / counts.sum()


def test_cutoffs_are_the_cheapest_there_are():
    """With so few ids that each stands on the grid: against every choice of one, two or three cutoffs."""
    counts = np.array([900, 300, 90, 40, 20, 9, 7, 5, 4, 3, 2, 2, 1, 1, 1, 1, 1], dtype=np.int64)
    choices = [c for tails in (1, 2, 3) for c in combinations(range(1, 17), tails) if head_share(counts, c) >= 0.9]
    found = find_cutoffs(counts)
    assert found in choices
    assert work(counts, found) == pytest.approx(min(work(counts, c) for c in choices))


def test_cutoffs_of_a_zipf_vocabulary():
    found = find_cutoffs(ZIPF)
    assert len(found) == 3
    assert head_share(ZIPF, found) >= 0.9
    assert work(ZIPF, found) < 0.5 * len(ZIPF)
    assert work(ZIPF, found) < work(ZIPF, find_cutoffs(ZIPF, most_tails=1))
    assert len(find_cutoffs(ZIPF, most_tails=1)) == 1
    assert find_cutoffs(ZIPF, most_tails=0) == ()


@pytest.mark.parametrize("size", [1, 2, 300])
def test_no_cutoffs_where_they_do_not_pay(size):
    assert find_cutoffs(np.ones(size, dtype=np.int64)) == ()


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 10**6), min_size=1, max_size=400), most=st.integers(0, 4))
def test_found_cutoffs_can_be_used(counts, most):
    counts = sorted((*counts[1:], counts[0] + 1), reverse=True)
    cutoffs = find_cutoffs(np.array(counts, dtype=np.int64), most)
    assert len(cutoffs) <= min(most, 3)
    TransformerXLConfig(vocab_size=len(counts), cutoffs=cutoffs)


@pytest.mark.parametrize("cutoffs", [(), (5, 11)])
def test_operations_are_those_of_a_real_step(cutoffs):
    config = TransformerXLConfig(
        vocab_size=23, n_layers=2, d_model=14, n_heads=2, d_ff=19, dropout=0.1, cutoffs=cutoffs
    )
    found = step_cost(config, batch_size=3, segment_length=5, memory_length=7)
    model = TransformerXL(config.model_copy(update={"attn_implementation": "sdpa"}), memory_length=7).train()
    _, memory = model(torch.zeros(3, 7, dtype=torch.int64))
    targets_BT = torch.arange(15).view(3, 5) % 23
    with FlopCounterMode(display=False) as counter:
        hidden_BTD, _ = model(torch.zeros(3, 5, dtype=torch.int64), memory)
        model.nats(hidden_BTD, targets_BT).sum().backward()
    # how many targets a tail has is taken from Zipf's law; without tails the numbers are the same
    assert found.flops == pytest.approx(counter.get_total_flops(), rel=0.05 if cutoffs else 0)
    assert found.parameters == model.num_parameters()
    assert found.state_bytes == 16 * found.parameters
    assert found.memory_bytes == 4 * 2 * 3 * 7 * 14
    assert found.bytes == found.state_bytes + found.activation_bytes + found.memory_bytes


def test_kept_activations_are_those_of_a_real_step():
    config = TransformerXLConfig(vocab_size=23, n_layers=2, d_model=14, n_heads=2, d_ff=19, dropout=0.1)
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    model = TransformerXL(config, memory_length=7).train()
    _, memory = model(torch.zeros(3, 7, dtype=torch.int64))
    tokens_BT, targets_BT = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.nats(model(tokens_BT, memory)[0], targets_BT).sum()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    real = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    assert step_cost(config, batch_size=3, segment_length=5, memory_length=7).activation_bytes == pytest.approx(
        real, rel=0.02
    )
