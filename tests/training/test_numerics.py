"""The implementations that a run computes with: what is chosen for a device and dtype, and by several processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training_runs import CPU

from transformer_xl.checkpoint_record import Numerics
from transformer_xl.device import Precision
from transformer_xl.ops.kernels import triton
from transformer_xl.training.distributed import DistributedContext
from transformer_xl.training.numerics import choose_numerics

CUDA = torch.device("cuda")


@pytest.mark.skipif(not triton.fits(CUDA, torch.float32), reason="Triton is not installed, or not for this GPU")
@pytest.mark.parametrize(("precision", "expected"), [("float32", "sdpa"), ("bfloat16", "triton")])
def test_kernel_is_the_fastest_for_the_dtype_of_training(precision: Precision, expected: str) -> None:
    """On a GPU; nothing is computed. A resumed run keeps its kernel."""
    assert choose_numerics("auto", CUDA, precision) == Numerics(attn_implementation=expected)
    earlier = Numerics(attn_implementation="sdpa", dropout_kernel="native")  # as was recorded on a GPU too
    assert choose_numerics("auto", CUDA, precision, recorded=earlier) == earlier
    for name in ("sdpa", "triton"):
        assert choose_numerics("auto", CUDA, precision, recorded=Numerics(attn_implementation=name)) == Numerics(
            attn_implementation=name
        )


class OtherProcess(DistributedContext):
    """A world of two processes, of which the other has only what torch brings."""

    def gather(self, value: Any) -> list[Any]:
        slowest = "sdpa" if value.attn_implementation else None
        return [value, Numerics(attn_implementation=slowest, matmul_library="blas")]


@pytest.mark.parametrize("setting", ["auto", None])
def test_processes_take_what_all_of_them_have(monkeypatch: pytest.MonkeyPatch, setting: str | None) -> None:
    monkeypatch.setattr("transformer_xl.training.numerics.packs", lambda _: True)
    monkeypatch.setattr("transformer_xl.training.numerics.fastest_matmul_library", lambda: "onednn")
    monkeypatch.setattr("transformer_xl.training.numerics.fastest", lambda: "native")
    alone, together = (
        choose_numerics(setting, CPU, "float32", world) for world in (DistributedContext(), OtherProcess())
    )
    assert (alone.matmul_library, alone.dropout_kernel, alone.norm_kernel) == ("onednn", "native", "native")
    assert alone.attn_implementation in ("native", "cpu") if setting else alone.attn_implementation is None
    assert together == Numerics(attn_implementation="sdpa" if setting else None)
