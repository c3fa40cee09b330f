"""Malformed requests over a socket: each has a clear answer or none, and the server works on.

The variable TXL_MALFORMED_REQUESTS is their number; 10,000 of them take some minutes.
"""

from __future__ import annotations

import json
import os
import re
import socket

import httpx2
import pytest
from malformed import malformed
from servers import make_run, running

from transformer_xl.apps.serve import guard
from transformer_xl.generation.generate import generate
from transformer_xl.run import Run

NUM_REQUESTS = int(os.environ.get("TXL_MALFORMED_REQUESTS", "400"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "tiny")


def answer_to(client: httpx2.Client, content: bytes, *, ends: bool) -> bytes:
    """Send bytes, and return all that comes back; `ends`: say that nothing follows them."""
    address, received = client.base_url, b""
    with socket.create_connection((address.host, address.port), timeout=60) as connection:
        try:
            connection.sendall(content)
            if ends or b"connection: close" not in content.lower():
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(2**16):
                received += part
        except (ConnectionResetError, BrokenPipeError):
            pass  # the server has refused a body that is too large, and does not read the rest
    return received


def assert_clear(received: bytes, sent: bytes) -> int:
    """Check the answers to what was sent, and return the status of the first; 0 if there is none."""
    first = 0
    while received:  # what a request leaves unread is taken for another one
        found = re.match(rb"HTTP/1\.1 (\d{3}) ", received)
        assert found, (sent[:2000], received[:500])
        status = int(found[1])
        first = first or status
        assert 200 <= status < 500, (status, sent[:2000], received[:2000])
        assert b"Traceback" not in received
        assert b"site-packages" not in received
        head, _, content = received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        if length is None or sent.startswith(b"HEAD"):  # a stream, or what uvicorn itself answers
            assert status < 400 or b"Invalid HTTP request received." in content or not content, (sent, content)
            return first
        content, received = content[: int(length[1])], content[int(length[1]) :]
        if status >= 400:
            assert json.loads(content)["error"]["message"]
    return first


def test_malformed_requests(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """After them, a session goes on as before, a completion is that of `generate`, and nothing runs or waits."""
    monkeypatch.setattr(guard, "_BODY_SECONDS", 0.3)  # for bodies that are shorter than their header says
    monkeypatch.setattr(guard, "_MAX_BODY_BYTES", 2**16)
    with running({"tiny": run}, chat_template="plain", max_tokens=50) as (client, runner):
        right = {"model": "tiny", "prompt": "abc", "seed": 3, "max_tokens": 12}
        kept = client.post("/v1/completions", json={**right, "session": "new"}).json()["session"]
        before = client.get(f"/v1/sessions/{kept}").json()
        statuses: list[int] = []
        for seed in range(NUM_REQUESTS):
            sent, ends = malformed(seed)
            statuses.append(assert_clear(answer_to(client, sent, ends=ends), sent))
        counts = {status: statuses.count(status) for status in sorted(set(statuses))}
        print(counts)
        assert {200, 400, 403, 404, 405, 413, 415} <= counts.keys()
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get(f"/v1/sessions/{kept}").json() == before
        text = client.post("/v1/completions", json=right).json()["choices"][0]["text"]
        assert text == generate(run, "abc", seed=3, max_new_tokens=12, top_k=None).text
        assert runner.engine.is_idle
        assert runner.engine.counters.failed == 0
