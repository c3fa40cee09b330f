"""Accelerated Conformers of transformers compute what they computed, in outputs and gradients.

Shape suffixes: B batch size, T frames, D model width.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tensors import assert_same_tensors, copied_tensors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_xl.config import UserError
from transformer_xl.integrations import conformer
from transformer_xl.integrations.conformer import accelerate, restore
from transformer_xl.ops import relative_attention

KERNEL = "auto"
FRAMES, LENGTHS = 23, (23, 17, 9)
NAMES = ["parakeet", "nemotron", "wav2vec2-conformer", "wav2vec2-bert", "seamless-m4t", "fastspeech2"]
# all but Parakeet, where padding attends to nothing; in others convolutions look at its outputs
EXACT_PADDING = [name for name in NAMES if name != "parakeet"]


def encoder(
    name: str, *, dropout: float = 0.0, attention: str = "sdpa", noise: float = 0.1, **changes: Any
) -> nn.Module:
    """Return an encoder with random weights, also of the biases, and dropout."""
    torch.manual_seed(3)
    common = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 20}
    wav2vec2 = common | {
        "position_embeddings_type": "relative", "attention_dropout": dropout, "hidden_dropout": dropout,
        "activation_dropout": dropout, "conformer_conv_dropout": dropout, "feat_proj_dropout": dropout,
        "layerdrop": 0.0, "conv_depthwise_kernel_size": 5, "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2, "conv_dim": (8,) * 7,
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
                adaptor_stride=2, speech_encoder_dropout=dropout, adaptor_dropout=dropout,
                feature_projection_input_dim=24, speech_encoder_layerdrop=0.0, conv_depthwise_kernel_size=5, **changes,
            )  # fmt: skip
            module = transformers.models.seamless_m4t.modeling_seamless_m4t
            model = module.SeamlessM4TSpeechEncoder(config)
        case "fastspeech2":
            config = transformers.FastSpeech2ConformerConfig(
                **{
                    "hidden_size": 24, "encoder_num_attention_heads": 3, "encoder_layers": 2,
                    "encoder_linear_units": 20, "decoder_num_attention_heads": 2, "decoder_layers": 1,
                    "vocab_size": 30, "encoder_dropout_rate": dropout, "encoder_positional_dropout_rate": dropout,
                    "encoder_attention_dropout_rate": dropout, "duration_predictor_channels": 8,
                    "energy_predictor_channels": 8, "pitch_predictor_channels": 8, "speech_decoder_postnet_units": 8,
                } | changes
            )  # fmt: skip
            model = transformers.FastSpeech2ConformerModel(config).encoder
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        config._attn_implementation = attention
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():  # biases are zeros at first
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return model.double().eval()


def inputs(name: str, *, padded: bool, width: int = 24) -> dict[str, Any]:
    """Return arguments of an encoder for three rows of frames."""
    generator = torch.Generator().manual_seed(7)
    frames = 2 * FRAMES if name in ("parakeet", "nemotron") else FRAMES
    width = 16 if name in ("parakeet", "nemotron") else width
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


def arguments_of(model: nn.Module, name: str, **options: Any) -> dict[str, Any]:
    """Return arguments in the dtype of a model."""
    dtype, given = next(model.parameters()).dtype, copy.deepcopy(inputs(name, **options))
    return {n: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in given.items()}


def outputs(model: nn.Module, name: str, *, padded: bool, width: int = 24) -> Tensor:
    """Return the last hidden states, those of padding as 0 where it attends to nothing."""
    out_BTD = model(**arguments_of(model, name, padded=padded, width=width)).last_hidden_state
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
    in_float32 = attention == "eager" and name in ("parakeet", "nemotron")  # their softmax
    weights = copied_tensors(model)
    expected = with_gradients(model.float() if in_float32 else model, name, padded=padded)
    assert accelerate(model, implementation=KERNEL) is model
    actual = with_gradients(model, name, padded=padded)
    assert_same_tensors(actual, expected, atol=1e-4 if in_float32 else 1e-9)
    assert not torch.equal(actual["out"], expected["out"])
    restore(model)
    assert_same_tensors(with_gradients(model, name, padded=padded), expected)
    assert_same_tensors(model.double(), weights, atol=1e-6 if in_float32 else 0)


PUBLISHED = {
    "parakeet": {
        "hidden_size": 1024, "num_attention_heads": 8, "intermediate_size": 64, "num_hidden_layers": 1,
        "conv_kernel_size": 9, "subsampling_factor": 2,
    },
    "wav2vec2-conformer": {
        "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 64, "num_hidden_layers": 1,
        "conv_depthwise_kernel_size": 31,
    },
    "fastspeech2": {
        "hidden_size": 384, "encoder_num_attention_heads": 2, "encoder_layers": 1, "encoder_linear_units": 64,
    },
}  # fmt: skip
"""A layer each of Parakeet CTC 0.6B and 1.1B, Wav2Vec2-Conformer large and FastSpeech2-Conformer; narrow inside of
feed-forward layers."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_of_published_sizes_are_equal_in_float32(name: str) -> None:
    model = encoder(name, noise=0.02, **PUBLISHED[name]).float()
    width = int(PUBLISHED[name]["hidden_size"])
    with torch.inference_mode():
        expected_BTD = outputs(model, name, padded=True, width=width)
        actual_BTD = outputs(accelerate(model, implementation=KERNEL), name, padded=True, width=width)
    torch.testing.assert_close(actual_BTD, expected_BTD, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_training_drops_what_transformers_drops(name: str) -> None:
    """Without dropout of probabilities no random number is ours, and all else must be equal."""
    changes = {"dropout_positions": 0.3} if name in ("parakeet", "nemotron") else {}
    model = encoder(name, dropout=0.2, **changes).train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
        elif isinstance(getattr(module, "dropout", None), nn.Dropout) and hasattr(module, "linear_q"):
            module.dropout.p = 0.0
    before, results = copy.deepcopy(model.state_dict()), []
    for prepared in (model, accelerate(copy.deepcopy(model), implementation=KERNEL)):
        prepared.load_state_dict(before)  # batch norm counts
        torch.manual_seed(1)
        results.append(with_gradients(prepared, name, padded=True) | dict(prepared.named_buffers()))
    assert_same_tensors(results[1], results[0], atol=1e-9)


@pytest.mark.parametrize("name", ["parakeet", "wav2vec2-bert", "fastspeech2"])
def test_probabilities_are_dropped_in_training_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = accelerate(encoder(name, dropout=0.25), implementation=KERNEL), []

    def attend(*args: Any, dropout: float, **kwargs: Any) -> Tensor:
        given.append(dropout)
        return relative_attention(*args, dropout=dropout, **kwargs)

    monkeypatch.setattr(conformer, "relative_attention", attend)
    outputs(model, name, padded=False)
    outputs(model.train(), name, padded=False)
    assert given == [0.0, 0.0, 0.25, 0.25]


@pytest.mark.parametrize(("name", "use_reentrant"), [("parakeet", True), ("wav2vec2-conformer", False)])
def test_gradient_checkpointing_gives_the_same_gradients(name: str, use_reentrant: bool) -> None:
    model, results = accelerate(encoder(name), implementation=KERNEL).train(), []
    for is_on in (False, True):
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = is_on
                module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=use_reentrant)
        model.zero_grad()
        outputs(model, name, padded=True).sin().sum().backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_same_tensors(results[1], results[0], atol=1e-12)


def test_layers_read_a_mask_once_and_again_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, read = [], conformer._read_mask
    monkeypatch.setattr(conformer, "_read_mask", lambda *args: calls.append(args[1:]) or read(*args))
    model = encoder("fastspeech2")
    mask_B1T = inputs("fastspeech2", padded=True)["attention_mask"]
    tokens_BT = inputs("fastspeech2", padded=True)["input_tensor"]
    expected = []
    for length in (None, 4):
        if length is not None:
            mask_B1T[1, :, length:] = 0
        expected.append(model(tokens_BT, mask_B1T, return_dict=True).last_hidden_state)
    mask_B1T[1] = inputs("fastspeech2", padded=True)["attention_mask"][1]
    accelerate(model, implementation=KERNEL)
    actual = [model(tokens_BT, mask_B1T, return_dict=True).last_hidden_state]
    assert len(calls) == 1  # for two layers
    mask_B1T[1, :, 4:] = 0
    actual.append(model(tokens_BT, mask_B1T, return_dict=True).last_hidden_state)
    assert len(calls) == 2
    assert_same_tensors(actual, expected, atol=1e-9)
    del mask_B1T, calls[:]
    assert not len(conformer._SEEN)


def test_mask_changed_in_inference_mode_is_read_again() -> None:
    """Tensors that are made there do not record changes."""
    model = encoder("fastspeech2")
    tokens_BT = inputs("fastspeech2", padded=True)["input_tensor"]
    results = []
    with torch.inference_mode():
        for _ in range(2):
            mask_B1T = inputs("fastspeech2", padded=True)["attention_mask"].clone()
            for length in (9, 4):
                mask_B1T[1, :, length:] = 0
                results.append(model(tokens_BT, mask_B1T, return_dict=True).last_hidden_state)
            accelerate(model, implementation=KERNEL)
    torch.testing.assert_close(results[2:], results[:2], rtol=0, atol=1e-9)


def masks() -> dict[str, Tensor]:
    """Return masks for Wav2Vec2's attention, other than those of padding."""
    holes_BT = torch.arange(FRAMES) % 5 != torch.tensor([1, 2, 3])[:, None]
    left_BT = torch.arange(FRAMES) >= torch.tensor([0, 4, 9])[:, None]
    empty_BT = torch.arange(FRAMES) < torch.tensor([FRAMES, 0, 3])[:, None]
    added = torch.zeros(3, 1, FRAMES, FRAMES, dtype=torch.float64)
    added[..., 5] = -0.5
    of_heads = torch.rand(3, 3, FRAMES, FRAMES, generator=torch.Generator().manual_seed(1)) < 0.7
    of_heads[..., 0] = True
    return {
        "holes": holes_BT[:, None, None], "left": left_BT[:, None, None].expand(-1, -1, FRAMES, -1),
        "empty": empty_BT[:, None, None], "of one row": left_BT[1:2, None, None], "added": added, "heads": of_heads,
        "chunks": (torch.arange(FRAMES)[:, None] // 4 >= torch.arange(FRAMES) // 4)[None, None],
    }  # fmt: skip


@pytest.mark.parametrize("kind", masks())
def test_any_mask_is_that_of_transformers(kind: str) -> None:
    model = encoder("wav2vec2-conformer")
    attention = model.layers[0].self_attn
    hidden_BTD = inputs("wav2vec2-conformer", padded=False)["hidden_states"]
    given = {"attention_mask": masks()[kind], "relative_position_embeddings": model.embed_positions(hidden_BTD)}
    expected_BTD = attention(hidden_BTD, **given)[0]
    actual_BTD = accelerate(attention, implementation=KERNEL)(hidden_BTD, **given)[0]
    if kind == "empty":  # where transformers averages what is not to be seen
        expected_BTD = expected_BTD.index_fill(0, torch.tensor(1), 0)
        actual_BTD = actual_BTD.index_fill(0, torch.tensor(1), 0)
    torch.testing.assert_close(actual_BTD, expected_BTD, rtol=0, atol=1e-9)


def test_attention_probabilities_are_computed_as_before() -> None:
    model = encoder("wav2vec2-conformer", attention="eager")
    attention, hidden_BTD = model.layers[0].self_attn, inputs("wav2vec2-conformer", padded=False)["hidden_states"]
    given = {"relative_position_embeddings": model.embed_positions(hidden_BTD), "output_attentions": True}
    expected = attention(hidden_BTD, **given)
    accelerate(model, implementation=KERNEL)
    assert_same_tensors(attention(hidden_BTD, **given), expected)
    assert attention(hidden_BTD, relative_position_embeddings=given["relative_position_embeddings"])[1] is None
    speech = encoder("parakeet", attention="eager").float()
    arguments = arguments_of(speech, "parakeet", padded=True) | {"output_attentions": True}
    expected = speech(**arguments).attentions
    assert_same_tensors(accelerate(speech, implementation=KERNEL)(**arguments).attentions, expected)
    assert len(expected) == 2


def test_a_stream_in_chunks_equals_the_whole() -> None:
    """The cache of Nemotron's encoder, of the frames that its chunks see, is the memory of relative_attention."""
    model = encoder("nemotron")
    features = torch.randn(2, 41, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.inference_mode():
        expected_BTD = model(input_features=features).last_hidden_state
        accelerate(model, implementation=KERNEL)
        torch.testing.assert_close(model(input_features=features).last_hidden_state, expected_BTD, rtol=0, atol=1e-9)
        hidden, caches = [], {"past_key_values": None, "padding_cache": None}
        for part in features.split([5, 6, 6, 6, 6, 6, 6], dim=1):
            out = model(input_features=part, use_cache=True, **caches)
            caches = {"past_key_values": out.past_key_values, "padding_cache": out.padding_cache}
            hidden.append(out.last_hidden_state)
    torch.testing.assert_close(torch.cat(hidden, 1), expected_BTD, rtol=0, atol=1e-9)


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_chunks_with_memory_equal_the_banded_whole(chunk_size: int | None) -> None:
    """A long recording, read in chunks with their left context as memory, for `relative_attention` itself."""
    generator = torch.Generator().manual_seed(1)
    frames, left, part = 24, 6, 3 if chunk_size else 4
    q, k, v = (torch.randn(2, frames, 2, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    u, w = (torch.randn(2, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    r = torch.randn(2 * frames - 1, 2, 5, generator=generator, dtype=torch.float64)  # of 23, ..., -23
    band = {"causal": False, "chunk_size": chunk_size, "window": (left, 0), "implementation": KERNEL}
    whole = relative_attention(q, k, v, r, u, w, **band)
    parts = []
    for start in range(0, frames, part):
        seen, stop = slice(max(0, start - left), start + part), start + part
        num_keys = stop - seen.start
        position_keys = r[frames - num_keys : frames + part - 1]
        parts.append(relative_attention(q[:, start:stop], k[:, seen], v[:, seen], position_keys, u, w, **band))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)


def test_it_survives_copies_files_and_other_dtypes(tmp_path: Path) -> None:
    model = encoder("parakeet")
    torch.save(model.state_dict(), tmp_path / "before.pt")
    expected_BTD = outputs(model, "parakeet", padded=True)
    accelerate(accelerate(model, implementation=KERNEL), implementation=KERNEL)
    torch.save(model.state_dict(), tmp_path / "after.pt")
    torch.save(model, tmp_path / "whole.pt")
    before, after = (torch.load(tmp_path / f"{name}.pt") for name in ("before", "after"))
    assert_same_tensors(after, before)
    other = accelerate(encoder("parakeet"), implementation=KERNEL)
    other.load_state_dict(after)
    copies = [other, copy.deepcopy(model), torch.load(tmp_path / "whole.pt", weights_only=False), model.to("cpu")]
    for one in copies:
        torch.testing.assert_close(outputs(one, "parakeet", padded=True), expected_BTD, rtol=0, atol=1e-9)
        restore(one)
        torch.testing.assert_close(outputs(one, "parakeet", padded=True), expected_BTD, rtol=0, atol=0)
    with pytest.raises(UserError, match="was not accelerated"):
        restore(model)
    low = accelerate(encoder("parakeet").bfloat16(), implementation=KERNEL)
    out_BTD = low(**arguments_of(low, "parakeet", padded=True))
    assert out_BTD.last_hidden_state.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        mixed_BTD = outputs(accelerate(model.float(), implementation=KERNEL), "parakeet", padded=True)
    torch.testing.assert_close(mixed_BTD.double(), expected_BTD, rtol=0, atol=0.2)


def test_adapters_of_peft_are_trained_through_it() -> None:
    peft = pytest.importorskip("peft")
    model = encoder("wav2vec2-conformer")
    config = peft.LoraConfig(target_modules=["linear_q", "linear_v", "linear_pos"], init_lora_weights=False)
    adapted = peft.inject_adapter_in_model(config, model)
    expected = with_gradients_of_trained(adapted)
    actual = with_gradients_of_trained(accelerate(adapted, implementation=KERNEL))
    assert_same_tensors(actual, expected, atol=1e-9)
    assert len(expected) == 1 + 3 * 2 * 2


def with_gradients_of_trained(model: nn.Module) -> dict[str, Tensor]:
    out_BTD = outputs(model, "wav2vec2-conformer", padded=True)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return {"out": out_BTD.detach()} | dict(
        zip(named, torch.autograd.grad(out_BTD.sin().sum(), named.values()), strict=True)
    )


class Derived(transformers.models.parakeet.modeling_parakeet.ParakeetEncoderAttention):
    """Attention of a user."""


def changed(how: str) -> nn.Module:
    model = encoder("wav2vec2-conformer" if how in ("rotary", "bias") else "parakeet")
    attention = model.layers[-1].self_attn
    match how:
        case "forward":
            attention.forward = partial(attention.forward)
        case "derived":
            attention.__class__ = Derived
        case "added":
            attention.q_norm = nn.LayerNorm(8)
        case "grouped":
            attention.num_key_value_groups = 2
        case "bias":
            attention.pos_bias_u = None
        case "rotary":
            model = encoder("wav2vec2-conformer", position_embeddings_type="rotary")
        case "none":
            model = nn.Sequential(nn.Linear(2, 3))
    return model


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("forward", "the forward of a module ParakeetEncoderAttention was replaced"),
        ("derived", "Derived is derived from ParakeetEncoderAttention; give"),
        (
            "added",
            "ParakeetEncoderAttention of the installed transformers is not the one that is known: it has .*q_norm",
        ),
        ("grouped", "fewer heads of keys"),
        ("bias", "Wav2Vec2ConformerSelfAttention of the installed transformers is not"),
        (
            "rotary",
            "Wav2Vec2ConformerEncoder has no attention .*position_embeddings_type='rotary'.*; it does FastSpeech2",
        ),
        ("none", "Sequential has no attention that relative_attention computes; it does"),
    ],
)
def test_what_is_not_known_is_refused_and_left(how: str, message: str) -> None:
    model = changed(how)
    types = [type(module) for module in model.modules()]
    with pytest.raises(UserError, match=message):
        accelerate(model)
    assert [type(module) for module in model.modules()] == types


def test_another_equation_of_a_known_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder("parakeet").train()
    kind = type(model.layers[0].self_attn)
    shift = kind._rel_shift
    monkeypatch.setattr(kind, "_rel_shift", lambda self, scores: shift(self, scores.flip(-1)))
    with pytest.raises(UserError, match=r"outputs for random input differ by .*; use a version from"):
        accelerate(model, implementation=KERNEL)
    assert all(module.training for module in model.modules())
    assert type(model.layers[0].self_attn) is kind
