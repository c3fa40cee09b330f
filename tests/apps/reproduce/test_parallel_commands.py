"""Commands run in parallel: their output is complete, a failure stops all, and no process is left running."""

import os
import signal
import subprocess
import sys
import time

import pytest

from transformer_xl.apps.reproduce import parallel
from transformer_xl.apps.reproduce.parallel import Command, Job, run_parallel
from transformer_xl.config import UserError


def test_output_is_written_and_commands_run_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "POLL_SECONDS", 0.01)
    progress, out = iter(range(1000)), tmp_path / "out.txt"
    job = Job("a", [Command(["--version"], output=out), Command(["--version"])], size=3, done=lambda: next(progress))
    run_parallel("all", [job], tmp_path, workers=1, threads=1)
    assert (tmp_path / "a.log").read_text() == f"$ txl --version\n$ txl --version\n{out.read_text()}"
    assert next(progress) > 3  # a job may report more work than its size


def test_modules_of_the_folder_are_not_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yaml.py").write_text("raise RuntimeError('not ours')\n")
    run_parallel("all", [Job("a", [Command(["recipes", "tiny"])])], tmp_path, workers=1, threads=1)


def test_failure_names_the_job_and_starts_no_other(tmp_path):
    never = tmp_path / "never.txt"
    jobs = [
        Job("bad", [Command(["info", "nowhere"])]),
        Job("next", [Command(["--version"], output=never)]),
    ]
    with pytest.raises(UserError, match=r"bad failed: nowhere: no such folder.*bad\.log"):
        run_parallel("all", jobs, tmp_path, workers=1, threads=1)
    assert not never.exists()


def test_internal_error_is_raised(tmp_path):
    """An argument that is no string causes a TypeError before the command runs."""
    with pytest.raises(TypeError):
        run_parallel("all", [Job("a", [Command([0])])], tmp_path, workers=2, threads=1)


# in place of txl: writes "working" to the file that it gets, and "saved" when it receives SIGTERM
SLEEPER = """
import signal, sys, time
from pathlib import Path
def save(*_):
    Path(sys.argv[-1]).write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
Path(sys.argv[-1]).write_text("working")
time.sleep(100)
"""
# runs two jobs, a and b, whose command is the script of its first argument, in the folder of its second
PARENT = """
import signal, sys
from pathlib import Path
from transformer_xl.apps.reproduce import parallel
from transformer_xl.apps.reproduce.parallel import Command, Job, run_parallel
parallel.PROGRAM = (sys.executable, sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
jobs = [Job(name, [Command([str(Path(sys.argv[2]) / name)])]) for name in ("a", "b")]
run_parallel("all", jobs, Path(sys.argv[2]), workers=2, threads=1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_lets_every_process_save(tmp_path, number):
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    words = [sys.executable, "-c", PARENT, script, tmp_path]
    parent = subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True)
    files, deadline = [tmp_path / "a", tmp_path / "b"], time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(parent.pid, number)
    assert parent.wait(60) != 0
    assert [file.read_text() for file in files] == ["saved", "saved"]
