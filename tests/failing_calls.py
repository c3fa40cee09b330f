"""Runs `txl` in forked processes in which a call that changes a file fails (see failing_calls.c); on Linux with cc.

with FailingCalls(folder) as calls:      # a process that has imported everything
    calls.run("prepare text.txt --out new".split(), work)                        # lists the calls, none fails
    calls.run("prepare text.txt --out new".split(), work, Fault("ENOSPC"), 3)    # from the third on, all fail
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).parent
SECONDS = 120  # more than any command may take
KINDS = "open write truncate fsync chmod mkdir unlink link rename close"


class Fault(NamedTuple):
    """What a call meets."""

    error: str
    kinds: str = KINDS
    """The calls that can meet it."""
    lasting: bool = False
    """Whether all later calls of these kinds meet it too."""


FAULTS = [
    Fault("EIO"),
    Fault("EACCES", "open chmod mkdir unlink link rename"),
    Fault("ENOSPC", "open write truncate fsync mkdir link rename", lasting=True),
    Fault("EROFS", lasting=True),  # some file systems become read-only after an error
    Fault("killed"),
]


@dataclass(frozen=True)
class Trial:
    """What a command did."""

    status: int
    out: str
    err: str
    calls: list[str]
    """The calls of the fault's kinds, such as `write new/corpus.json`."""
    failed: bool
    """Whether one failed."""
    modules: list[str] = field(repr=False)


class FailingCalls:
    """A process that has imported what commands need, and forks one for each command."""

    def __init__(self, folder: Path) -> None:
        """Compile the library, and start the process; both use the folder."""
        self._folder, library = folder, folder / "failing_calls.so"
        source = TESTS / "failing_calls.c"
        subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([sys.executable, __file__], env=environment, text=True, **pipes)  # type: ignore

    def __enter__(self) -> FailingCalls:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(
        self, words: Sequence[str], work: Path, fault: Fault = FAULTS[0], number: int = 0, stdin: bytes = b""
    ) -> Trial:
        """Run a command in the folder `work`.

        Args:
            words: the command, or MODULE:FUNCTION of the tests, which returns a status.
            work: the working directory; the calls of other folders never fail.
            fault: what a call meets.
            number: which one, from 1; with 0 none does.
            stdin: standard input.
        """
        (self._folder / "stdin").write_bytes(stdin)
        (self._folder / "said").write_text('{"calls": [], "failed": true, "modules": []}')  # if it is killed
        asked = {"words": list(words), "work": str(work), "number": number, **fault._asdict()}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({**asked, "files": str(self._folder)}), file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline())
        said = json.loads((self._folder / "said").read_text())
        out, err = ((self._folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return Trial(status, out, err, **said)


def main() -> None:
    """Answer the lines on standard input, each a command, with its exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:0] = [str(TESTS), str(TESTS / "apps" / "serve")]
    import torch

    from transformer_xl.cli.main import run

    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        process = os.fork()
        if not process:
            status = 1
            try:
                status = _run(run, **asked)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        _, result = os.waitpid(process, 0)
        for name in json.loads(Path(asked["files"], "said").read_text())["modules"]:
            if name not in sys.modules:
                with suppress(Exception):
                    importlib.import_module(name)
        print(os.waitstatus_to_exitcode(result), file=answers, flush=True)


def _run(run: Any, words: list[str], work: str, number: int, error: str, kinds: str, lasting: bool, files: str) -> int:
    shim = ctypes.CDLL(None)
    shim.failing_call.restype = ctypes.c_char_p
    signal.alarm(SECONDS)
    os.chdir(work)
    with open(f"{files}/stdin") as stdin, open(f"{files}/stdout", "w") as out, open(f"{files}/stderr", "w") as err:
        for descriptor, file in enumerate((stdin, out, err)):
            os.dup2(file.fileno(), descriptor)
    names = work.encode(), kinds.encode()
    shim.failing_arm(*names, ctypes.c_long(number), getattr(errno, error, -1), int(lasting))
    status = 1
    try:
        if ":" in words[0]:
            module, name = words[0].split(":")
            status = getattr(importlib.import_module(module), name)(*words[1:])
        else:
            status = run(words)
    finally:
        calls = [shim.failing_call(ctypes.c_long(index)).decode() for index in range(shim.failing_count())]
        said = {"calls": calls, "failed": bool(shim.failing_failed()), "modules": list(sys.modules)}
        Path(files, "said").write_text(json.dumps(said))
    return status


if __name__ == "__main__":
    main()
