"""Attention of a whole text as plain loops over places, from the paper and the weights alone; float64.

What stands in memory was computed when it was read and never again, so each layer has one input for each place, and a
query of a segment that begins at b sees the keys from b - M on, as far as the window goes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from reference import layer_norm, sinusoid


@dataclass
class Seen:
    """Of one layer and head: numbers by (query, key), places in the text."""

    terms: dict[tuple[int, int], tuple[float, float, float, float]] = field(default_factory=dict)
    probability: dict[tuple[int, int], float] = field(default_factory=dict)


def attention_of(model, tokens, segment, context_limits):
    """The numbers of every layer and head, as a dictionary by (layer, head)."""
    weights, config = dict(model.state_dict()), model.config
    width, heads, d_head = config.d_model, config.n_heads, config.head_dim
    x = weights["embedding.tables.0"][tokens] * math.sqrt(width)
    found = {}
    for layer in range(config.n_layers):

        def part(name, layer=layer):
            return weights[f"layers.{layer}.{name}"]

        def position_key(distance, part=part):
            """Of all heads: (N, H)."""
            if config.architecture == "shaw":
                keys = part("attention.distance_keys")
                return keys[min(distance, len(keys) - 1)]
            encoding = sinusoid(distance, width, context_limits.clamp_length)
            return (part("attention.r_proj.weight") @ encoding).view(heads, d_head)

        q, k, v = (
            (x @ part(f"attention.{name}.weight").T).view(-1, heads, d_head) for name in ("q_proj", "k_proj", "v_proj")
        )
        u = w = torch.zeros(heads, d_head, dtype=torch.float64)
        if config.architecture != "shaw":
            pair = 0 if config.tie_attention_biases else layer
            u, w = weights["content_bias"][pair], weights["position_bias"][pair]
        attended = torch.zeros_like(q)
        for head in range(heads):
            seen = found[layer, head] = Seen()
            for i in range(len(tokens)):
                first = max(0, i - i % segment - context_limits.memory_length)
                keys = [
                    j
                    for j in range(first, i + 1)
                    if context_limits.attention_window is None or i - j < context_limits.attention_window
                ]
                scores = []
                for j in keys:
                    r = position_key(i - j)[head]
                    four = (q[i, head] @ k[j, head], q[i, head] @ r, u[head] @ k[j, head], w[head] @ r)
                    seen.terms[i, j] = tuple(float(term) / math.sqrt(d_head) for term in four)
                    scores.append(sum(seen.terms[i, j]))
                total = sum(math.exp(score) for score in scores)
                for j, score in zip(keys, scores, strict=True):
                    seen.probability[i, j] = math.exp(score) / total
                    attended[i, head] += seen.probability[i, j] * v[j, head]
        x = x + attended.flatten(1) @ part("attention.o_proj.weight").T
        x = layer_norm(x, part("attention.norm.weight"), part("attention.norm.bias"))
        inner = torch.relu(x @ part("feed_forward.up_proj.weight").T + part("feed_forward.up_proj.bias"))
        x = x + inner @ part("feed_forward.down_proj.weight").T + part("feed_forward.down_proj.bias")
        x = layer_norm(x, part("feed_forward.norm.weight"), part("feed_forward.norm.bias"))
    return found
