"""Which dtype a device uses by default, and that the process keeps freed memory."""

import subprocess
import sys

import pytest
import torch

from transformer_xl.device import autocast, has_bfloat16, resolve_dtype

# A program that allocates and frees 96 MiB five times, and prints the number of minor page faults of each time: a fault
# occurs at the first access to a page that the system has just given to the process.
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses the C library of Linux")
def test_freed_memory_is_kept():
    """With keep_freed_memory, only the first allocations take pages from the system; without it, all do."""
    faults = {}
    for mode in ("keep", "release"):
        command = [sys.executable, "-c", TOUCH, mode]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        faults[mode] = [int(count) for count in output.split()]
    # Touching 96 MiB of fresh memory causes 24,576 faults with pages of 4 KiB, and 48 with huge pages of 2 MiB. Fewer
    # than 30 mean that most of the freed memory was not given back to the system, so there is nothing to compare.
    if min(faults["release"]) < 30:
        pytest.skip("huge pages or another C library: freed memory causes no page faults")
    assert faults["keep"][0] > 20  # the first time, memory is fresh in any case
    # the heap may still grow the second time
    assert max(faults["keep"][2:]) < min(faults["release"]) / 4


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def simulate_cpu(
    monkeypatch, *, mkldnn: bool, avx512: bool = False, amx: bool = False, machine: str = "x86_64"
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: mkldnn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr("platform.machine", lambda: machine)


@pytest.mark.parametrize(
    ("cpu", "expected"),  # mkldnn: torch's CPU library (oneDNN) says that it supports bfloat16, even if emulated
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
def test_auto_is_bfloat16_only_with_cpu_instructions(monkeypatch, cpu, expected):
    simulate_cpu(monkeypatch, **cpu)
    assert has_bfloat16(CPU) == expected
    assert resolve_dtype(CPU, "auto") == ("bfloat16" if expected else "float32")


@pytest.mark.parametrize("native", [False, True])
def test_emulated_bfloat16_of_a_gpu_is_not_used(monkeypatch, native):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    assert has_bfloat16(CUDA) == native
    assert not has_bfloat16(torch.device("mps"))


@pytest.mark.parametrize(("dtype", "expected"), [("float32", torch.float32), ("auto", torch.bfloat16)])
def test_autocast_sets_the_dtype_of_matrix_products(monkeypatch, dtype, expected):
    simulate_cpu(monkeypatch, mkldnn=True, avx512=True)
    weight = torch.ones(3, 3)
    with autocast(CPU, dtype):
        assert (weight @ weight).dtype == expected
        assert (weight + weight).dtype == torch.float32
    assert (weight @ weight).dtype == torch.float32
