"""Helpers that run `txl` commands in this process, and check commands that must fail.

A failing command prints one line to standard error, returns exit status 2, and creates and changes no file.
"""

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

NO_RECIPE = Path(__file__).with_name("no_recipe.yaml")
"""A recipe without settings, for `txl train` with the defaults of all settings."""
FULL = "no space left on the device; free some or choose another path"


@dataclass
class CommandResult:
    """The exit status of a command, and what it printed to standard output and standard error."""

    status: int
    out: str
    err: str

    @property
    def warnings(self) -> str:
        """Standard error without the lines on the weights and the memory length that are used."""
        return re.sub(r"^(weights|memory length).*\n", "", self.err, flags=re.MULTILINE)

    @property
    def object(self) -> dict[str, Any]:
        """The JSON object that was printed; there must be nothing else on standard output."""
        assert self.out.startswith("{")
        assert self.out.endswith("}\n")
        return json.loads(self.out, parse_constant=pytest.fail)


def txl(*words: str | Path) -> CommandResult:
    """Run a command, such as txl("info", folder)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run([str(word) for word in words])
    return CommandResult(status, out.getvalue(), err.getvalue())


def do(words: str) -> None:
    """Run a command that must succeed, such as do("info run")."""
    assert run(words.split()) == 0


def files(folder: Path) -> dict[str, bytes | None]:
    """Return the contents of all files in a folder and its subfolders by path, and None for each subfolder."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def error_of(words: str, capfd: Capture) -> str:
    """Run a command that must fail, and return its one-line message."""
    capfd.readouterr()
    status = run(words.split())
    out, err = capfd.readouterr()
    # printed before training, where a run is loaded, and before contexts are compared
    progress = ("resuming run at", "model: ", "note: the warm-up", "weights", "memory length ", "tokens to process: ")
    message = "".join(line for line in err.splitlines(keepends=True) if not line.startswith(progress))
    assert (status, out) == (2, "")
    assert re.fullmatch(r"txl: error: [^\n]+\n", message)
    assert ".partial-" not in message  # temporary names are not the user's
    return message


def assert_refused(folder: Path, words: str, pattern: str, capfd: Capture) -> None:
    """Check that a command fails with a message that matches the pattern, and changes no file in `folder`."""
    before = files(folder.parent)
    message = error_of(words, capfd)
    assert re.search(pattern, message), message
    assert files(folder.parent) == before


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Limit the size of files, in bytes, that this process can write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_after(writes: int, monkeypatch: Patch) -> None:
    """Simulate a disk that is full after so many calls of os.fsync, which ends the writing of each file and folder."""
    flush, remaining = os.fsync, iter(range(writes))

    def fsync(descriptor: int) -> None:
        if next(remaining, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
