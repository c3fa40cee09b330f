"""Compile the Triton kernels for a GPU, without needing one, and print the resources they use.

    python tests/triton_compiled.py HEAD_WIDTH DTYPE DROPOUT [TILE [CAPABILITY [SIDES]]]

TILE is the number of queries, and of keys, of a block (by default, or if 0, the one that the launch would choose).
CAPABILITY is the compute capability: 80 for Ampere, 90 for Hopper (the default), 100 for Blackwell. SIDES is `causal`
(the default), `both` (also later keys), or `ranges` (also with a first and a stop key of each query). Prints one JSON
object a line for each kernel: registers of a thread, spilled bytes (values that did not fit into registers), and bytes
of shared memory. TRITON_INTERPRET must not be set, because the interpreter compiles nothing.
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

from transformer_xl.ops.kernels import triton_kernels as kernels

# the kernels `forward_kernel` and so on: the forward pass, then the gradients of queries, keys and values, distances
NAMES = ("forward", "queries", "keys", "distances")
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def signature(name, pointer, dropout, sides):
    """Return the types of a kernel's arguments in Triton's notation; sums are float32."""
    rows, sums = (kernels.Rows(kind, "i32", "i32", "i32", "i32") for kind in (pointer, "*fp32"))
    limit = "*i64" if sides == "ranges" else "constexpr"
    mask_and_seed = kernels.MaskAndSeed("*i64", limit, limit, "*i64" if dropout else "constexpr")
    types = {"inputs": kernels.Inputs(rows, rows, rows, rows, pointer, pointer), "mask_and_seed": mask_and_seed}
    if name == "forward":
        types["results"] = kernels.Results(rows, "*fp32")
    else:
        types["saved"] = kernels.SavedForBackward(rows, rows, "*fp32", "*fp32")
        types["gradients"] = kernels.Gradients(rows, rows, rows, sums, sums, sums)
    return types | {
        "sizes": kernels.Sizes(*["i32"] * 6, "constexpr" if sides == "causal" else "i32"),
        "config": "constexpr",
    }


def aligned_paths(types, path=(), name=""):
    """Yield the index paths of the pointers and strides, which torch aligns to 16 bytes."""
    if isinstance(types, tuple):
        for index, (field, kind) in enumerate(zip(types._fields, types, strict=True)):
            yield from aligned_paths(kind, (*path, index), field)
    elif types.startswith("*") or name.startswith("stride"):
        yield path


def compile_kernel(name, width, dtype, dropout, tile=None, capability=90, sides="causal"):
    """Compile a kernel as it would be launched, or with a smaller tile."""
    config = kernels.choose_config(name, width, dtype, dropout, atomic=name == "queries", capability=capability // 10)
    types = signature(name, POINTERS[dtype], dropout, sides)
    constants = {"config": config._replace(tile=tile or config.tile)}
    for index, argument in enumerate(types.values()):  # the other constants are arguments that are None
        parts = enumerate(argument if isinstance(argument, tuple) else ())
        constants |= {(index, field): None for field, kind in parts if kind == "constexpr"}
    divisible = [path for index, kind in enumerate(types.values()) for path in aligned_paths(kind, (index,))]
    attributes = {path: [["tt.divisibility", 16]] for path in divisible} if width % 16 == 0 else {}
    return triton.compile(
        ASTSource(getattr(kernels, f"{name}_kernel"), types, constants, attributes),
        target=GPUTarget("cuda", capability, 32),  # warps of 32 threads
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )


def resources(binary):
    """Return registers and spilled bytes, as NVIDIA's cuobjdump (part of Triton) prints them, and shared memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary.asm["cubin"])
        printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, spilled = re.search(r"REG:(\d+) STACK:(\d+)", printed).groups()
    return {"registers": int(registers), "spilled_bytes": int(spilled), "shared_bytes": binary.metadata.shared}


def main(width, dtype, dropout, tile=None, capability=90, sides="causal"):
    for name in NAMES:
        binary = compile_kernel(
            name, int(width), getattr(torch, dtype), float(dropout), tile and int(tile), int(capability), sides
        )
        print(json.dumps({"kernel": name, **resources(binary)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
