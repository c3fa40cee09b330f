"""Text that is still being written: standard input, a file that grows, and local sockets.

A source is read in blocks. `read` waits for a while, and returns what there is, an empty block if nothing came, or None
after the end.
"""

from __future__ import annotations

import ipaddress
import os
import queue
import re
import select
import socket
import stat
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error, check_is_new
from transformer_xl.progress import note

BLOCK_BYTES = 2**13  # read at once; a signal is noticed between two blocks
_TAIL_BYTES = 2**12
_POLL_SECONDS = 0.1  # between two looks at a file that has not grown
_MAX_WRITERS = 64  # connections to a socket
_MAX_LINE_BYTES = 2**16  # of a line from a writer
_MAX_WAITING_LINES = 1000  # which writers have written and nobody has read


class LiveText:
    """Text that is still being written."""

    name: str
    """What it is, for messages."""

    def read(self, seconds: float) -> bytes | None:
        """Return the next block; empty if nothing comes within so many seconds, None after the end."""
        raise NotImplementedError

    def rest(self) -> bytes:
        """Return what has been received already and would be lost; nothing more is received."""
        return b""

    def position(self) -> dict[str, Any]:
        """Return the position from which `begin_at` continues, as JSON values; empty if the text is gone then."""
        return {}

    def begin_at(self, position: Mapping[str, Any]) -> None:
        """Continue at a position, if it still exists."""

    def close(self) -> None:
        """Close what is open."""


class PipedText(LiveText):
    """The text of a file descriptor, such as standard input, until its end."""

    name = "standard input"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @override
    def read(self, seconds: float) -> bytes | None:
        with as_user_error(f"reading {self.name}"):
            if not select.select([self._descriptor], [], [], seconds)[0]:
                return b""
            return os.read(self._descriptor, BLOCK_BYTES) or None


class FollowedFile(LiveText):
    """A file that grows, without an end, as `tail -F` shows it.

    If the path names another file (rotation), the rest of the old one is read and then the new one. If the file becomes
    shorter, or its last bytes that were read have changed (truncation), it is read from its beginning. A line that is
    cut off by either ends there. While there is no file at the path, it is waited for.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        """Open the file.

        Args:
            path: the file, which must exist.
            from_end: whether only what is appended from now on is read.

        Raises:
            UserError: the file cannot be read, or is no regular file.
        """
        self.name, self._path = str(path), path
        self._position, self._tail, self._ends_in_line = 0, b"", False  # the tail is what is in front of the position
        with as_user_error(f"reading {path}"):
            self._descriptor = self._open(path)
            if from_end:
                self._position = os.lseek(self._descriptor, 0, os.SEEK_END)
                self._tail = _before(self._descriptor, self._position)

    @override
    def read(self, seconds: float) -> bytes | None:
        """Return the next block, or an empty one if nothing is appended in time."""
        deadline = time.monotonic() + seconds
        with as_user_error(f"reading {self._path}"):
            while True:
                if block := self._read_or_restart():
                    return block
                left = deadline - time.monotonic()
                if left <= 0:
                    return b""
                time.sleep(min(left, _POLL_SECONDS))

    @override
    def position(self) -> dict[str, Any]:
        """Return which file is open, how much of it is read, and a checksum of the last bytes of that."""
        status = os.fstat(self._descriptor)
        names = {"device": status.st_dev, "inode": status.st_ino, "tail_sha256": sha256(self._tail).hexdigest()}
        return {**names, "offset": self._position, "ends_in_line": self._ends_in_line}

    @override
    def begin_at(self, position: Mapping[str, Any]) -> None:
        """Continue at a position, in the file that has the bytes in front of it, which may have got another name.

        That is the file at the path, or one beside it whose name begins with the same name (`log.1` for `log`). What is
        not found, or cannot be read, is said; the file at the path is read from its beginning then.
        """
        given, identity = position.get("offset"), (position.get("device"), position.get("inode"))
        offset = given if type(given) is int else -1
        name = re.compile(re.escape(self._path.name) + r"[._-]\d")
        self._ends_in_line = position.get("ends_in_line") is True
        with as_user_error(f"reading {self._path}"):
            rotated = [path for path in self._path.parent.iterdir() if name.match(path.name) and path.is_file()]
            rotated.sort(key=lambda path: path.stat().st_mtime, reverse=True)
            paths = sorted([self._path, *rotated], key=lambda path: _identity(path.stat()) != identity)
            for path in paths if offset >= 0 else ():
                try:
                    descriptor = self._open(path)
                except OSError:  # another user's, or removed meanwhile
                    continue
                status, tail = os.fstat(descriptor), _before(descriptor, offset)
                known = position.get("tail_sha256")  # None in states of 0.1
                is_it = sha256(tail).hexdigest() == known if known else _identity(status) == identity
                if not is_it or status.st_size < offset:
                    os.close(descriptor)
                    continue
                os.close(self._descriptor)
                self._descriptor, self._position, self._tail = descriptor, offset, tail
                if unread := rotated[: rotated.index(path)] if path in rotated else []:
                    names = ", ".join(map(str, unread))
                    note(f"{names}: not read, though written after {path}, in which this text goes on")
                return
        note(f"{self._path} was replaced or truncated; what was written to it after the last stop is lost")
        self._position = sys.maxsize  # beyond the end, as after a truncation

    @override
    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    @staticmethod
    def _open(path: Path) -> int:
        # without O_NONBLOCK, opening a named pipe would wait for a writer
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UserError(f"{path} is not a regular file; give its text on standard input: txl watch RUN < FILE")
        return descriptor

    def _read_or_restart(self) -> bytes:
        is_shorter = os.fstat(self._descriptor).st_size < self._position
        if is_shorter or _before(self._descriptor, self._position) != self._tail:
            return self._restart(self._descriptor)
        if block := self._read_on():
            return block
        try:
            status, current = os.stat(self._path), os.fstat(self._descriptor)
            if _identity(status) == _identity(current):
                return b""
            opened = self._open(self._path)
        except FileNotFoundError:  # between the renaming of the old file and the creation of the new one
            return b""
        # what was written to the old file after it was read, and before it was renamed
        if block := self._read_on():
            os.close(opened)
            return block
        os.close(self._descriptor)
        return self._restart(opened)

    def _read_on(self) -> bytes:
        if block := os.pread(self._descriptor, BLOCK_BYTES, self._position):
            self._position += len(block)
            self._tail = (self._tail + block)[-_TAIL_BYTES:]
            self._ends_in_line = not block.endswith(b"\n")
        return block

    def _restart(self, descriptor: int) -> bytes:
        """Continue at the beginning of a file, and return the end of the line that was cut off."""
        self._descriptor, self._position, self._tail = descriptor, 0, b""
        cut, self._ends_in_line = self._ends_in_line, False
        return b"\n" if cut else b""


def _before(descriptor: int, position: int) -> bytes:
    """Return the last bytes in front of a position, by which a file is recognized."""
    start = max(0, position - _TAIL_BYTES)
    return os.pread(descriptor, position - start, start)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class SocketText(LiveText):
    """The lines that programs on this machine write to a socket, in the order in which they arrive, without an end.

    The lines of several writers are not mixed; a writer that disconnects within a line ends it.
    """

    def __init__(self, address: str) -> None:
        """Listen.

        Args:
            address: the path of a Unix socket, which is created for this user alone, or HOST:PORT, where the host is of
                this machine.

        Raises:
            UserError: the address is not one of this machine, or is in use.
        """
        self.name, self._path = address, None
        host, colon, port = address.rpartition(":")
        with as_user_error(f"listening at {address}"):
            if address and (not colon or "/" in address):
                self._path = Path(address)
                self._server = _listening_path(self._path)
            elif port.isdecimal() and int(port) < 2**16:
                self._server = _listening_port(host, int(port))
            else:
                raise UserError(
                    f"'{address}' is no address; give 127.0.0.1:PORT with a port up to 65535, or a path such as ./a:b"
                )
        self._lines: queue.Queue[bytes] = queue.Queue(_MAX_WAITING_LINES)
        self._places = threading.Semaphore(_MAX_WRITERS)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Number of the port."""
        return int(self._server.getsockname()[1])

    @override
    def read(self, seconds: float) -> bytes | None:
        """Return the next lines, or an empty block if no line ends in time."""
        block = b""
        with suppress(queue.Empty):
            block = self._lines.get(timeout=seconds)
            while len(block) < BLOCK_BYTES:
                block += self._lines.get_nowait()
        return block

    @override
    def rest(self) -> bytes:
        self.close()
        return b"".join([self._lines.get_nowait() for _ in range(self._lines.qsize())])

    @override
    def close(self) -> None:
        """Accept no more writers, and remove the socket."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        """Start a thread for each writer, until the socket is closed."""
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                if self._places.acquire(blocking=False):
                    threading.Thread(target=self._receive, args=(connection,), daemon=True).start()
                else:
                    connection.close()

    def _receive(self, connection: socket.socket) -> None:
        """Pass on the lines of a writer; one that is too long ends where it is cut."""
        with suppress(OSError), connection, connection.makefile("rb") as text:  # the connection may be reset
            while line := text.readline(_MAX_LINE_BYTES):
                self._lines.put(line if line.endswith(b"\n") else line + b"\n")
        self._places.release()


def _listening_port(host: str, port: int) -> socket.socket:
    name = host.strip("[]")
    try:
        is_local = name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        raise UserError(f"{host}:{port} is not an address of this machine alone; give 127.0.0.1:PORT or a path")
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    return socket.create_server((name, port), family=family)


def _listening_path(path: Path) -> socket.socket:
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise UserError(f"{path} is in use by another program; give another path, or stop that program")
        path.unlink()  # left by a process that was killed
    check_is_new(path)
    server = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)  # for this user alone
    try:
        server.bind(str(path))
    except OSError:
        server.close()
        raise
    finally:
        os.umask(before)
    server.listen()
    return server
