"""The paper's other systems as plain loops, in float64; weights come by name, and nothing else from the package.

Letters: B rows, T new tokens, D model width, N heads, H head width.
"""

from __future__ import annotations

import math

import torch
from tensors import assert_same_tensors, named_gradients


def layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * weight + bias


def embedded(weights, tokens):
    table = weights["embedding.tables.0"]
    return table[tokens] * math.sqrt(table.shape[1])


def scores_of(weights, x):
    return x @ weights["embedding.tables.0"].T + weights["softmax.bias"]


def of_layer(weights, index):
    start = f"layers.{index}."
    return {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}


def sinusoid(place, width):
    angles = [place / 10000 ** (2 * i / width) for i in range(width // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def attended(part, x, before, heads, position_score, window=None):
    """x (B, T, D) over [before ; x]; `position_score(q, n, distance)` is added to q . k."""
    rows = torch.cat([before, x], dim=1)
    q, k, v = (
        r @ part[f"attention.{name}.weight"].T for name, r in (("q_proj", x), ("k_proj", rows), ("v_proj", rows))
    )
    q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
    width, out = q.shape[-1], []
    for b in range(len(x)):
        for i in range(x.shape[1]):
            place = before.shape[1] + i
            heads_out = []
            for n in range(heads):
                seen = [j for j in range(place + 1) if window is None or place - j < window]
                score = [
                    (q[b, i, n] @ k[b, j, n] + position_score(q[b, i, n], n, place - j)) / width**0.5 for j in seen
                ]
                share = torch.softmax(torch.stack(score), 0)
                heads_out.append(sum(share[place] * v[b, j, n] for place, j in enumerate(seen)))
            out.append(torch.cat(heads_out))
    return torch.stack(out).view(*x.shape[:2], -1)


def transformer_layer(part, x, before, heads, pre_norm, position_score, window=None):
    norm = part["attention.norm.weight"], part["attention.norm.bias"]
    given = (layer_norm(x, *norm), layer_norm(before, *norm)) if pre_norm else (x, before)
    x = x + attended(part, *given, heads, position_score, window) @ part["attention.o_proj.weight"].T
    x = x if pre_norm else layer_norm(x, *norm)
    norm = part["feed_forward.norm.weight"], part["feed_forward.norm.bias"]
    inner = layer_norm(x, *norm) if pre_norm else x
    inner = (inner @ part["feed_forward.up_proj.weight"].T + part["feed_forward.up_proj.bias"]).clamp(min=0)
    x = x + inner @ part["feed_forward.down_proj.weight"].T + part["feed_forward.down_proj.bias"]
    return x if pre_norm else layer_norm(x, *norm)


def shaw(weights, tokens, memory, *, heads, slots, pre_norm=False, window=None):
    """Scores (B, T, V) and the next memory; memory: for each layer the rows (B, up to `slots`, D) it read last."""
    x, after = embedded(weights, tokens), []
    for index, before in enumerate(memory):
        part = of_layer(weights, index)
        table = part["attention.distance_keys"]
        after.append(torch.cat([before, x.detach()], dim=1)[:, max(0, before.shape[1] + x.shape[1] - slots) :])

        def position_score(q, n, distance, table=table):
            return q @ table[min(distance, len(table) - 1), n]

        x = transformer_layer(part, x, before, heads, pre_norm, position_score, window)
    if "final_norm.weight" in weights:
        x = layer_norm(x, weights["final_norm.weight"], weights["final_norm.bias"])
    return scores_of(weights, x), after


def absolute(weights, tokens, *, layers, heads, pre_norm=False, window=None):
    """The output (B, T, D) of every layer, after the last norm where there is one."""
    x, outputs = embedded(weights, tokens), []
    if "position_embeddings" not in weights:
        x = x + torch.stack([sinusoid(place, x.shape[-1]) for place in range(x.shape[1])])
    for index in range(layers):
        if "position_embeddings" in weights:
            x = x + weights["position_embeddings"][index, : x.shape[1]]
        x = transformer_layer(of_layer(weights, index), x, x[:, :0], heads, pre_norm, lambda *_: 0.0, window)
        last = x
        if "final_norm.weight" in weights:
            last = layer_norm(x, weights["final_norm.weight"], weights["final_norm.bias"])
        outputs.append(last)
    return outputs


def auxiliary(weights, outputs, targets, progress):
    """What Al-Rfou et al. add for each row, target by target: (B,) sums of nats."""
    total, num_layers = torch.zeros(len(targets), dtype=torch.float64), len(outputs)
    for number, output in enumerate(outputs, start=1):
        if number < num_layers and progress >= number / (2 * num_layers):
            continue
        for kind, ahead, share in (("next", 0, 1.0), ("second", 1, 0.5)):
            name = f"{kind}_heads.{number}"
            if f"{name}.weight" not in weights:
                continue
            for b in range(len(targets)):
                for t in range(targets.shape[1] - ahead):
                    score = weights[f"{name}.weight"] @ output[b, t] + weights[f"{name}.bias"]
                    total[b] = total[b] + share * (torch.logsumexp(score, 0) - score[targets[b, t + ahead]])
    return total


def lstm(weights, tokens, states, *, layers):
    """Scores (B, T, V) and the next states; states: for each layer h and c, (B, D) each."""
    x, after = embedded(weights, tokens), []
    for index in range(layers):
        part, (h, c), outputs = of_layer(weights, index), states[index], []
        for t in range(x.shape[1]):
            gates = x[:, t] @ part["input_weight"].T + h @ part["recurrent_weight"].T + part["bias"]
            i, f, z, o = gates.chunk(4, dim=-1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        x = torch.stack(outputs, dim=1)
        after.append((h.detach(), c.detach()))
    return scores_of(weights, x), after


def qrnn(weights, tokens, states, *, layers, forgets=None):
    """Scores (B, T, V) and the next states; states: for each layer c (B, D), and the inputs before (B, 0 or 1, D).

    `forgets(index, f)` may change the forget gates (B, T, D) of a layer.
    """
    x, after = embedded(weights, tokens), []
    for index in range(layers):
        part, (c, before), outputs = of_layer(weights, index), states[index], []
        rows, context_limits = torch.cat([before, x], dim=1), before.shape[1]
        gates = []
        for t in range(x.shape[1]):
            seen = torch.cat([rows[:, t + back] for back in range(context_limits + 1)], dim=-1)
            gates.append(seen @ part["gates.weight"].T + part["gates.bias"])
        z, f, o = torch.stack(gates, dim=1).chunk(3, dim=-1)
        f = torch.sigmoid(f) if forgets is None else forgets(index, torch.sigmoid(f))
        for t in range(x.shape[1]):
            c = f[:, t] * c + (1 - f[:, t]) * torch.tanh(z[:, t])
            outputs.append(torch.sigmoid(o[:, t]) * c)
        x = torch.stack(outputs, dim=1)
        after.append((c.detach(), rows[:, rows.shape[1] - context_limits :].detach()))
    return scores_of(weights, x), after


def copied(model):
    """The weights of a model by name, to be differentiated by themselves."""
    return {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}


def assert_same_gradients(model, found, weights, wanted):
    """Of two scalars, one of the model's parameters and one of the weights."""
    assert_same_tensors(named_gradients(found, model), named_gradients(wanted, weights), rtol=1e-9, atol=1e-9)
