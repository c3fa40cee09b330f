"""Relative attention of chosen sizes, for the benchmarks: random inputs, errors of a kernel, and time and memory.

Shape suffixes: B batch size, T queries, S = M + T keys (M memory slots), P distances, N heads, H head width.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from transformer_xl.ops.kernels import KERNELS, AttentionInputs, AttentionMask, sdpa

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# errors always allowed, relative to the largest element: rounding of sums of some hundred terms in another order
FLOORS = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
TIMES_REFERENCE = 3.0  # allowed error, as a multiple of that of the reference kernel in the same dtype


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention."""

    batch_size: int
    queries: int
    memory_length: int
    n_heads: int
    d_head: int
    attention_window: int | None = None
    dropout: float = 0.0
    dtype: str = "float32"
    device: str = "cpu"
    empty_slots: int = 0
    """Number of empty memory slots of the first batch row; with 0, all slots are valid and there is no mask."""

    @property
    def keys(self) -> int:
        """S."""
        return self.memory_length + self.queries

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that it attends to, in one head of one batch row."""
        window = self.attention_window or self.keys
        return sum(min(window, self.memory_length + query + 1) for query in range(self.queries))

    @property
    def forward_flops(self) -> int:
        """FLOPs of content scores, position scores and weighted values, for attended pairs only.

        The backward pass has twice as many, plus what a kernel recomputes.
        """
        return 3 * 2 * self.batch_size * self.n_heads * self.d_head * self.pairs

    def words(self) -> str:
        """Return the sizes as readable text."""
        parts = [
            f"B {self.batch_size}",
            f"T {self.queries}",
            f"M {self.memory_length}",
            f"{self.n_heads} x {self.d_head}",
        ]
        parts += [f"window {self.attention_window}"] if self.attention_window else []
        parts += [f"dropout {self.dropout:g}"] if self.dropout else []
        parts += [f"{self.empty_slots} empty"] if self.empty_slots else []
        return ", ".join([*parts, self.dtype])


def draw(shape: Shape, seed: int = 1) -> tuple[AttentionInputs, AttentionMask]:
    """Return random inputs that require gradients, and the mask; the values are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    per_head = (shape.n_heads, shape.d_head)
    distances = min(shape.keys, shape.attention_window or shape.keys)
    sizes = [
        (shape.batch_size, shape.queries),
        (shape.batch_size, shape.keys),
        (shape.batch_size, shape.keys),
        (distances,),
        (),
        (),
    ]
    tensors = [
        torch.randn(*size, *per_head, generator=generator).to(shape.device, DTYPES[shape.dtype]).requires_grad_()
        for size in sizes
    ]
    if not shape.empty_slots:
        return AttentionInputs(*tensors), AttentionMask(None)
    valid_B = torch.full((shape.batch_size,), shape.memory_length, device=shape.device)
    valid_B[0] -= shape.empty_slots
    return AttentionInputs(*tensors), AttentionMask(valid_B)


def out_and_gradients(kernel: str, shape: Shape, inputs: AttentionInputs, mask: AttentionMask) -> dict[str, Tensor]:
    """Return attended values and the gradient of every input, by name, for a fixed gradient of the output."""
    out_BTNH = KERNELS[kernel].attend(inputs, mask, shape.dropout)
    grad_BTNH = torch.randn(out_BTNH.shape, generator=torch.Generator().manual_seed(9)).to(out_BTNH)
    grads = torch.autograd.grad(out_BTNH, inputs.tensors(), grad_BTNH, materialize_grads=True)
    names = [field.name.rpartition("_")[0] for field in fields(inputs) if field.name != "sink_N"]
    return {"out": out_BTNH.detach(), **dict(zip(names, grads, strict=True))}


def in_float64(inputs: AttentionInputs) -> AttentionInputs:
    """Return the same values in float64."""
    return AttentionInputs(*(tensor.detach().double().requires_grad_() for tensor in inputs.tensors()))


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest error of each tensor, relative to its largest expected element; infinity instead of NaN.

    A gradient that is zero everywhere, as that of the scores of queries with one key, is compared with the others.
    """
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    relative = {
        name: float((actual[name].double() - tensor).abs().max()) / (float(tensor.abs().max()) or largest)
        for name, tensor in expected.items()
    }
    return {name: error if math.isfinite(error) else math.inf for name, error in relative.items()}


def check(kernel: str, shape: Shape) -> dict[str, Any]:
    """Compare a kernel with the reference kernel in float64.

    Its error may be a few times that of the reference kernel in the same dtype.
    """
    inputs, mask = draw(shape)
    expected = out_and_gradients("reference", shape, in_float64(inputs), mask)
    kernel_errors = errors(out_and_gradients(kernel, shape, inputs, mask), expected)
    reference_errors = errors(out_and_gradients("reference", shape, inputs, mask), expected)
    allowed = {name: max(TIMES_REFERENCE * reference_errors[name], FLOORS[shape.dtype]) for name in kernel_errors}
    worst = max(kernel_errors, key=lambda name: kernel_errors[name] / allowed[name])
    return {
        "kernel": kernel,
        "what": f"{shape.words()}: {worst}",
        "error": kernel_errors[worst],
        "allowed": allowed[worst],
        "ok": kernel_errors[worst] <= allowed[worst],
    }


def check_dropout(kernel: str, shape: Shape) -> list[dict[str, Any]]:
    """Check what must hold for any dropout mask: it depends on the seed, keeps the mean, and is the gradients' mask."""
    inputs, mask = draw(shape)

    def run(attention_inputs: AttentionInputs, seed: int = 3) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return out_and_gradients(kernel, shape, attention_inputs, mask)

    def loss_at(sign: int) -> Tensor:
        q_BTNH = (inputs.q_BTNH + sign * step * direction_BTNH).detach().requires_grad_()
        return (grad_BTNH * run(replace(inputs, q_BTNH=q_BTNH))["out"].double()).sum()

    first, again, other = run(inputs), run(inputs), run(inputs, 4)
    ones = run(replace(inputs, v_BSNH=torch.ones_like(inputs.v_BSNH).requires_grad_()))
    grad_BTNH = torch.randn(first["out"].shape, generator=torch.Generator().manual_seed(9)).to(first["out"]).double()
    direction_BTNH = torch.randn(first["q"].shape, generator=torch.Generator().manual_seed(7)).to(first["q"])
    step = 1e-2
    # out is linear in v: if the mask is the same forward and backward, <dout, out> = <dv, v>
    by_v = (first["v"].double() * inputs.v_BSNH.detach().double()).sum()
    by_out = (grad_BTNH * first["out"].double()).sum()
    slope = (first["q"].double() * direction_BTNH.double()).sum()
    difference = (loss_at(1) - loss_at(-1)) / (2 * step)
    checks = {
        # gradients may be summed in any order; see check_deterministic
        "the same seed gives the same": (max(errors(again, first).values()), 1e-5),
        "another seed gives another": (float((first["out"] == other["out"]).float().mean()), 0.5),
        "probabilities still sum to about one": (float((ones["out"].double().mean() - 1).abs()), 0.05),
        "gradient of values belongs to the mask": (float((by_v - by_out).abs() / by_out.abs().clamp(min=1)), 1e-3),
        "gradient of queries belongs to the mask": (
            float((difference - slope).abs() / slope.abs().clamp(min=1)),
            2e-2,
        ),
    }
    return [
        {
            "kernel": kernel,
            "what": f"{shape.words()}: {what}",
            "error": error,
            "allowed": allowed,
            "ok": error <= allowed,
        }
        for what, (error, allowed) in checks.items()
    ]


def check_deterministic(kernel: str, shape: Shape) -> dict[str, Any]:
    """Check that outputs and gradients are bit-identical each time if torch uses deterministic algorithms."""
    inputs, mask = draw(shape)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        runs = [out_and_gradients(kernel, shape, inputs, mask) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    num_differing = float(sum((runs[0][name] != run[name]).any().item() for run in runs[1:] for name in run))
    return {
        "kernel": kernel,
        "what": f"{shape.words()}: the same bits each time",
        "error": num_differing,
        "allowed": 0.0,
        "ok": not num_differing,
    }


def wait(device: str) -> None:
    """Wait until the device has finished its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def median_seconds(work: Callable[[], object], device: str, *, seconds: float = 0.3, rounds: int = 5) -> float:
    """Return the median over rounds of the time of one call; all rounds together take about `seconds`."""
    work()
    wait(device)
    began = time.perf_counter()
    work()
    wait(device)
    calls = max(1, round(seconds / rounds / max(time.perf_counter() - began, 1e-7)))
    return statistics.median(_seconds(work, device, calls) for _ in range(rounds))


def _seconds(work: Callable[[], object], device: str, calls: int) -> float:
    """Return the mean time of one of several calls."""
    if device.startswith("cuda"):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls
    began = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - began) / calls


def peak_beyond(work: Callable[[], object], device: str) -> int:
    """Return the peak memory of a call beyond what was in use before, in bytes; on a CPU, that of the process."""
    cuda = device.startswith("cuda")
    wait(device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current size
        before = _status("VmRSS")
    work()
    wait(device)
    return (torch.cuda.max_memory_allocated() if cuda else _status("VmHWM")) - before


def _status(name: str) -> int:
    """Return a field of this process's status in bytes: VmRSS, its memory, or VmHWM, the peak of that."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def flex(inputs: AttentionInputs, mask: AttentionMask, dropout: float) -> Tensor:
    """Compute the same attention by torch's FlexAttention, which reads the position scores from a whole matrix."""
    assert mask.valid_B is None
    assert not dropout
    num_queries, num_keys = inputs.q_BTNH.shape[1], inputs.k_BSNH.shape[1]
    position_BNTH = (inputs.q_BTNH + inputs.position_bias_NH).transpose(1, 2) * inputs.q_BTNH.shape[-1] ** -0.5
    position_BNTP = position_BNTH @ inputs.position_key_PNH.permute(1, 2, 0)
    bias_BNTS = sdpa.shifted(position_BNTP, num_keys=num_keys).contiguous()
    out_BNTH = _compiled_flex()(
        (inputs.q_BTNH + inputs.content_bias_NH).transpose(1, 2),
        inputs.k_BSNH.transpose(1, 2),
        inputs.v_BSNH.transpose(1, 2),
        score_mod=lambda score, b, n, t, s: score + bias_BNTS[b, n, t, s],
        block_mask=_causal_blocks(num_queries, num_keys, str(bias_BNTS.device)),
    )
    return out_BNTH.transpose(1, 2)


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


@cache
def _causal_blocks(num_queries: int, num_keys: int, device: str) -> Any:
    memory = num_keys - num_queries
    return create_block_mask(lambda b, n, t, s: s <= t + memory, None, None, num_queries, num_keys, device=device)


def flash_rotary(inputs: AttentionInputs, mask: AttentionMask, dropout: float) -> Tensor:
    """Compute another attention, without position keys and biases: rotary positions and FlashAttention."""
    assert mask.valid_B is None
    q_BNTH, k_BNSH = (rotated(rows.transpose(1, 2)) for rows in (inputs.q_BTNH, inputs.k_BSNH))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        causal = causal_lower_right(q_BNTH.shape[2], k_BNSH.shape[2])
        out_BNTH = F.scaled_dot_product_attention(
            q_BNTH, k_BNSH, inputs.v_BSNH.transpose(1, 2), attn_mask=causal, dropout_p=dropout
        )
    return out_BNTH.transpose(1, 2)


def rotated(rows_BNXH: Tensor) -> Tensor:
    """Rotate queries or keys by their positions; the last rows of both have the same positions."""
    num_rows, width = rows_BNXH.shape[-2:]
    rate_K = 10_000.0 ** (-torch.arange(0, width, 2, device=rows_BNXH.device) / width)
    angle_XK = torch.arange(-num_rows, 0, device=rows_BNXH.device)[:, None] * rate_K
    sin_XK, cos_XK = angle_XK.sin().to(rows_BNXH.dtype), angle_XK.cos().to(rows_BNXH.dtype)
    first, second = rows_BNXH.chunk(2, dim=-1)
    return torch.cat([first * cos_XK - second * sin_XK, first * sin_XK + second * cos_XK], dim=-1)


PEERS = {"flex": flex, "flash-rotary": flash_rotary}
"""Attention of torch that is timed beside the kernels: the same by FlexAttention, and another with rotary positions."""


def times(kernel: str, shape: Shape, *, seconds: float = 0.3, rounds: int = 5) -> dict[str, float]:
    """Return times of the forward pass without gradients, and of forward and backward pass; and FLOPs per second.

    Args:
        kernel: one of the package, or of `PEERS`.
        shape: sizes of the attention.
        seconds: about the time that each of the two takes.
        rounds: number of measurements, of which the median is returned.
    """
    attend = PEERS[kernel] if kernel in PEERS else KERNELS[kernel].attend
    inputs, mask = draw(shape)
    grad_BTNH = torch.ones_like(inputs.q_BTNH)

    def forward() -> None:
        with torch.no_grad():
            attend(inputs, mask, shape.dropout)

    def both() -> None:
        out_BTNH = attend(inputs, mask, shape.dropout)
        torch.autograd.grad(out_BTNH, inputs.tensors(), grad_BTNH, materialize_grads=True)

    forward_seconds = median_seconds(forward, shape.device, seconds=seconds, rounds=rounds)
    both_seconds = median_seconds(both, shape.device, seconds=seconds, rounds=rounds)
    return {
        "forward_seconds": forward_seconds,
        "forward_backward_seconds": both_seconds,
        "forward_tflops": shape.forward_flops / forward_seconds / 1e12,
        "forward_backward_tflops": 3 * shape.forward_flops / both_seconds / 1e12,
    }
