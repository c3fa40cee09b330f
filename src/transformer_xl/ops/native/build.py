"""Compiles the native operators, into a folder that only this user can write to.

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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

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
        compiler = _run([*command, "--version"], time.monotonic() + 60).partition("\n")[0]
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


def _compile(command: Sequence[str], where: Path, end: float) -> bytes:
    """Compile and link the operators in a temporary folder, try them in another process, and return the library."""
    import torch

    torch_folder = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    with tempfile.TemporaryDirectory(prefix=".build.partial-", dir=where) as name:
        temporary = Path(name)
        objects = [temporary / f"{unit}.o" for unit in _UNITS]
        for (source, flags), path in zip(_UNITS.values(), objects, strict=True):
            words = ["-isystem", str(torch_folder / "include"), "-c", str(_SOURCES / source), "-o", str(path)]
            _run([*command, *_COMMON, abi, *flags, *words], end)
        library = temporary / "library.so"
        # without -fopenmp: functions of OpenMP are those of torch's own library, which has the threads
        link = ["-shared", "-o", str(library), *map(str, objects), f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
        _run([*command, *link], end)
        trial = f"import torch; torch.ops.load_library({str(library)!r}); torch.ops.transformer_xl_native.description()"
        _run([sys.executable, "-c", trial], end)
        return read_bytes(library)


def _run(command: Sequence[str], end: float) -> str:
    """Run a command and return what it prints; it and what it has started are ended with it.

    Args:
        command: the command with its arguments.
        end: when it must have ended, in the time of time.monotonic.

    Raises:
        UserError: it cannot be started, fails, or takes too long.
    """
    name = command[0]
    with as_user_error(f"running {name}"):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with process:
        try:
            printed = process.communicate(timeout=max(0.0, end - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            raise UserError(f"{name} took too long and was ended") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    text, status = printed.decode(errors="replace").strip(), process.returncode
    if status:
        lines = [line for line in text.splitlines() if "error" in line.lower()] or text.splitlines() or ["no message"]
        ended = f"was ended by signal {-status}" if status < 0 else f"failed with status {status}"
        raise UserError(f"{name} {ended}: {final_names(lines[0].strip())[:300]}")
    return text
