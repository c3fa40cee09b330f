"""The device: its dtypes, and the memory of its process."""

import subprocess
import sys

import pytest
import torch

from transformer_xl.device import autocast, has_bfloat16, resolve_dtype

TOUCH = """
import ctypes, resource, sys
from transformer_xl.cli.main import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size, counts = 24 * 2**20, []
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffers = [libc.malloc(size) for _ in range(4)]
    for buffer in buffers:
        ctypes.memset(buffer, 1, size)
    for buffer in buffers:
        libc.free(buffer)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*counts)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library of Linux is asked")
def test_freed_memory_is_kept():
    """96 MiB asked for and given back five times: pages come from the system once, and each time without it."""
    faults = {}
    for how in ("keep", "give back"):
        words = [sys.executable, "-c", TOUCH, how]
        faults[how] = [int(n) for n in subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()]
    if min(faults["give back"]) < 30:  # huge pages, or another C library
        pytest.skip("this system does not count what is looked for")
    assert faults["keep"][0] > 20
    assert max(faults["keep"][2:]) < min(faults["give back"]) / 4


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def pretend(monkeypatch, *, mkldnn: bool, avx512: bool = False, amx: bool = False, machine: str = "x86_64") -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: mkldnn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr("platform.machine", lambda: machine)


@pytest.mark.parametrize(
    ("cpu", "has_it"),
    [
        ({"mkldnn": False}, False),
        ({"mkldnn": True}, False),  # emulated
        ({"mkldnn": True, "avx512": True}, True),
        ({"mkldnn": True, "amx": True}, True),
        ({"mkldnn": True, "machine": "AMD64"}, False),
        ({"mkldnn": True, "machine": "aarch64"}, True),
        ({"mkldnn": False, "machine": "aarch64"}, False),
    ],
)
def test_bfloat16_on_a_cpu_must_be_in_hardware(monkeypatch, cpu, has_it):
    pretend(monkeypatch, **cpu)
    assert has_bfloat16(CPU) == has_it
    assert resolve_dtype(CPU, "auto") == ("bfloat16" if has_it else "float32")


@pytest.mark.parametrize("has_it", [False, True])
def test_bfloat16_on_a_gpu_must_not_be_emulated(monkeypatch, has_it):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or has_it)
    assert has_bfloat16(CUDA) == has_it
    assert not has_bfloat16(torch.device("mps"))


@pytest.mark.parametrize(
    ("dtype", "has_it", "wanted"),
    [
        ("float32", True, torch.float32),
        ("bfloat16", False, torch.bfloat16),
        ("auto", False, torch.float32),
        ("auto", True, torch.bfloat16),
    ],
)
def test_autocast_sets_the_dtype_of_matrix_products(monkeypatch, dtype, has_it, wanted):
    pretend(monkeypatch, mkldnn=has_it, avx512=has_it)
    weight = torch.ones(3, 3)
    with autocast(CPU, dtype):
        assert (weight @ weight).dtype == wanted
        assert (weight + weight).dtype == torch.float32
    assert (weight @ weight).dtype == torch.float32
