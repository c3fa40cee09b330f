"""Slow reference for the attention of a whole text: loops over positions, from the paper and the weights; float64.

Cached hidden states are never recomputed, so each layer has one input for each position, and a query of a segment that
starts at position b attends to the keys from b - M on (M memory slots), as far as the attention window allows. Layers
normalize after each residual branch, and Shaw's attention has a learned vector for each distance instead of a
sinusoidal encoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from reference import layer_norm, sinusoid


@dataclass
class HeadAttention:
    """The attention of one layer and head, by (query, key), which are positions in the text."""

    terms: dict[tuple[int, int], tuple[float, float, float, float]] = field(default_factory=dict)
    """Content, position, content bias and position bias (paper section 3.3), each divided by sqrt(d_head)."""
    probability: dict[tuple[int, int], float] = field(default_factory=dict)


def attention_of(model, tokens, segment, context_limits):
    """Return the attention of every layer and head, by (layer, head), for a text read in segments of `segment`
    tokens."""
    weights, config = dict(model.state_dict()), model.config
    width, heads, d_head = config.d_model, config.n_heads, config.head_dim
    x = weights["embedding.tables.0"][tokens] * math.sqrt(width)
    result = {}
    for layer in range(config.n_layers):

        def weight(name, layer=layer):
            return weights[f"layers.{layer}.{name}"]

        def position_key(distance, weight=weight):
            """Return the position keys of all heads for a distance, (heads, d_head)."""
            if config.architecture == "shaw":
                keys = weight("attention.distance_keys")
                return keys[min(distance, len(keys) - 1)]
            encoding = sinusoid(distance, width, clamp=context_limits.clamp_length)
            return (weight("attention.r_proj.weight") @ encoding).view(heads, d_head)

        q, k, v = (
            (x @ weight(f"attention.{name}.weight").T).view(-1, heads, d_head)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        # content bias u and position bias w (the paper's v), zero for Shaw's attention; tied biases are stored once
        u = w = torch.zeros(heads, d_head, dtype=torch.float64)
        if config.architecture != "shaw":
            pair = 0 if config.tie_attention_biases else layer
            u, w = weights["content_bias"][pair], weights["position_bias"][pair]
        attended = torch.zeros_like(q)
        for head in range(heads):
            attention = result[layer, head] = HeadAttention()
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
                    four_terms = (q[i, head] @ k[j, head], q[i, head] @ r, u[head] @ k[j, head], w[head] @ r)
                    attention.terms[i, j] = tuple(float(term) / math.sqrt(d_head) for term in four_terms)
                    scores.append(sum(attention.terms[i, j]))
                total = sum(math.exp(score) for score in scores)
                if config.has_attention_sinks:  # 16 times the parameter is the score of no key
                    total += math.exp(16 * weight("attention.sinks")[head])
                for j, score in zip(keys, scores, strict=True):
                    attention.probability[i, j] = math.exp(score) / total
                    attended[i, head] += attention.probability[i, j] * v[j, head]
        x = x + attended.flatten(1) @ weight("attention.o_proj.weight").T
        x = layer_norm(x, weight("attention.norm.weight"), weight("attention.norm.bias"))
        inner = torch.relu(x @ weight("feed_forward.up_proj.weight").T + weight("feed_forward.up_proj.bias"))
        x = x + inner @ weight("feed_forward.down_proj.weight").T + weight("feed_forward.down_proj.bias")
        x = layer_norm(x, weight("feed_forward.norm.weight"), weight("feed_forward.norm.bias"))
    return result
