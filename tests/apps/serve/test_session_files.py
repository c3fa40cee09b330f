"""Sessions as files: whatever a file has, its import has a clear answer, and the server starts without it."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from servers import make_run, running

from transformer_xl import files, tensor_file
from transformer_xl.run import Run
from transformer_xl.tensor_file import load_tensors, save_tensors

BODY: dict[str, Any] = {"model": "tiny", "prompt": "abc", "seed": 1, "max_tokens": 9}
OCTETS = {"content-type": "application/octet-stream"}
WRONG = [
    None,
    True,
    1.5,
    -1,
    0,
    5,
    2**31,
    2**63,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "x" * 2000,
    [],
    [1, 2],
    {},
    "\0",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "tiny")


def make_session(client: httpx2.Client, **body: Any) -> str:
    answer = client.post("/v1/completions", json={**BODY, "session": "new", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["session"]


def imported(client: httpx2.Client, content: bytes) -> httpx2.Response:
    """Import a file, and check that the answer says nothing about the inside of the server."""
    answer = client.post("/v1/sessions/import", content=content, headers=OCTETS)
    assert answer.status_code in (200, 400), answer.text
    assert "Traceback" not in answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]
    return answer


def mutated(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield values of which one is missing or another, with what was changed."""
    for name in values:
        yield f"{name} missing", {other: value for other, value in values.items() if other != name}
        for wrong in WRONG:
            yield f"{name} {wrong!r:.40}", {**values, name: wrong}
        if isinstance(values[name], dict):
            for change, inner in mutated(values[name]):
                yield f"{name} {change}", {**values, name: inner}
    yield "one more", {**values, "more": 1}


def test_session_with_any_metadata_has_a_clear_answer_and_stops_no_server(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a right checksum: each value missing, of another type, huge, negative or no number."""
    path, folder, refused = tmp_path / "good.safetensors", tmp_path / "sessions", list[str]()
    folder.mkdir()
    with running({"tiny": run}) as (client, _):
        path.write_bytes(client.get(f"/v1/sessions/{make_session(client)}/export").content)
        tensors, metadata = load_tensors(path)
        values = json.loads(metadata["session"])
        for index, (change, forged) in enumerate(mutated(values)):
            session_id = f"session-{index:032}"
            if forged.get("id") == values["id"]:
                forged["id"] = session_id  # as in a folder of sessions
            forged_path = folder / f"{session_id}.safetensors"
            save_tensors(forged_path, tensors, {"session": json.dumps(forged)})
            answer = imported(client, forged_path.read_bytes())
            if answer.status_code == 400:
                refused.append(change)
            else:
                assert "missing" not in change or change in ("message_end missing", "parent missing")
                body = {**BODY, "prompt": "then", "session": answer.json()["id"]}
                assert client.post("/v1/completions", json=body).status_code == 200, change
                forged_path.unlink()
        for content in ("5", "[]", "{}", "null", "[" * 3000, '{"id": NaN}', "no JSON"):
            save_tensors(folder / "session-text.safetensors", tensors, {"session": content})
            assert imported(client, (folder / "session-text.safetensors").read_bytes()).status_code == 400
    assert len(refused) > 100
    (folder / "session-link.safetensors").symlink_to(folder / "nothing")
    (folder / f"session-{'f' * 32}.safetensors").mkdir()
    (folder / "session-empty.safetensors").touch()
    capsys.readouterr()
    with running({"tiny": run}, sessions=str(folder)) as (client, _):
        assert client.get("/v1/sessions").json()["data"] == []
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(list(folder.iterdir())) == len(refused) + 4
    assert all("is left out: " in line for line in lines)


def test_damaged_session_is_refused_wherever_it_is_damaged(run: Run) -> None:
    draw = random.Random(3)
    with running({"tiny": run}) as (client, _):
        good = client.get(f"/v1/sessions/{make_session(client)}/export").content
        assert imported(client, good).status_code == 200
        for _ in range(40):
            place = draw.choice([draw.randrange(len(good)), draw.randrange(2500)])
            flipped = good[:place] + bytes([good[place] ^ 1 << draw.randrange(8)]) + good[place + 1 :]
            for content in (flipped, good[:place], good[:place] + good[place + 1 :], good + b"\0"):
                assert imported(client, content).status_code == 400, place


# Imports


def sent(client: httpx2.Client, content: bytes, *headers: str) -> socket.socket:
    """Begin an import, and return the connection."""
    connection = socket.create_connection((client.base_url.host, client.base_url.port), timeout=20)
    lines = ["POST /v1/sessions/import HTTP/1.1", "Host: localhost", "Content-Type: application/octet-stream", *headers]
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + content)
    return connection


def status_of(connection: socket.socket) -> int:
    return int(connection.recv(2**16).split()[1])


def test_import_of_another_length_is_refused(run: Run) -> None:
    with running({"tiny": run}) as (client, _):
        good = client.get(f"/v1/sessions/{make_session(client)}/export").content
        with sent(client, b"", "Content-Length: 3000000") as connection:  # more than any state of this model has
            assert status_of(connection) == 413
        for content in (good[:-9], good + b"\0" * 9, bytes(2000)):
            with sent(client, content, f"Content-Length: {len(content)}") as connection:
                assert status_of(connection) == 400
        assert imported(client, good).status_code == 200


def test_one_import_at_a_time(run: Run) -> None:
    with running({"tiny": run}) as (client, runner):
        good = client.get(f"/v1/sessions/{make_session(client)}/export").content
        with sent(client, good[:100], f"Content-Length: {len(good)}"):
            while not runner.sessions._importing.locked():
                pass
            answer = client.post("/v1/sessions/import", content=good, headers=OCTETS)
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
        while runner.sessions._importing.locked():  # until the server knows that its client has gone
            pass
        assert imported(client, good).status_code == 200


# Files


@pytest.mark.skipif(not hasattr(stat, "S_IMODE") or not hasattr(files.os, "getuid"), reason="needs modes of POSIX")
def test_files_of_sessions_are_private_from_the_beginning(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, modes = tmp_path / "new" / "sessions", list[int]()
    save = tensor_file.save_file

    def noted(tensors: Any, path: Path, metadata: Any) -> None:
        modes.append(stat.S_IMODE(path.stat().st_mode))
        save(tensors, path, metadata=metadata)
        modes.append(stat.S_IMODE(path.stat().st_mode))

    rename = Path.rename
    monkeypatch.setattr(tensor_file, "save_file", noted)
    monkeypatch.setattr(
        Path, "rename", lambda path, to: (modes.append(stat.S_IMODE(path.stat().st_mode)), rename(path, to))[1]
    )
    with running({"tiny": run}, sessions=str(folder)) as (client, _):
        session = make_session(client)
        assert client.get(f"/v1/sessions/{session}/export").status_code == 200
    modes += [stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()]
    assert set(modes) == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_sessions_for_which_there_is_no_room_are_not_read_at_the_start(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their files stay, since the bound may be raised again."""
    with running({"tiny": run}, sessions=str(tmp_path)) as (client, _):
        ids = [make_session(client) for _ in range(4)]
        size = client.get(f"/v1/sessions/{ids[0]}").json()["bytes"]
    opened, read = list[Path](), tensor_file._opened

    @contextlib.contextmanager
    def noted(path: Path) -> Iterator[Any]:
        opened.append(path)
        with read(path) as file:
            yield file

    monkeypatch.setattr(tensor_file, "_opened", noted)
    with running({"tiny": run}, sessions=str(tmp_path), session_bytes=2 * size) as (client, _):
        kept = [session["id"] for session in client.get("/v1/sessions").json()["data"]]
    assert sorted(kept) == sorted(ids[2:])
    assert len(set(opened)) == 3  # the first for which there is no room is read, and no other
    assert len(list(tmp_path.iterdir())) == 4
    assert "2 of them are left out" in capsys.readouterr().err


# Models


def test_session_belongs_to_the_model_that_made_it_among_those_with_the_same_weights(run: Run, tmp_path: Path) -> None:
    narrow = make_run(tmp_path / "narrow", evaluation={"attention_window": 5})
    folder = str(tmp_path / "sessions")
    with running({"a": run, "b": run, "narrow": narrow}, sessions=folder) as (client, _):
        made = {make_session(client, model=name): name for name in ("a", "b", "narrow")}
        content = {name: client.get(f"/v1/sessions/{session}/export").content for session, name in made.items()}
    with running({"a": run, "b": run, "narrow": narrow}, sessions=folder) as (client, _):
        data = client.get("/v1/sessions").json()["data"]
        assert {session["id"]: session["model"] for session in data} == made
        for name, one in content.items():
            assert imported(client, one).json()["model"] == name
    with running({"other": run, "narrow": narrow}) as (client, _):  # where another has its name
        assert imported(client, content["b"]).json()["model"] == "other"
        assert imported(client, content["narrow"]).json()["model"] == "narrow"
    with running({"narrow": narrow}) as (client, _):
        assert "another attention window" in imported(client, content["a"]).json()["error"]["message"]
