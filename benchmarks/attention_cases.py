"""Relative attention at given sizes: inputs, how far a kernel is from float64, and what it takes.

Letters: B rows, T queries, S = M + T keys, P distances, N heads, H head width.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from transformer_xl.model.kernels import KERNELS, AttentionInputs, AttentionMask

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# least allowed error, as a share of the largest number: sums of some hundred terms in another order
FLOORS = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
TIMES_REFERENCE = 3.0  # allowed error, in those of the reference kernel in the same number format


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
    """Memory slots of the first row that hold nothing; 0: every slot of every row is valid, and no mask is given."""

    @property
    def keys(self) -> int:
        """S."""
        return self.memory_length + self.queries

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key it sees, in one head of one row."""
        window = self.attention_window or self.keys
        return sum(min(window, self.memory_length + place + 1) for place in range(self.queries))

    @property
    def forward_flops(self) -> int:
        """Additions and multiplications: content scores, position scores and weighted values, of pairs that are seen.

        The backward pass has twice as many, beside what a kernel computes again.
        """
        return 3 * 2 * self.batch_size * self.n_heads * self.d_head * self.pairs

    def words(self) -> str:
        """For people."""
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
    """Inputs that want gradients, and what is seen. The same numbers on every device."""
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


def as_list(inputs: AttentionInputs) -> list[Tensor]:
    """Its tensors, in order."""
    return [getattr(inputs, field.name) for field in fields(inputs)]


def out_and_gradients(kernel: str, shape: Shape, inputs: AttentionInputs, sight: AttentionMask) -> dict[str, Tensor]:
    """Attended values and the gradient of every input, by name, for a fixed gradient of the output."""
    out_BTNH = KERNELS[kernel].attend(inputs, sight, shape.dropout)
    grad_BTNH = torch.randn(out_BTNH.shape, generator=torch.Generator().manual_seed(9)).to(out_BTNH)
    grads = torch.autograd.grad(out_BTNH, as_list(inputs), grad_BTNH, materialize_grads=True)
    names = [field.name.rpartition("_")[0] for field in fields(inputs)]
    return {"out": out_BTNH.detach(), **dict(zip(names, grads, strict=True))}


def in_float64(inputs: AttentionInputs) -> AttentionInputs:
    """The same numbers in float64."""
    return AttentionInputs(*(tensor.detach().double().requires_grad_() for tensor in as_list(inputs)))


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Largest error of each, as a share of the largest wanted number; infinite where one is not a number."""
    shares = {
        name: float((found[name].double() - right).abs().max() / right.abs().max().clamp(min=1e-30))
        for name, right in wanted.items()
    }
    return {name: share if math.isfinite(share) else math.inf for name, share in shares.items()}


def check(kernel: str, shape: Shape) -> dict[str, Any]:
    """Holds a kernel to the reference in float64: its error may be a few times that of the reference in its format."""
    inputs, sight = draw(shape)
    wanted = out_and_gradients("reference", shape, in_float64(inputs), sight)
    own = errors(out_and_gradients(kernel, shape, inputs, sight), wanted)
    usual = errors(out_and_gradients("reference", shape, inputs, sight), wanted)
    allowed = {name: max(TIMES_REFERENCE * usual[name], FLOORS[shape.dtype]) for name in own}
    worst = max(own, key=lambda name: own[name] / allowed[name])
    return {
        "kernel": kernel,
        "what": f"{shape.words()}: {worst}",
        "error": own[worst],
        "allowed": allowed[worst],
        "ok": own[worst] <= allowed[worst],
    }


def check_dropout(kernel: str, shape: Shape) -> list[dict[str, Any]]:
    """What must hold of dropout whatever the mask: the seed decides it, it keeps the mean, gradients belong to it."""
    inputs, sight = draw(shape)

    def run(of: AttentionInputs, seed: int = 3) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return out_and_gradients(kernel, shape, of, sight)

    def moved(sign: int) -> Tensor:
        q_BTNH = (inputs.q_BTNH + sign * step * way_BTNH).detach().requires_grad_()
        return (grad_BTNH * run(replace(inputs, q_BTNH=q_BTNH))["out"].double()).sum()

    first, again, other = run(inputs), run(inputs), run(inputs, 4)
    ones = run(replace(inputs, v_BSNH=torch.ones_like(inputs.v_BSNH).requires_grad_()))
    grad_BTNH = torch.randn(first["out"].shape, generator=torch.Generator().manual_seed(9)).to(first["out"]).double()
    way_BTNH = torch.randn(first["q"].shape, generator=torch.Generator().manual_seed(7)).to(first["q"])
    step = 1e-2
    # out is linear in v: with a mask that is the same forward and backward, <dout, out> = <dv, v>
    by_v = (first["v"].double() * inputs.v_BSNH.detach().double()).sum()
    by_out = (grad_BTNH * first["out"].double()).sum()
    slope, rise = (first["q"].double() * way_BTNH.double()).sum(), (moved(1) - moved(-1)) / (2 * step)
    found = {
        # sums of gradients may be formed in any order; see check_deterministic
        "the same seed gives the same": (max(errors(again, first).values()), 1e-5),
        "another seed gives another": (float((first["out"] == other["out"]).float().mean()), 0.5),
        "probabilities still sum to about one": (float((ones["out"].double().mean() - 1).abs()), 0.05),
        "gradient of values belongs to the mask": (float((by_v - by_out).abs() / by_out.abs().clamp(min=1)), 1e-3),
        "gradient of queries belongs to the mask": (float((rise - slope).abs() / slope.abs().clamp(min=1)), 2e-2),
    }
    return [
        {
            "kernel": kernel,
            "what": f"{shape.words()}: {what}",
            "error": error,
            "allowed": allowed,
            "ok": error <= allowed,
        }
        for what, (error, allowed) in found.items()
    ]


def check_deterministic(kernel: str, shape: Shape) -> dict[str, Any]:
    """With torch told to be deterministic, outputs and gradients are the same to the last bit each time."""
    inputs, sight = draw(shape)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        runs = [out_and_gradients(kernel, shape, inputs, sight) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    unlike = float(sum((runs[0][name] != run[name]).any().item() for run in runs[1:] for name in run))
    return {
        "kernel": kernel,
        "what": f"{shape.words()}: the same bits each time",
        "error": unlike,
        "allowed": 0.0,
        "ok": not unlike,
    }


def wait(device: str) -> None:
    """Until the device has done what it was told."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def median_seconds(work: Callable[[], object], device: str, *, seconds: float = 0.3, rounds: int = 5) -> float:
    """Median over rounds of the time one call takes, each round of at least so many seconds in all rounds together."""
    work()
    wait(device)
    began = time.perf_counter()
    work()
    wait(device)
    calls = max(1, round(seconds / rounds / max(time.perf_counter() - began, 1e-7)))
    return statistics.median(_seconds(work, device, calls) for _ in range(rounds))


def _seconds(work: Callable[[], object], device: str, calls: int) -> float:
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


def times(kernel: str, shape: Shape, *, seconds: float = 0.3, rounds: int = 5) -> dict[str, float]:
    """Forward as without gradients; forward and backward together as in training; with operations per second."""
    inputs, sight = draw(shape)
    grad_BTNH = torch.ones_like(inputs.q_BTNH)

    def forward() -> None:
        with torch.no_grad():
            KERNELS[kernel].attend(inputs, sight, shape.dropout)

    def both() -> None:
        out_BTNH = KERNELS[kernel].attend(inputs, sight, shape.dropout)
        torch.autograd.grad(out_BTNH, as_list(inputs), grad_BTNH)

    one = median_seconds(forward, shape.device, seconds=seconds, rounds=rounds)
    two = median_seconds(both, shape.device, seconds=seconds, rounds=rounds)
    return {
        "forward_seconds": one,
        "forward_backward_seconds": two,
        "forward_tflops": shape.forward_flops / one / 1e12,
        "forward_backward_tflops": 3 * shape.forward_flops / two / 1e12,
    }


def kept_bytes(kernel: str, shape: Shape) -> int:
    """What the forward pass keeps for the backward pass, beside its inputs."""
    inputs, sight = draw(shape)
    kept = {tensor.untyped_storage().data_ptr(): 0 for tensor in as_list(inputs)}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out_BTNH = KERNELS[kernel].attend(inputs, sight, shape.dropout)
    # the output is there in any case
    return sum(size for place, size in kept.items() if place != out_BTNH.untyped_storage().data_ptr())
