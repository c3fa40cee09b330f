"""Text that is being written arrives once and in order, whatever happens to the file or the writers."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from transformer_xl.apps.watch.live import FollowedFile, LiveText, SocketText
from transformer_xl.config import UserError


def all_of(source: LiveText) -> bytes:
    """Return what has arrived; twice an empty block ends it, as a file is looked at again after a rotation."""
    blocks, num_empty = list[bytes](), 0
    while num_empty < 2:
        block = source.read(0.2 if isinstance(source, SocketText) else 0.02)  # its writers have threads
        assert block is not None
        blocks.append(block)
        num_empty = 0 if block else num_empty + 1
    return b"".join(blocks)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw")
    return path


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def test_a_file_grows_is_rotated_and_truncated(log: Path) -> None:
    source = FollowedFile(log)
    assert all_of(source) == b"one\ntw"
    append(log, b"o\n" + b"x" * 20_000 + b"\ncut")
    assert all_of(source) == b"o\n" + b"x" * 20_000 + b"\ncut"
    log.rename(log.with_suffix(".1"))
    append(log.with_suffix(".1"), b" off")  # between the last look and the rotation
    assert all_of(source) == b" off"
    log.write_bytes(b"new\nline")
    assert all_of(source) == b"\nnew\nline"  # the line that was cut off ends
    os.truncate(log, 0)
    assert all_of(source) == b"\n"
    append(log, b"after\n")
    assert all_of(source) == b"after\n"
    log.unlink()
    assert all_of(source) == b""
    log.write_bytes(b"again\n")
    assert all_of(source) == b"again\n"
    source.close()


def test_a_file_is_continued_at_its_position(log: Path) -> None:
    """Unless it was replaced or truncated meanwhile: then it is read from its beginning."""

    def position() -> dict[str, object]:
        source = FollowedFile(log)
        all_of(source)
        found = source.position()
        source.close()
        return found

    def continued(at: dict[str, object]) -> bytes:
        source = FollowedFile(log)
        source.begin_at(at)
        text = all_of(source)
        source.close()
        return text

    first = position()
    append(log, b"o\n")
    assert continued(first) == b"o\n"
    assert continued({**first, "offset": -5}) == b"\none\ntwo\n"
    second = position()
    os.truncate(log, 4)
    assert continued(second) == b"one\n"
    third = position()
    log.rename(log.with_suffix(".1"))
    log.write_bytes(b"another\n")
    assert continued(third) == b"another\n"


def test_a_file_from_its_end(log: Path) -> None:
    source = FollowedFile(log, from_end=True)
    append(log, b"o\n")
    assert all_of(source) == b"o\n"
    source.close()


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is not a regular file; give its text on standard input"):
        FollowedFile(tmp_path / "pipe")


def test_a_path_for_writers(tmp_path: Path) -> None:
    """Lines of two writers are not mixed, a line may come in parts, and a writer that leaves ends its line."""
    path = tmp_path / "socket"
    source = SocketText(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UserError, match="is in use by another program"):
        SocketText(str(path))
    assert all_of(source) == b""
    writers = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for writer in writers:
        writer.connect(str(path))
    writers[0].sendall(b"first ")
    writers[1].sendall(b"second\nthird\nfourth ")
    assert all_of(source) == b"second\nthird\n"
    writers[0].sendall(b"line\n")
    assert all_of(source) == b"first line\n"
    writers[1].close()
    assert all_of(source) == b"fourth \n"
    for _ in range(10):  # a line without an end
        writers[0].sendall(b"x" * 8192)
        text = all_of(source)
        assert len(text) < 2**16 + 8194
    writers[0].close()
    assert len(text + all_of(source)) < 10 * 8192
    source.close()
    assert not path.exists()


def test_a_path_left_by_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    source = SocketText(str(path))
    source.close()
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(UserError, match="file exists already"):
        SocketText(str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_a_port_for_writers() -> None:
    source = SocketText("127.0.0.1:0")
    with socket.create_connection(("127.0.0.1", source.port)) as writer:
        writer.sendall(b"line\n")
        assert all_of(source) == b"line\n"
    source.close()
