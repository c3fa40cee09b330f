"""Environment variables of torchrun that are wrong are reported in one line; a waiting process can be stopped."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from processes import command_job, free_port, start_process

from transformer_xl.cli.main import run as txl
from transformer_xl.config import UserError
from transformer_xl.training.distributed import process_group

# what torchrun sets for the first of two processes
VARIABLES = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}


def set_environment(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("changed", "message"),  # None removes a variable
    [
        ({"WORLD_SIZE": "abc"}, "missing or wrong .*'abc'"),
        ({"RANK": None}, "missing or wrong .*'RANK'"),
        ({"RANK": "5"}, "RANK 5 is not below WORLD_SIZE 2"),
        ({"MASTER_PORT": "70000"}, "could not connect at 127.0.0.1:70000"),
    ],
)
def test_wrong_variables_are_reported(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], message: str
) -> None:
    variables = {name: value for name, value in {**VARIABLES, **changed}.items() if value is not None}
    set_environment(monkeypatch, variables)
    with pytest.raises(UserError, match=f"{message}.*torchrun"), process_group(lambda: torch.device("cpu")):
        pass


def test_single_process_needs_no_other_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, {"WORLD_SIZE": "1", "RANK": "7"})
    with process_group(lambda: torch.device("cpu")) as world:  # RANK is ignored
        assert (world.rank, world.size) == (0, 1)


def test_port_in_use_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    on_sigterm, on_sigint = (signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT))
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        set_environment(monkeypatch, {**VARIABLES, "MASTER_PORT": port})
        message = f"the 2 processes could not connect at 127.0.0.1:{port} (.*); .*torchrun"

        def join() -> None:
            with process_group(lambda: torch.device("cpu")):
                pass

        for connect in (join, lambda: ThreadPoolExecutor(1).submit(join).result()):  # a thread cannot change signals
            with pytest.raises(UserError, match=message):
                connect()
    signal.signal(signal.SIGTERM, on_sigterm)  # process_group ignores it after an error, before the process ends
    assert signal.getsignal(signal.SIGINT) == on_sigint


@pytest.mark.parametrize(
    ("environment", "silent"),  # only a process with a RANK above 0, one of several, is silent
    [
        ({}, False),
        ({"RANK": "1"}, False),
        ({"RANK": "1", "WORLD_SIZE": "1"}, False),
        ({**VARIABLES, "RANK": "1"}, True),
    ],
)
def test_only_the_first_process_prints_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environment: dict[str, str], silent: bool
) -> None:
    set_environment(monkeypatch, environment)
    assert txl(["train", "--no-such-option"]) == 2
    assert (capsys.readouterr().err == "") == silent


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net/tcp")
def test_process_that_waits_for_others_can_be_stopped(tmp_path: Path) -> None:
    port = free_port()
    # the first of 2 processes, whose second never starts
    process = start_process(0, 2, port, command_job, tmp_path / "error", "train", "--corpus", "none", "--device", "cpu")
    try:
        deadline = time.monotonic() + 100
        # /proc/net/tcp contains ports as four hexadecimal digits
        while f":{port:04X} " not in listening_addresses():
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)  # until it waits for the other process
        os.kill(process.pid, signal.SIGINT)
        process.join(20)
        assert process.exitcode == -signal.SIGINT
    finally:
        process.kill()


def listening_addresses() -> str:
    """Return the addresses of all sockets in state LISTEN (0A in /proc/net/tcp)."""
    tables = (Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    return "".join(f"{line.split()[1]} " for table in tables for line in table if line.split()[3] == "0A")
