"""Each architecture builds its model, and accepts only its own settings and context limits.

The second argument of `run_settings` is the source of the settings, with which error messages begin.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_configs import model_config

from transformer_xl.architectures import build_model
from transformer_xl.baselines.absolute import AbsoluteTransformer
from transformer_xl.baselines.recurrent import RecurrentModel
from transformer_xl.baselines.shaw import ShawTransformer
from transformer_xl.config import ARCHITECTURES, ShawConfig, TransformerXLConfig, UserError, run_settings
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.xlnet.two_streams import XLNet

SMALL = {"d_model": 14, "n_heads": 2, "n_layers": 1, "d_ff": 19}
SHAW = {"architecture": "shaw", "max_relative_positions": 3}
MODELS = {  # the class that builds each architecture
    "transformer-xl": TransformerXL,
    "xlnet": XLNet,
    "shaw": ShawTransformer,
    "vaswani": AbsoluteTransformer,
    "al-rfou": AbsoluteTransformer,
    "lstm": RecurrentModel,
    "qrnn": RecurrentModel,
}


def test_architecture_selects_the_config_class() -> None:
    for name in ARCHITECTURES:
        assert type(run_settings({"model": {"architecture": name}}, "settings").model) is ARCHITECTURES[name]
    assert type(run_settings({"model": {"n_layers": 3}}, "settings").model) is TransformerXLConfig


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_architecture_builds_its_model(architecture: str) -> None:
    # fills in settings that follow from others, such as the number of learned position vectors
    resolved = run_settings({"model": model_config(architecture=architecture, **SMALL).model_dump()}, "settings").model
    with torch.device("meta"):
        model = build_model(resolved)
    assert type(model) is MODELS[architecture]
    # the default memory length; the models with absolute positions have no memory
    assert model.context_limits.memory_length == (0 if architecture in ("vaswani", "al-rfou") else 128)


def test_memory_length_is_that_of_the_argument() -> None:
    assert build_model(TransformerXLConfig(**SMALL), memory_length=5).initial_memory(2).length == 5


@pytest.mark.parametrize("settings", [{"architecture": "lstm"}, SHAW])
def test_model_with_the_config_of_another_architecture_raises(settings: dict[str, Any]) -> None:
    """Otherwise a model with relative attention would be built from the settings of another architecture."""
    with pytest.raises(UserError, match=r"not the model of (vaswani|lstm|shaw); use build_model"):
        TransformerXL(model_config(**SMALL, **settings))


def test_number_of_learned_position_vectors_is_the_longest_context_of_training() -> None:
    """Vectors of further positions would never be trained, yet used where evaluation has longer contexts."""
    shaw = run_settings(
        {"model": {"architecture": "shaw"}, "train": {"segment_length": 7, "memory_length": 11}}, "settings"
    )
    al_rfou = run_settings({"model": {"architecture": "al-rfou"}, "train": {"segment_length": 7}}, "settings")
    assert shaw.model.max_relative_positions == 18  # segment and memory: 7 + 11
    assert (al_rfou.model.max_position_embeddings, al_rfou.train.memory_length) == (7, 0)
    for config in (shaw, al_rfou):
        assert run_settings(config.model_dump(), "settings") == config


def test_config_class_accepts_only_its_own_settings() -> None:
    with pytest.raises(UserError, match="zoneout"):
        ShawConfig(zoneout=0.1)  # a setting of qrnn
    # without d_head, the head width is d_model / n_heads
    assert (TransformerXLConfig(d_model=24, n_heads=3).head_dim, TransformerXLConfig(d_head=5).head_dim) == (8, 5)
