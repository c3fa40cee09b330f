"""Accelerated Conformers of transformers compute what they computed, in outputs and gradients.

Shape suffixes: B batch size, T frames, D model width.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from tensors import assert_same_tensors, copied_tensors
from torch import Tensor, nn

from transformer_xl.integrations.conformer import accelerate, restore

FRAMES, LENGTHS = 23, (23, 17, 9)
NAMES = ["parakeet", "nemotron", "wav2vec2-conformer", "wav2vec2-bert", "seamless-m4t", "fastspeech2"]
# the attention of padding is computed, as convolutions or projections look at it
EXACT_PADDING = ("wav2vec2-conformer", "wav2vec2-bert", "seamless-m4t", "fastspeech2")


def encoder(name: str, *, dropout: float = 0.0, attention: str = "sdpa", **changes: Any) -> nn.Module:
    """Return an encoder with random weights, also of the biases, and dropout."""
    torch.manual_seed(3)
    common = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 20}
    wav2vec2 = common | {
        "position_embeddings_type": "relative", "attention_dropout": dropout, "hidden_dropout": dropout,
        "activation_dropout": dropout, "conformer_conv_dropout": dropout, "feat_proj_dropout": dropout,
        "layerdrop": 0.0, "conv_depthwise_kernel_size": 5, "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    }  # fmt: skip
    parakeet = common | {
        "num_mel_bins": 16, "subsampling_factor": 2, "subsampling_conv_channels": 4, "conv_kernel_size": 5,
        "attention_dropout": dropout, "dropout": dropout, "activation_dropout": dropout, "layerdrop": 0.0,
    }  # fmt: skip
    match name:
        case "parakeet":
            model = transformers.ParakeetEncoder(transformers.ParakeetEncoderConfig(**parakeet | changes))
        case "nemotron":
            changes = {"sliding_window": 7, "default_num_lookahead_tokens": 2} | changes
            config = transformers.NemotronAsrStreamingEncoderConfig(**parakeet | changes)
            model = transformers.NemotronAsrStreamingEncoder(config)
        case "wav2vec2-conformer":
            model = transformers.Wav2Vec2ConformerModel(transformers.Wav2Vec2ConformerConfig(**wav2vec2 | changes))
            model = model.encoder
        case "wav2vec2-bert":
            config = transformers.Wav2Vec2BertConfig(**wav2vec2 | {"feature_projection_input_dim": 24} | changes)
            model = transformers.Wav2Vec2BertModel(config).encoder
        case "seamless-m4t":
            config = transformers.SeamlessM4TConfig(
                hidden_size=24, speech_encoder_attention_heads=3, speech_encoder_layers=2,
                speech_encoder_intermediate_size=20, position_embeddings_type="relative", adaptor_kernel_size=3,
                adaptor_stride=2, speech_encoder_dropout=dropout, adaptor_dropout=dropout, feature_projection_input_dim=24,
                speech_encoder_layerdrop=0.0, conv_depthwise_kernel_size=5, **changes,
            )  # fmt: skip
            module = transformers.models.seamless_m4t.modeling_seamless_m4t
            model = module.SeamlessM4TSpeechEncoder(config)
        case "fastspeech2":
            config = transformers.FastSpeech2ConformerConfig(
                hidden_size=24, encoder_num_attention_heads=3, encoder_layers=2, encoder_linear_units=20,
                decoder_num_attention_heads=3, decoder_layers=1, vocab_size=30, encoder_dropout_rate=dropout,
                encoder_positional_dropout_rate=dropout, encoder_attention_dropout_rate=dropout, **changes,
            )  # fmt: skip
            model = transformers.FastSpeech2ConformerModel(config).encoder
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        config._attn_implementation = attention
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():  # biases are zeros at first
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.double().eval()


def inputs(name: str, *, padded: bool) -> dict[str, Any]:
    """Return arguments of an encoder for three rows of frames."""
    generator = torch.Generator().manual_seed(7)
    frames = 2 * FRAMES if name in ("parakeet", "nemotron") else FRAMES
    width = 16 if name in ("parakeet", "nemotron") else 24
    hidden_BTD = torch.randn(3, frames, width, generator=generator, dtype=torch.float64)
    mask_BT = torch.arange(frames) < torch.tensor(LENGTHS)[:, None] * frames // FRAMES
    mask = mask_BT if padded else None
    if name in ("parakeet", "nemotron", "seamless-m4t"):
        return {"input_features": hidden_BTD, "attention_mask": mask}
    if name == "fastspeech2":
        return {
            "input_tensor": torch.randint(1, 30, (3, FRAMES), generator=generator),
            "attention_mask": mask_BT.int()[:, None] if padded else None,
            "return_dict": True,
        }
    return {"hidden_states": hidden_BTD, "attention_mask": mask}


def outputs(model: nn.Module, name: str, *, padded: bool) -> Tensor:
    """Return the last hidden states, those of padding as 0 where it attends to nothing."""
    out_BTD = model(**copy.deepcopy(inputs(name, padded=padded))).last_hidden_state
    if padded and name not in EXACT_PADDING:
        out_BTD = out_BTD * (torch.arange(out_BTD.shape[1]) < torch.tensor(LENGTHS)[:, None])[..., None]
    return out_BTD


def with_gradients(model: nn.Module, name: str, *, padded: bool) -> dict[str, Tensor]:
    """Return the outputs, and the gradient of each weight for a fixed gradient of the outputs."""
    out_BTD = outputs(model, name, padded=padded)
    weight_BTD = torch.randn(out_BTD.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    named = dict(model.named_parameters())
    grads = torch.autograd.grad((out_BTD * weight_BTD).sum(), list(named.values()), allow_unused=True)
    return {"out": out_BTD.detach()} | {n: g for n, g in zip(named, grads, strict=True) if g is not None}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_are_those_of_transformers(name: str, attention: str, padded: bool) -> None:
    model = encoder(name, attention=attention)
    weights = copied_tensors(model)
    expected = with_gradients(model, name, padded=padded)
    assert accelerate(model, implementation="sdpa") is model
    actual = with_gradients(model, name, padded=padded)
    in_float32 = attention == "eager" and name in ("parakeet", "nemotron")  # their softmax
    assert_same_tensors(actual, expected, atol=1e-4 if in_float32 else 1e-9)
    assert not torch.equal(actual["out"], expected["out"])
    assert_same_tensors(model, weights)
    restore(model)
    assert_same_tensors(with_gradients(model, name, padded=padded), expected)
