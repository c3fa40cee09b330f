"""Softmax cutoffs of minimal cost, and the FLOPs and memory of a training step.

Cutoffs are the token ids at which an adaptive softmax divides the vocabulary: the ids below the first one are the head,
and each later range is a tail, whose logits are computed only for targets in it. The head must contain at least 0.9 of
the text's tokens.

Shape suffixes: B batch size, T new tokens, D model width.
"""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from transformer_xl.config import TransformerXLConfig
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.ops.native import chosen
from transformer_xl.training.cost import find_cutoffs, step_cost

# counts of 10,007 tokens by Zipf's law, with an exponent above 1 so that cutoffs save more than half of the logits
ZIPF = (1e9 / (np.arange(10_007) + 2.7) ** 1.2).astype(np.int64)


def num_logits(counts: np.ndarray, cutoffs: tuple[int, ...]) -> float:
    """Return the expected number of logits for one token of the text.

    These are those of the head, one for each tail, and those of the token's own tail, if it is in a tail.
    """
    edges = (*cutoffs, len(counts))
    tails = (counts[start:stop].sum() / counts.sum() * (stop - start) for start, stop in pairwise(edges))
    return cutoffs[0] + len(cutoffs) + sum(tails)


def head_share(counts: np.ndarray, cutoffs: tuple[int, ...]) -> float:
    return counts[: cutoffs[0]].sum() / counts.sum()


def test_cutoffs_have_the_lowest_cost_of_all_choices():
    """Compared with every choice of one, two or three cutoffs; there are so few ids that each is a candidate cutoff."""
    counts = np.array([900, 300, 90, 40, 20, 9, 7, 5, 4, 3, 2, 2, 1, 1, 1, 1, 1], dtype=np.int64)
    # all increasing cutoffs from 1 to 16 (there are 17 ids) whose head contains enough of the text
    choices = [c for tails in (1, 2, 3) for c in combinations(range(1, 17), tails) if head_share(counts, c) >= 0.9]
    cutoffs = find_cutoffs(counts)
    assert cutoffs in choices
    assert num_logits(counts, cutoffs) == pytest.approx(min(num_logits(counts, c) for c in choices))


def test_cutoffs_of_a_zipf_vocabulary():
    cutoffs = find_cutoffs(ZIPF)
    assert len(cutoffs) == 3
    assert head_share(ZIPF, cutoffs) >= 0.9
    assert num_logits(ZIPF, cutoffs) < 0.5 * len(ZIPF)
    assert num_logits(ZIPF, cutoffs) < num_logits(ZIPF, find_cutoffs(ZIPF, max_tails=1))
    assert len(find_cutoffs(ZIPF, max_tails=1)) == 1
    assert find_cutoffs(ZIPF, max_tails=0) == ()


@pytest.mark.parametrize("size", [1, 2, 300])
def test_no_cutoffs_for_equal_frequencies(size):
    assert find_cutoffs(np.ones(size, dtype=np.int64)) == ()


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 10**6), min_size=1, max_size=400), max_tails=st.integers(0, 4))
def test_cutoffs_are_valid_settings(counts, max_tails):
    # in descending order, as token ids are; at least one count is above 0
    counts = sorted((*counts[1:], counts[0] + 1), reverse=True)
    cutoffs = find_cutoffs(np.array(counts, dtype=np.int64), max_tails)
    assert len(cutoffs) <= min(max_tails, 3)
    TransformerXLConfig(vocab_size=len(counts), cutoffs=cutoffs)  # raises if they are invalid


@pytest.mark.parametrize("cutoffs", [(), (5, 11)])  # a dense softmax, and one with two tails
def test_flops_and_sizes_are_those_of_a_real_step(cutoffs):
    config = TransformerXLConfig(
        vocab_size=23, n_layers=2, d_model=14, n_heads=2, d_ff=19, dropout=0.1, cutoffs=cutoffs
    )
    actual = step_cost(config, batch_size=3, segment_length=5, memory_length=7)
    model = TransformerXL(config.model_copy(update={"attn_implementation": "sdpa"}), memory_length=7).train()
    _, memory = model(torch.zeros(3, 7, dtype=torch.int64))
    targets_BT = torch.arange(15).view(3, 5) % 23
    with FlopCounterMode(display=False) as counter:
        hidden_BTD, _ = model(torch.zeros(3, 5, dtype=torch.int64), memory)
        model.nats(hidden_BTD, targets_BT).sum().backward()
    # targets in step_cost follow Zipf's law, so each tail has another number of them; without tails FLOPs are equal
    assert actual.flops == pytest.approx(counter.get_total_flops(), rel=0.05 if cutoffs else 0)
    assert actual.parameters == model.num_parameters()
    assert actual.state_bytes == 16 * actual.parameters  # weight, gradient and two moving averages, float32 each
    assert actual.memory_bytes == 4 * 2 * 3 * 7 * 14  # bytes x layers x batch size x slots x width
    assert actual.bytes == actual.state_bytes + actual.activation_bytes + actual.memory_bytes


def test_activation_bytes_are_those_of_a_real_step():
    config = TransformerXLConfig(vocab_size=23, n_layers=2, d_model=14, n_heads=2, d_ff=19, dropout=0.1)
    model = TransformerXL(config, memory_length=7).train()
    _, memory = model(torch.zeros(3, 7, dtype=torch.int64))
    tokens_BT, saved = torch.zeros(3, 5, dtype=torch.int64), {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor  # by address: several views are counted once
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), chosen(dropout="torch"):
        model.nats(model(tokens_BT, memory)[0], tokens_BT).sum()
    addresses = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    expected = sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in addresses)
    cost = step_cost(config, batch_size=3, segment_length=5, memory_length=7)
    assert cost.activation_bytes == pytest.approx(expected, rel=0.02)
