"""The native operators are built by `txl info --build-native` alone: whole or not at all, once at a time, for one user.

Most compilers here are scripts that fail, wait or are killed; one copies the library that was built for this machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from native_operators import needs_native
from refusals import files, txl

import transformer_xl
from transformer_xl.ops import native
from transformer_xl.ops.kernels import choose
from transformer_xl.ops.native import build

RECORD = build.find_record() if native.operators() else None
LIBRARY = build.library_path(RECORD) if RECORD else None
BUILD = ["info", "--build-native"]
pytestmark = pytest.mark.skipif(build.unsupported() is not None, reason=f"native operators: {build.unsupported()}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the libraries, which does not exist yet; the operators of this process are loaded from there."""
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TXL_NATIVE", raising=False)
    monkeypatch.setattr(native, "_status", None)
    return tmp_path / "cache" / "native"


def reloaded(monkeypatch: pytest.MonkeyPatch) -> native.NativeStatus:
    """Return the status that a new process would find."""
    monkeypatch.setattr(native, "_status", None)
    return native.status()


def use_compiler(monkeypatch: pytest.MonkeyPatch, path: Path, script: str) -> Path:
    """Make a script the compiler; it answers --version by itself, and notes each other call in a file beside it."""
    version = 'case "$1" in --version) echo "fake 1.0"; exit;; esac'
    path.write_text(f'#!/bin/sh\n{version}\necho "$@" >> {path}.calls\n{script}\n')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path.with_name(path.name + ".calls")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo "kernels.cpp:1: error: no such thing" >&2; exit 1', "failed with status 1: kernels.cpp:1: error: no"),
        ("kill -9 $$", "was ended by signal 9"),
        ("sleep 60", "took too long and was ended"),
    ],
)
def test_failed_build_is_remembered_and_the_package_works_without(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    use_compiler(monkeypatch, tmp_path / "fake", script)
    monkeypatch.setattr(build, "_TIMEOUT", 1.5)
    result = txl(*BUILD)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("txl: error: ")
    assert result.err.count("\n") == 1
    assert message in result.err
    assert [path.suffix for path in folder.iterdir()] == [".json"]  # the record of the failure, nothing half built
    facts = txl("info", "--json").object["machine"]
    assert facts["native_operators"].startswith("the build failed (")
    assert message in facts["native_operators"]
    assert facts["native_operators"].endswith("to try again: txl info --build-native")
    assert facts["attn_implementation_auto"] == choose("auto", torch.device("cpu"), torch.float32).name == "cpu"


def test_program_that_a_compiler_starts_is_ended_with_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(monkeypatch, tmp_path / "fake", f"sleep 60 & echo $! >> {tmp_path / 'pids'}; wait")
    monkeypatch.setattr(build, "_TIMEOUT", 1.5)
    assert txl(*BUILD).status == 2
    for pid in (tmp_path / "pids").read_text().split():
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z"
    assert folder.exists()


def test_nothing_but_the_command_builds(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_compiler(monkeypatch, tmp_path / "fake", "exit 1")
    assert choose("auto", torch.device("cpu"), torch.float32).name == "cpu"
    assert txl("info", "--json").object["machine"]["native_operators"] == (
        "not built; faster with: txl info --build-native"
    )
    assert not calls.exists()
    assert not folder.exists()


def test_lock_dies_with_its_holder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one process builds, another is refused; after it was killed, the next one builds and clears up."""
    calls = use_compiler(monkeypatch, tmp_path / "fake", "sleep 60")
    environment = {**os.environ, "PYTHONPATH": str(Path(transformer_xl.__file__).parents[1])}
    command = [sys.executable, "-c", "from transformer_xl.ops.native.build import build; build()"]
    with subprocess.Popen(command, env=environment) as builder:
        try:
            deadline = time.monotonic() + 60
            while not calls.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert calls.exists()
            result = txl(*BUILD)
            assert result.status == 2
            assert "in use by another txl command" in result.err
        finally:
            # the builder first: it would end the other compiler and clear up if one was ended before it
            for process in (builder.pid, *children(builder.pid)):
                os.kill(process, signal.SIGKILL)
    assert list(folder.glob(".build.partial-*"))  # what the killed process leaves
    use_compiler(monkeypatch, tmp_path / "fake", "exit 1")
    deadline = time.monotonic() + 60
    while "in use by another" in (error := txl(*BUILD).err):  # until the system has ended the killed compilers
        assert time.monotonic() < deadline
    assert "failed with status 1" in error
    assert not list(folder.glob(".*"))


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def test_folders_of_others_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_compiler(monkeypatch, tmp_path / "fake", "exit 1")
    assert txl(*BUILD).status == 2  # makes the folder, for this user alone
    assert folder.stat().st_mode & 0o777 == 0o700
    calls.unlink()
    for path, mode, fault in ((folder, 0o770, "others can write"), (folder.parent, 0o777, "others can write")):
        before = path.stat().st_mode & 0o777
        path.chmod(mode)
        result = txl(*BUILD)
        assert result.status == 2
        assert fault in result.err
        assert "no safe place for libraries" in reloaded(monkeypatch).text
        path.chmod(before)
    other_user = os.getuid() + 1
    monkeypatch.setattr("os.getuid", lambda: other_user)
    assert "it belongs to another user); set TXL_CACHE to a folder of your own" in txl(*BUILD).err
    assert not calls.exists()


def test_missing_compiler_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    result = txl(*BUILD)
    assert result.status == 2
    assert result.err == (
        "txl: error: no C++ compiler was found; install g++ or clang, or name one: CXX=... txl info --build-native\n"
    )
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert "running /nowhere/g++: no such file or folder" in txl(*BUILD).err
    assert not folder.exists() or files(folder) == {}


@needs_native
def test_built_library_is_used_until_it_is_altered_or_switched_off(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built and loaded in another process, because torch takes the operators' names once; one compiler builds once."""
    copy = f'while [ "$1" != -o ]; do shift; done; cp {LIBRARY} "$2"'
    calls = use_compiler(monkeypatch, tmp_path / "fake", copy)
    environment = {**os.environ, "PYTHONPATH": str(Path(transformer_xl.__file__).parents[1])}
    command = [sys.executable, "-m", "transformer_xl", *BUILD, "--json"]
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert built.stderr.startswith("native operators built in ")
    facts = json.loads(built.stdout)["machine"]
    assert facts["native_operators"].startswith("AVX")
    assert facts["attn_implementation_auto"] == "native"
    (library,) = folder.glob("*.so")
    assert library.stat().st_mode & 0o077 == 0
    # where oneDNN has no bfloat16 products, and throws an exception of its own
    limited = subprocess.run(
        [*command[:4], "--json"], env={**environment, "ONEDNN_MAX_CPU_ISA": "AVX2"}, capture_output=True, text=True
    )
    assert json.loads(limited.stdout)["machine"]["native_operators"].endswith("bfloat16 products in float32")
    calls.unlink()
    assert build.build() == "native operators were built before, by fake 1.0"
    assert not calls.exists()
    with monkeypatch.context() as patch:
        patch.setenv("TXL_NATIVE", "0")
        assert reloaded(monkeypatch).text == "switched off by TXL_NATIVE=0"
    library.write_bytes(library.read_bytes()[:-1])
    assert reloaded(monkeypatch).text.endswith("is missing or altered; build again: txl info --build-native")
    library.unlink()
    assert reloaded(monkeypatch).operators is None
    (record,) = folder.glob("*.json")
    record.write_text("{")
    assert reloaded(monkeypatch).text.endswith("is damaged; build again: txl info --build-native")
    assert build.build().startswith("native operators built in ")
    assert library.exists()


@needs_native
def test_library_of_a_wheel_is_used_if_it_loads_and_none_was_built(folder: Path, tmp_path: Path) -> None:
    """In another process, because torch takes the operators' names once."""
    assert LIBRARY is not None
    library, damaged = tmp_path / "operators.so", tmp_path / "damaged.so"
    library.write_bytes(LIBRARY.read_bytes())
    damaged.write_bytes(b"no library")
    code = """if True:
        import sys, torch
        from pathlib import Path
        from transformer_xl.ops import native
        for path in sys.argv[1:]:
            native._status, native.build.IN_WHEEL = None, Path(path)
            print(native.status().text, native.fastest(), sep=": ")
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(transformer_xl.__file__).parents[1])}
    command = [sys.executable, "-c", code, str(damaged), str(library)]
    first, second = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert first.startswith(f"not used: {damaged}: ")
    assert first.endswith("; to build another: txl info --build-native: torch")
    assert second.startswith("AVX")
    assert second.endswith(", from the wheel: native")
    assert not folder.exists()
