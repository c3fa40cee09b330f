"""The default dtype of a device, that the process keeps freed memory, and how much memory is available."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_runs import make_run

from transformer_xl import EvaluationConfig, GenerationConfig, device, generate, score
from transformer_xl.config import UserError
from transformer_xl.device import (
    autocast,
    available_memory_bytes,
    has_bfloat16,
    require_memory,
    resolve_dtype,
)

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


GROUPS = {  # limits and usage by file
    "version 2": {
        "proc/self/cgroup": "0::/job/task\n",
        "cgroup/job/memory.max": "7000",
        "cgroup/job/memory.current": "3000",
        "cgroup/job/memory.stat": "inactive_file 200\nactive_file 30\n",
        "cgroup/job/task/memory.max": "max",
        "cgroup/job/task/memory.current": "100",
    },
    "in a container": {
        "proc/self/cgroup": "0::/path/outside\n",
        "cgroup/memory.max": "7000",
        "cgroup/memory.current": "2770",
        "cgroup/memory.stat": "",
    },
    "none": {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 4 kB\nSwapFree: 0 kB\n"},
}


@pytest.mark.parametrize("name", GROUPS)
def test_available_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The smallest limit counts; the file cache and swap are available, too."""
    files = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8 kB\nSwapFree: 1 kB\n", **GROUPS[name]}
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    monkeypatch.setattr(device, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(device, "_CGROUPS", tmp_path / "cgroup")
    assert available_memory_bytes(torch.device("cpu")) == (4096 if name == "none" else 7000 - 3000 + 230 + 1024)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not enforce the limit")
def test_limit_of_the_process_counts():
    program = """
import resource, torch
from transformer_xl.device import available_memory_bytes
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
assert 2**29 < available_memory_bytes(torch.device("cpu")) <= 2**30
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(device, "available_memory_bytes", lambda _: 14 * 10**9)
    require_memory("work", 14 * 10**9, cpu, "do less")
    monkeypatch.setattr(device, "available_memory_bytes", lambda _: 13 * 10**9)
    with pytest.raises(UserError, match=r"work needs at least 14\.0 GB .*13\.0 GB are available on cpu; do less"):
        require_memory("work", 14 * 10**9, cpu, "do less")
    monkeypatch.setattr(device, "available_memory_bytes", lambda _: None)
    require_memory("work", 14 * 10**9, cpu, "do less")


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["transformer-xl", "lstm", "xlnet"])
def test_the_dtype_of_reading_is_not_that_of_the_callers_autocast(tmp_path, given, architecture):
    run = make_run(tmp_path / "run", architecture)
    configs = [EvaluationConfig(), EvaluationConfig(dtype="bfloat16")]
    configs.append(EvaluationConfig(method="dynamic", dynamic={"optimizer": "sgd"}))
    configs += [EvaluationConfig(method="both-sides")] if architecture == "xlnet" else []
    expected = [score(run, "a short text", config)[0].sums.nats for config in configs]
    with torch.autocast("cpu", given):
        assert [score(run, "a short text", config)[0].sums.nats for config in configs] == expected
        assert len(generate(run, "a short", GenerationConfig(max_new_tokens=2)).token_ids) == 2
