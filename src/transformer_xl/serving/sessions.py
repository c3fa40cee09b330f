"""Sessions: memories that stay on the server from one request to the next.

A session holds an immutable `MemoryState`: a branch or a snapshot is another name for the same state, and a request
that fails leaves it as it was. Sessions belong to an API key, and their ids cannot be guessed. The least recently used
ones are deleted where all together exceed a bound in bytes.

A session as a file is a safetensors file with a checksum (`tensor_file.py`), and says which weights it belongs to.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from transformer_xl.config import UserError
from transformer_xl.files import remove_leftovers
from transformer_xl.progress import note
from transformer_xl.serving.protocol import ApiError
from transformer_xl.serving.rows import MemoryState
from transformer_xl.serving.served_model import ServedModel
from transformer_xl.tensor_file import load_tensors, save_tensors

_ID = re.compile(r"(session|snapshot)-[A-Za-z0-9_-]{32}")
_MAX_HEADER_BYTES = 2**20
_BASE_BYTES = 4096  # of a session without a memory
_UNKNOWN = "no session {!r} of this key: it was deleted, or the least recently used to make room, or never existed"


@dataclass(frozen=True, eq=False)
class Session:
    """A session as it is now; a change makes another one with the same id."""

    id: str
    owner: str
    """Digest of the API key that it belongs to."""
    model: str
    memory_length: int
    """Memory length of its requests."""
    state: MemoryState | None
    """Its memory; None before its first request."""
    created: float
    """Seconds since 1970."""
    parent: str | None = None
    """Id of the session that it was branched from."""

    @property
    def is_snapshot(self) -> bool:
        """Whether it never changes."""
        return self.id.startswith("snapshot")

    @property
    def num_bytes(self) -> int:
        """Size of the session in bytes."""
        return _BASE_BYTES + (self.state.num_bytes if self.state else 0)

    def as_dict(self) -> dict[str, Any]:
        """Return what the API says about the session."""
        return {
            "id": self.id,
            "object": "snapshot" if self.is_snapshot else "session",
            "model": self.model,
            "tokens": 0 if self.state is None else self.state.num_read + 1,
            "memory_tokens": 0 if self.state is None else self.state.num_valid,
            "memory_length": self.memory_length,
            "bytes": self.num_bytes,
            "created": int(self.created),
            "parent": self.parent,
        }


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

    def reserve(self, owner: str, model: str, memory_length: int) -> Session:
        """Return a session that exists only once it is committed; this request alone may change it until `release`."""
        session = _new_session(owner, model, memory_length)
        with self._lock:
            self._busy.add(session.id)
        return session

    def create(
        self,
        owner: str,
        model: str,
        memory_length: int,
        state: MemoryState | None = None,
        *,
        parent: str | None = None,
        kind: str = "session",
    ) -> Session:
        """Make a session.

        Raises:
            ApiError: it does not fit into the bound, or cannot be saved.
        """
        session = _new_session(owner, model, memory_length, state, parent=parent, kind=kind)
        self._put(session)
        return session

    def branch(self, session: Session, kind: str = "session") -> Session:
        """Make a session, or a snapshot, that begins where another one is now.

        Raises:
            ApiError: as for `create`.
        """
        return self.create(
            session.owner, session.model, session.memory_length, session.state, parent=session.id, kind=kind
        )

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

    def commit(self, session: Session, state: MemoryState) -> None:
        """Give a session that was acquired or reserved its next state; it is saved first.

        Raises:
            ApiError: it does not fit into the bound, or cannot be saved; the session is as it was.
        """
        self._put(replace(session, state=state))

    def delete(self, session_id: str, owner: str) -> None:
        """Delete a session.

        Raises:
            ApiError: the owner has no such session, or a request is changing it.
        """
        with self._lock:
            self.get(session_id, owner)
            self._check_free(session_id)
            self._remove(session_id)

    def exported(self, session: Session) -> bytes:
        """Return a session as the contents of a file."""
        with tempfile.TemporaryDirectory(prefix="txl-session-") as folder:
            path = Path(folder) / "session.safetensors"
            self._write(replace(session, owner=""), path)
            return path.read_bytes()

    def imported(self, content: bytes, owner: str) -> Session:
        """Make a session from the contents of a file.

        Raises:
            ApiError: it is no session of these models and weights, or is damaged.
        """
        try:
            check_header(content, self._models)
            with tempfile.TemporaryDirectory(prefix="txl-session-") as folder:
                path = Path(folder) / "session.safetensors"
                path.write_bytes(content)
                session = read_session(path, self._models)
        except UserError as error:
            raise ApiError(400, str(error)) from None
        return self.create(owner, session.model, session.memory_length, session.state)

    def _check_free(self, session_id: str) -> None:
        if session_id in self._busy:
            message = f"another request is changing {session_id}; wait until it has ended, or branch the session"
            raise ApiError(409, message, param="session", code="session_busy")

    def _put(self, session: Session) -> None:
        """Save and add a session, and delete the least recently used ones for which there is no room."""
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
            unused = [one for one in self._sessions if one not in self._busy and one != session.id]
            while self.num_bytes > self.max_bytes and unused:
                self._remove(unused.pop(0))

    def _remove(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        if self._folder is not None:
            (self._folder / f"{session_id}.safetensors").unlink(missing_ok=True)

    def _write(self, session: Session, path: Path) -> None:
        served, state = self._models[session.model], session.state
        tensors = {} if state is None else {**state.tensors}
        values: dict[str, Any] = {
            "id": session.id,
            "owner": session.owner,
            "memory_length": session.memory_length,
            "created": session.created,
            "parent": session.parent,
            "weights_sha256": served.weights_sha256,
            "limits": served.limits_text,
        }
        if state is not None:
            names = ("newest", "num_valid", "num_read", "memory_length")
            values["state"] = {name: getattr(state, name) for name in names}
        # safetensors needs at least one tensor for its checksum to cover
        save_tensors(path, {**tensors, "txl_session": torch.zeros(1)}, {"session": json.dumps(values)})
        path.chmod(0o600)

    def _load(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder)
            files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
        except OSError as error:
            raise UserError(f"--sessions {folder}: {error.strerror or error}") from None
        for file in files:
            try:
                if not _ID.fullmatch(file.stem):
                    raise UserError("its name is not that of a session")
                with file.open("rb") as opened:
                    check_header(opened.read(8 + _MAX_HEADER_BYTES), self._models, num_bytes=file.stat().st_size)
                session = read_session(file, self._models)
                if session.id != file.stem:
                    raise UserError("it was renamed")
            except (UserError, OSError) as error:
                note(f"{file} is left out: {error}")
                continue
            self._sessions[session.id] = session
        while self.num_bytes > self.max_bytes and self._sessions:
            self._sessions.popitem(last=False)  # the file stays: the bound may be raised again


def _new_session(
    owner: str,
    model: str,
    memory_length: int,
    state: MemoryState | None = None,
    *,
    parent: str | None = None,
    kind: str = "session",
) -> Session:
    session_id = f"{kind}-{secrets.token_urlsafe(24)}"
    return Session(session_id, owner, model, memory_length, state, time.time(), parent)


def check_header(content: bytes, models: Mapping[str, ServedModel], *, num_bytes: int | None = None) -> None:
    """Check the header of a session's file before anything is allocated: its size, the model, names and shapes.

    Args:
        content: the file, or the beginning of it.
        models: the models by name.
        num_bytes: size of the whole file, or None if `content` is the whole.

    Raises:
        UserError: it is not a session of one of these models.
    """
    num_bytes = len(content) if num_bytes is None else num_bytes
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > min(_MAX_HEADER_BYTES, num_bytes - 8):
        raise UserError("this is not the file of a session: its header is too long, or not there")
    try:
        header = json.loads(content[8 : 8 + size])
        metadata = header.pop("__metadata__")
        values = json.loads(json.loads(metadata["transformer_xl"])["session"])
        shapes = {
            name: (str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in header.items()
            if name != "txl_session"
        }
        served, state = _model_of(values, models), values.get("state")
        no_memory: dict[str, tuple[str, tuple[int, ...]]] = {}
        expected = no_memory if state is None else served.state_shapes(_counts(state, served))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError("this is not the file of a session: its header is not readable") from None
    if shapes != expected:
        raise UserError("the memory in this file has another shape than this model and memory length need")


def read_session(path: Path, models: Mapping[str, ServedModel]) -> Session:
    """Read the file of a session whose header was checked.

    Raises:
        UserError: it is damaged, or its values are not finite or out of range.
    """
    try:
        tensors, metadata = load_tensors(path)
    except UserError:
        raise UserError("the file of the session is damaged: its checksum does not match its contents") from None
    tensors.pop("txl_session", None)
    values = json.loads(metadata["session"])
    served, state = _model_of(values, models), None
    if values.get("state") is not None:
        counts = _counts(values["state"], served)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise UserError(f"the memory in this file has values that are not finite numbers ({name})")
            # ids of tokens; those for n-gram embeddings are one higher
            bound = served.model.config.vocab_size + (name == "recent")
            if not tensor.is_floating_point() and bool(((tensor < 0) | (tensor >= bound)).any()):
                raise UserError(f"the memory in this file has token ids that are not in the vocabulary ({name})")
        state = replace(counts, tensors=tensors)
    memory_length = served.check_memory_length(_whole(values["memory_length"]))
    parent, created = values.get("parent"), float(values["created"])
    return Session(
        str(values["id"]),
        str(values["owner"]),
        served.name,
        memory_length,
        state,
        created if math.isfinite(created) else 0.0,
        parent if parent is None else str(parent)[:100],
    )


def _model_of(values: Mapping[str, Any], models: Mapping[str, ServedModel]) -> ServedModel:
    for served in models.values():
        if served.weights_sha256 == values["weights_sha256"]:
            if values["limits"] != served.limits_text:
                raise UserError("this session was made with another attention window or clamp length")
            return served
    raise UserError("this session belongs to other weights than those of the models that are served")


def _counts(values: Mapping[str, Any], served: ServedModel) -> MemoryState:
    """Return the counts of a state, without its tensors.

    Raises:
        UserError: they are out of range.
    """
    newest, num_valid, num_read, length = (
        _whole(values[name]) for name in ("newest", "num_valid", "num_read", "memory_length")
    )
    longest = max(served.max_memory_length, served.generation_slots(0))
    if newest >= served.model.config.vocab_size or not num_valid <= min(num_read, length) or length > longest:
        raise UserError("the counts of tokens in this session are out of range")
    if num_valid != min(num_read, length):
        raise UserError("the counts of tokens in this session contradict each other")
    return MemoryState({}, newest, num_valid, num_read, length)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise UserError("a number in this session is out of range")
    return value
