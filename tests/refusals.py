"""Commands and what they say; those that must fail: one line on standard error, status 2, nothing changed on disk."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from transformer_xl.cli.main import run

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

FULL = "no space left on the device; free some or choose another path"


@dataclass
class Said:
    status: int
    out: str
    err: str

    @property
    def object(self) -> dict[str, Any]:
        """The JSON object that is all there is on standard output."""
        assert self.out.startswith("{")
        assert self.out.endswith("}\n")
        return json.loads(self.out, parse_constant=pytest.fail)


def txl(*words: str | Path) -> Said:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run([str(word) for word in words])
    return Said(status, out.getvalue(), err.getvalue())


def do(words: str) -> None:
    assert run(words.split()) == 0


def files(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def error_of(words: str, capfd: Capture) -> str:
    """Runs a command that must fail, and gives its one line."""
    capfd.readouterr()
    status = run(words.split())
    out, err = capfd.readouterr()
    remarks = ("resuming run at", "model: ")
    said = "".join(line for line in err.splitlines(keepends=True) if not line.startswith(remarks))
    assert (status, out) == (2, "")
    assert re.fullmatch(r"txl: error: [^\n]+\n", said)
    return said


def assert_refused(place: Path, words: str, message: str, capfd: Capture) -> None:
    before = files(place.parent)
    said = error_of(words, capfd)
    assert re.search(message, said), said
    assert files(place.parent) == before


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_after(writes: int, monkeypatch: Patch) -> None:
    """Lets the disk be full from the given flush on."""
    flush, left = os.fsync, iter(range(writes))

    def fsync(descriptor: int) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
