"""The parts of the regularised Penn Treebank model: dropout with one mask for all tokens, tied keys, biases that are a
query, penalties of activations, the extended context, and the temperature.

Sizes are those of the fixture `make_model` (tests/conftest.py): 3 layers, width 14, 2 heads of width 5, feed-forward
width 19, 23 tokens in the vocabulary.

Shape suffixes: B batch size, T targets, C tokens of the extended context, X = C + T, P distances, D model width, N
heads, H head width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_configs import model_config
from reference import forward as oracle
from reference import layer_norm, layer_weights, sinusoid
from tensors import assert_same_tensors, named_gradients, run_parts
from torch import Tensor

from transformer_xl.architectures import build_model
from transformer_xl.config import UserError
from transformer_xl.inference import prepare_inference
from transformer_xl.model.memory import ContextLimits
from transformer_xl.ops import dropout
from transformer_xl.ops.dropout import FastDropout, drop_vocabulary

AUTHORS = {
    "dropout": 0.2, "embedding_dropout": 0.25, "input_dropout": 0.6, "output_dropout": 0.5, "variational_dropout": True,
    "attention_dropout": 0.3, "qkv_dropout": 0.35, "learned_attention_biases": False, "tie_key_projections": True,
    "activation_penalty": 0.2, "temporal_activation_penalty": 0.1,
}  # fmt: skip
QUERY_BIASES = {"learned_attention_biases": False, "tie_key_projections": True}


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("token_dim", [0, 1])
def test_variational_dropout_is_constant_over_tokens_and_differs_between_sequences(relu: bool, token_dim: int) -> None:
    torch.manual_seed(5)
    x = torch.rand(31, 37, 41, dtype=torch.float64) + 0.1
    x.requires_grad_()
    out = FastDropout(0.6, relu=relu, variational=True)(x, token_dim)
    scale = (out / x).detach()
    one = scale.narrow(token_dim, 0, 1)
    torch.testing.assert_close(scale, one.expand_as(scale), rtol=0, atol=1e-14)
    torch.testing.assert_close(one, (one > 0).double() * 2.5, rtol=0, atol=1e-14)
    assert abs((one == 0).double().mean().item() - 0.6) < 0.03
    rows = one.flatten(1) if token_dim else one[0]
    assert not torch.equal(rows[0], rows[1])
    weight = torch.randn_like(x)
    (grad,) = torch.autograd.grad((out * weight).sum(), x)
    torch.testing.assert_close(grad, weight * scale, rtol=0, atol=1e-13)


def test_vocabulary_dropout_drops_all_occurrences_of_a_token() -> None:
    torch.manual_seed(2)
    tokens_BT = torch.randint(0, 400, (7, 501))
    x_BTD = torch.rand(7, 501, 3, dtype=torch.float64) + 0.1
    scale_BTD = drop_vocabulary(x_BTD, tokens_BT, 0.2, 400) / x_BTD
    assert (scale_BTD[:, 0] == 1).all()
    by_token: dict[int, set[float]] = {token: set() for token in range(400)}
    for token, values in zip(tokens_BT[:, 1:].flatten().tolist(), scale_BTD[:, 1:].flatten(0, 1).tolist(), strict=True):
        by_token[token] |= {round(value, 9) for value in values}
    assert all(values in ({0.0}, {1.25}) for values in by_token.values())
    assert abs(sum(values == {0.0} for values in by_token.values()) / len(by_token) - 0.2) < 0.07


class Masks:
    """Records the masks that are drawn, as factors, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn: list[tuple[tuple[int, ...], float, Tensor]] = []
        draw = dropout._mask

        def mask(x: Tensor, p: float) -> Tensor:
            keep = draw(x, p)
            self.drawn.append((tuple(x.shape), p, keep.double() / (1 - p)))
            return keep

        def plain(x: Tensor, p: float = 0.5) -> Tensor:
            scale = (torch.rand(x.shape) >= p).double() / (1 - p)
            self.drawn.append((tuple(x.shape), p, scale))
            return x * scale

        monkeypatch.setattr(dropout, "_mask", mask)
        monkeypatch.setattr("torch.nn.functional.dropout", plain)


def losses_by_hand(
    weights: dict[str, Tensor], masks: Iterator[Tensor], tokens_BX: Tensor, targets_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Return losses (B, T) and penalties (B, T) of the model with AUTHORS, for the masks in their order."""
    (batch_size, num_inputs), num_targets, table_VD = (
        tokens_BX.shape,
        targets_BT.shape[1],
        weights["embedding.tables.0"],
    )
    vocabulary_BX = next(masks)[tokens_BX]
    vocabulary_BX[:, 0] = 1  # the first token is never dropped
    x_BXD = table_VD[tokens_BX] * math.sqrt(14) * vocabulary_BX[..., None] * next(masks)
    encoding_PD = torch.stack([sinusoid(distance, 14) for distance in range(num_inputs)]).flip(0) * next(masks)
    for index in range(3):
        layer = layer_weights(weights, index)
        query, key, value = (layer[f"attention.{name}_proj.weight"].T for name in "qkv")
        q_BXNH, k_BXNH, v_BXNH = (
            (x_BXD @ weight).unflatten(-1, (2, 5)) * next(masks) for weight in (query, key, value)
        )
        r_PNH = (encoding_PD @ key).unflatten(-1, (2, 5)) * next(masks)
        u_NH = (encoding_PD[-1] @ query).unflatten(-1, (2, 5)) * next(masks)[0]
        scale_BNXX, out_BXNH = next(masks), []
        for b in range(batch_size):
            for i in range(num_inputs):
                for n in range(2):
                    with_bias_H = q_BXNH[b, i, n] + u_NH[n]
                    scores = torch.stack(
                        [
                            with_bias_H @ (k_BXNH[b, j, n] + r_PNH[num_inputs - 1 - (i - j), n]) / math.sqrt(5)
                            for j in range(i + 1)
                        ]
                    )
                    attended = scores.softmax(0) * scale_BNXX[b, n, i, : i + 1]
                    out_BXNH.append(attended @ v_BXNH[b, : i + 1, n])
        attended_BXD = torch.stack(out_BXNH).view(batch_size, num_inputs, -1) @ layer["attention.o_proj.weight"].T
        x_BXD = layer_norm(
            x_BXD + attended_BXD * next(masks), layer["attention.norm.weight"], layer["attention.norm.bias"]
        )
        inner_BXF = x_BXD @ layer["feed_forward.up_proj.weight"].T + layer["feed_forward.up_proj.bias"]
        inner_BXF = inner_BXF.clamp(min=0) * next(masks)
        outer_BXD = inner_BXF @ layer["feed_forward.down_proj.weight"].T + layer["feed_forward.down_proj.bias"]
        x_BXD = layer_norm(
            x_BXD + outer_BXD * next(masks), layer["feed_forward.norm.weight"], layer["feed_forward.norm.bias"]
        )
    hidden_BTD = x_BXD[:, num_inputs - num_targets :]
    logits_BTV = (hidden_BTD * next(masks)) @ table_VD.T + weights["softmax.bias"]
    nats_BT = -logits_BTV.log_softmax(-1).gather(-1, targets_BT[..., None])[..., 0]
    penalty = 0.2 * hidden_BTD.square().mean()
    penalty = (
        penalty
        + 0.1
        * torch.stack([(hidden_BTD[:, i] - hidden_BTD[:, i - 1]).square().mean() for i in range(1, num_targets)]).mean()
    )
    return nats_BT, penalty


def test_training_losses_equal_plain_computation_with_the_same_masks(make_model, tokens, monkeypatch) -> None:
    """Losses, penalties and all gradients, with four tokens of extended context before five targets."""
    model = make_model(**AUTHORS, attn_implementation="reference").train()
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    assert not {name for name in weights if "r_proj" in name or name in ("content_bias", "position_bias")}
    tokens_BX, targets_BT = tokens(3, 9), tokens(3, 5, seed=8)
    masks = Masks(monkeypatch)
    nats_BT, penalties_BT, _ = model.training_losses(
        tokens_BX, targets_BT, model.initial_memory(3, ContextLimits(0)), progress=0.0
    )
    # queries, keys, values, position keys and biases; probabilities; attention output; feed-forward
    layer = [
        *[((3, 1, 2, 5), 0.35)] * 3, ((1, 2, 5), 0.35), ((1, 2, 5), 0.35), ((3, 2, 9, 9), 0.3),
        ((3, 1, 14), 0.2), ((3, 1, 19), 0.2), ((3, 1, 14), 0.2),
    ]  # fmt: skip
    # the vocabulary, the embedding, the encodings, three layers, the last hidden states
    expected = [((23,), 0.25), ((3, 1, 14), 0.6), ((1, 14), 0.6), *layer * 3, ((3, 1, 14), 0.5)]
    assert [(shape, p) for shape, p, _ in masks.drawn] == expected
    monkeypatch.undo()
    by_hand_BT, penalty = losses_by_hand(weights, (mask for _, _, mask in masks.drawn), tokens_BX, targets_BT)
    torch.testing.assert_close(nats_BT, by_hand_BT, rtol=0, atol=1e-10)
    torch.testing.assert_close(penalties_BT.mean(), penalty, rtol=0, atol=1e-12)
    gradients = named_gradients((nats_BT + penalties_BT).mean(), model)
    assert_same_tensors(gradients, named_gradients(by_hand_BT.mean() + penalty, weights), rtol=1e-9, atol=1e-11)


def test_gradients_are_finite_at_initial_weights(tokens) -> None:
    """In as many layers as the recipe has, with half of the vocabulary dropped: biases are 0, so a sequence whose first
    token was dropped would have states of 0 and gradients that overflow."""
    torch.manual_seed(1)
    config = model_config(**AUTHORS | {"embedding_dropout": 0.5}, n_layers=16, d_model=38, n_heads=2, vocab_size=23)
    model = build_model(config, memory_length=0).train()
    nats_BT, _, _ = model.training_losses(tokens(7, 9), tokens(7, 5), model.initial_memory(7), progress=0.0)
    nats_BT.mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("kernel", ["cpu", "sdpa"])
def test_kernels_give_the_same_losses_and_gradients(make_model, tokens, kernel) -> None:
    """Without dropout of the probabilities, whose masks differ between kernels."""
    results = []
    for name in ("reference", kernel):
        model = make_model(**{**AUTHORS, "attention_dropout": 0.0}, attn_implementation=name).train()
        torch.manual_seed(3)
        nats_BT, penalties_BT, _ = model.training_losses(
            tokens(3, 9), tokens(3, 5, seed=8), model.initial_memory(3, ContextLimits(0)), progress=0.0
        )
        results.append(named_gradients((nats_BT + penalties_BT).mean(), model) | {"nats": nats_BT.detach()})
    assert_same_tensors(*results, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("settings", [QUERY_BIASES, {"tie_key_projections": True}, {"learned_attention_biases": False}])
def test_tied_keys_and_query_biases_equal_the_oracle_with_these_weights(make_model, tokens, settings) -> None:
    """With memory: the oracle gets the weights of the keys for position keys, and W_q R[0] of each layer as u and v."""
    model = make_model(**settings)
    weights = dict(model.named_parameters())
    for index in range(3):
        layer = f"layers.{index}.attention."
        if model.config.tie_key_projections:
            weights[f"{layer}r_proj.weight"] = weights[f"{layer}k_proj.weight"]
    if not model.config.learned_attention_biases:
        queries = [weights[f"layers.{index}.attention.q_proj.weight"] @ sinusoid(0, 14) for index in range(3)]
        weights["content_bias"] = weights["position_bias"] = torch.stack(queries).unflatten(-1, (2, 5))
    limits = ContextLimits(7, clamp_length=4)
    oracle_settings = {
        "pre_norm": False, "tied": model.config.learned_attention_biases, "window": None, "clamp": 4,
    }  # fmt: skip
    expected_memory, valid = [torch.zeros(2, 7, 14, dtype=torch.float64)] * 3, [0, 0]
    memory, parts = model.initial_memory(2, limits), [tokens(2, 5), tokens(2, 3, seed=1)]
    for text in parts:
        hidden_BTD, memory = model(text, memory)
        expected, expected_memory, valid = oracle(weights, oracle_settings, text, expected_memory, valid)
        torch.testing.assert_close(model.logits(hidden_BTD), expected, rtol=0, atol=1e-10)
    actual = named_gradients(model.logits(hidden_BTD).pow(2).sum(), model)
    assert_same_tensors(actual, named_gradients(expected.pow(2).sum(), model), rtol=1e-9, atol=1e-9)
    # a KV cache, also token by token, where the position keys are in the cache
    plain_BTD, _ = run_parts(model, model.initial_memory(2, limits), *parts)
    prepared = prepare_inference(model)
    cached_BTD, _ = run_parts(prepared, prepared.initial_memory(2, limits), *parts[0].split(1, 1), parts[1])
    alone_BTD, _ = run_parts(model, model.initial_memory(2, limits), *parts[0].split(1, 1), parts[1])
    torch.testing.assert_close(cached_BTD, alone_BTD, rtol=0, atol=1e-10)
    assert plain_BTD.shape == cached_BTD.shape


def test_extended_context_gets_a_gradient_and_no_loss(make_model, tokens) -> None:
    """Token 22 occurs in the context only; its embedding gets a gradient, which it does not through a memory."""
    model = make_model(tie_word_embeddings=False)
    context_BC, inputs_BT, targets_BT = (
        tokens(2, 4).clamp(max=21),
        tokens(2, 5, seed=1).clamp(max=21),
        tokens(2, 5, seed=2),
    )
    context_BC[0, 1] = 22
    whole_BTD, _ = model(torch.cat([context_BC, inputs_BT], 1), model.initial_memory(2, ContextLimits(0)))
    expected_BT = model.nats(whole_BTD[:, 4:], targets_BT)
    actual_BT, _, _ = model.training_losses(
        torch.cat([context_BC, inputs_BT], 1), targets_BT, model.initial_memory(2, ContextLimits(0)), progress=0.0
    )
    assert torch.equal(actual_BT, expected_BT)
    (gradient_VD,) = torch.autograd.grad(actual_BT.sum(), model.embedding.tables[0])
    assert gradient_VD[22].abs().min() > 1e-6
    _, memory = model(context_BC, model.initial_memory(2, ContextLimits(4)))
    nats_BT, _, _ = model.training_losses(inputs_BT, targets_BT, memory, progress=0.0)
    torch.testing.assert_close(nats_BT, expected_BT)
    (gradient_VD,) = torch.autograd.grad(nats_BT.sum(), model.embedding.tables[0])
    assert not gradient_VD[22].any()


def test_penalties_are_off_by_default_and_those_of_one_token_have_no_change(make_model, tokens) -> None:
    model = make_model(activation_penalty=0.3, temporal_activation_penalty=0.7)
    memory = model.initial_memory(2, ContextLimits(0))
    _, penalties_BT, _ = model.training_losses(tokens(2, 6), tokens(2, 1, seed=1), memory, progress=0.0)
    hidden_BTD, _ = model(tokens(2, 6), memory)
    torch.testing.assert_close(penalties_BT, 0.3 * hidden_BTD[:, -1:].square().mean(-1))
    assert not make_model().training_losses(tokens(2, 6), tokens(2, 6), memory, progress=0.0)[1].any()


@pytest.mark.parametrize(("cutoffs", "chunked"), [((), False), ((), True), ((5, 11), True)])
def test_temperature_divides_the_logits(make_model, tokens, monkeypatch, cutoffs, chunked) -> None:
    if chunked:
        monkeypatch.setattr("transformer_xl.model.adaptive.fits_at_once", lambda *_: False)
        monkeypatch.setattr("transformer_xl.model.adaptive._PART", 3)
    model, targets_BT = make_model(cutoffs=cutoffs), tokens(2, 5, seed=1)
    hidden_BTD, _ = model(tokens(2, 5))
    logits_BTV = model.logits(hidden_BTD) / 1.7
    expected_BT = -logits_BTV.log_softmax(-1).gather(-1, targets_BT[..., None])[..., 0]
    torch.testing.assert_close(model.nats(hidden_BTD, targets_BT, temperature=1.7), expected_BT, rtol=0, atol=1e-10)
    with pytest.raises(UserError, match="temperature must be above 0, not 0"):
        model.nats(hidden_BTD, targets_BT, temperature=0)


@pytest.mark.parametrize("architecture", ["vaswani", "lstm", "shaw"])
def test_other_architectures_have_the_dropout_and_the_penalties_too(tokens, architecture) -> None:
    """Only that each setting has an effect."""
    names = (
        "embedding_dropout",
        "input_dropout",
        "output_dropout",
        "activation_penalty",
        "temporal_activation_penalty",
    )
    base: dict[str, Any] = {"architecture": architecture, "vocab_size": 23, "n_layers": 2, "d_model": 14, "n_heads": 2}
    base |= {"d_ff": 19, "dropout": 0.0} | ({"max_relative_positions": 5} if architecture == "shaw" else {})

    def losses(**settings: Any) -> Tensor:
        torch.manual_seed(1)
        model = build_model(model_config(**base, **settings), memory_length=0).train()
        torch.manual_seed(2)
        nats_BT, auxiliary_BT, _ = model.training_losses(
            tokens(2, 5), tokens(2, 3, seed=1), model.initial_memory(2), progress=0.0
        )
        return nats_BT + auxiliary_BT

    plain_BT = losses()
    for name in names:
        assert not torch.equal(losses(**{name: 0.5}), plain_BT), name
    assert torch.equal(losses(variational_dropout=True), plain_BT)
