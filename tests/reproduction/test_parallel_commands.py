"""Commands side by side: outputs whole, a failure stops all, and no process is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from transformer_xl.config import UserError
from transformer_xl.reproduction import parallel
from transformer_xl.reproduction.parallel import Command, Job, run_parallel


def jobs_of(*jobs):
    return [Job(name, lambda commands=commands: commands) for name, commands in jobs]


def test_what_is_printed_goes_into_a_file_and_commands_follow_one_another(tmp_path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    commands = [Command(["recipes", "--json"], output=one), Command(["recipes", "--json"], output=two)]
    run_parallel("all", jobs_of(("a", commands)), tmp_path, workers=1, threads=1)
    assert one.read_text() == two.read_text() != ""
    assert (tmp_path / "a.log").read_text() == "$ txl recipes --json\n" * 2


def test_a_failure_names_the_job_and_begins_no_other(tmp_path):
    never = tmp_path / "never.json"
    jobs = jobs_of(("bad", [Command(["info", "nowhere"])]), ("next", [Command(["recipes", "--json"], output=never)]))
    with pytest.raises(UserError, match=r"bad failed: nowhere: no such folder.*bad\.log"):
        run_parallel("all", jobs, tmp_path, workers=1, threads=1)
    assert not never.exists()


def test_a_fault_of_ours_is_not_hidden(tmp_path):
    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_parallel("all", [Job("a", broken)], tmp_path, workers=2, threads=1)


SLEEPER = """
import signal, sys, time
from pathlib import Path
def save(*_):
    Path(sys.argv[-1]).write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
Path(sys.argv[-1]).write_text("at work")
time.sleep(100)
"""
PARENT = """
import signal, sys
from pathlib import Path
from transformer_xl.reproduction import parallel
from transformer_xl.reproduction.parallel import Command, Job, run_parallel
parallel.PROGRAM = (sys.executable, sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
jobs = [Job(name, lambda name=name: [Command([str(Path(sys.argv[2]) / name)])]) for name in ("a", "b")]
run_parallel("all", jobs, Path(sys.argv[2]), workers=2, threads=1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_every_process_save(tmp_path, number):
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text(SLEEPER)
    words = [sys.executable, "-c", textwrap.dedent(PARENT), sleeper, tmp_path]
    parent = subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True)
    files = [tmp_path / "a", tmp_path / "b"]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    os.kill(parent.pid, number)
    assert parent.wait(60) != 0
    assert [file.read_text() for file in files] == ["saved", "saved"]


def test_what_is_done_is_counted_by_the_jobs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(parallel, "POLL_SECONDS", 0.01)
    counted = iter(range(1000))
    job = Job("a", lambda: [Command(["--version"])], size=3, done=lambda: next(counted))
    run_parallel("all", [job], tmp_path, workers=1, threads=1)
    assert next(counted) > 3  # more than its size is not counted, and breaks nothing


def wait_until(holds, seconds=60.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
