"""What goes wrong where a setting is not brought over: each one changes the losses of a small model visibly.

`python -m pytest -s tests/interop/test_traps.py` prints the numbers that docs/fidelity.md shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.checkpoints import golden, hugging_face_folder, scores_of
from interop.golden_huggingface import SEGMENTS
from torch import Tensor

from transformer_xl.config import TransformerXLConfig
from transformer_xl.interop.huggingface import read
from transformer_xl.model.transformer_xl import TransformerXL

Weights = dict[str, Tensor]


def as_first(weights: Weights) -> None:
    """The biases of the first layer for all layers."""
    for name in ("content_bias", "position_bias"):
        weights[name] = weights[name][:1]


def with_final_norm(weights: Weights) -> None:
    width = weights["layers.0.attention.norm.weight"].shape[0]
    weights |= {"final_norm.weight": torch.ones(width), "final_norm.bias": torch.zeros(width)}


def flipped(weights: Weights) -> None:
    for name in ("softmax.cluster_weight", "softmax.cluster_bias"):
        weights[name] = weights[name].flip(0)


def without_own_projections(weights: Weights) -> None:
    for name in [name for name in weights if name.startswith("softmax.projections.")]:
        del weights[name]


def without_own_tables(weights: Weights) -> None:
    for name in [name for name in weights if name.startswith("softmax.tables.")]:
        del weights[name]


def nothing(_: Weights) -> None:
    pass


TRAPS: dict[str, tuple[str, dict[str, Any], Callable[[Weights], None], float]] = {
    "tails counted from the other end": ("clusters", {}, flipped, 0.01),
    "an empty memory not attended": ("clusters", {"attend_empty_memory": False}, nothing, 0.01),
    "one key more for each query": ("clusters", {"attention_window": 10}, nothing, 0.01),
    "all keys for each query": ("clusters", {"attention_window": None}, nothing, 0.01),
    "distances not clamped": ("clusters", {"clamp_length": None}, nothing, 0.01),
    "one pair of biases for all layers": ("clusters", {"tie_attention_biases": True}, as_first, 0.01),
    "the embedding's projections": ("narrow-tails", {"tie_projections": "all"}, without_own_projections, 0.01),
    "the embedding's weights": ("own-softmax", {"tie_word_embeddings": True}, without_own_tables, 0.01),
    "a LayerNorm after the last layer": ("pre-norm", {"final_norm": True}, with_final_norm, 0.01),
    "LayerNorm's epsilon 1e-12, not 1e-5": ("clusters", {"norm_eps": 1e-12}, nothing, 1e-7),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_each_setting_counts(trap: str, tmp_path: Path) -> None:
    case, changes, change, least = TRAPS[trap]
    config, weights, expected = golden(case)
    imported = read(hugging_face_folder(tmp_path / "hub", config, weights))
    settings = imported.model
    changed_weights = dict(imported.weights)
    change(changed_weights)
    nats = [
        nats_of(TransformerXLConfig(**values), loaded, expected["tokens_BT"])
        for values, loaded in ((settings, imported.weights), ({**settings, **changes}, changed_weights))
    ]
    change_BT = (nats[1] - nats[0]).abs()
    means = ", ".join(f"{one.mean():.6f}" for one in nats)
    print(f"\n{trap}: {means} nats a token; most at one token {change_BT.max():.6f}")
    assert change_BT.max() > least


def nats_of(config: TransformerXLConfig, weights: Weights, tokens_BT: Tensor) -> Tensor:
    """Losses (B, T - 1) in nats, float64."""
    model = TransformerXL(config)
    model.load_state_dict(weights)
    scores_BTV, _ = scores_of(model.double().eval(), tokens_BT, SEGMENTS)
    return -scores_BTV[:, :-1].gather(-1, tokens_BT[:, 1:, None])[..., 0]
