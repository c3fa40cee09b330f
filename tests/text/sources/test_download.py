"""Tests of downloads from a local server: mirrors, resumed transfers, checksums, and errors."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest
from text_sources import digest

from transformer_xl.config import UserError
from transformer_xl.files import cache_folder, lock_folder
from transformer_xl.text.sources import download
from transformer_xl.text.sources.archives import FileDigest
from transformer_xl.text.sources.download import RemoteFile, download_file

CONTENT = bytes((index * index + index // 13) % 251 for index in range(700_001))
WRONG = CONTENT[::-1]
PAGE = b"<html>gone</html>"


class Server(ThreadingHTTPServer):
    """Serves CONTENT; the path of the URL selects a fault of `Handler`, and any other path (good, never) has none."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str | None]] = []
        """The path and the Range header of each request."""
        self.stopped = threading.Event()

    def mirrors(self, *paths: str) -> RemoteFile:
        urls = tuple(f"http://127.0.0.1:{self.server_port}/{path}" for path in paths)
        return RemoteFile("a.zip", urls, digest(CONTENT))


class Handler(BaseHTTPRequestHandler):
    """Answers with the fault that the path names.

    403, 404, 416: this HTTP status. wrong, page, long: another content. norange: the whole content even if a range was
    requested. otherpart: a Content-Range header that begins at byte 0. silent: 1000 bytes and then nothing, without
    closing the connection. cut: only a third of the requested bytes. cutatonce: only the headers. slow: the second half
    half a second after the first.
    """

    server: Server

    def do_GET(self) -> None:
        fault, byte_range = self.path.strip("/"), self.headers["Range"]
        self.server.requests.append((fault, byte_range))
        if fault in ("403", "404", "416"):
            self.send_error(int(fault))
            return
        content = {"wrong": WRONG, "page": PAGE, "long": CONTENT + b"more"}.get(fault, CONTENT)
        start = 0
        if byte_range and fault != "norange":
            match = re.fullmatch(r"bytes=(\d+)-", byte_range)
            assert match
            start = int(match[1])
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            first = 0 if fault == "otherpart" else start
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        content = content[start:]
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault == "silent":
            self.wfile.write(content[:1000])
            self.wfile.flush()
            self.server.stopped.wait()
            return
        if fault == "cut":
            content = content[: len(content) // 3]
        elif fault == "cutatonce":
            content = b""
        if fault == "slow":
            self.wfile.write(content[: len(content) // 2])
            content = content[len(content) // 2 :]
            self.server.stopped.wait(0.5)
        with suppress(OSError):  # the client closes the connection when it has enough
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
        running.stopped.set()
        running.shutdown()
        thread.join()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_is_downloaded_once_with_progress(server: Server, tmp_path: Path) -> None:
    progress: list[tuple[str, int, int]] = []
    folder = tmp_path / "new" / "cache"
    for _ in range(2):
        path = download_file(server.mirrors("good"), folder, lambda *call: progress.append(call))
        assert path == folder / "a.zip"
        assert path.read_bytes() == CONTENT
    assert server.requests == [("good", None)]
    assert names(folder) == ["a.zip"]
    downloads = [done for stage, done, _ in progress if stage == "download a.zip"]
    assert downloads[-1] == len(CONTENT)
    assert all(before < after for before, after in pairwise(downloads))
    assert progress[-1] == ("check a.zip", len(CONTENT), len(CONTENT))


def test_mirrors_are_tried_in_order(server: Server, tmp_path: Path) -> None:
    bad = ["404", "403", "wrong", "page", "cutatonce", "long"]
    assert download_file(server.mirrors(*bad, "good", "never"), tmp_path).read_bytes() == CONTENT
    assert list(dict.fromkeys(path for path, _ in server.requests)) == [*bad, "good"]
    assert names(tmp_path) == ["a.zip"]


def test_broken_transfer_is_resumed_by_the_next_attempt_and_mirror(server: Server, tmp_path: Path) -> None:
    """Each of five attempts gets a third of the missing bytes; the second mirror sends the rest."""
    assert download_file(server.mirrors("cut", "good"), tmp_path).read_bytes() == CONTENT
    starts = [int(byte_range[6:-1]) if byte_range else 0 for _, byte_range in server.requests]
    expected, size = [], 0
    for _ in range(6):
        expected.append(size)
        size += (len(CONTENT) - size) // 3
    assert starts == expected
    assert [path for path, _ in server.requests] == ["cut"] * 5 + ["good"]


def test_broken_transfer_is_resumed_by_a_later_call(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the connection was broken 5 times"):
        download_file(server.mirrors("cut"), tmp_path)
    (partial,) = tmp_path.iterdir()
    size = partial.stat().st_size
    assert 0 < size < len(CONTENT)
    assert download_file(server.mirrors("good"), tmp_path).read_bytes() == CONTENT
    assert server.requests[-1] == ("good", f"bytes={size}-")
    assert names(tmp_path) == ["a.zip"]


@pytest.mark.skipif(os.name != "posix", reason="folders are locked on POSIX only")
def test_two_downloads_at_once_are_one(server: Server, tmp_path: Path) -> None:
    stages: set[str] = set()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(download_file, server.mirrors("slow"), tmp_path)
        while not list(tmp_path.iterdir()):
            pass
        second = threads.submit(download_file, server.mirrors("slow"), tmp_path, lambda *call: stages.add(call[0]))
        assert first.result() == second.result() == tmp_path / "a.zip"
    assert names(tmp_path) == ["a.zip"]
    assert server.requests == [("slow", None)]
    assert stages == {"wait for another txl command", "check a.zip"}


@pytest.mark.skipif(os.name != "posix", reason="folders are locked on POSIX only")
def test_a_cache_that_stays_in_use_is_reported(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_WAIT_SECONDS", 0.1)
    with lock_folder(tmp_path), pytest.raises(UserError, match=rf"{tmp_path} is in use by another txl command"):
        download_file(server.mirrors("good"), tmp_path)
    with lock_folder(tmp_path.parent):
        assert download_file(server.mirrors("good"), tmp_path) == tmp_path / "a.zip"


@pytest.mark.parametrize("path", ["good", "norange", "otherpart"])
# Partial files of an earlier attempt: correct, with wrong bytes, complete but wrong, and longer than the file.
@pytest.mark.parametrize("part", [CONTENT[:1009], WRONG[:1009], WRONG, CONTENT + b"more"], ids=range(4))
def test_wrong_partial_file_does_not_spoil_the_download(server: Server, tmp_path: Path, path: str, part: bytes) -> None:
    (tmp_path / ".a.zip.part").write_bytes(part)
    assert download_file(server.mirrors(path, "norange"), tmp_path).read_bytes() == CONTENT
    assert names(tmp_path) == ["a.zip"]


def test_complete_partial_file_needs_no_server(tmp_path: Path) -> None:
    (tmp_path / ".a.zip.part").write_bytes(CONTENT)  # the URL below refuses connections
    md5 = FileDigest(len(CONTENT), f"md5:{hashlib.md5(CONTENT).hexdigest()}")
    assert download_file(RemoteFile("a.zip", ("http://127.0.0.1:1/",), md5), tmp_path).read_bytes() == CONTENT


def error_of(file: RemoteFile, folder: Path) -> str:
    """The reasons in the error message of a download that fails."""
    with pytest.raises(UserError) as caught:
        download_file(file, folder)
    message = re.fullmatch(
        rf"a.zip \({digest(CONTENT)}\) cannot be downloaded \[(.*)\]; try again later, or download it yourself into "
        rf"{folder}, or .* data_dir=DIR; .* your own: txl prepare --train FILE --valid FILE --test FILE",
        str(caught.value),
    )
    assert message
    return message[1].replace("127.0.0.1", "host")


def test_error_has_the_reason_of_each_mirror(server: Server, tmp_path: Path) -> None:
    host = f"host:{server.server_port}: "
    assert error_of(server.mirrors("404", "403", "wrong", "page", "cutatonce"), tmp_path).split("; ") == [
        f"{host}answers 404 Not Found",
        f"{host}answers 403 Forbidden",
        f"{host}sends another file, {digest(WRONG)}",
        f"{host}sends another file, {digest(PAGE)}",
        f"{host}the connection was broken",
    ]
    assert names(tmp_path) in ([], [".a.zip.part"])  # the last mirror may leave an empty partial file


def test_wrong_file_in_the_cache_is_replaced_or_else_reported(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(WRONG)
    reasons = error_of(server.mirrors("404"), tmp_path)
    assert reasons.startswith(f"{tmp_path / 'a.zip'} is another file, {digest(WRONG)}; host")
    assert (tmp_path / "a.zip").read_bytes() == WRONG
    assert download_file(server.mirrors("good"), tmp_path).read_bytes() == CONTENT


def test_silent_server_times_out(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(download, "_ATTEMPTS", 1)
    with pytest.raises(UserError, match=r"timed out|broken 1 times"):
        download_file(server.mirrors("silent"), tmp_path)


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXL_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("TXL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert cache_folder() == tmp_path / "other" / "transformer-xl"
