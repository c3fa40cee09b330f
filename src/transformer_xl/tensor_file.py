"""Tensors in a safetensors file that carries its own checksum, so that a damaged file is never taken for a good one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error, atomic_file

_KEY = "transformer_xl"
_FORMAT = "1"


def save_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> None:
    """Writes tensors and notes to `path`, whole or not at all.

    Raises:
        UserError: the file system refuses (full, read-only, no permission); what stood there stays.
    """
    # clone: safetensors wants each tensor in a storage of its own
    separate = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    notes = {**(notes or {}), "format": _FORMAT}
    # one entry: safetensors writes several in random order, and the same contents should be the same file
    entry = json.dumps({**notes, "sha256": _digest(separate, notes)}, sort_keys=True)
    with atomic_file(path) as aside:
        write_safetensors(aside, separate, {_KEY: entry})


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file that whoever may read new files here may read: the library's own is for its owner only.

    Raises:
        OSError: the file system refuses.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:  # what the operating system refused stands only in its words
        number = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(number[1]) if number else 0, str(error)) from None
    path.chmod(mode)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads what `save_tensors` wrote: the tensors (on the CPU) and the notes.

    Raises:
        UserError: there is no such file, or it is truncated or altered.
    """
    advice = "copy it again, or delete its folder checkpoints/step-N to resume from the one before"
    damaged = f"{path} is damaged ({{}}); {advice}"
    with as_user_error(f"reading {path}"):
        path.open("rb").close()
    try:
        with safe_open(path, framework="pt") as file:
            entry = (file.metadata() or {}).get(_KEY, "{}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(damaged.format(f"not a whole safetensors file: {error}")) from None
    try:
        notes = {name: str(value) for name, value in json.loads(entry).items()}
    except (ValueError, AttributeError):
        raise UserError(damaged.format("its header is not readable")) from None
    expected = notes.pop("sha256", None)
    if notes.get("format") != _FORMAT:
        raise UserError(f"{path} was not written by this program (or by another version); wanted format {_FORMAT}")
    if expected != _digest(tensors, notes):
        raise UserError(damaged.format("its checksum does not match its contents"))
    return tensors, notes


def _digest(tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> str:
    """sha256 over names, types, shapes, contents and notes, whatever the order in the file."""
    digest = hashlib.sha256(repr(sorted(notes.items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
