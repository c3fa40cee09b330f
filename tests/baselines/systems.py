"""Small float64 models of every architecture, by name, for the tests."""

from __future__ import annotations

from typing import Any

from model_configs import small_model

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
    "xlnet": {"architecture": "xlnet"},
    "vaswani": {"architecture": "vaswani"},
    "vaswani, n-grams": {"architecture": "vaswani", "max_ngram": 3},
    "al-rfou": {"architecture": "al-rfou", "max_position_embeddings": 17},
}
WITH_MEMORY = [name for name, system in SYSTEMS.items() if ARCHITECTURES[system["architecture"]].has_memory]


def make_system(name: str, *, memory_length: int = 11, **settings: Any) -> LanguageModel:
    """Build a float64 model without dropout; `name` is a key of SYSTEMS. Models without memory ignore memory_length."""
    ngrams = {"ngram_buckets": 29, "d_ngram": 3} if "max_ngram" in SYSTEMS[name] else {}
    return small_model(memory_length=memory_length, **{**ngrams, **SYSTEMS[name], **settings})
