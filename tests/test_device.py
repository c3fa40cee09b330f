"""What is said of the machine, and done to it."""

import subprocess
import sys

import pytest

TOUCH = """
import ctypes, resource, sys
from transformer_xl.device import keep_freed_memory

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
