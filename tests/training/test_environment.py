"""A process whose environment is not as torchrun sets it is told so in one line, and can be stopped while it waits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import transformer_xl
from transformer_xl.cli.main import run as txl
from transformer_xl.config import UserError
from transformer_xl.training.distributed import process_group

WHOLE = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}


def start_in(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in WHOLE:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE: .*valid integer.*'abc'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: .*greater than or equal to 1.*'0'"),
        ({"RANK": None}, "RANK: Field required"),
        ({"RANK": "5"}, "RANK 5 must be below WORLD_SIZE 2"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK: .*greater than or equal to 0.*'-1'"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR: Field required"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT: .*less than or equal to 65535.*'70000'"),
    ],
)
def test_a_wrong_environment_is_told(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], message: str
) -> None:
    given = {name: value for name, value in {**WHOLE, **changed}.items() if value is not None}
    start_in(monkeypatch, given)
    with pytest.raises(UserError, match=f"torchrun.*WORLD_SIZE.*{message}"), process_group(lambda: torch.device("cpu")):
        pass


def test_one_process_needs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    start_in(monkeypatch, {"WORLD_SIZE": "1", "RANK": "7"})
    with process_group(lambda: torch.device("cpu")) as world:
        assert (world.rank, world.size) == (0, 1)


def test_a_port_that_is_taken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    on_sigterm, on_sigint = (signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT))
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        start_in(monkeypatch, {**WHOLE, "MASTER_PORT": port})
        message = f"the 2 processes could not connect at 127.0.0.1:{port} (.*); .*torchrun"
        with pytest.raises(UserError, match=message), process_group(lambda: torch.device("cpu")):
            pass
    signal.signal(signal.SIGTERM, on_sigterm)  # a process that ends hears of no SIGTERM; this one goes on
    assert signal.getsignal(signal.SIGINT) == on_sigint


@pytest.mark.parametrize(
    ("environment", "silent"),
    [({}, False), ({"RANK": "1"}, False), ({"RANK": "1", "WORLD_SIZE": "1"}, False), ({**WHOLE, "RANK": "1"}, True)],
)
def test_only_another_process_than_the_first_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environment: dict[str, str], silent: bool
) -> None:
    start_in(monkeypatch, environment)
    assert txl(["train", "--no-such-option"]) == 2
    assert (capsys.readouterr().err == "") == silent


@pytest.mark.skipif(sys.platform != "linux", reason="looks for listening sockets as Linux does")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_waits_for_others_can_be_stopped(number: signal.Signals) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source = str(Path(transformer_xl.__file__).parents[1])
    environment = {**os.environ, **WHOLE, "MASTER_PORT": str(port), "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "transformer_xl", "train", "--corpus", "none", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        deadline = time.monotonic() + 100
        while f":{port:04X} " not in listening():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)  # it waits for the other process by now
        process.send_signal(number)
        assert process.wait(timeout=20) == -number
    finally:
        process.kill()
        process.communicate()


def listening() -> str:
    """Addresses of all sockets that listen, as Linux shows them."""
    tables = (Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    return "".join(f"{line.split()[1]} " for table in tables for line in table if line.split()[3] == "0A")
