"""Small float64 baselines for the tests, and where their oracles are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from model_configs import model_config
from systems import SYSTEMS

from transformer_xl.model.build import build_model
from transformer_xl.model.language_model import LanguageModel


@pytest.fixture
def make_baseline():
    """Builds a float64 model without dropout; a name of SYSTEMS, and settings as keywords."""

    def make(name: str, *, memory_length: int = 11, **settings) -> LanguageModel:
        torch.manual_seed(7)
        small = {
            "vocab_size": 23, "n_layers": 3, "d_model": 14, "n_heads": 2, "d_head": 5, "d_ff": 19,
            "dropout": 0.0,
        }  # fmt: skip
        config = model_config(**{**small, **SYSTEMS[name], **settings})
        model = build_model(config, memory_length=memory_length if config.has_memory else 0).double()
        with torch.no_grad():
            for parameter in model.parameters():  # larger than at the start, so that all of it matters
                parameter.add_(torch.randn_like(parameter) * 0.3)
        return model.eval()

    return make
