"""The slow oracle: Transformer-XL written from the paper as plain loops over i, j and the four terms.

It shares no code with the package: it reads the weights by name, and nothing else. float64 throughout, no dropout.

Letters: B rows, T new tokens, M memory slots, S = M + T keys, D model width, N heads, H head width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class Case:
    """What the attention oracle needs besides tensors."""

    valid: list[int]
    """Valid memory slots of each row."""
    window: int | None = None
    """Keys a query sees, itself included."""


def attention(q, k, v, position_keys, u, w, case):
    """q (B, T, N, H), k and v (B, S, N, H), position_keys (P, N, H) farthest distance first, u and w (N, H)."""
    rows, num_queries, num_heads, d_head = q.shape
    num_keys, num_distances = k.shape[1], position_keys.shape[0]
    memory = num_keys - num_queries
    out_rows = []
    for b in range(rows):
        for i in range(num_queries):
            for n in range(num_heads):
                scores, values = [], []
                for j in range(num_keys):
                    distance = memory + i - j
                    empty = j < memory - case.valid[b]
                    too_far = case.window is not None and distance >= case.window
                    if distance < 0 or empty or too_far:
                        continue
                    r = position_keys[num_distances - 1 - distance, n]
                    a = (q[b, i, n] * k[b, j, n]).sum()
                    b_term = (q[b, i, n] * r).sum()
                    c = (u[n] * k[b, j, n]).sum()
                    d = (w[n] * r).sum()
                    scores.append((a + b_term + c + d) / math.sqrt(d_head))
                    values.append(v[b, j, n])
                highest = max(score.item() for score in scores)
                weights = [torch.exp(score - highest) for score in scores]
                total = sum(weights)
                out_rows.append(sum(weight / total * value for weight, value in zip(weights, values, strict=True)))
    return torch.stack(out_rows).view(rows, num_queries, num_heads, d_head)


def sinusoid(distance, width, clamp):
    """R[d]: sines of all frequencies, then cosines."""
    d = distance if clamp is None else min(distance, clamp)
    angles = [d / 10000 ** (2 * i / width) for i in range(width // 2)]
    return torch.tensor([math.sin(x) for x in angles] + [math.cos(x) for x in angles], dtype=torch.float64)


def layer_norm(x, weight, bias):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * weight + bias


def forward(weights, settings, tokens, memory, valid):
    """One segment through the whole model.

    weights: the state dict in float64; settings: layers, heads, pre_norm, tied, window, clamp as a plain dictionary;
    tokens (B, T); memory: a list of L tensors (B, M, D); valid: valid slots of each row.
    Returns logits (B, T, V), the new memory, and the new valid counts.
    """
    table = weights["embedding.tables.0"]
    width = table.shape[1]
    x = table[tokens] * math.sqrt(width)
    new_memory = []
    num_memory, num_new = memory[0].shape[1], tokens.shape[1]
    num_distances = num_memory + num_new
    if settings["window"] is not None:
        num_distances = min(num_distances, settings["window"])
    encodings = torch.stack([sinusoid(d, width, settings["clamp"]) for d in range(num_distances - 1, -1, -1)])
    for index in range(settings["layers"]):
        old = memory[index]
        everything = torch.cat([old, x], dim=1)
        new_memory.append(everything[:, num_new:].detach().clone())

        def part(name, index=index):
            return weights[f"layers.{index}.{name}"]

        norm = part("attention.norm.weight"), part("attention.norm.bias")
        context = layer_norm(everything, *norm) if settings["pre_norm"] else everything
        heads = settings["heads"]

        def split(rows, heads=heads):
            return rows.unflatten(-1, (heads, -1))

        q = split(context[:, num_memory:] @ part("attention.q_proj.weight").T)
        k = split(context @ part("attention.k_proj.weight").T)
        v = split(context @ part("attention.v_proj.weight").T)
        r = split(encodings @ part("attention.r_proj.weight").T)
        pair = 0 if settings["tied"] else index
        u, w = weights["content_bias"][pair], weights["position_bias"][pair]
        attended = attention(q, k, v, r, u, w, Case(valid, settings["window"])).flatten(-2)
        x = x + attended @ part("attention.o_proj.weight").T
        x = x if settings["pre_norm"] else layer_norm(x, *norm)

        norm = part("feed_forward.norm.weight"), part("feed_forward.norm.bias")
        inner = layer_norm(x, *norm) if settings["pre_norm"] else x
        inner = torch.relu(inner @ part("feed_forward.up_proj.weight").T + part("feed_forward.up_proj.bias"))
        x = x + inner @ part("feed_forward.down_proj.weight").T + part("feed_forward.down_proj.bias")
        x = x if settings["pre_norm"] else layer_norm(x, *norm)
    if "final_norm.weight" in weights:
        x = layer_norm(x, weights["final_norm.weight"], weights["final_norm.bias"])
    logits = x @ table.T + weights["softmax.bias"]
    return logits, new_memory, [min(count + num_new, num_memory) for count in valid]
