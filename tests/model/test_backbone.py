"""The backbone equals an oracle of plain loops, whatever the episode starts, and a window equals its single steps.

The oracle reads each batch row step by step and has no memory to cut: it knows the inputs of each layer at all earlier
steps, and attends to those of the same episode that memory and window would hold. It is written from Dai et al. 2019
and Parisotto et al. 2019, shares no code with the package, and uses its weights by name.

Shape suffixes: B batch size, T steps, L layers, M memory slots, D width.
"""

from __future__ import annotations

import math

import pytest
import torch
from reference import layer_norm, layer_weights, sinusoid
from tensors import assert_same_tensors, copied_tensors, named_gradients

from transformer_xl import Backbone, BackboneConfig, ContextLimits, TransformerXL, TransformerXLConfig, UserError
from transformer_xl.inference import prepare_inference
from transformer_xl.model.memory import HiddenMemory, Memory

SIZES = {"n_layers": 2, "d_model": 14, "n_heads": 2, "d_head": 5, "d_ff": 19}
ORDERS = {
    "post-norm": {"norm_first": False, "residual_relu": False, "gating": "none"},
    "pre-norm": {"residual_relu": False, "gating": "none"},
    "TrXL-I": {"gating": "none"},
    "GTrXL": {},
}
MEMORY, WINDOWS = 4, (3, 5, 2)  # memory slots; steps of three windows that follow each other
# for each of two batch rows, the steps of the windows at which an episode starts
STARTS = {"none": [[], []], "inside": [[1, 5, 7], [4]], "each window's first step": [[0, 3, 8], [0, 3, 8]]}


def make_backbone(seed: int = 7, **settings) -> Backbone:
    """Return a float64 backbone with weights so large that attention and gates are far from uniform."""
    torch.manual_seed(seed)
    backbone = Backbone(BackboneConfig(**{**SIZES, "d_input": 3, **settings}), memory_length=MEMORY).double()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return backbone.eval()


def random_inputs(steps: int = sum(WINDOWS), width: int = 3, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, steps, width, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def mask_of(starts: list[list[int]], steps: int = sum(WINDOWS)) -> torch.Tensor:
    """Return the bool mask (B, T) of the steps at which an episode starts."""
    return torch.tensor([[step in row for step in range(steps)] for row in starts])


def run(backbone: Backbone, inputs_BTD: torch.Tensor, starts_BT, memory: Memory, windows=WINDOWS):
    """Return the outputs of all windows, one after the other, and the last memory."""
    outputs, parts = [], zip(inputs_BTD.split(windows, 1), starts_BT.split(windows, 1), strict=True)
    for part_BTD, part_BT in parts:
        out_BTD, memory = backbone(part_BTD, memory, starts=part_BT)
        outputs.append(out_BTD)
    return torch.cat(outputs, dim=1), memory


def oracle(weights, config, x, starts, limits, windows):
    """Return the outputs (T, D) of one batch row with inputs x (T, width); no gradient reaches earlier windows."""
    heads, d_head = config.n_heads, config.head_dim
    if "input_proj.weight" in weights:
        x = x @ weights["input_proj.weight"].T + weights["input_proj.bias"]
    window_starts = [sum(windows[:index]) for index, length in enumerate(windows) for _ in range(length)]
    u, w = weights["content_bias"][0], weights["position_bias"][0]
    for index in range(config.n_layers):
        layer, outputs = layer_weights(weights, index), []

        def normalized(state, part, layer=layer):
            return layer_norm(state, layer[f"{part}.norm.weight"], layer[f"{part}.norm.bias"])

        def joined(state, result, part, layer=layer):
            result = torch.relu(result) if config.residual_relu else result
            if config.gating == "none":
                return state + result
            (w_r, w_z, w_g), (u_r, u_z) = (layer[f"{part}.gate.{name}_proj.weight"].split(14) for name in "yx")
            r = torch.sigmoid(w_r @ result + u_r @ state)
            z = torch.sigmoid(w_z @ result + u_z @ state - layer[f"{part}.gate.bias"])
            h = torch.tanh(w_g @ result + layer[f"{part}.gate.reset_proj.weight"] @ (r * state))
            return (1 - z) * state + z * h

        for step, state in enumerate(x):
            first = max([start for start in starts if start <= step], default=0)
            first = max(first, window_starts[step] - limits.memory_length)
            if limits.attention_window is not None:
                first = max(first, step - limits.attention_window + 1)
            keys = range(first, step + 1)
            seen = [x[key] if key >= window_starts[step] else x[key].detach() for key in keys]
            if config.norm_first:
                seen = [normalized(one, "attention") for one in seen]
            q, attended = layer["attention.q_proj.weight"] @ seen[-1], []
            for head in range(heads):
                part, scores, values = slice(head * d_head, (head + 1) * d_head), [], []
                for key, one in zip(keys, seen, strict=True):
                    k = (layer["attention.k_proj.weight"] @ one)[part]
                    r = (layer["attention.r_proj.weight"] @ sinusoid(step - key, 14, limits.clamp_length))[part]
                    scores.append(((q[part] + u[head]) @ k + (q[part] + w[head]) @ r) / math.sqrt(d_head))
                    values.append((layer["attention.v_proj.weight"] @ one)[part])
                probabilities = torch.stack(scores).softmax(0)
                attended.append(sum(p * value for p, value in zip(probabilities, values, strict=True)))
            state = joined(state, layer["attention.o_proj.weight"] @ torch.cat(attended), "attention")
            state = state if config.norm_first else normalized(state, "attention")
            inner = normalized(state, "feed_forward") if config.norm_first else state
            inner = torch.relu(layer["feed_forward.up_proj.weight"] @ inner + layer["feed_forward.up_proj.bias"])
            inner = layer["feed_forward.down_proj.weight"] @ inner + layer["feed_forward.down_proj.bias"]
            state = joined(state, inner, "feed_forward")
            outputs.append(state if config.norm_first else normalized(state, "feed_forward"))
        x = torch.stack(outputs)
    if config.norm_first:
        x = layer_norm(x, weights["final_norm.weight"], weights["final_norm.bias"])
    return x


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("limits", "kernel"),
    [
        (ContextLimits(4), "auto"),
        (ContextLimits(4, 5), "reference"),
        (ContextLimits(4, 3, 2), "sdpa"),
        (ContextLimits(0), "auto"),
    ],
)
def test_outputs_and_gradients_equal_oracle(order, starts, limits, kernel):
    """Also with keys and values as memory; the memory that is returned holds the steps since the last start."""
    backbone, starts_BT = make_backbone(attn_implementation=kernel, **ORDERS[order]), mask_of(STARTS[starts])
    inputs_BTD = random_inputs().requires_grad_()
    actual, memory = run(backbone, inputs_BTD, starts_BT, backbone.initial_memory(2, limits))
    weights = dict(backbone.named_parameters())
    expected = torch.stack([
        oracle(weights, backbone.config, row, row_starts, limits, WINDOWS)
        for row, row_starts in zip(inputs_BTD, STARTS[starts], strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    weight = torch.randn_like(expected)
    gradients = [
        named_gradients((result * weight).sum(), {**weights, "inputs": inputs_BTD}) for result in (actual, expected)
    ]
    assert_same_tensors(*gradients, rtol=1e-10, atol=1e-10)
    since_start = [10 - max(row, default=0) for row in STARTS[starts]]
    assert memory.position_B.tolist() == since_start
    assert memory.valid_B.tolist() == [min(number, limits.memory_length) for number in since_start]
    with torch.no_grad():
        prepared = prepare_inference(backbone)
        cached, memory = run(prepared, inputs_BTD, starts_BT, prepared.initial_memory(2, limits))
    torch.testing.assert_close(cached, expected, rtol=0, atol=1e-10)
    assert memory.valid_B.tolist() == [min(number, limits.memory_length) for number in since_start]


def test_inputs_before_a_start_have_no_effect_on_what_follows():
    """By gradient, and by inputs that are not finite only in value: larger by a factor of 1e6."""
    backbone, inputs_BTD = make_backbone(), random_inputs(rows=1).requires_grad_()
    starts_BT = mask_of([[4]])
    out_BTD, memory = backbone(inputs_BTD, starts=starts_BT)
    (grad_BTD,) = torch.autograd.grad(out_BTD[:, 4:].square().sum(), inputs_BTD)
    assert (grad_BTD[:, :4] == 0).all()
    assert (grad_BTD[:, 4:].abs().sum(-1) > 0).all()
    changed_BTD = inputs_BTD.detach().clone()
    changed_BTD[:, :4] *= 1e6
    again_BTD, other = backbone(changed_BTD, starts=starts_BT)
    torch.testing.assert_close(again_BTD[:, 4:], out_BTD[:, 4:], rtol=0, atol=0)
    nexts = [backbone(inputs_BTD.detach()[:, :3], one)[0] for one in (memory, other)]
    torch.testing.assert_close(*nexts, rtol=0, atol=0)


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("window", [MEMORY + 1, 3])
def test_a_window_equals_its_single_steps(window, is_prepared):
    """If the attention window is memory_length + 1 at most; without one, a query sees more in a window."""
    backbone, inputs_BTD, starts_BT = make_backbone(attention_window=window), random_inputs(), mask_of(STARTS["inside"])
    backbone = prepare_inference(backbone) if is_prepared else backbone
    with torch.no_grad():
        steps_BTD, after_steps = run(backbone, inputs_BTD, starts_BT, backbone.initial_memory(2), (1,) * 10)
        whole_BTD, after_whole = run(backbone, inputs_BTD, starts_BT, backbone.initial_memory(2), (10,))
        unlimited = backbone.initial_memory(2, ContextLimits(MEMORY))
        other_BTD, _ = run(backbone, inputs_BTD, starts_BT, unlimited, (10,))
    torch.testing.assert_close(steps_BTD, whole_BTD, rtol=0, atol=1e-12)
    assert_same_tensors(after_steps, after_whole, atol=1e-12)
    assert (other_BTD - whole_BTD).abs().max() > 1e-3


@pytest.mark.parametrize("order", ["post-norm", "pre-norm"])
def test_layers_are_those_of_the_language_model_bit_for_bit(order):
    torch.manual_seed(1)
    norm_first = order == "pre-norm"
    model = TransformerXL(
        TransformerXLConfig(vocab_size=11, dropout=0.0, norm_first=norm_first, **SIZES), memory_length=MEMORY
    )
    backbone = Backbone(BackboneConfig(**SIZES, **{**ORDERS[order], "norm_first": norm_first}), memory_length=MEMORY)
    backbone.load_state_dict({name: model.state_dict()[name] for name in backbone.state_dict()})
    inputs_BTD, memory, other = random_inputs(width=14).float(), None, None
    for part_BTD in inputs_BTD.split(WINDOWS, 1):
        expected_BTD, memory = model(memory=memory, inputs=part_BTD)
        actual_BTD, other = backbone(part_BTD, other)
        assert torch.equal(actual_BTD, expected_BTD)
        assert_same_tensors(other, memory)


def test_memory_survives_a_replay_buffer():
    """A window from the middle of a text is computed again from three plain tensors, with the same gradients."""
    backbone, inputs_BTD = make_backbone(), random_inputs()
    _, memory = backbone(inputs_BTD[:, :3], starts=mask_of([[1], []], 3))
    stored = copied_tensors(memory.stacked())
    assert stored["hidden"].shape == (2, 2, MEMORY, 14)  # B, L, M, D
    assert stored["valid"].tolist() == [2, 3]
    replayed = backbone.initial_memory(2).with_stacked(stored)
    assert_same_tensors(replayed, memory)
    expected, actual = (backbone(inputs_BTD[:, 3:], one)[0] for one in (memory, replayed))
    assert torch.equal(actual, expected)
    assert_same_tensors(*(named_gradients(out_BTD.square().sum(), backbone) for out_BTD in (actual, expected)))
    # rows of several windows, put together in another order
    both = {name: torch.cat([tensor, tensor])[[3, 0]] for name, tensor in stored.items()}
    assert_same_tensors(backbone.initial_memory(2).with_stacked(both), memory.select([1, 0]))
    assert isinstance(replayed, HiddenMemory)


def test_a_new_gate_passes_its_input_on_by_its_bias():
    """With b_g = 2, a gate passes on about sigmoid(2) = 0.88 of its input; more with a larger bias."""
    for bias, share in ((2.0, 0.88), (5.0, 0.993)):
        torch.manual_seed(3)
        gate = Backbone(BackboneConfig(**SIZES, gate_bias=bias)).layers[0].attention.gate
        x_BTD = torch.randn(2, 5, 14)
        with torch.no_grad():
            out_BTD = gate(x_BTD, torch.zeros_like(x_BTD))
        assert float((out_BTD * x_BTD).sum() / x_BTD.square().sum()) == pytest.approx(share, abs=0.01)


def test_starts_compile_without_graph_breaks():
    """Memory and starts are inputs of the graph."""
    backbone, inputs_BTD = make_backbone(n_layers=1, attention_window=MEMORY + 1), random_inputs()
    starts_BT = mask_of(STARTS["inside"])
    compiled = torch.compile(backbone, backend="aot_eager", fullgraph=True, dynamic=False)
    expected, memory = run(backbone, inputs_BTD, starts_BT, backbone.initial_memory(2), (5, 5))
    actual, other = run(compiled, inputs_BTD, starts_BT, backbone.initial_memory(2), (5, 5))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert_same_tensors(other, memory, atol=1e-12)
    gradients = (named_gradients(out_BTD.square().sum(), backbone) for out_BTD in (actual, expected))
    assert_same_tensors(*gradients, rtol=1e-9, atol=1e-9)


class Exportable(torch.nn.Module):
    """A backbone whose memory is plain tensors, as docs/reinforcement-learning.md exports it."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone, self.empty = backbone, backbone.initial_memory(1)

    def forward(self, inputs_BTD, starts_BT, hidden_BLMD, valid_B, position_B):
        tensors = {"hidden": hidden_BLMD, "valid": valid_B, "position": position_B}
        out_BTD, memory = self.backbone(inputs_BTD, self.empty.with_stacked(tensors), starts=starts_BT)
        return out_BTD, *memory.stacked().values()


def test_exported_graph_runs_windows_of_any_length():
    backbone = make_backbone(n_layers=1, attention_window=3, attn_implementation="reference")
    module, stacked = Exportable(backbone), backbone.initial_memory(1).stacked()
    steps = {1: torch.export.Dim("steps", min=1)}
    example = (random_inputs(4, rows=1), mask_of([[2]], 4), *stacked.values())
    with torch.no_grad():
        program = torch.export.export(module, example, dynamic_shapes=(steps, steps, None, None, None), strict=False)
        expected, memory = None, backbone.initial_memory(1)
        tensors = tuple(stacked.values())
        for length in (1, 6):
            inputs_BTD, starts_BT = random_inputs(length, rows=1), mask_of([[length - 1]], length)
            actual, *tensors = program.module()(inputs_BTD, starts_BT, *tensors)
            expected, memory = backbone(inputs_BTD, memory, starts=starts_BT)
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
            assert_same_tensors(tensors, memory.stacked().values(), atol=1e-12)


def test_wrong_inputs_are_refused():
    backbone = make_backbone()
    inputs_BTD, memory = random_inputs(5), backbone.initial_memory(2)
    cases = {
        r"inputs of shape \(2, 5, 7\); expected \(batch, steps, 3\)": lambda: backbone(random_inputs(5, 7)),
        r"starts of shape \(2, 4\) for inputs of shape \(2, 5, 3\); expected \(2, 5\)": lambda: backbone(
            inputs_BTD, starts=mask_of([[], []], 4)
        ),
        r"starts has dtype torch\.int64; give torch\.bool": lambda: backbone(
            inputs_BTD, starts=mask_of([[], []], 5).long()
        ),
        r"inputs of dtype torch\.float32, and the model has torch\.float64; give": lambda: backbone(inputs_BTD.float()),
        r"inputs of dtype torch\.uint8": lambda: backbone(inputs_BTD.byte()),
        "starts is of type list; give a tensor": lambda: backbone(inputs_BTD, starts=[True]),
        "memory of batch size 3 for inputs of batch size 2": lambda: backbone(inputs_BTD, backbone.initial_memory(3)),
        "made by another model": lambda: backbone(inputs_BTD, make_backbone(n_layers=3).initial_memory(2)),
        "another shape than this model, batch size and memory length": lambda: memory.with_stacked(
            backbone.initial_memory(2, ContextLimits(5)).stacked()
        ),
        "another shape than this model": lambda: memory.with_stacked(backbone.initial_memory(3).stacked()),
        "the saved memory has another shape than": lambda: memory.with_stacked({}),
        r"context_limits is of type int \(64\); give ContextLimits": lambda: backbone.initial_memory(2, 64),
        "the saved memory has another shape": lambda: memory.with_stacked({"hidden": memory.stacked()["hidden"]}),
        "give the settings of the backbone": lambda: Backbone(TransformerXLConfig()),
        "d_model 14 is not divisible by n_heads 4": lambda: BackboneConfig(d_model=14, n_heads=4),
        "unknown setting 'vocab_size'": lambda: BackboneConfig(vocab_size=3),
    }
    for message, call in cases.items():
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
