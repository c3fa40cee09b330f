"""A session, and the file as which it is saved, exported and imported.

The file is a safetensors file with a checksum (`tensor_file.py`). Its header names the weights that it belongs to, and
is checked before anything else of it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from transformer_xl.apps.serve.rows import Count, MemoryState
from transformer_xl.apps.serve.served_model import ServedModel
from transformer_xl.config import UserError
from transformer_xl.tensor_file import load_tensors, read_metadata, read_shapes, save_tensors

_BASE_BYTES = 4096  # of a session without a memory
_Text = Annotated[str, Field(max_length=1000)]
# safetensors needs at least one tensor for its checksum to cover
_EMPTY_TENSOR = {"txl_session": torch.zeros(1)}


@dataclass(frozen=True, eq=False)
class Session:
    """A session as it is now; a change makes another one with the same id.

    The types are those of its JSON in the header of a file, where the state has no tensors.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)

    id: Annotated[str, Field(pattern=r"^(session|snapshot)-[A-Za-z0-9_-]{32}$")]
    owner: _Text
    """Digest of the API key that it belongs to."""
    model: _Text
    memory_length: Count
    """Memory length of its requests."""
    state: MemoryState | None
    """Its memory; None before its first request."""
    created: Annotated[float, Field(ge=0, lt=2**53)]
    """Seconds since 1970."""
    parent: _Text | None = None
    """Id of the session that it was branched from."""
    message_end: _Text = ""
    """The end of its last message, which a reply that was cut lacks: it comes before the next message of a chat."""

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


@dataclass(frozen=True, eq=False, kw_only=True)
class _SavedSession(Session):
    """A session in a file, with what its keys and values were computed with."""

    weights_sha256: _Text
    limits: _Text
    """`ServedModel.limits_text`."""


_JSON = TypeAdapter(_SavedSession)


def write_session(path: Path, session: Session, served: ServedModel) -> None:
    """Write a session atomically as a file that only its owner can read.

    Raises:
        UserError: the file system refuses.
    """
    saved = _SavedSession(**vars(session), weights_sha256=served.weights_sha256, limits=served.limits_text)
    metadata = {"session": _JSON.dump_json(saved, exclude={"state": {"tensors"}}).decode()}
    tensors = session.state.tensors if session.state else {}
    save_tensors(path, {**tensors, **_EMPTY_TENSOR}, metadata, private=True)


def read_session(path: Path, models: Mapping[str, ServedModel]) -> Session:
    """Read the file of a session; its header is checked before any tensor is read: its values, names and shapes.

    Raises:
        UserError: it is not a session of one of these models, is damaged, or its values are not finite or out of range.
    """
    with _damage_reported():
        metadata, shapes = read_metadata(path), read_shapes(path)
    session, served = _described(metadata.get("session", ""), models)
    described = (
        served.state_shapes(session.state) if session.state else dict[str, tuple[torch.dtype, tuple[int, ...]]]()
    )
    expected = {name: shape for name, (_, shape) in described.items()} | dict.fromkeys(_EMPTY_TENSOR, (1,))
    if shapes != expected:
        raise UserError("the memory in this file has another shape than this model and memory length need")
    with _damage_reported():
        tensors, _ = load_tensors(path)
    if session.state is None:
        return session
    del tensors["txl_session"]
    for name, tensor in tensors.items():
        if tensor.dtype != described[name][0]:
            raise UserError(f"the memory in this file has another data type than this model ({name})")
        if tensor.is_floating_point() and not _is_finite(tensor):
            raise UserError(f"the memory in this file has values that are not finite numbers ({name})")
        # ids of tokens; those for other embeddings are one higher
        bound = served.inference.config.vocab_size + name.startswith(("recent", "ids_"))
        if not tensor.is_floating_point() and bool(((tensor < 0) | (tensor >= bound)).any()):
            raise UserError(f"the memory in this file has token ids that are not in the vocabulary ({name})")
    return replace(session, state=replace(session.state, tensors=tensors))


@contextmanager
def _damage_reported() -> Iterator[None]:
    """Let an error in reading the file say nothing about where it is on the server."""
    try:
        yield
    except UserError:
        raise UserError("this is not the file of a session, or it is damaged") from None


def _described(text: str, models: Mapping[str, ServedModel]) -> tuple[Session, ServedModel]:
    """Return a session without its tensors, by the JSON in its header, and its model.

    Raises:
        UserError: a value is missing or wrong, or it fits none of the models.
    """
    try:
        saved = _JSON.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "all of them"
        raise UserError(f"the values in the header of this session are malformed: {name}: {first['msg']}") from None
    same = [served for served in models.values() if served.weights_sha256 == saved.weights_sha256]
    problem = UserError("this session belongs to other weights than those of the models that are served")
    for served in sorted(same, key=lambda one: one.name != saved.model):  # runs may have the same weights
        try:
            if saved.limits != served.limits_text:
                raise UserError("this session was made with another attention window or clamp length")
            length = served.check_memory_length(saved.memory_length)
            if saved.state is not None:
                _check_counts(saved.state, served)
        except UserError as error:
            problem = error
            continue
        fields: dict[str, Any] = {**vars(saved), "model": served.name, "memory_length": length}
        del fields["weights_sha256"], fields["limits"]
        return Session(**fields), served
    raise problem


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values are finite, computed in parts that one thread computes; `serve` says why."""
    return all(bool(part.isfinite().all()) for part in tensor.flatten().split(2**14))


def _check_counts(state: MemoryState, served: ServedModel) -> None:
    """Check that the counts of a state are in range.

    Raises:
        UserError: they are not.
    """
    if state.newest >= served.inference.config.vocab_size or state.memory_length > served.max_slots:
        raise UserError("the counts of tokens in this session are out of range")
    if state.num_valid != min(state.num_read, state.memory_length):
        raise UserError("the counts of tokens in this session contradict each other")
