"""Compiles the Triton kernels for a Hopper GPU, which needs none, and says what the compiler made of them.

    python tests/triton_compiled.py HEAD_WIDTH DTYPE DROPOUT [TILE]

One JSON object a line, for each kernel: registers, bytes spilled, shared memory. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from transformer_xl.model.kernels.triton import backward, forward, tiles

KERNELS = {
    "forward": forward.forward_kernel,
    "queries": backward.queries_kernel,
    "keys": backward.keys_kernel,
    "distances": backward.distances_kernel,
}


def signature(kernel, pointer, dropout):
    """Types of a kernel's arguments; rows of float32 where sums are written."""
    rows, sums = (tiles.Rows(kind, "i32", "i32", "i32", "i32") for kind in (pointer, "*fp32"))
    valid_and_seed = tiles.ValidAndSeed("*i64", "*i64" if dropout else "constexpr")
    taken = {"inputs": tiles.Inputs(rows, rows, rows, rows, pointer, pointer), "valid_and_seed": valid_and_seed}
    if kernel == "forward":
        taken["results"] = forward.Results(rows, "*fp32")
    else:
        taken["saved"] = backward.SavedForBackward(rows, rows, "*fp32", "*fp32")
        taken["gradients"] = backward.Gradients(rows, rows, rows, sums, sums, sums)
    return taken | {"sizes": tiles.Sizes(*["i32"] * 6), "config": "constexpr"}


def aligned(types, path=(), name=""):
    """Paths of the pointers and strides, which torch aligns to 16 bytes."""
    if isinstance(types, tuple):
        for index, (field, kind) in enumerate(zip(types._fields, types, strict=True)):
            yield from aligned(kind, (*path, index), field)
    elif types.startswith("*") or name.startswith("stride"):
        yield path


def compiled(kernel, width, dtype, dropout, tile=None):
    """Compiles one kernel as it would be launched, or with a smaller tile."""
    config = tiles.choose_config(kernel, width, dtype, dropout, atomic=kernel == "queries")
    kernel_config = config.kernel._replace(tile=tile or config.kernel.tile)
    pointer = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}[dtype]
    types = signature(kernel, pointer, dropout)
    constants = {"config": kernel_config} | ({} if dropout else {(1, 1): None})
    divisible = [path for index, kind in enumerate(types.values()) for path in aligned(kind, (index,))]
    attributes = {path: [["tt.divisibility", 16]] for path in divisible} if width % 16 == 0 else {}
    return triton.compile(
        ASTSource(KERNELS[kernel], types, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )


def resources(binary):
    """Registers and bytes spilled, as NVIDIA's tool beside Triton reads them from the compiled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary.asm["cubin"])
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, spilled = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()
    return {"registers": int(registers), "spilled_bytes": int(spilled), "shared_bytes": binary.metadata.shared}


def main(width, dtype, dropout, tile=None):
    for kernel in KERNELS:
        binary = compiled(kernel, int(width), getattr(torch, dtype), float(dropout), tile and int(tile))
        print(json.dumps({"kernel": kernel, **resources(binary)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
