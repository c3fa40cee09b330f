"""Chooses the implementations that a run computes with: attention kernel, library of products, dropout, RMSNorm.

All compute the same up to rounding, but kernels of attention and of dropout draw other dropout masks. So a new run
takes the first that is there in a fixed order, the fastest first, and records it with its checkpoints, and a resumed
run goes on with what is recorded where that is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from transformer_xl.checkpoint_record import Numerics
from transformer_xl.device import Precision, resolve_dtype
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.norm import RMSNorm
from transformer_xl.ops.dropout import FastDropout
from transformer_xl.ops.kernels import KERNELS, choose
from transformer_xl.ops.linear import fastest_matmul_library, matmul_library, packs
from transformer_xl.ops.native import chosen, fastest, status
from transformer_xl.training.distributed import SINGLE_PROCESS, DistributedContext

# from the fastest; the last works everywhere
_ORDERS = {
    "attn_implementation": [None, *KERNELS],
    "matmul_library": ["onednn", "mixed", "blas"],
    "dropout_kernel": ["native", "torch"],
    "norm_kernel": ["native", "torch"],
}


def choose_numerics(
    attn_implementation: str | None,
    device: torch.device,
    precision: Precision,
    world: DistributedContext = SINGLE_PROCESS,
    recorded: Numerics | None = None,
) -> Numerics:
    """Return the fastest implementations, or the recorded ones, as far as all processes have them.

    The processes of a run may prefer different ones; then those that every computer has are taken.

    Args:
        attn_implementation: the setting; a kernel that it names is taken in any case. None for a model without one.
        device: device to compute on.
        precision: data type of matrix products in training, on which the fastest kernel depends.
        world: the processes that train together.
        recorded: what the checkpoint was trained with from which a run is resumed, or None for a new run.
    """
    dtype = torch.bfloat16 if resolve_dtype(device, precision) == "bfloat16" else torch.float32
    kernel = attn_implementation
    if kernel == "auto":
        kernel = None if recorded is None else recorded.attn_implementation
        if kernel not in KERNELS or not KERNELS[kernel].fits(device, dtype):
            kernel = choose("auto", device, dtype).name
    is_cpu = device.type == "cpu"  # elsewhere torch computes products, dropout and RMSNorm, whatever is recorded
    library = recorded.matmul_library if recorded is not None else fastest_matmul_library() if is_cpu else "blas"
    dropout = norm = fastest() if is_cpu else "torch"
    if recorded is not None and (norm == "native" or not is_cpu):
        dropout, norm = recorded.dropout_kernel, recorded.norm_kernel
    preferred = Numerics(
        attn_implementation=kernel,
        matmul_library=library if packs(torch.float32) else "blas",
        dropout_kernel=dropout,
        norm_kernel=norm,
    )
    everywhere = world.gather(preferred)
    slowest = {
        name: max((getattr(one, name) for one in everywhere), key=order.index) for name, order in _ORDERS.items()
    }
    return preferred.model_copy(update=slowest)


@contextmanager
def computing_with(numerics: Numerics) -> Iterator[None]:
    """Within this context compute products, dropout and RMSNorm as recorded, forward and backward.

    N-grams always by torch, in validation too, whose losses are then those of any computer.
    """
    kernels = chosen(dropout=numerics.dropout_kernel, norm=numerics.norm_kernel, ngrams="torch")
    with matmul_library(numerics.matmul_library), kernels:
        yield


def differences(recorded: Numerics, used: Numerics, model: LanguageModel) -> list[str]:
    """Say what of the recorded implementations is not available here, where it matters.

    Args:
        recorded: what a checkpoint was trained with.
        used: what training goes on with.
        model: the model; dropout and RMSNorm matter only if it has some.
    """
    unused = set[str]()
    if not any(isinstance(m, FastDropout) and m.p and not m.variational for m in model.modules()):
        unused.add("dropout_kernel")
    if not any(isinstance(m, RMSNorm) for m in model.modules()):
        unused.add("norm_kernel")
    missing = [
        f"{name.replace('_', ' ')} {value}"
        for name, value in recorded
        if value not in (None, getattr(used, name)) and name not in unused
    ]
    return [
        f"the checkpoint was trained with {what}, which is not available here (native operators: {status().text}): "
        "training goes on without, not bit for bit as if it had not stopped"
        for what in missing
    ]
