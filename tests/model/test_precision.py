"""Weights rounded once give what weights rounded for every product give."""

import torch
from tensors import assert_same_tensors, copied_tensors

from transformer_xl.model.precision import with_matrices_in


def test_as_autocast_bit_for_bit_and_the_model_stays(make_model, tokens):
    model = make_model().float()
    before = copied_tensors(model)
    ready = with_matrices_in(model, torch.bfloat16)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        results = []
        for one in (model, ready):
            hidden_BTD, memory = one(tokens(2, 7), one.inference_memory(2))
            hidden_BTD, _ = one(tokens(2, 7, seed=5), memory)
            results.append(one.nats(hidden_BTD, tokens(2, 7)))
    assert torch.equal(*results)
    assert ready.layers[0].attention.k_proj.weight.dtype == torch.bfloat16
    assert ready.embedding.tables[0] is model.embedding.tables[0]
    assert_same_tensors(model, before)
