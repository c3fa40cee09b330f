"""Compiles the native operators, into a folder that only this user can write to, or for a wheel.

The folder has a record (`NAME.json`) for each combination of sources, flags and torch version, which are its name. It
is written last: it says which library was built, by which compiler, or why there is none. So a library is used whole or
not at all. A record of another compiler is replaced when that one builds.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from transformer_xl.config import UserError
from transformer_xl.files import (
    as_user_error,
    atomic_file,
    cache_folder,
    check_private,
    final_names,
    lock_folder,
    read_bytes,
    write_json,
)

COMMAND = "txl info --build-native"
_TIMEOUT = 900.0  # seconds for all of a build; one core takes about 40
_SOURCES = Path(__file__).parent
_COMMON = ("-O3", "-std=c++20", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=fast")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_UNITS = {  # flags of each file that is compiled
    "avx2": ("kernels.cpp", (*_AVX2, "-DTXL_KERNELS=avx2_kernels")),
    "avx512": ("kernels.cpp", (*_AVX512, "-DTXL_KERNELS=avx512_kernels")),
    "operators": ("operators.cpp", ()),
}
_PORTABLE = {**_UNITS, "portable": ("portable.cpp", ())}
IN_WHEEL = _SOURCES / "operators.so"
"""The library of a wheel that carries one, for every torch from 2.11 on. It is trusted as the Python code beside it."""


@dataclass(frozen=True)
class BuildRecord:
    """What came of a build by a compiler: the name and checksum of the library, or why there is none."""

    compiler: str
    library: str | None = None
    sha256: str | None = None
    failure: str | None = None


def folder() -> Path:
    """Return the folder of the built libraries."""
    return cache_folder() / "native"


def unsupported() -> str | None:
    """Return why the operators cannot run on this computer, or None if they can."""
    import torch

    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"they are for Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return "the processor has no AVX2"
    return None


def has_avx512() -> bool:
    """Return whether torch uses AVX512 here, which ATEN_CPU_CAPABILITY limits."""
    import torch

    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def find_record() -> BuildRecord | None:
    """Return the record of the build for these sources and this torch, or None if there is none.

    Raises:
        UserError: the folder or a file in it is not only this user's, or is damaged.
    """
    path = _record_path()
    if not path.exists():
        return None
    check_private(path.parent)
    try:
        return BuildRecord(**json.loads(read_bytes(path)))
    except (ValueError, TypeError):
        raise UserError(f"{path} is damaged; build again: {COMMAND}") from None


def library_path(record: BuildRecord) -> Path:
    """Return the path of a record's library, whose contents are checked.

    Raises:
        UserError: the file is missing or altered.
    """
    path = folder() / str(record.library)
    if not path.exists() or hashlib.sha256(read_bytes(path)).hexdigest() != record.sha256:
        raise UserError(f"{path} is missing or altered; build again: {COMMAND}")
    return path


def build() -> str:
    """Compile the operators, unless this compiler has done so, and return what was done.

    Raises:
        UserError: the operators cannot run here, there is no compiler, it fails or takes too long, another process
            builds, or the folder is not safe. A failure of the compiler is recorded.
    """
    if reason := unsupported():
        raise UserError(f"native operators cannot be used: {reason}")
    command, where, record = _compiler(), folder(), None
    with as_user_error(f"writing {where}"):
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_private(where)
    with lock_folder(where):
        compiler = _run_all([[*command, "--version"]], time.monotonic() + 60)[0].partition("\n")[0]
        with suppress(UserError):  # built again if it is altered
            record = find_record()
            if record is not None and record.library and record.compiler == compiler:
                library_path(record)
                return f"native operators were built before, by {compiler}"
        start = time.monotonic()
        for leftover in where.glob(".build.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            content = _compile(command, where, start + _TIMEOUT)
        except UserError as error:
            if record is None or not record.library:
                write_json(_record_path(), asdict(BuildRecord(compiler, failure=str(error))))
            raise
        sha256 = hashlib.sha256(content).hexdigest()
        with atomic_file(where / f"{sha256[:20]}.so") as path:
            path.write_bytes(content)
            path.chmod(0o700)
        write_json(_record_path(), asdict(BuildRecord(compiler, f"{sha256[:20]}.so", sha256)))
        return f"native operators built in {time.monotonic() - start:.0f} s by {compiler}"


def _record_path() -> Path:
    """Return the path of the record for these sources, flags and torch version."""
    import torch

    digest = hashlib.sha256()
    for part in (torch.__version__, torch.version.git_version, repr((_COMMON, _UNITS))):
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.glob("*.cpp")) + sorted(_SOURCES.glob("*.h")):
        digest.update(source.read_bytes())
    return folder() / f"{digest.hexdigest()[:20]}.json"


def _compiler() -> list[str]:
    """Return the command of the C++ compiler: that of CXX, or the first that is installed."""
    given = os.environ.get("CXX")
    if given:
        return shlex.split(given)
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise UserError("no C++ compiler was found; install g++ or clang, or name one: CXX=... " + COMMAND)


def compile_for_wheel() -> bytes:
    """Return the library that a wheel carries: for every torch from 2.11 on, and the C libraries of manylinux_2_28.

    Raises:
        UserError: the operators cannot run here, there is no g++, or it fails.
    """
    if reason := unsupported():
        raise UserError(f"native operators cannot be tried here: {reason}")
    return _compile(_compiler(), Path(tempfile.gettempdir()), time.monotonic() + _TIMEOUT, _PORTABLE, ["-s"])


def _compile(
    command: Sequence[str],
    where: Path,
    end: float,
    units: Mapping[str, tuple[str, Sequence[str]]] = _UNITS,
    link_flags: Sequence[str] = (),
) -> bytes:
    """Compile and link the operators in a temporary folder, try them in another process, and return the library."""
    import torch

    torch_folder = Path(torch.__file__).parent
    # paths of this computer would be in messages
    common = [*_COMMON, f"-ffile-prefix-map={_SOURCES}=native", f"-ffile-prefix-map={torch_folder}=torch"]
    with tempfile.TemporaryDirectory(prefix=".build.partial-", dir=where) as name:
        temporary = Path(name)
        objects = [temporary / f"{unit}.o" for unit in units]
        commands = [
            [*command, *common, *flags, "-isystem", str(torch_folder / "include"), "-c", str(_SOURCES / source)]
            for source, flags in units.values()
        ]
        _run_all([[*words, "-o", str(path)] for words, path in zip(commands, objects, strict=True)], end)
        library, exports = temporary / "library.so", temporary / "exports"
        exports.write_text("{ local: *; };")  # torch is told of the operators when the library is loaded
        # without -fopenmp: functions of OpenMP are those of torch's own library, which has the threads
        link = ["-shared", "-o", str(library), *map(str, objects), f"-L{torch_folder / 'lib'}", "-ltorch_cpu"]
        # -z now: what a torch lacks is found when the library is loaded
        _run_all([[*command, *link, f"-Wl,-z,now,--version-script={exports}", *link_flags]], end)
        trial = f"import torch; torch.ops.load_library({str(library)!r}); torch.ops.transformer_xl_native.prepare"
        _run_all([[sys.executable, "-c", f"{trial}({has_avx512()}, True)"]], end)
        return read_bytes(library)


def _run_all(commands: Sequence[Sequence[str]], end: float) -> list[str]:
    """Run commands at the same time, and return what they print; if one fails, the others are ended.

    Args:
        commands: the commands with their arguments.
        end: when all must have ended, in the time of time.monotonic.

    Raises:
        UserError: one cannot be started, fails, or takes too long.
    """
    with ExitStack() as stack:
        started: list[tuple[str, subprocess.Popen[bytes], IO[bytes]]] = []
        for command in commands:
            # a file, because nobody reads a pipe while the others are waited for
            output = stack.enter_context(tempfile.TemporaryFile())
            with as_user_error(f"running {command[0]}"):
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
            stack.callback(_end, process)
            started.append((command[0], process, output))
        return [_output(*one, end - time.monotonic()) for one in started]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that may still run, and what it has started, which is in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _output(name: str, process: subprocess.Popen[bytes], output: IO[bytes], seconds: float) -> str:
    try:
        status = process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        raise UserError(f"{name} took too long and was ended") from None
    output.seek(0)
    text = output.read().decode(errors="replace").strip()
    if status:
        lines = [line for line in text.splitlines() if "error" in line.lower()] or text.splitlines() or ["no message"]
        ended = f"was ended by signal {-status}" if status < 0 else f"failed with status {status}"
        raise UserError(f"{name} {ended}: {final_names(lines[0].strip())[:300]}")
    return text
