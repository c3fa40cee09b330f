"""Model configurations of any architecture for tests, from one set of sizes."""

from __future__ import annotations

from typing import Any

from transformer_xl.config import ARCHITECTURES

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
