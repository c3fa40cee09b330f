"""Slow reference implementations of the paper's baselines, as plain loops in float64.

They take the models' weights by name, and use no code of the package.

Shape suffixes: B batch size, T new tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import torch
from reference import KeyMask, embed, final_norm, layer_weights, logits, sinusoid, transformer_layer
from tensors import assert_same_tensors, named_gradients


def shaw(weights, tokens, memory, *, slots, pre_norm=False, window=None):
    """Return logits (B, T, V) and the next memory: for each layer its last inputs (B, at most `slots`, D).

    `slots` is the number of memory slots; `window` is the attention window, or None for all keys.
    """
    x, next_memory = embed(weights, tokens), []
    for index, old in enumerate(memory):
        layer, num_keys = layer_weights(weights, index), old.shape[1] + x.shape[1]
        table = layer["attention.distance_keys"]
        next_memory.append(torch.cat([old, x.detach()], dim=1)[:, max(0, num_keys - slots) :])
        position_keys = torch.stack([table[min(d, len(table) - 1)] for d in range(num_keys - 1, -1, -1)])
        zeros, key_mask = torch.zeros_like(table[0]), KeyMask([old.shape[1]] * len(x), window)
        x = transformer_layer(layer, x, old, position_keys, zeros, zeros, key_mask, pre_norm)
    return logits(weights, final_norm(weights, x)), next_memory


def absolute(weights, tokens, *, layers, heads, pre_norm=False, window=None):
    """Return the output (B, T, D) of every layer, after the final LayerNorm if the model has one."""
    x, outputs = embed(weights, tokens), []
    num_new, width = x.shape[1:]
    if "position_embeddings" not in weights:
        x = x + torch.stack([sinusoid(position, width) for position in range(num_new)])
    for index in range(layers):
        if "position_embeddings" in weights:
            x = x + weights["position_embeddings"][index, :num_new]
        layer = layer_weights(weights, index)
        d_head = len(layer["attention.q_proj.weight"]) // heads
        # position keys and biases of zero: ordinary attention
        no_keys, no_bias = torch.zeros(num_new, heads, d_head).double(), torch.zeros(heads, d_head).double()
        x = transformer_layer(layer, x, x[:, :0], no_keys, no_bias, no_bias, KeyMask([0] * len(x), window), pre_norm)
        outputs.append(final_norm(weights, x))
    return outputs


def auxiliary(weights, outputs, targets, progress):
    """Return the sum of the auxiliary losses of Al-Rfou et al. 2018 in nats for each batch row, (B,).

    Layer l of L predicts the next token until the fraction l / (2 L) of training (`progress`), and the token after the
    next at half the weight. `outputs` is the result of `absolute`.
    """
    total, num_layers = torch.zeros(len(targets), dtype=torch.float64), len(outputs)
    for number, output in enumerate(outputs, start=1):
        if number < num_layers and progress >= number / (2 * num_layers):
            continue
        for kind, offset, factor in (("next", 0, 1.0), ("second", 1, 0.5)):
            name = f"{kind}_heads.{number}"
            if f"{name}.weight" not in weights:
                continue
            for b in range(len(targets)):
                for t in range(targets.shape[1] - offset):
                    score = weights[f"{name}.weight"] @ output[b, t] + weights[f"{name}.bias"]
                    total[b] = total[b] + factor * (torch.logsumexp(score, 0) - score[targets[b, t + offset]])
    return total


def lstm(weights, tokens, states, *, layers):
    """Return logits (B, T, V) and the next states: for each layer h and c, (B, D) each."""
    x, next_states = embed(weights, tokens), []
    for index in range(layers):
        layer, (h, c), outputs = layer_weights(weights, index), states[index], []
        for t in range(x.shape[1]):
            gates = x[:, t] @ layer["input_weight"].T + h @ layer["recurrent_weight"].T + layer["bias"]
            i, f, z, o = gates.chunk(4, dim=-1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        x = torch.stack(outputs, dim=1)
        next_states.append((h.detach(), c.detach()))
    return logits(weights, x), next_states


def qrnn(weights, tokens, states, *, layers, change_forget_gates=None):
    """Return logits (B, T, V) and the next states: for each layer c (B, D), and the previous inputs (B, 0 or 1, D).

    `change_forget_gates(index, f)` may change the forget gates (B, T, D) of a layer.
    """
    x, next_states = embed(weights, tokens), []
    for index in range(layers):
        layer, (c, previous), outputs = layer_weights(weights, index), states[index], []
        inputs, num_previous = torch.cat([previous, x], dim=1), previous.shape[1]
        gates = []
        for t in range(x.shape[1]):
            gate_inputs = torch.cat([inputs[:, t + offset] for offset in range(num_previous + 1)], dim=-1)
            gates.append(gate_inputs @ layer["gates.weight"].T + layer["gates.bias"])
        z, f, o = torch.stack(gates, dim=1).chunk(3, dim=-1)
        f = torch.sigmoid(f) if change_forget_gates is None else change_forget_gates(index, torch.sigmoid(f))
        for t in range(x.shape[1]):
            c = f[:, t] * c + (1 - f[:, t]) * torch.tanh(z[:, t])
            outputs.append(torch.sigmoid(o[:, t]) * c)
        x = torch.stack(outputs, dim=1)
        next_states.append((c.detach(), inputs[:, inputs.shape[1] - num_previous :].detach()))
    return logits(weights, x), next_states


def copied_weights(model):
    """Return a copy of the model's weights by name, for separate gradients."""
    return {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}


def assert_same_gradients(model, result, weights, expected):
    """Compare the gradients of two scalars, one computed from the model's parameters, one from the copied weights."""
    assert_same_tensors(named_gradients(result, model), named_gradients(expected, weights), rtol=1e-9, atol=1e-9)
