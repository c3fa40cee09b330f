"""Downloads, from a server on this machine: mirrors, what is left of a cut connection, checksums, and no server."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from transformer_xl import __version__
from transformer_xl.config import UserError
from transformer_xl.text.sources import download
from transformer_xl.text.sources.download import RemoteFile, cache_folder, download_file

CONTENT = bytes((place * place + place // 13) % 251 for place in range(700_001))
WRONG = CONTENT[::-1]


def remote(*addresses: str) -> RemoteFile:
    return RemoteFile("a.zip", addresses, len(CONTENT), f"sha256:{hashlib.sha256(CONTENT).hexdigest()}")


class Server(ThreadingHTTPServer):
    """Serves CONTENT; the path says how badly."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str | None]] = []
        self.agents: set[str | None] = set()
        self.over = threading.Event()

    def at(self, *paths: str) -> RemoteFile:
        return remote(*(f"http://127.0.0.1:{self.server_port}/{path}" for path in paths))


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        how = self.path.strip("/")
        span = self.headers["Range"]
        self.server.asked.append((how, span))
        self.server.agents.add(self.headers["User-Agent"])
        if how in ("403", "404", "416"):
            self.send_error(int(how))
            return
        content = {"wrong": WRONG, "page": b"<html>gone</html>", "long": CONTENT + b"more"}.get(how, CONTENT)
        start = 0
        if span and how != "norange":
            found = re.fullmatch(r"bytes=(\d+)-", span)
            assert found
            start = int(found[1])
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            first = 0 if how == "otherpart" else start
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        content = content[start:]
        self.send_header("Content-Length", str(len(content)))
        if how == "encoded":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if how == "silent":
            self.wfile.write(content[:1000])
            self.wfile.flush()
            self.server.over.wait()
            return
        if how.startswith("cut"):  # after a third of what is left, or at once
            content = content[: 0 if how == "cutatonce" else len(content) // 3]
        with suppress(OSError):  # the reader has had enough
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.over.set()
        running.shutdown()
        thread.join()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_downloaded_once(server: Server, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    folder = tmp_path / "new" / "cache"
    for _ in range(2):
        path = download_file(server.at("good"), folder, lambda *said: told.append(said))
        assert path == folder / "a.zip"
        assert path.read_bytes() == CONTENT
    assert server.asked == [("good", None)]
    assert server.agents == {f"transformer-xl/{__version__}"}
    assert names(folder) == ["a.zip"]
    loaded = [said for said in told if said[0] == "download a.zip"]
    assert loaded[-1][1:] == (len(CONTENT), len(CONTENT))
    assert all(before[1] < after[1] for before, after in pairwise(loaded))
    assert told[-1] == ("check a.zip", len(CONTENT), len(CONTENT))


def test_mirrors_are_tried_in_turn(server: Server, tmp_path: Path) -> None:
    bad = ["404", "403", "wrong", "page", "cutatonce", "long"]
    assert download_file(server.at(*bad, "good", "never"), tmp_path).read_bytes() == CONTENT
    assert list(dict.fromkeys(how for how, _ in server.asked)) == [*bad, "good"]
    assert names(tmp_path) == ["a.zip"]


def test_a_cut_connection_is_gone_on_with(server: Server, tmp_path: Path) -> None:
    """Each try gets a third of what is missing, and the next begins there; the second address ends it."""
    assert download_file(server.at("cut", "good"), tmp_path).read_bytes() == CONTENT
    starts = [int(span[6:-1]) if span else 0 for _, span in server.asked]
    wanted, have = [], 0
    for _ in range(6):
        wanted.append(have)
        have += (len(CONTENT) - have) // 3
    assert starts == wanted
    assert [how for how, _ in server.asked] == ["cut"] * 5 + ["good"]


def test_a_later_call_goes_on(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the connection was broken 5 times"):
        download_file(server.at("cut"), tmp_path)
    (partial,) = tmp_path.iterdir()
    have = partial.stat().st_size
    assert 0 < have < len(CONTENT)
    assert CONTENT.startswith(partial.read_bytes())
    assert download_file(server.at("good"), tmp_path).read_bytes() == CONTENT
    assert server.asked[-1] == ("good", f"bytes={have}-")
    assert names(tmp_path) == ["a.zip"]


@pytest.mark.parametrize("how", ["good", "norange", "otherpart"])
@pytest.mark.parametrize("rest", [CONTENT[:1009], WRONG[:1009], WRONG, CONTENT + b"more"], ids=range(4))
def test_what_is_left_does_no_harm(server: Server, tmp_path: Path, how: str, rest: bytes) -> None:
    """Whatever an earlier try left, and whether the server knows parts or not, the file is right in the end."""
    (tmp_path / ".a.zip.part").write_bytes(rest)
    assert download_file(server.at(how, "norange"), tmp_path).read_bytes() == CONTENT
    assert names(tmp_path) == ["a.zip"]


def test_a_whole_rest_needs_no_server(tmp_path: Path) -> None:
    (tmp_path / ".a.zip.part").write_bytes(CONTENT)
    file = RemoteFile("a.zip", ("http://127.0.0.1:1/",), len(CONTENT), f"md5:{hashlib.md5(CONTENT).hexdigest()}")
    assert download_file(file, tmp_path).read_bytes() == CONTENT


def test_a_file_that_is_called_packed_is_not_unpacked(server: Server, tmp_path: Path) -> None:
    assert download_file(server.at("encoded"), tmp_path).read_bytes() == CONTENT


def test_a_wrong_file_in_the_cache_is_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(WRONG)
    assert download_file(server.at("good"), tmp_path).read_bytes() == CONTENT


def refusal(file: RemoteFile, folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        download_file(file, folder)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(
        f"a.zip (700,001 bytes, sha256 {hashlib.sha256(CONTENT).hexdigest()}) cannot be downloaded ["
    )
    assert said.endswith(
        f"]; try again later, or download it yourself into {folder}, or name the folder that contains it with "
        "--data-dir DIR"
    )
    return said.partition("[")[2].partition("]")[0].replace("127.0.0.1", "host")


def test_why_no_address_gave_it(server: Server, tmp_path: Path) -> None:
    said = refusal(server.at("404", "403", "wrong", "page", "cutatonce"), tmp_path)
    host = f"host:{server.server_port}: "
    wrong, page = (hashlib.sha256(content).hexdigest() for content in (WRONG, b"<html>gone</html>"))
    assert said.split("; ") == [
        f"{host}answers 404 Not Found",
        f"{host}answers 403 Forbidden",
        f"{host}sends another file, 700,001 bytes, sha256 {wrong}",
        f"{host}sends another file, 17 bytes, sha256 {page}",
        f"{host}the connection was broken",
    ]
    assert names(tmp_path) in ([], [".a.zip.part"])


def test_a_wrong_file_put_into_the_cache_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(WRONG)
    said = refusal(server.at("404"), tmp_path)
    assert said.startswith(
        f"{tmp_path / 'a.zip'} has another checksum, sha256 {hashlib.sha256(WRONG).hexdigest()}; host"
    )
    assert (tmp_path / "a.zip").read_bytes() == WRONG


def test_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    assert refusal(remote(f"http://127.0.0.1:{port}/a"), tmp_path) == f"host:{port}: Connection refused"


def test_a_silent_server(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(download, "_ATTEMPTS", 1)
    with pytest.raises(UserError, match=r"timed out|broken 1 times"):
        download_file(server.at("silent"), tmp_path)


def test_no_room_for_it(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"writing .*file/a.zip: part of the path is a file"):
        download_file(server.at("good"), tmp_path / "file")


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXL_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("TXL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert cache_folder() == tmp_path / "other" / "transformer-xl"
