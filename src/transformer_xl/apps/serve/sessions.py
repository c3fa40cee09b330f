"""Sessions: memories that stay on the server from one request to the next.

A session holds an immutable `MemoryState`: a branch or a snapshot is another name for the same state, and a request
that fails leaves it as it was. Sessions belong to an API key, and their ids cannot be guessed. Where all together
exceed a bound in bytes, those of the key that has the most bytes are deleted, the least recently used first.
"""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from transformer_xl.apps.serve.protocol import ApiError
from transformer_xl.apps.serve.rows import MemoryState
from transformer_xl.apps.serve.served_model import ServedModel
from transformer_xl.apps.serve.session_file import Session, read_session, write_session
from transformer_xl.config import UserError
from transformer_xl.files import as_user_error, remove_leftovers
from transformer_xl.progress import note

_HEADER_BYTES = 2**20  # in which the header of a session's file certainly fits
_UNKNOWN = "no session {!r} of this key: it was deleted, or the least recently used to make room, or never existed"


class SessionStore:
    """All sessions, within a bound in bytes; safe to use from several threads."""

    def __init__(self, models: Mapping[str, ServedModel], max_bytes: int, folder: Path | None = None) -> None:
        """Open the store, with the sessions in a folder if one is given.

        Args:
            models: the models by name.
            max_bytes: bound of the size of all sessions together.
            folder: where sessions are saved before a request that changes them is answered; None: in memory alone.

        Raises:
            UserError: the folder cannot be made.
        """
        self._models, self.max_bytes, self._folder = models, max_bytes, folder
        self._lock = threading.RLock()
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # the least recently used first
        self._busy: set[str] = set()
        self._importing = threading.Lock()
        if folder is not None:
            self._load(folder)

    @property
    def num_bytes(self) -> int:
        """Size of all sessions in bytes."""
        with self._lock:
            return sum(session.num_bytes for session in self._sessions.values())

    def __len__(self) -> int:
        return len(self._sessions)

    def listed(self, owner: str) -> list[Session]:
        """Return the sessions of an owner, the most recently used first."""
        with self._lock:
            return [session for session in reversed(self._sessions.values()) if session.owner == owner]

    def get(self, session_id: str, owner: str) -> Session:
        """Return a session, which is now the most recently used.

        Raises:
            ApiError: the owner has no such session.
        """
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None or session.owner != owner:
                raise ApiError(404, _UNKNOWN.format(session_id[:64]), param="session", code="session_not_found")
            self._sessions.move_to_end(session_id)
            return session

    @property
    def max_file_bytes(self) -> int:
        """Size of the largest file of a session that may be imported."""
        largest = max(served.max_state_bytes for served in self._models.values())
        return _HEADER_BYTES + min(largest, self.max_bytes)

    def reserve(self, owner: str, model: str, memory_length: int) -> Session:
        """Return a session that exists only once it is committed; this request alone may change it until `release`."""
        session = Session(_new_id(), owner, model, memory_length, None, time.time())
        with self._lock:
            self._busy.add(session.id)
        return session

    def create(self, owner: str, model: str, memory_length: int) -> Session:
        """Make a session without a memory.

        Raises:
            ApiError: it does not fit into the bound, or cannot be saved.
        """
        session = Session(_new_id(), owner, model, memory_length, None, time.time())
        self._put(session)
        return session

    def branch(self, session: Session, kind: str = "session") -> Session:
        """Make a session, or a snapshot, that begins where another one is now.

        Raises:
            ApiError: as for `create`.
        """
        branch = replace(session, id=_new_id(kind), created=time.time(), parent=session.id)
        self._put(branch)
        return branch

    def acquire(self, session_id: str, owner: str) -> Session:
        """Return a session that this request alone may change, until `release`.

        Raises:
            ApiError: the owner has no such session, it is a snapshot, or another request is changing it.
        """
        with self._lock:
            session = self.get(session_id, owner)
            if session.is_snapshot:
                message = f"{session_id} is a snapshot, which never changes; branch it and use the branch"
                raise ApiError(409, message, param="session")
            self._check_free(session_id)
            self._busy.add(session_id)
            return session

    def release(self, session_id: str) -> None:
        """Let other requests change the session."""
        with self._lock:
            self._busy.discard(session_id)

    def commit(self, session: Session, state: MemoryState, message_end: str = "") -> None:
        """Give a session that was acquired or reserved its next state; it is saved first.

        Args:
            session: the session.
            state: its next state.
            message_end: what the last message of a chat lacks.

        Raises:
            ApiError: it does not fit into the bound, or cannot be saved; the session is as it was.
        """
        self._put(replace(session, state=state, message_end=message_end))

    def delete(self, session_id: str, owner: str) -> None:
        """Delete a session.

        Raises:
            ApiError: the owner has no such session, a request is changing it, or its file cannot be deleted.
        """
        with self._lock:
            self.get(session_id, owner)
            self._check_free(session_id)
            try:
                self._delete_file(session_id)
            except OSError as error:  # it would be there again after a restart
                raise _not_written(error) from None
            del self._sessions[session_id]

    def exported(self, session: Session) -> bytes:
        """Return a session as the contents of a file.

        Raises:
            ApiError: the folder of temporary files cannot be written.
        """
        try:
            with tempfile.TemporaryDirectory(prefix="txl-session-") as folder:
                path = Path(folder) / "session.safetensors"
                self._write(replace(session, owner=""), path)
                return path.read_bytes()
        except (OSError, UserError) as error:
            raise _not_written(error) from None

    @contextmanager
    def importing(self) -> Iterator[IO[bytes]]:
        """Yield a file for what arrives of a session; only one at a time is received.

        Raises:
            ApiError: another one is being received, or what has arrived cannot be written.
        """
        if not self._importing.acquire(blocking=False):
            message, headers = "another session is being imported; try again later", {"retry-after": "1"}
            raise ApiError(429, message, code="import_busy", headers=headers)
        try:
            with tempfile.NamedTemporaryFile(prefix="txl-session-", suffix=".safetensors") as file:
                yield file
        except OSError as error:
            raise _not_written(error) from None
        finally:
            self._importing.release()

    def imported(self, file: IO[bytes], owner: str) -> Session:
        """Make a session from a file that was received.

        Raises:
            UserError: it is no session of these models and weights, or is damaged.
            ApiError: it does not fit into the bound, or cannot be saved.
        """
        file.flush()
        session = read_session(Path(file.name), self._models)
        session = replace(session, id=_new_id(), owner=owner, created=time.time(), parent=None)
        self._put(session)
        return session

    def _check_free(self, session_id: str) -> None:
        if session_id in self._busy:
            message = f"another request is changing {session_id}; wait until it has ended, or branch the session"
            raise ApiError(409, message, param="session", code="session_busy")

    def _put(self, session: Session) -> None:
        """Save and add a session, and delete others for which there is no room."""
        if session.num_bytes > self.max_bytes:
            raise ApiError(
                507,
                f"the session would have {session.num_bytes:,} bytes, and all sessions together may have "
                f"{self.max_bytes:,}; use a shorter memory_length, or raise --session-bytes",
            )
        if self._folder is not None:
            try:
                self._write(session, self._folder / f"{session.id}.safetensors")
            except UserError as error:
                note(str(error))
                message = "the session could not be saved, and is as it was before; the server's log says why"
                raise ApiError(507, message, code="session_not_saved") from None
        with self._lock:
            self._sessions[session.id] = session
            self._sessions.move_to_end(session.id)
            self._make_room(session.id)

    def _make_room(self, kept: str) -> None:
        """Delete sessions of the owner whose have the most bytes, the least recently used first, but not `kept`."""
        sizes = Counter[str]()
        for one in self._sessions.values():
            sizes[one.owner] += one.num_bytes
        while sizes.total() > self.max_bytes:
            unused = [one for one in self._sessions.values() if one.id not in self._busy and one.id != kept]
            if not unused:
                return
            removed = max(unused, key=lambda one: sizes[one.owner])  # the first of them
            sizes[removed.owner] -= removed.num_bytes
            del self._sessions[removed.id]
            try:
                self._delete_file(removed.id)
            except OSError as error:  # what was to be saved is saved
                note(f"deleting the file of a session: {error}")

    def _delete_file(self, session_id: str) -> None:
        if self._folder is not None:
            (self._folder / f"{session_id}.safetensors").unlink(missing_ok=True)

    def _write(self, session: Session, path: Path) -> None:
        write_session(path, session, self._models[session.model])

    def _load(self, folder: Path) -> None:
        """Read the sessions of a folder, as many of the most recently used as there is room for."""
        with as_user_error(f"--sessions {folder}"):
            folder.mkdir(0o700, parents=True, exist_ok=True)
            remove_leftovers(folder)
            files = sorted(folder.glob("*.safetensors"), key=lambda file: file.lstat().st_mtime, reverse=True)
        left, num_left_out = self.max_bytes, 0
        for file in files:
            if num_left_out:
                num_left_out += 1
                continue
            try:
                session = read_session(file, self._models)
                if session.id != file.stem:
                    raise UserError("it was renamed")
            except (UserError, OSError) as error:
                note(f"{file} is left out: {error}")
                continue
            if session.num_bytes > left:
                num_left_out = 1  # the file stays: the bound may be raised again
                continue
            left -= session.num_bytes
            self._sessions[session.id] = session
            self._sessions.move_to_end(session.id, last=False)
        if num_left_out:
            note(f"--sessions {folder}: {num_left_out} of them are left out, for which --session-bytes has no room")


def _not_written(error: Exception) -> ApiError:
    note(f"writing the file of a session: {error}")
    return ApiError(507, "the session could not be written; the server's log says why")


def _new_id(kind: str = "session") -> str:
    return f"{kind}-{secrets.token_urlsafe(24)}"
