"""Slow reference implementation of Transformer-XL, written from the paper as loops over queries, keys and heads.

Tests compare the package with it. It shares no code with the package: it uses only the model's weights, by name. All
computation is in float64, without dropout.

Shape suffixes: B batch size, T new tokens, M memory slots, S = M + T keys, P distances, D model width, N heads, H head
width, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class KeyMask:
    """Which keys a query attends to."""

    valid: list[int]
    """Number of valid memory slots of each batch row, which are the last ones."""
    window: int | None = None
    """Number of keys that a query attends to, its own position included, or None for all."""


def attention(q, k, v, position_keys, u, w, key_mask, sinks=None):
    """Return relative attention (B, T, N, H).

    Shapes: q (B, T, N, H), k and v (B, S, N, H), position_keys (P, N, H) in descending order of distance, the content
    bias u and the position bias w (the paper's v) (N, H); sinks (N,), or None: a further score, of no key.
    """
    batch_size, num_queries, num_heads, d_head = q.shape
    num_keys, num_distances = k.shape[1], position_keys.shape[0]
    memory = num_keys - num_queries
    out = []
    for b in range(batch_size):
        for i in range(num_queries):
            for n in range(num_heads):
                scores, values = [], []
                for j in range(num_keys):
                    distance = memory + i - j
                    is_empty = j < memory - key_mask.valid[b]
                    is_beyond_window = key_mask.window is not None and distance >= key_mask.window
                    if distance < 0 or is_empty or is_beyond_window:
                        continue
                    r = position_keys[num_distances - 1 - distance, n]
                    content, position = (q[b, i, n] * k[b, j, n]).sum(), (q[b, i, n] * r).sum()
                    content_bias, position_bias = (u[n] * k[b, j, n]).sum(), (w[n] * r).sum()
                    scores.append((content + position + content_bias + position_bias) / math.sqrt(d_head))
                    values.append(v[b, j, n])
                if sinks is not None:
                    scores, values = [*scores, sinks[n]], [*values, torch.zeros_like(v[b, 0, n])]
                highest = max(score.item() for score in scores)
                weights = [torch.exp(score - highest) for score in scores]
                total = sum(weights)
                out.append(sum(weight / total * value for weight, value in zip(weights, values, strict=True)))
    return torch.stack(out).view(batch_size, num_queries, num_heads, d_head)


def sinusoid(distance, width, clamp=None):
    """Return the encoding R[d] of a distance (or position): sines of all frequencies, then cosines."""
    d = distance if clamp is None else min(distance, clamp)
    angles = [d / 10000 ** (2 * i / width) for i in range(width // 2)]
    return torch.tensor([math.sin(x) for x in angles] + [math.cos(x) for x in angles], dtype=torch.float64)


def layer_norm(x, weight, bias):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * weight + bias  # torch's default epsilon


def rms_norm(x, weight):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5) * weight


def layer_weights(weights, index):
    """Return the weights of one layer, by their names within the layer."""
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def transformer_layer(layer, x, memory, position_keys, u, w, key_mask, pre_norm, added=0, key_offset=False):
    """Return the output (B, T, D) of a layer with these weights, of x (B, T, D) after memory (B, M, D).

    The other arguments are those of `attention`; pre_norm applies LayerNorm at the start of each residual branch;
    added (B, M + T, N, H) is added to the values, through a gate if the layer has one; with key_offset memory is
    (B, M + 1, D), and half of each key is that of the token before, or 0 where none is (whose state is 0).
    """
    norm = layer["attention.norm.weight"], layer["attention.norm.bias"]
    context = torch.cat([memory, x], dim=1)
    is_token = (context != 0).any(-1)
    is_token[:, 0] &= memory.shape[1] > 1  # without slots the first token sees none before it
    context = layer_norm(context, *norm) if pre_norm else context
    q, k, v = (
        (states @ layer[f"attention.{name}.weight"].T).unflatten(-1, u.shape)
        for name, states in (("q_proj", context[:, memory.shape[1] :]), ("k_proj", context), ("v_proj", context))
    )
    if "attention.q_norm.weight" in layer:
        q, k = rms_norm(q, layer["attention.q_norm.weight"]), rms_norm(k, layer["attention.k_norm.weight"])
    if key_offset:
        before, first = k[:, :-1] * is_token[:, :-1, None, None], math.ceil(u.shape[1] / 2)
        k = torch.stack([(k[:, 1:] if h < first else before)[..., h] for h in range(u.shape[1])], dim=-1)
        context, v = context[:, 1:], v[:, 1:]
    if "attention.value_embedding.gate" in layer:
        gate = layer["attention.value_embedding.gate"]
        v = v + 2 * torch.sigmoid(context[..., : gate.shape[1]] @ gate.T)[..., None] * added
    sinks = 16 * layer["attention.sinks"] if "attention.sinks" in layer else None
    attended = attention(q, k, v, position_keys, u, w, key_mask, sinks).flatten(-2)
    x = x + attended @ layer["attention.o_proj.weight"].T
    x = x if pre_norm else layer_norm(x, *norm)

    norm = layer["feed_forward.norm.weight"], layer["feed_forward.norm.bias"]
    inner = layer_norm(x, *norm) if pre_norm else x
    inner = torch.relu(inner @ layer["feed_forward.up_proj.weight"].T + layer["feed_forward.up_proj.bias"])
    x = x + inner @ layer["feed_forward.down_proj.weight"].T + layer["feed_forward.down_proj.bias"]
    return x if pre_norm else layer_norm(x, *norm)


def embed(weights, tokens, earlier=None):
    """Return the embeddings of the tokens times the square root of their width, (B, T, D), with those of n-grams.

    Args:
        weights: the state dict; with weights of n-grams, their embeddings are added.
        tokens: (B, T).
        earlier: the tokens before them that the memory remembers, or None if there are none.
    """
    table = weights["embedding.tables.0"]
    x = table[tokens] * math.sqrt(table.shape[1])
    earlier = tokens[:, :0] if earlier is None else earlier
    for order in range(2, 2 + sum(name.startswith("ngrams.tables.") for name in weights)):
        table, projection = (weights[f"ngrams.{name}.{order - 2}"] for name in ("tables", "projections"))
        rows = []
        for row, before in zip(tokens.tolist(), earlier.tolist(), strict=True):
            numbers = [0] * order + [token + 1 for token in [*before, *row]]  # 0: no token
            for end in range(len(numbers) - len(row), len(numbers)):
                value = numbers[end]
                for number in reversed(numbers[end + 1 - order : end]):
                    value = (value * 1_000_003 + number) % (2**31 - 1)
                rows.append(table[value % len(table)] * math.sqrt(table.shape[1]) @ projection.T)
        x = x + torch.stack(rows).view(x.shape)
    return x


def value_embeddings(weights, index, tokens, earlier, num_memory, shape):
    """Return what a layer adds to the values of memory and tokens (B, M + T, N, H), or 0."""
    name = f"layers.{index}.attention.value_embedding.table.weight"
    if name not in weights:
        return 0
    table = weights[name] * math.sqrt(weights["embedding.tables.0"].shape[1])
    rows = torch.zeros(len(tokens), num_memory, table.shape[1], dtype=table.dtype)
    if earlier is not None and earlier.shape[1]:
        rows[:, num_memory - earlier.shape[1] :] = table[earlier]
    return torch.cat([rows, table[tokens]], dim=1).unflatten(-1, shape)


def final_norm(weights, x):
    """Return x after the LayerNorm of the last layer, if the model has one."""
    return (
        layer_norm(x, weights["final_norm.weight"], weights["final_norm.bias"]) if "final_norm.weight" in weights else x
    )


def logits(weights, x):
    """Return the logits (B, T, V) of the last hidden states x; the softmax shares the embedding's weights."""
    return x @ weights["embedding.tables.0"].T + weights["softmax.bias"]


def forward(weights, settings, tokens, memory, valid, earlier=None):
    """Return the logits (B, T, V) of one segment, the new memory, and the new numbers of valid slots.

    Arguments: weights, the state dict in float64; settings, a dictionary of pre_norm, tied (all layers share the
    attention biases), window (attention window or None), clamp (clamp length or None) and, if so, key_offset; tokens
    (B, T); memory, a list of L tensors (B, M, D), with key_offset (B, M + 1, D); valid, the number of valid slots of
    each batch row; earlier, as for `embed`.
    """
    x, new_memory, offset = embed(weights, tokens, earlier), [], settings.get("key_offset", False)
    num_memory, num_new = memory[0].shape[1] - offset, tokens.shape[1]
    num_distances = num_memory + num_new
    if settings["window"] is not None:
        num_distances = min(num_distances, settings["window"])
    encodings = torch.stack([sinusoid(d, x.shape[-1], settings["clamp"]) for d in range(num_distances - 1, -1, -1)])
    for index, old in enumerate(memory):
        new_memory.append(torch.cat([old, x], dim=1)[:, num_new:].detach().clone())
        layer, pair = layer_weights(weights, index), 0 if settings["tied"] else index
        u, w = weights["content_bias"][pair], weights["position_bias"][pair]
        position_keys = (encodings @ layer["attention.r_proj.weight"].T).unflatten(-1, u.shape)
        key_mask = KeyMask(valid, settings["window"])
        added = value_embeddings(weights, index, tokens, earlier, num_memory, u.shape)
        x = transformer_layer(layer, x, old, position_keys, u, w, key_mask, settings["pre_norm"], added, offset)
    new_valid = [min(count + num_new, num_memory) for count in valid]
    return logits(weights, final_norm(weights, x)), new_memory, new_valid
