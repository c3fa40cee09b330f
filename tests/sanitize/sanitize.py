"""`make sanitize`: the C++ of the native operators under the sanitizers of g++; a line for each part.

1. Faults that are planted in a copy of kernels.cpp are seen, in each of the ways below, or nothing else is believed.
2. AddressSanitizer with UndefinedBehaviorSanitizer, and ThreadSanitizer, on `kernels_in_threads.cpp`. Under the first,
   buffers of a thread are made for each call, of exactly the size asked for and full of NaN.
3. AddressSanitizer with UndefinedBehaviorSanitizer on tests of the operators, in Python, with each of the instruction
   sets that this processor has. What torch and oneDNN compute is not instrumented.

What is built is kept in `.cache/sanitize`, by sources and flags. The builder of the package builds the operators: from
a copy of the package, into a cache of its own, by a compiler that is a script which adds flags.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from transformer_xl.config import UserError
from transformer_xl.ops.native import build

ROOT = Path(__file__).parents[2]
WORK = ROOT / ".cache" / "sanitize"
FOLDER = Path("transformer_xl", "ops", "native")
HARNESS = Path(__file__).with_name("kernels_in_threads.cpp")
SECONDS = 1200  # for each command; most need one minute or two
FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS", "-Wno-psabi")
SANITIZERS = {
    "address": ("-fsanitize=address,undefined,float-cast-overflow", "-include", "malloc.h"),
    "thread": ("-fsanitize=thread",),
}
NAMES = {"address": "AddressSanitizer, UndefinedBehaviorSanitizer", "thread": "ThreadSanitizer"}
OPTIONS = {  # memory is full of NaN before it is written; Python itself leaks
    "ASAN_OPTIONS": "detect_leaks=0:max_malloc_fill_size=2000000000:malloc_fill_byte=255",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
    "OMP_NUM_THREADS": "1",
}
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
# what the operators say of themselves: what the processor must have, and limits that make them say it
PATHS: dict[str, tuple[set[str], dict[str, str]]] = {
    "AVX2, bfloat16 products in float32": (set(), {"ATEN_CPU_CAPABILITY": "avx2"}),
    "AVX512, bfloat16 products in float32": (_AVX512, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    "AVX512, bfloat16 products": ({*_AVX512, "avx512_bf16"}, {}),
}
FUNCTIONS = ("drop", "norm", "attention", "decode", "layer")

Edits = Sequence[tuple[str, str]]
BUFFERS: Edits = [
    ("round_up(count * static_cast<int64_t>(sizeof(X)) + 64, 4096)", "count * static_cast<int64_t>(sizeof(X))"),
    ("if (buffers.bytes[slot] < bytes) {", "{"),
    ("std::aligned_alloc(4096, ", "memalign(4096, "),
]


class Plant(NamedTuple):
    """A fault, the sanitizer and the words with which it must report it, and what meets it."""

    fault: str
    edit: tuple[str, str]
    sanitizer: str
    report: str
    function: str
    call: str = ""
    """The same in Python, where `t` makes a tensor and `o` has the operators."""


INPUTS = "[t(2, 3, 1, 17), t(2, 5, 1, 17), t(2, 5, 1, 17), t(5, 1, 17), t(1, 17), t(1, 17)]"
PLANTS = [
    Plant(
        "read past a tensor",
        ("const A value = widen(x[i]);", "const A value = widen(x[i + 1]);"),
        "address", "heap-buffer-overflow", "drop", "o.dropout(t(7), torch.tensor(1), 0.5, False, None)",
    ),
    Plant(
        "write past a buffer",
        ("factor[a] = 0;", "factor[a + 1] = 0;"),
        "address", "heap-buffer-overflow", "attention",
        f"o.attention({INPUTS}, None, None, None, None, None, 0.0, 0, 0)",
    ),
    Plant(
        "misaligned load",
        ("std::memcpy(&x, from, sizeof(x));", "x = *static_cast<const V*>(from);"),
        "address", "misaligned address", "decode", f"o.attention_decode({INPUTS}, None, None, None, 0)",
    ),
    Plant(
        "threads that write one element",
        ("= static_cast<A*>(z.lse) + query;", "= static_cast<A*>(z.lse);"),
        "thread", "data race", "attention",
    ),
]  # fmt: skip

TESTS = [
    "tests/inference",
    "tests/ops/test_kernels.py",
    *(f"tests/ops/test_relative_attention.py::test_equals_loops[{tenth}]" for tenth in range(2)),
    "tests/ops/test_relative_attention.py::test_several_blocks_equal_the_reference_kernel",
    "tests/ops/test_relative_attention.py::test_queries_without_keys_spoil_nothing[native]",
    "tests/ops/test_dropout.py",
    "tests/model/test_norm.py",
    "tests/model/test_ngrams.py",
    "tests/training/test_numerics.py",
    "tests/training/test_resume.py::test_run_is_resumed_with_the_operators_it_began_with",
    # without optimization, sums have another order, and larger errors
    "--deselect=tests/inference/test_decode.py::test_low_precision_is_as_near_to_float64_as_modules[torch.float32-2-False]",
    "--deselect=tests/inference/test_decode.py::test_low_precision_is_as_near_to_float64_as_modules[torch.float32-2-True]",
]
IN_PYTHON = """
import sys, torch
from transformer_xl.ops import native
assert native.status().text == sys.argv[1], native.status().text
"""


def main() -> None:
    libraries = {name: library(f"lib{name}.so") for name in ("asan", "ubsan", "tsan")}
    if reason := build.unsupported():
        stop(f"the native operators are not for this computer: {reason}")
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        processor = set(file.read().split())
    paths = {text: limits for text, (needed, limits) in PATHS.items() if needed <= processor}
    tables = ["avx2", "avx512"] if len(paths) > 1 else ["avx2"]

    see_planted_faults(libraries["asan"])
    for sanitizer in SANITIZERS:
        for table in tables:
            start = time.monotonic()
            status, output = harness(sanitizer, table, [], FUNCTIONS)
            done(status, output, f"{NAMES[sanitizer]}: {table} kernels, {output.strip()}", start)
    package, environment = operators([], libraries["asan"])
    for text, limits in paths.items():
        start = time.monotonic()
        code = IN_PYTHON + "import pytest; sys.exit(pytest.main(sys.argv[2:]))"
        command = [sys.executable, "-c", code, text, "-n0", "-p", "no:cacheprovider", *TESTS]
        status, output = run(command, {**environment, **limits, "PYTHONPATH": str(package)})
        done(status, output, f"{NAMES['address']}: {text}, tests: {output.strip().splitlines()[-1].strip('= ')}", start)
    missing = [text for text in PATHS if text not in paths]
    print("not covered, as this processor lacks the instructions: " + "; ".join(missing or ["nothing"]))


def see_planted_faults(asan: str) -> None:
    """End with an error if a sanitizer does not report a fault."""
    start, seen = time.monotonic(), []
    for sanitizer in SANITIZERS:
        plants = [plant for plant in PLANTS if plant.sanitizer == sanitizer]
        edits = [plant.edit for plant in plants]
        trials = [(plant, harness(sanitizer, "avx2", edits, [plant.function])) for plant in plants]
        if sanitizer == "address":
            package, environment = operators(edits, asan)
            environment = {**environment, "PYTHONPATH": str(package), "ATEN_CPU_CAPABILITY": "avx2"}
            code = f"{IN_PYTHON}t, o = torch.ones, native.operators()\n"
            text = next(iter(PATHS))
            for plant in plants:
                trials.append((plant, run([sys.executable, "-c", code + plant.call, text], environment)))
        for plant, (status, output) in trials:
            if not status or plant.report not in output:
                stop(f"a planted fault was not seen ({plant.fault}); what was said instead:\n{output[-3000:]}")
            seen.append(plant.fault)
    print(f"planted faults seen: {len(seen)} ({', '.join(dict.fromkeys(seen))}), {seconds(start)}", flush=True)


def edited(edits: Edits) -> str:
    """Return kernels.cpp with other words in place of these."""
    text = (ROOT / "src" / FOLDER / "kernels.cpp").read_text(encoding="utf-8")
    for old, new in edits:
        if text.count(old) != 1:
            stop(f"kernels.cpp has {text.count(old)} times, not once, what tests/sanitize/sanitize.py changes: {old}")
        text = text.replace(old, new)
    return text


def harness(sanitizer: str, table: str, edits: Edits, functions: Sequence[str]) -> tuple[int, str]:
    """Build `kernels_in_threads.cpp` with a table of kernels, and run functions of it."""
    kernels = edited([*edits, *(BUFFERS if sanitizer == "address" else [])])
    command = ["g++", *build._COMMON, *FLAGS, *SANITIZERS[sanitizer], f"-DTXL_KERNELS={table}_kernels"]
    native = ROOT / "src" / FOLDER
    headers = [header.read_text() for header in sorted(native.glob("*.h"))]
    parts = [kernels, repr((command, build._UNITS)), *headers, HARNESS.read_text()]
    folder = WORK / "programs" / digest(*parts)
    if not (folder / "program").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernels.cpp").write_text(kernels, encoding="utf-8")
        command += ["-I", str(native), "-c"]
        sources = {"kernels": [str(folder / "kernels.cpp"), *build._UNITS[table][1]], "harness": [str(HARNESS)]}
        objects = {name: str(folder / f"{name}.o") for name in sources}
        end = time.monotonic() + SECONDS
        try:
            build._run_all([[*command, *source, "-o", objects[name]] for name, source in sources.items()], end)
            link = ["g++", *SANITIZERS[sanitizer][:1], "-pthread", *objects.values(), "-o", str(folder / "linked")]
            build._run_all([link], end)
        except UserError as error:
            stop(str(error))
        (folder / "linked").rename(folder / "program")
    # addresses at random are too far apart for the ThreadSanitizer of some versions
    fixed = ["setarch", "-R"] if sanitizer == "thread" and shutil.which("setarch") else []
    return run([*fixed, str(folder / "program"), *functions], OPTIONS)


def operators(edits: Edits, asan: str) -> tuple[Path, dict[str, str]]:
    """Build the operators with AddressSanitizer; returns the folder of the package, and the environment for Python."""
    compiler = f'#!/bin/sh\nunset LD_PRELOAD\nexec g++ "$@" {" ".join((*FLAGS, *SANITIZERS["address"]))}\n'
    cache = WORK / digest(compiler)
    kernels = edited([*edits, *BUFFERS])
    package = WORK / "packages" / ("planted" if edits else "whole")
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "src", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / FOLDER / "kernels.cpp").write_text(kernels, encoding="utf-8")
    cache.mkdir(parents=True, exist_ok=True)
    script = cache / "g++"
    script.write_text(compiler, encoding="utf-8")
    script.chmod(0o700)
    # libstdc++ beside it, as Python itself is not linked with it
    preload = f"{asan} {library('libstdc++.so')}"
    environment = {**OPTIONS, "LD_PRELOAD": preload, "CXX": str(script), "TXL_CACHE": str(cache)}
    code = "from transformer_xl.ops.native.build import build; build()"
    status, output = run([sys.executable, "-c", code], {**environment, "PYTHONPATH": str(package)})
    if status:
        stop(f"the operators were not built:\n{output[-3000:]}")
    return package, environment


def library(name: str) -> str:
    """Return the path of a library of g++."""
    try:
        found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        stop("no g++ was found; install it: apt-get install g++")
    if not os.path.isabs(found.strip()):
        stop(f"g++ has no {name}; install it: apt-get install g++ (Debian, Ubuntu), dnf install {name[:-3]} (Fedora)")
    return found.strip()


def run(command: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
    """Return the status of a command and what it printed."""
    try:
        result = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, timeout=SECONDS, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        stop(
            f"{command[0]} took more than {SECONDS} seconds:\n{(error.stdout or b'').decode(errors='replace')[-3000:]}"
        )
    return result.returncode, result.stdout


def done(status: int, output: str, text: str, start: float) -> None:
    """Print what ran, or end with what a sanitizer or a test reported."""
    if status:
        report = re.search(r"(runtime error|ERROR: AddressSanitizer|WARNING: ThreadSanitizer|== FAILURES ==)", output)
        at = max(0, report.start() - 200) if report else -5000
        stop(f"{text}\n{output[at:][:10000]}")
    print(f"{text}, {seconds(start)}", flush=True)


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def seconds(start: float) -> str:
    return f"{time.monotonic() - start:.0f} s"


def stop(message: str) -> NoReturn:
    sys.exit(f"sanitize: {message}")


if __name__ == "__main__":
    main()
