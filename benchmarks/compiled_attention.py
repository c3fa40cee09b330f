"""Times relative attention of one layer as torch compiles it, beside this package's kernels.

    python benchmarks/compiled_attention.py [--dtype float32] [--rounds 7] [--out FILE]

`reference, compiled` is the plain kernel with torch.compile; `FlexAttention` is torch's flex_attention, compiled, whose
score_mod adds the position scores, which one product computes before. Inputs have the sizes of one layer of the 41M
model, batch 4, 512 queries, 1,024 keys, and random values. Each result is compared with the reference in float64. The
kernels take turns, and the results are medians.

Shape suffixes: B batch size, T queries, S keys, P distances, N heads, H head width.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from attention_cases import Shape, draw, in_float64
from environment import command, commit, cpu_features, cpu_model, positive, results_file, say, warn_if_busy, write
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from transformer_xl.ops.kernels import KERNELS, AttentionInputs, AttentionMask, choose

Attend = Callable[[AttentionInputs], Tensor]


def of_kernel(name: str) -> Attend:
    """Return one of this package's kernels, without a mask but the causal one."""
    choose(name, torch.device("cpu"), torch.float32)  # which loads the native operators
    return lambda inputs: KERNELS[name].attend(inputs, AttentionMask(None), 0.0)


def flex() -> Attend:
    """Return torch's flex_attention, compiled, with the position scores added."""
    compiled = torch.compile(flex_attention)
    masks = {}

    def attend(inputs: AttentionInputs) -> Tensor:
        num_queries, num_keys = inputs.q_BTNH.shape[1], inputs.k_BSNH.shape[1]
        if not masks:
            first = num_keys - num_queries
            masks[0] = create_block_mask(
                lambda b, h, query, key: key <= first + query, None, None, num_queries, num_keys, device="cpu"
            )
        scale = inputs.q_BTNH.shape[-1] ** -0.5
        position_q_BNTH = (inputs.q_BTNH + inputs.position_bias_NH).transpose(1, 2)
        position_BNTP = position_q_BNTH @ (inputs.position_key_PNH.permute(1, 2, 0) * scale)

        def add_position(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + position_BNTP[b, h, query, (num_queries - 1 - query + key).clamp(max=num_keys - 1)]

        q_BNTH = (inputs.q_BTNH + inputs.content_bias_NH).transpose(1, 2)
        k_BNSH, v_BNSH = inputs.k_BSNH.transpose(1, 2), inputs.v_BSNH.transpose(1, 2)
        return compiled(q_BNTH, k_BNSH, v_BNSH, score_mod=add_position, block_mask=masks[0]).transpose(1, 2)

    return attend


def run(attend: Attend, inputs: AttentionInputs, *, backward: bool) -> list[Tensor]:
    """Return the attended values, and the gradients of the inputs if they are wanted."""
    if not backward:
        return [attend(AttentionInputs(*(tensor.detach() for tensor in inputs.tensors())))]
    out_BTNH = attend(inputs)
    return [out_BTNH.detach(), *torch.autograd.grad(out_BTNH.sum(), inputs.tensors())]


def main() -> None:
    """Measure, print the results and write them to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--threads", type=positive, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    load = warn_if_busy()
    inputs, _ = draw(Shape(4, 512, 512, 8, 64, dtype=args.dtype))
    compiled = torch.compile(of_kernel("reference"))
    kernels: dict[str, Attend] = {
        "native": of_kernel("native"),
        "cpu": of_kernel("cpu"),
        "reference": of_kernel("reference"),
        "reference, compiled": compiled,
        "FlexAttention": flex(),
    }
    rows = []
    for backward in (False, True):
        exact = run(of_kernel("reference"), in_float64(inputs), backward=backward)
        seconds: dict[str, list[float]] = {}
        for name, attend in kernels.items():
            row = {"kernel": name, "pass": "forward and backward" if backward else "forward"}
            rows.append(row)
            start = time.perf_counter()
            try:
                results = run(attend, inputs, backward=backward)
            except Exception as error:  # what torch cannot compile is a result
                row["refused"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                continue
            row["first_call_seconds"] = round(time.perf_counter() - start, 2)
            row["error"] = max(
                float((one.double() - other).abs().max() / other.abs().max())
                for one, other in zip(results, exact, strict=True)
            )
            seconds[name] = []
        for _ in range(args.rounds):
            for name in seconds:
                start = time.perf_counter()
                run(kernels[name], inputs, backward=backward)
                seconds[name].append(time.perf_counter() - start)
        for row in rows[-len(kernels) :]:
            if row["kernel"] in seconds:
                row["ms"] = round(1e3 * statistics.median(seconds[row["kernel"]]), 1)
    for row in rows:
        say(", ".join(f"{key} {value}" for key, value in row.items()))
    machine = {"cpu": cpu_model(), "features": cpu_features(), "threads": args.threads, "load": load}
    head = {"command": command(), "commit": commit(), "torch": torch.__version__, "machine": machine}
    write({**head, "dtype": args.dtype, "rows": rows}, args.out or results_file(f"compiled-attention-{args.dtype}"))


if __name__ == "__main__":
    main()
