"""Faults: what comes from outside is wrong, the client goes away, the disk is full, the server is told to stop."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import make_run, running

from transformer_xl.apps.serve import sessions as sessions_module
from transformer_xl.cli.main import run as run_command
from transformer_xl.generation.generate import generate
from transformer_xl.run import Run

BODY = {"model": "tiny", "prompt": "abc", "seed": 1}
OCTETS = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def client(run: Run):
    with running({"tiny": run}, chat_template="plain") as (made, _):
        yield made


def assert_clear(answer: httpx2.Response) -> None:
    """An error in OpenAI's form, which says nothing about the inside of the server."""
    assert 200 <= answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]
    assert_no_inside(answer)


def assert_no_inside(answer: httpx2.Response) -> None:
    assert "Traceback" not in answer.text
    assert "site-packages" not in answer.text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = """model prompt max_tokens temperature top_p top_k min_p n best_of stop seed echo logprobs stream
stream_options session memory_length messages tokens user suffix""".split()  # noqa: SIM905
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/sessions"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(PATHS), body=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_any_body_has_a_clear_answer(client: httpx2.Client, path: str, body: dict[str, Any]) -> None:
    small = {name: value for name, value in body.items() if name not in ("max_tokens", "n", "best_of")}
    for values in (body, {**BODY, "max_tokens": 2, **small}):
        content = json.dumps(values)  # with NaN and Infinity, which are no JSON
        assert_clear(client.post(path, content=content, headers={"content-type": "application/json"}))


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"model": "tiny", "prompt": "\\ud800"}',
        b"1" * 5000, b'{"prompt": NaN}',
    ],
    ids=["empty", "cut", "list", "null", "string", "no UTF-8", "deep", "surrogate", "long number", "NaN"],
)  # fmt: skip
def test_malformed_bodies(client: httpx2.Client, content: bytes) -> None:
    answer = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert_clear(answer)


def test_client_that_vanishes_stops_its_request(run: Run) -> None:
    """While its text is streamed, and while it waits for a whole answer."""
    with running({"tiny": run}) as (client, runner):
        for stream in (True, False):
            address = client.base_url
            body = json.dumps({**BODY, "max_tokens": 60_000, "stream": stream}).encode()
            with socket.create_connection((address.host, address.port)) as connection:
                head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                while not runner.engine.num_running:
                    time.sleep(0.01)
                if stream:
                    connection.recv(1000)
            deadline = time.monotonic() + 20
            while not runner.engine.is_idle:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert runner.engine.counters.cancelled == 2


def test_two_models_at_once_each_give_their_own_text(run: Run, tmp_path: Path) -> None:
    """Requests of both, with sessions and without, are stepped in turns; a session belongs to its model."""
    runs = {"tiny": run, "other": make_run(tmp_path / "other", "pre-norm")}
    with running(runs) as (client, runner):

        def text_of(index: int) -> str:
            name, session = list(runs)[index % 2], {"session": "new"} if index % 3 else {}
            body = {"model": name, "prompt": f"text {index}", "max_tokens": 60 + index, "seed": index, **session}
            answer = httpx2.post(f"{client.base_url}/v1/completions", json=body, timeout=60).json()
            assert answer["model"] == name
            return answer["choices"][0]["text"]

        with ThreadPoolExecutor(12) as pool:
            texts = list(pool.map(text_of, range(24)))
        for index, text in enumerate(texts):
            model = list(runs.values())[index % 2]
            expected = generate(model, f"text {index}", max_new_tokens=60 + index, seed=index, top_k=None)
            assert text == expected.text, index
        assert runner.engine.counters.step_rows > 1.5 * runner.engine.counters.steps, "they did not run together"
        session = make_session(client)
        answer = client.post("/v1/completions", json={**BODY, "model": "other", "session": session})
        assert "belongs to the model tiny, not other" in answer.json()["error"]["message"]
        answer = client.post("/v1/completions", json={**BODY, "model": "third"})
        assert "the models are tiny, other" in answer.json()["error"]["message"]


def test_death_of_the_model_thread_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with running({"tiny": run}) as (client, runner):
        monkeypatch.setattr(runner.engine, "_share_rows", lambda: 1 / 0)
        answer = client.post("/v1/completions", json=BODY)
        assert answer.status_code == 500
        assert "ZeroDivision" not in answer.text
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json=BODY).status_code == 503


def test_failed_stream_has_all_that_was_generated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what the listener was not told yet, as none is told again so soon."""
    monkeypatch.setattr("transformer_xl.apps.serve.engine._MAX_NEWS", 1e-3)
    body, texts, error = {**BODY, "max_tokens": 60_000, "stream": True, "seed": 1}, list[str](), None
    with running({"tiny": run}) as (client, runner), client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            chunk = json.loads(line[6:]) if line.startswith("data: {") else None
            if chunk and "error" in chunk:
                error = chunk["error"]["message"]
            elif chunk:
                texts += [choice["text"] for choice in chunk["choices"]]
                if len(texts) == 1:
                    while runner.engine.counters.generated_tokens < 100:
                        time.sleep(0.01)
                    runner.engine.stop(wait=False)
        number = runner.engine.counters.generated_tokens
    assert error is not None
    assert len(texts) == 2
    expected = generate(run, BODY["prompt"], max_new_tokens=number, seed=1, top_k=None).text
    assert "".join(texts) == expected[: len("".join(texts))]
    assert len("".join(texts)) >= len(expected) - 1  # a character that is not complete


# Sessions


def make_session(client: httpx2.Client, **body: Any) -> str:
    answer = client.post("/v1/completions", json={**BODY, "session": "new", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["session"]


def test_session_with_other_values_and_a_right_checksum_is_refused(run: Run, tmp_path: Path) -> None:
    """Shapes, counts and values are checked, not only the checksum, which anybody can compute."""
    with running({"tiny": run}) as (client, runner):
        session = runner.sessions.get(make_session(client), runner.sessions.listed(_owner())[0].owner)
        state, path = session.state, tmp_path / "session.safetensors"
        changes: dict[str, Any] = {
            "not finite": {"tensors": {name: torch.full_like(t, torch.nan) for name, t in state.tensors.items()}},
            "another shape": {"tensors": {name: t[..., :1].contiguous() for name, t in state.tensors.items()}},
            "one tensor more": {"tensors": {**state.tensors, "more": torch.zeros(1)}},
            "a token that is none": {"newest": 256},
            "too many slots": {"memory_length": 10**6, "num_valid": 10**6, "num_read": 10**6},
            "counts that contradict": {"num_valid": 1, "num_read": 9},
        }
        for name, change in changes.items():
            forged = sessions_module.replace(session, state=sessions_module.replace(state, **change))
            runner.sessions._write(forged, path)
            answer = client.post("/v1/sessions/import", content=path.read_bytes(), headers=OCTETS)
            assert answer.status_code == 400, name
            assert_clear(answer)


def _owner() -> str:
    from transformer_xl.apps.serve.guard import owner_of

    return owner_of("")


def test_least_recently_used_sessions_go_first(run: Run) -> None:
    with running({"tiny": run}) as (client, _):
        size = client.get(f"/v1/sessions/{make_session(client)}").json()["bytes"]
    with running({"tiny": run}, session_bytes=2 * size) as (client, _):
        first, second = make_session(client), make_session(client)
        client.get(f"/v1/sessions/{first}")
        third = make_session(client)
        statuses = [client.get(f"/v1/sessions/{one}").status_code for one in (first, second, third)]
        assert statuses == [200, 404, 200]
    with running({"tiny": run}, session_bytes=size - 1) as (client, _):
        answer = client.post("/v1/completions", json={**BODY, "session": "new"})
        assert answer.status_code == 507
        assert "--session-bytes" in answer.json()["error"]["message"]


def test_sessions_survive_a_restart(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running({"tiny": run}, sessions=str(tmp_path)) as (client, _):
        session, branch = make_session(client), make_session(client)
        texts = [client.post("/v1/completions", json={**BODY, "session": branch}).json()["choices"]]
        assert client.delete(f"/v1/sessions/{branch}").status_code == 200
    (tmp_path / "session-forged.safetensors").write_bytes(b"nothing")
    assert len(list(tmp_path.glob("session-*"))) == 2
    with running({"tiny": run}, sessions=str(tmp_path)) as (client, _):
        texts.append(client.post("/v1/completions", json={**BODY, "session": session}).json()["choices"])
        assert client.get(f"/v1/sessions/{branch}").status_code == 404
    assert texts[0] == texts[1]
    assert "session-forged.safetensors is left out" in capsys.readouterr().err


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """Let the system refuse what is written to any file beyond a size, as a full disk does: after a part of it."""
    resource = pytest.importorskip("resource", reason="needs the limits of POSIX")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_leaves_the_session_as_it_was(run: Run, tmp_path: Path) -> None:
    with running({"tiny": run}, sessions=str(tmp_path), memory_length=4000) as (client, _):
        session = make_session(client)
        before = client.get(f"/v1/sessions/{session}").json()
        files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        body = {**BODY, "session": session, "prompt": "a" * 4000}  # whose memory has more bytes than a file may have
        with small_files(2**18):
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 507
            assert str(tmp_path) not in answer.text
            streamed = client.post("/v1/completions", json={**body, "stream": True}).text
            assert "session_not_saved" in streamed
            assert "[DONE]" not in streamed
        assert client.get(f"/v1/sessions/{session}").json() == before
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == files
        assert client.post("/v1/completions", json=body).status_code == 200
        (file,) = tmp_path.iterdir()
        assert file.stat().st_size > 2**18


def test_session_whose_file_cannot_be_deleted_stays(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would be there again after a restart. To make room it is deleted all the same."""

    def refuse(path: Path, **_: Any) -> None:
        if path.suffix == ".safetensors" and ".partial-" not in path.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with running({"tiny": run}, sessions=str(tmp_path)) as (client, runner):
        session = make_session(client)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refuse)
            answer = client.delete(f"/v1/sessions/{session}")
            assert answer.status_code == 507
            assert_no_inside(answer)
            assert client.get(f"/v1/sessions/{session}").status_code == 200
            runner.sessions.max_bytes = runner.sessions.num_bytes
            another = make_session(client)
        assert [entry["id"] for entry in client.get("/v1/sessions").json()["data"]] == [another]
        assert client.delete(f"/v1/sessions/{another}").status_code == 200


def test_full_temporary_disk_is_said_without_its_path(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running({"tiny": run}, memory_length=4000) as (client, _):
        session = make_session(client, prompt="a" * 4000)
        content = client.get(f"/v1/sessions/{session}/export").content
        for is_missing in (False, True):
            folder = tmp_path / ("missing" if is_missing else "")
            monkeypatch.setattr(tempfile, "tempdir", str(folder))
            with small_files(2**18):
                for answer in (
                    client.get(f"/v1/sessions/{session}/export"),
                    client.post("/v1/sessions/import", content=content, headers=OCTETS),
                ):
                    assert answer.status_code == 507, answer.text
                    assert str(tmp_path) not in answer.text
                    assert_no_inside(answer)
        assert list(tmp_path.iterdir()) == []


# The command


PROGRAM = ("-m", "transformer_xl")
DYING_PROGRAM = """
from transformer_xl.cli.main import main
from transformer_xl.apps.serve.engine import Engine

Engine._step = None
Engine._failures = lambda self, jobs: __import__("contextlib").nullcontext()
main()
"""


def start(run: Run, *options: str, program: Sequence[str] = PROGRAM) -> tuple[subprocess.Popen[str], str]:
    """Start a server, and return its process and address."""
    command = [sys.executable, *program, "serve", str(run.path), "--port", "0", "--threads", "1", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(r"on (http://\S+) ", line):
            return process, match[1]
    raise AssertionError(f"the server did not start: {process.wait()}")


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads what libgomp prints")
@pytest.mark.parametrize(("given", "spins"), [({}, "'0'"), ({"GOMP_SPINCOUNT": "5"}, "'5'")])
def test_waiting_threads_leave_the_cores_to_others(given: dict[str, str], spins: str) -> None:
    """They do not spin, unless the user wants it; set too late, libgomp would not see it."""
    others = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment = {**others, "OMP_DISPLAY_ENV": "VERBOSE", **given}
    command = [sys.executable, *PROGRAM, "serve", "nothere"]
    printed = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment).stderr
    assert f"GOMP_SPINCOUNT = {spins}" in printed


def test_sigterm_under_load_finishes_what_runs_and_waits(run: Run, tmp_path: Path) -> None:
    """A stream ends properly and its session is saved; others, which wait, are answered; the status is 143."""
    process, address = start(run, "--sessions", str(tmp_path), "--shutdown-seconds", "300", "--max-batch", "1")
    try:
        body = {**BODY, "max_tokens": 2000, "stream": True, "session": "new"}
        with (
            ThreadPoolExecutor(6) as pool,
            httpx2.Client(base_url=address, timeout=300) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()
            first = json.loads(next(lines).removeprefix("data: "))
            other = {**BODY, "max_tokens": 100}
            others = [pool.submit(client.post, "/v1/completions", json=other) for _ in range(6)]
            while waiting_in(client) < len(others):  # all of them wait as long as the stream runs
                assert not any(one.done() for one in others), "the stream ended too early"
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
            texts = {one.result().json()["choices"][0]["text"] for one in others}
        assert rest[-1] == "data: [DONE]"
        assert texts == {generate(run, "abc", seed=1, max_new_tokens=100, top_k=None).text}
        assert process.wait(300) == 143
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{address}/health")
    finally:
        stop(process)
    process, address = start(run, "--sessions", str(tmp_path))
    try:
        described = httpx2.get(f"{address}/v1/sessions/{first['session']}").json()
        assert described["tokens"] == 1 + 3 + 2000
    finally:
        stop(process)


def waiting_in(client: httpx2.Client) -> int:
    """Return how many prompts wait."""
    return int(re.search(r"^txl_requests_waiting (\d+)", client.get("/metrics").text, re.M)[1])


def test_sigterm_cuts_what_takes_too_long(run: Run, tmp_path: Path) -> None:
    """After --shutdown-seconds, requests end with a clear error, sessions are as they were, and nothing is printed."""
    process, address = start(run, "--sessions", str(tmp_path), "--shutdown-seconds", "1")
    try:
        session = httpx2.post(f"{address}/v1/completions", json={**BODY, "session": "new"}).json()["session"]
        body = {**BODY, "max_tokens": 60_000, "stream": True, "session": session}
        with httpx2.stream("POST", f"{address}/v1/completions", json=body, timeout=300) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert "the server is stopping" in rest[-1]
        assert process.wait(60) == 143
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    finally:
        stop(process)
    process, address = start(run, "--sessions", str(tmp_path))
    try:
        assert httpx2.get(f"{address}/v1/sessions/{session}").json()["tokens"] == 1 + 3 + 16
    finally:
        stop(process)


def test_second_server_of_a_folder_of_sessions_is_refused(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    process, address = start(run, "--sessions", str(folder))
    try:
        session = httpx2.post(f"{address}/v1/completions", json={**BODY, "session": "new"}).json()["session"]
        (folder / ".session-other.safetensors.partial-1").touch()  # as the first server leaves it while it writes
        command = [sys.executable, *PROGRAM, "serve", str(run.path), "--port", "0", "--sessions", str(folder)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 2
        (line,) = second.stderr.splitlines()
        assert f"{folder} is in use by another txl command" in line
        assert len(list(folder.iterdir())) == 2
        assert httpx2.get(f"{address}/v1/sessions/{session}").status_code == 200
    finally:
        stop(process)


def test_command_ends_when_the_model_thread_dies(run: Run) -> None:
    """The client gets a plain answer, the log says why, and the status is 1, so that systemd starts it again."""
    process, address = start(run, program=("-c", DYING_PROGRAM))
    try:
        answer = httpx2.post(f"{address}/v1/completions", json=BODY, timeout=60)
        assert answer.status_code == 500
        assert_no_inside(answer)
        assert process.wait(60) == 1
        assert process.stderr is not None
        log = process.stderr.read()
        assert "TypeError" in log
        assert "the thread that runs the models has died" in log
    finally:
        stop(process)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "needs an API key"),
        (["--max-batch", "0"], "--max-batch"),
        (["--chat-template", "no content"], "{content} once"),
        (["--api-key-file", "/nowhere/keys"], "no such file"),
    ],
)
def test_command_refuses_wrong_options(
    run: Run, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["serve", str(run.path), *options]) == 2
    stderr = capsys.readouterr().err
    assert message in stderr
    assert stderr.count("\n") == 1
