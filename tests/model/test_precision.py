"""Weights converted to bfloat16 once give the same results as autocast, which converts them for every product.

Shape suffixes: B batch size, T new tokens, D model width.
"""

import torch
from tensors import assert_same_tensors, copied_tensors

from transformer_xl.model.precision import with_matrices_in


def test_converted_model_equals_autocast_bit_for_bit_and_the_original_is_unchanged(make_model, tokens):
    model = make_model().float()
    before = copied_tensors(model)
    converted = with_matrices_in(model, torch.bfloat16)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        results = []
        for variant in (model, converted):
            hidden_BTD, memory = variant(tokens(2, 7), variant.inference_memory(2))
            hidden_BTD, _ = variant(tokens(2, 7, seed=5), memory)
            results.append(variant.nats(hidden_BTD, tokens(2, 7)))
    assert torch.equal(*results)
    assert converted.layers[0].attention.k_proj.weight.dtype == torch.bfloat16
    assert converted.embedding.tables[0] is model.embedding.tables[0]
    assert_same_tensors(model, before)
