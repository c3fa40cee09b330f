"""One client among others: whoever reads slowly, asks for much or sends nothing keeps nobody else from being served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from pydantic import ValidationError
from servers import make_run, running

from transformer_xl.apps.serve import app, connections
from transformer_xl.apps.serve.answers import TokenNames, text_offsets
from transformer_xl.apps.serve.config import ServerConfig
from transformer_xl.apps.serve.engine import QueueFullError
from transformer_xl.apps.serve.guard import owner_of
from transformer_xl.apps.serve.protocol import ApiError, AttentionBody, Body, ChatBody, CompletionBody, DetokenizeBody
from transformer_xl.apps.serve.requests import RequestRunner
from transformer_xl.apps.serve.server import uvicorn_settings
from transformer_xl.run import Run

BODY: dict[str, Any] = {"model": "tiny", "prompt": "abc", "seed": 1, "max_tokens": 4}
OWNER = owner_of("")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "tiny")


class Connection:
    """A client that stays."""

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}


class SlowDisk:
    """Lets sessions be saved only once `go` is set."""

    def __init__(self, runner: RequestRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        write = runner.sessions._write

        def wait(*arguments: Any) -> None:
            self.begun.set()
            assert self.go.wait(60)
            write(*arguments)

        monkeypatch.setattr(runner.sessions, "_write", wait)


def test_session_is_not_released_while_it_is_saved(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client goes away meanwhile: a second writer is refused until then, so that nothing is lost."""
    with running({"tiny": run}, sessions=str(tmp_path)) as (client, runner):
        session = client.post("/v1/completions", json={**BODY, "session": "new"}).json()["session"]
        disk = SlowDisk(runner, monkeypatch)

        async def go() -> None:
            request = await runner.completion(CompletionBody(**BODY, session=session), OWNER, None)

            async def consume() -> None:
                async for _ in runner.events(request, Connection()):
                    pass

            task = asyncio.create_task(consume())
            await asyncio.to_thread(disk.begun.wait, 60)
            task.cancel()
            await asyncio.wait([task])
            with pytest.raises(ApiError, match="another request is changing"):
                runner.sessions.acquire(session, OWNER)
            disk.go.set()
            while session in runner.sessions._busy:
                await asyncio.sleep(0.01)

        asyncio.run(go())
        assert client.get(f"/v1/sessions/{session}").json()["tokens"] == 1 + 2 * (3 + 4)


def test_new_session_is_made_when_its_request_completes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is refused, or whose client goes away, leaves none; and the event loop does not wait for the disk."""
    with running({"tiny": run}, sessions=str(tmp_path)) as (client, runner):

        def refuse(*_: Any) -> None:
            raise QueueFullError

        with monkeypatch.context() as patch:
            patch.setattr(runner.engine, "submit", refuse)
            assert client.post("/v1/completions", json={**BODY, "session": "new"}).status_code == 429
        wrong = {**BODY, "session": "new", "prompt": "", "add_special_tokens": False}
        assert client.post("/v1/completions", json=wrong).status_code == 400
        with client.stream(
            "POST", "/v1/completions", json={**BODY, "max_tokens": 60_000, "stream": True, "session": "new"}
        ) as r:
            next(r.iter_raw())
        while runner.sessions._busy:
            pass
        assert client.get("/v1/sessions").json()["data"] == []
        assert list(tmp_path.iterdir()) == []
        disk = SlowDisk(runner, monkeypatch)
        thread = threading.Thread(
            target=client.post, args=("/v1/completions",), kwargs={"json": {**BODY, "session": "new"}}
        )
        thread.start()
        assert disk.begun.wait(60)
        assert client.get("/health", timeout=20).status_code == 200
        disk.go.set()
        thread.join()
        assert len(client.get("/v1/sessions").json()["data"]) == 1


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (CompletionBody, {"prompt": [-1] * 1000}),
        (CompletionBody, {"prompt": [[-1] * 1000] * 1000}),
        (CompletionBody, {"prompt": "a", **{f"field{index}": 1 for index in range(1000)}}),
        (CompletionBody, {"prompt": "a", "logit_bias": {f"{index}": "b" for index in range(1000)}}),
        (CompletionBody, {"prompt": "a", "stop": [""] * 1000}),
        (ChatBody, {"messages": [5] * 1000}),
        (ChatBody, {"messages": [{"role": "user", "content": [5] * 1000}]}),
        (DetokenizeBody, {"tokens": [-1] * 1000}),
        (AttentionBody, {"prompt": [-1] * 1000}),
    ],
)
def test_wrong_values_of_a_body_are_not_all_collected(model: type[Body], values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        model.model_validate({"model": "tiny", **values})
    assert error.value.error_count() < 10


@pytest.mark.parametrize("stream", [False, True])
def test_echo_is_made_once_and_not_in_the_event_loop(run: Run, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    threads: list[str] = []

    def noted(*arguments: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return text_offsets(*arguments)

    monkeypatch.setattr(app, "text_offsets", noted)
    with running({"tiny": run}) as (client, _):
        body = {**BODY, "n": 8, "echo": True, "logprobs": 2, "stream": stream}
        assert client.post("/v1/completions", json=body).text.count('"token_logprobs"') >= 8
    assert len(threads) == 1
    assert threads[0].startswith("AnyIO worker")


def test_tokens_of_prompts_are_bounded(run: Run) -> None:
    with running({"tiny": run}, max_prompt_tokens=100_000) as (client, _):
        long = {"model": "tiny", "prompt": "a" * 100_001}
        for path, body in (
            ("/v1/completions", {**long, "max_tokens": 0}),
            ("/v1/completions", {**long, "prompt": ["a" * 50_001] * 2}),
            ("/tokenize", long),
            ("/detokenize", {"tokens": [1] * 100_001}),
            ("/attention", long),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 400
            assert "more than 100,000" in answer.json()["error"]["message"]
        echoed = {"model": "tiny", "prompt": "a" * 70_000, "echo": True, "max_tokens": 0, "n": 60}
        answer = client.post("/v1/completions", json=echoed)
        assert "too much, more than 4,194,304" in answer.json()["error"]["message"]


@pytest.mark.parametrize("sent", [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nG"])
def test_connection_without_a_request_is_closed(run: Run, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.5)
    with running({"tiny": run}) as (client, _), connect(client) as connection:
        connection.sendall(sent)
        connection.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(2**16):
                pass


@pytest.mark.parametrize(
    "sent", [b"", b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"], ids=["idle", "no body"]
)
def test_connections_that_send_no_request_keep_nobody_out(
    run: Run, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 5)
    with running({"tiny": run}) as (client, _), contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(client)) for _ in range(12)]
        for connection in idle:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(sent)
        assert client.get("/health", timeout=20).status_code == 200
        idle[0].settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert idle[0].recv(1) == b""


def test_uvicorn_refuses_no_connection_before_the_longest_idle_makes_room() -> None:
    settings = uvicorn_settings(cast("Any", None), ServerConfig())
    assert settings.limit_concurrency is None


def test_malformed_requests_write_no_lines_into_the_log(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    with running({"tiny": run}) as (client, _):
        for sent in (
            b"GET / HTTP/9.9\r\n\r\n",
            b"\x16\x03\x01 a TLS greeting \r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nmore",
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5, 6\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"A: " + b"a" * 2**17 + b"\r\n\r\n",
        ):
            with connect(client) as connection:
                connection.settimeout(20)
                with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                    connection.sendall(sent)
                    with contextlib.suppress(OSError):  # the server may have closed it
                        connection.shutdown(socket.SHUT_WR)
                    while connection.recv(2**16):
                        pass
    assert capfd.readouterr().err == ""


def test_client_that_reads_nothing_is_left(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SEND_SECONDS", 0.5)
    lost = threading.Event()
    connection_lost = connections.BoundedProtocol.connection_lost
    monkeypatch.setattr(
        connections.BoundedProtocol, "connection_lost", lambda *given: (connection_lost(*given), lost.set())
    )
    with running({"tiny": run}) as (client, _), connect(client) as connection:
        content = json.dumps({"prompt": "a" * 2**20}).encode()  # with an answer that no buffer of the system holds
        head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        assert lost.wait(60)


def connect(client: httpx2.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port))


def test_timeout_ends_a_request_whose_client_does_not_read(run: Run) -> None:
    """Its session is free again, as it was, and what it still gets is the error."""
    with running({"tiny": run}, timeout=1.0) as (client, runner):
        session = client.post("/v1/sessions", json={"model": "tiny"}).json()["id"]

        async def go() -> None:
            body = CompletionBody(**{**BODY, "max_tokens": 5}, session=session, stream=True)
            request = await runner.completion(body, OWNER, None)
            events = runner.events(request, Connection())
            await anext(events)
            while session in runner.sessions._busy:
                await asyncio.sleep(0.01)
            runner.sessions.acquire(session, OWNER)
            with pytest.raises(ApiError, match="not done in time"):
                async for _ in events:
                    pass
            assert session in runner.sessions._busy  # the next request holds it

        asyncio.run(asyncio.wait_for(go(), 30))
        assert client.get(f"/v1/sessions/{session}").json()["tokens"] == 0


KEYS = "first-key-of-the-tests", "other-key-of-the-tests"


def headers_of(path: Path) -> list[dict[str, str]]:
    """Write a file of two keys; return the headers of requests with each."""
    path.write_text("\n".join(KEYS))
    path.chmod(0o600)
    return [{"authorization": f"Bearer {key}"} for key in KEYS]


def test_sessions_of_the_key_with_the_most_bytes_make_room(run: Run, tmp_path: Path) -> None:
    many, few = headers_of(tmp_path / "keys")
    with running({"tiny": run}, api_key_file=str(tmp_path / "keys"), session_bytes=60_000) as (client, _):

        def make(headers: dict[str, str]) -> str:
            return client.post("/v1/sessions", json={"model": "tiny"}, headers=headers).json()["id"]

        kept = [make(few), make(few)]
        made = [make(many) for _ in range(30)]
        assert [client.get(f"/v1/sessions/{one}", headers=few).status_code for one in kept] == [200, 200]
        left = [one for one in made if client.get(f"/v1/sessions/{one}", headers=many).status_code == 200]
        assert left == made[-12:]  # 60,000 // 4,096 together with the other two


def test_key_that_asks_for_much_leaves_others_their_share(run: Run, tmp_path: Path) -> None:
    """All rows are its own, and as many of its requests wait as may: those of another key are answered meanwhile."""
    greedy, modest = headers_of(tmp_path / "keys")
    limits = {"max_batch": 4, "max_waiting": 8, "api_key_file": str(tmp_path / "keys")}
    with running({"tiny": run}, **limits) as (client, runner), contextlib.ExitStack() as stack:
        wide = {**BODY, "n": 4, "max_tokens": 60_000, "stream": True}
        answers = [
            stack.enter_context(client.stream("POST", "/v1/completions", json=wide, headers=greedy)) for _ in range(4)
        ]
        chunks = [answer.iter_raw() for answer in answers]  # names, since an iterator that is dropped ends the stream
        for one in chunks:
            next(one)
        (job, *_) = runner.engine._running
        runner.engine.submit(*(replace(job, is_cancelled=threading.Event()) for _ in range(8)))
        wait_until(lambda: runner.engine.num_waiting == 8)
        assert client.post("/v1/completions", json=BODY, headers=greedy).status_code == 429
        for _ in range(3):
            answer = client.post("/v1/completions", json={**BODY, "n": 2}, headers=modest)
            assert answer.status_code == 200, answer.text
        assert runner.engine.num_waiting == 8
        assert len(runner.engine._running) == 4


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "abc"}), ("/detokenize", {"tokens": [5]})])
def test_texts_of_a_key_leave_threads_to_others(
    run: Run, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """To name the tokens of a long text takes seconds, and all requests share the threads in which that is done."""
    in_place, now, most = TokenNames.in_place, list[int](), list[int]()

    def noted(names: TokenNames, ids: list[int]) -> list[str]:
        now.append(1)
        most.append(len(now))
        time.sleep(0.1)
        now.pop()
        return in_place(names, ids)

    monkeypatch.setattr(TokenNames, "in_place", noted)
    with running({"tiny": run}) as (client, _), ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda _: client.post(path, json=body).status_code, range(8))]
    assert (answers, max(most)) == ([200] * 8, 2)


def test_request_for_many_samples_leaves_others_of_its_key_some_rows(run: Run) -> None:
    with running({"tiny": run}, max_batch=4) as (client, _):
        wide = {**BODY, "n": 4, "max_tokens": 60_000, "stream": True}
        with client.stream("POST", "/v1/completions", json=wide) as answer:
            chunks = answer.iter_raw()
            next(chunks)
            for num_samples in (1, 4):
                answer = client.post("/v1/completions", json={**BODY, "n": num_samples})
                assert len(answer.json()["choices"]) == num_samples
            next(chunks)


def test_room_of_an_answer_is_free_once_it_is_sent(run: Run) -> None:
    """However the request ends; while a client does not read a long answer, it has the room."""
    with running({"tiny": run}, timeout=20, max_batch=2) as (client, runner):
        sizes = runner.engine._sizes
        content = json.dumps({**BODY, "prompt": "a" * 2**16, "max_tokens": 0, "echo": True, "logprobs": 5}).encode()
        with connect(client) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
            time.sleep(0.5)  # in which no more is sent: no buffer of the system holds it
            assert len(sizes) == 1
        wait_until(lambda: not sizes)
        for body, status in (({}, 200), ({"stream": True}, 200), ({"session": "unknown"}, 404), ({"n": 3}, 400)):
            assert client.post("/v1/completions", json={**BODY, **body}).status_code == status
        assert client.post("/attention", json={"prompt": "abc"}).status_code == 200
        with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 60_000, "stream": True}) as answer:
            next(answer.iter_raw())
        wait_until(lambda: not sizes)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
