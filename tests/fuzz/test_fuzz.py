"""Bytes from elsewhere: whatever they are, each reader of them answers with a UserError, in bounded time and memory.

TXL_FUZZ_CASES is the number of drawn inputs of each target (default 60), TXL_FUZZ_SEED their seed (default 1). `run.py`
searches for more of them under atheris.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fuzz.targets import OPENED, TARGETS, kept_inputs, survive

from transformer_xl.config import UserError

CASES, SEED = int(os.environ.get("TXL_FUZZ_CASES", "60")), int(os.environ.get("TXL_FUZZ_SEED", "1"))
SECONDS, NUM_BYTES = 10, 2**30  # more than any input may take
ENOUGH_SECONDS = 0.6  # of a target; those that are slow read fewer inputs, unless more are asked for


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux's")
@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # of pickletools
@pytest.mark.parametrize("name", TARGETS)
def test_foreign_bytes_are_read_or_refused(name: str, tmp_path: Path) -> None:
    target, draw = TARGETS[name], random.Random(f"{SEED} {name}")
    seeds, check = target.prepare(tmp_path)
    assert not all(isinstance(survive(check, seed), UserError) for seed in seeds), "no seed is right"

    def stop(*_: Any) -> None:
        pytest.fail(f"more than {SECONDS} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits, before = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + NUM_BYTES, limits[1]))
    kept, start, content = kept_inputs(name), time.monotonic(), b""
    try:
        for number in range(len(kept) + CASES):
            content = kept[number] if number < len(kept) else target.mutate(draw, draw.choice(seeds))
            signal.alarm(SECONDS)
            survive(check, content)
            if number >= len(kept) and CASES <= 60 and time.monotonic() - start > ENOUGH_SECONDS:
                break
    except BaseException:  # a panic of a library in Rust is no Exception
        (tmp_path / "input").write_bytes(content)
        print(f"the input is in {tmp_path / 'input'}")
        raise
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        OPENED.close()
