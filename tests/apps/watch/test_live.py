"""Text that is being written arrives once and in order, whatever happens to the file or the writers."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
from small_runs import make_run

from transformer_xl.apps.watch.line_surprisal import LineStream, watch_lines
from transformer_xl.apps.watch.live import FollowedFile, LiveText, SocketText
from transformer_xl.config import UserError
from transformer_xl.evaluation.stream import SurprisalStream


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
    log.write_bytes(b"truncated, and longer again before the next look\n")
    assert all_of(source) == b"truncated, and longer again before the next look\n"
    log.unlink()
    assert all_of(source) == b""
    log.write_bytes(b"again\n")
    assert all_of(source) == b"again\n"
    source.close()


def position(log: Path) -> dict[str, object]:
    source = FollowedFile(log)
    all_of(source)
    found = source.position()
    source.close()
    return found


def continued(log: Path, at: dict[str, object]) -> bytes:
    source = FollowedFile(log)
    source.begin_at(at)
    text = all_of(source)
    source.close()
    return text


def test_a_file_is_continued_at_its_position(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless it was replaced or truncated meanwhile: then it is read from its beginning, which is said."""
    first = position(log)
    append(log, b"o\n")
    assert continued(log, first) == b"o\n"
    assert continued(log, {name: first[name] for name in first if name != "tail_sha256"}) == b"o\n"  # of 0.1
    assert not capsys.readouterr().err
    assert continued(log, {**first, "offset": -5}) == b"\none\ntwo\n"
    second = position(log)
    os.truncate(log, 4)
    assert continued(log, second) == b"one\n"
    assert "what was written to it after the last stop is lost" in capsys.readouterr().err
    log.write_bytes(b"longer than before\n")  # the same inode
    assert continued(log, second) == b"longer than before\n"
    assert "is lost" in capsys.readouterr().err
    third = position(log)
    log.unlink()
    log.write_bytes(b"another, and longer\n")
    assert continued(log, third) == b"another, and longer\n"


@pytest.mark.parametrize("is_copied", [False, True])  # as logrotate does with copytruncate
def test_what_a_rotated_file_got_after_the_stop_is_read(
    log: Path, capsys: pytest.CaptureFixture[str], is_copied: bool
) -> None:
    stopped = position(log)
    append(log, b"o\nthree\n")
    older, newer = log.with_name("log.2"), log.with_name("log.1")
    if is_copied:
        newer.write_bytes(log.read_bytes())
        log.write_bytes(b"four is longer than what was there\n")
    else:
        log.rename(newer)
        log.write_bytes(b"four is longer than what was there\n")
    log.with_name("log.err").write_bytes(b"of another program\n")
    assert continued(log, stopped) == b"o\nthree\nfour is longer than what was there\n"
    assert not capsys.readouterr().err
    newer.rename(older)
    newer.write_bytes(b"between them\n")
    assert continued(log, stopped) == b"o\nthree\nfour is longer than what was there\n"
    assert f"note: {newer}: not read, though written after {older}" in capsys.readouterr().err


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


def test_lines_that_were_received_are_read_when_it_stops(tmp_path: Path) -> None:
    source = SocketText(str(tmp_path / "socket"))
    with socket.socket(socket.AF_UNIX) as writer:
        writer.connect(str(tmp_path / "socket"))
        writer.sendall(b"a line\n" * 600)
    for _ in range(600):
        if source._lines.qsize() == 600:
            break
        time.sleep(0.1)
    lines = LineStream(SurprisalStream(make_run(tmp_path / "run")))
    assert len(list(watch_lines(lines, source, max_delay=1, is_stopped=lambda: True))) == 600
    assert not (tmp_path / "socket").exists()
