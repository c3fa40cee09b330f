"""Model configurations for tests, of any architecture, from one set of sizes."""

from __future__ import annotations

from typing import Any

from transformer_xl.config import ARCHITECTURES

SIZES = {"n_heads", "d_head", "d_ff"}


def settings_of(**settings: Any) -> dict[str, Any]:
    """The settings, without the sizes of attention and feed-forward layers that the architecture does not have."""
    fields = ARCHITECTURES[settings.get("architecture", "transformer-xl")].model_fields
    return {name: value for name, value in settings.items() if name in fields or name not in SIZES}


def model_config(**settings: Any) -> Any:
    """The configuration of the architecture that the settings name (transformer-xl if none)."""
    return ARCHITECTURES[settings.get("architecture", "transformer-xl")](**settings_of(**settings))
