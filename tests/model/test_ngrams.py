"""Native n-gram embeddings are those of torch's operators.

Shape suffixes: B batch size, S recent and new tokens.
"""

from __future__ import annotations

import pytest
import torch
from native_operators import needs_native

from transformer_xl.config import TransformerXLConfig
from transformer_xl.device import autocast
from transformer_xl.model.ngrams import NgramEmbedding
from transformer_xl.ops import native
from transformer_xl.training.numerics import Numerics, computing_with


def make_embedding(dtype: torch.dtype) -> NgramEmbedding:
    config = TransformerXLConfig(vocab_size=90_000, n_heads=2, d_model=10, max_ngram=5, ngram_buckets=37, d_ngram=3)
    torch.manual_seed(1)
    embedding = NgramEmbedding(config)
    for parameter in embedding.parameters():
        torch.nn.init.normal_(parameter)
    return embedding.to(dtype)


@needs_native
@pytest.mark.parametrize("num_new", [1, 3, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_results_are_those_of_torch(dtype: torch.dtype, num_new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of ids that are a view, as large as the vocabulary, or no token."""
    embedding, calls = make_embedding(dtype), list[int]()
    ids_BS = torch.randint(90_001, (num_new + 4, 7), generator=torch.Generator().manual_seed(2)).T
    ids_BS[:3, :4] = 0
    with torch.no_grad():
        with native.chosen(ngrams="torch"):
            expected_BTD = embedding(ids_BS, num_new)
        rows = native.operators().ngram_rows
        monkeypatch.setattr(native.operators(), "ngram_rows", lambda *args: (calls.append(1), rows(*args))[1])
        torch.testing.assert_close(embedding(ids_BS, num_new), expected_BTD, rtol=1e-5, atol=1e-5)
        assert calls
        with autocast(torch.device("cpu"), "bfloat16"):
            low_BTD = embedding(ids_BS, num_new)
        error = (low_BTD.to(dtype) - expected_BTD).square().mean().sqrt()
        assert error < 0.01 * expected_BTD.square().mean().sqrt()
    with_gradient_BTD = embedding(ids_BS, num_new)
    torch.testing.assert_close(with_gradient_BTD, expected_BTD, rtol=0, atol=0)
    assert len(calls) == 2


@needs_native
def test_limits_of_what_is_visible_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = make_embedding(torch.float32)
    monkeypatch.setattr(native.operators(), "ngram_rows", None)
    with torch.no_grad():
        embedding(torch.ones(1, 5, dtype=torch.int64), 1, torch.tensor([[2]]))


@needs_native
def test_training_computes_them_by_torch_in_validation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a resumed run has the losses that it would have had, wherever the operators are built."""
    embedding = make_embedding(torch.float32)
    monkeypatch.setattr(native.operators(), "ngram_rows", None)
    with computing_with(Numerics()), torch.no_grad():
        embedding(torch.ones(1, 5, dtype=torch.int64), 1)


@needs_native
def test_ids_that_are_none_reach_no_other_memory() -> None:
    rows_BTE = native.operators().ngram_rows(torch.tensor([[-1_000_000, -7, -5]]), 1, [torch.ones(9, 4)] * 2, 1.0)
    assert torch.equal(rows_BTE, torch.ones(1, 1, 8))
