"""The effect of importing a setting wrongly: each such mistake visibly changes the losses of a small model.

`python -m pytest -s tests/interop/test_traps.py` prints the losses that docs/fidelity.md shows.

Shape suffixes: B batch rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interop.checkpoints import golden, hugging_face_folder, log_probs_of
from interop.golden_huggingface import SEGMENTS
from torch import Tensor

from transformer_xl.config import TransformerXLConfig
from transformer_xl.interop.huggingface import read
from transformer_xl.model.transformer_xl import TransformerXL

TRAPS: dict[str, tuple[str, dict[str, Any], float]] = {
    "tails counted from the other end": ("clusters", {}, 0.01),
    "an empty memory not attended": ("clusters", {"attend_empty_memory": False}, 0.01),
    "one key more for each query": ("clusters", {"attention_window": 10}, 0.01),
    "all keys for each query": ("clusters", {"attention_window": None}, 0.01),
    "distances not clamped": ("clusters", {"clamp_length": None}, 0.01),
    "one pair of biases for all layers": ("clusters", {"tie_attention_biases": True}, 0.01),
    "the embedding's projections": ("narrow-tails", {"tie_projections": "all"}, 0.01),
    "the embedding's weights": ("own-softmax", {"tie_word_embeddings": True}, 0.01),
    "a LayerNorm after the last layer": ("pre-norm", {"final_norm": True}, 0.01),
    "LayerNorm's epsilon 1e-12, not 1e-5": ("clusters", {"norm_eps": 1e-12}, 1e-7),
}
"""By mistake: the fixture, the wrong settings, and the change in nats that some token's loss must exceed."""


@pytest.mark.parametrize("trap", TRAPS)
def test_wrong_setting_changes_the_losses(trap: str, tmp_path: Path) -> None:
    case, wrong_settings, min_change = TRAPS[trap]
    config, weights, expected = golden(case)
    imported = read(hugging_face_folder(tmp_path / "hub", config, weights))
    nats_BT, wrong_BT = (
        nats_of(
            imported.weights, TransformerXLConfig(**{**imported.model, **changes}), expected["tokens_BT"], flip=flip
        )
        for changes, flip in (({}, False), (wrong_settings, not wrong_settings))
    )
    max_change = (wrong_BT - nats_BT).abs().max()
    print(f"\n{trap}: {nats_BT.mean():.6f}, {wrong_BT.mean():.6f} nats per token; at one token up to {max_change:.6f}")
    assert max_change > min_change


def nats_of(weights: dict[str, Tensor], config: TransformerXLConfig, tokens_BT: Tensor, *, flip: bool) -> Tensor:
    """Return the losses (B, T - 1) in nats of a model with the weights that its settings need, in float64.

    With `flip` the rows that score the tail clusters are in reverse order.
    """
    model = TransformerXL(config).double().eval()
    default = {"final_norm.weight": torch.ones(config.d_model), "final_norm.bias": torch.zeros(config.d_model)}
    for name, parameter in model.state_dict().items():
        weight = {**default, **weights}[name][: len(parameter)]  # the first layer's biases, if all layers share them
        parameter.copy_(weight.flip(0) if flip and "softmax.cluster" in name else weight)
    log_probs_BTV, _ = log_probs_of(model, tokens_BT, SEGMENTS)
    return -log_probs_BTV[:, :-1].gather(-1, tokens_BT[:, 1:, None])[..., 0]
