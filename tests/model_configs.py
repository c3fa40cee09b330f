"""Configurations and small models of any architecture for tests, from one set of sizes."""

from __future__ import annotations

from typing import Any

import torch

from transformer_xl.architectures import build_model
from transformer_xl.config import ARCHITECTURES
from transformer_xl.model.language_model import LanguageModel

# sizes of attention and feed-forward layers, which not every architecture has
SIZES = {"n_heads", "d_head", "d_ff"}


def settings_of(**settings: Any) -> dict[str, Any]:
    """Return the settings of a model without the sizes of attention and feed-forward layers if it has no such layers.

    The setting `architecture` is the model's architecture, transformer-xl by default.
    """
    fields = ARCHITECTURES[settings.get("architecture", "transformer-xl")].model_fields
    return {name: value for name, value in settings.items() if name in fields or name not in SIZES}


def model_config(**settings: Any) -> Any:
    """Return the configuration of the architecture in the settings, or of transformer-xl if they contain none."""
    return ARCHITECTURES[settings.get("architecture", "transformer-xl")](**settings_of(**settings))


def small_model(seed: int = 7, memory_length: int = 11, **settings: Any) -> LanguageModel:
    """Return a float64 model without dropout, in evaluation mode; one without memory ignores memory_length."""
    torch.manual_seed(seed)
    small = {"vocab_size": 23, "n_layers": 3, "d_model": 14, "n_heads": 2, "d_head": 5, "d_ff": 19, "dropout": 0.0}
    config = model_config(**{**small, **settings})
    model = build_model(config, memory_length=memory_length if config.has_memory else 0).double()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than initialized, so that attention is not nearly uniform
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()
