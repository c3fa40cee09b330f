"""Small float64 models of every architecture, by name, for the tests."""

from __future__ import annotations

from typing import Any

import torch
from model_configs import model_config

from transformer_xl.architectures import build_model
from transformer_xl.config import ARCHITECTURES
from transformer_xl.model.language_model import LanguageModel

# Settings that differ from those of `make_system`. Pre-norm: LayerNorm at the start of each residual branch, not after
# it. Kernel of a QRNN: number of inputs on which its gates depend.
SYSTEMS: dict[str, dict[str, Any]] = {
    "transformer-xl": {"architecture": "transformer-xl"},
    "pre-norm": {"architecture": "transformer-xl", "norm_first": True, "tie_attention_biases": False},
    "normalized queries and keys, n-grams": {"architecture": "transformer-xl", "qk_norm": True, "max_ngram": 4},
    "lstm": {"architecture": "lstm"},
    "lstm, n-grams": {"architecture": "lstm", "max_ngram": 3},
    "qrnn, kernel 1": {"architecture": "qrnn", "qrnn_kernel_size": 1},
    "qrnn, kernel 2": {"architecture": "qrnn"},  # the default
    "shaw": {"architecture": "shaw", "max_relative_positions": 5},
    "vaswani": {"architecture": "vaswani"},
    "vaswani, n-grams": {"architecture": "vaswani", "max_ngram": 3},
    "al-rfou": {"architecture": "al-rfou", "max_position_embeddings": 17},
}
WITH_MEMORY = [name for name, system in SYSTEMS.items() if ARCHITECTURES[system["architecture"]].has_memory]


def make_system(name: str, *, memory_length: int = 11, **settings: Any) -> LanguageModel:
    """Build a float64 model without dropout; `name` is a key of SYSTEMS. Models without memory ignore memory_length."""
    torch.manual_seed(7)
    small = {"vocab_size": 23, "n_layers": 3, "d_model": 14, "n_heads": 2, "d_head": 5, "d_ff": 19, "dropout": 0.0}
    small |= {"ngram_buckets": 29, "d_ngram": 3}
    config = model_config(**{**small, **SYSTEMS[name], **settings})
    model = build_model(config, memory_length=memory_length if config.has_memory else 0).double()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than initial weights, so that every part affects the results
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()
