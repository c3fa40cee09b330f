"""Tensors in a safetensors file with a checksum in its header, so that damaged files are detected."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error, atomic_file, check_not_special, parse_json

_ADVICE = "copy it again; if it is in a step-N folder, delete that to resume from an earlier one"
DAMAGED = f"{{}} is damaged ({{}}); {_ADVICE}"
"""Message for a damaged file, to be formatted with its path and the reason."""

SCALE = "_scale"
"""What follows the name of a weight of 8 bits in the name of its scales."""

_KEY = "transformer_xl"  # of the entry in the metadata of the safetensors header
_FORMAT = "1"  # version of the contents of that entry


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, private: bool = False
) -> None:
    """Write tensors and metadata to `path` atomically.

    Args:
        path: the file.
        tensors: the tensors by name.
        metadata: the metadata.
        private: whether only the owner may read the file.

    Raises:
        UserError: the file system refuses (full, read-only, no permission); an existing file is unchanged.
    """
    # clone: safetensors requires that tensors share no storage
    separate = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    metadata = {**(metadata or {}), "format": _FORMAT}
    # one metadata entry, because safetensors writes several in random order; equal contents should give equal files
    entry = json.dumps({**metadata, "sha256": _digest(separate, metadata)}, sort_keys=True)
    with atomic_file(path) as temporary:
        write_safetensors(temporary, separate, {_KEY: entry}, private=private)


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str], *, private: bool = False
) -> None:
    """Write a safetensors file with the default permissions of new files, or, as safetensors does, for its owner alone.

    Raises:
        OSError: the file system refuses.
    """
    path.touch(0o600 if private else 0o666)
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:  # the OS error number is only in the message
        number = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(number[1]) if number else 0, str(error)) from None
    path.chmod(mode)


def check_exists(path: Path) -> None:
    """Check that a file of a run is there.

    Raises:
        UserError: it is missing, or the file system refuses to look.
    """
    with as_user_error(f"reading {path}"):
        if not path.exists():
            raise UserError(f"{path} is missing; {_ADVICE}")
    check_not_special(path, _ADVICE)  # of a folder, reading it says what it is


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file written by `save_tensors`; return the tensors (on the CPU) and the metadata.

    Raises:
        UserError: the file is missing, truncated or altered.
    """
    with _opened(path) as file:
        metadata = _metadata(path, file)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    expected = metadata.pop("sha256", None)
    if expected != _digest(tensors, metadata):
        raise UserError(DAMAGED.format(path, "its checksum does not match its contents"))
    return tensors, metadata


def contents_digest(path: Path) -> str:
    """Return the sha256 of the tensors of a file written by `save_tensors`, without its metadata.

    Raises:
        UserError: the file is missing, truncated or altered.
    """
    return _digest(load_tensors(path)[0], {})


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a file written by `save_tensors`, from its header alone: the checksum is not verified.

    Raises:
        UserError: the file is missing or truncated.
    """
    with _opened(path) as file:
        return _metadata(path, file)


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a safetensors file by name, from its header alone.

    Raises:
        UserError: the file is missing or truncated.
    """
    with _opened(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; convert errors in opening and reading it to a UserError."""
    check_exists(path)
    with as_user_error(f"reading {path}"):
        path.open("rb").close()
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except UserError:
        raise
    except (SafetensorError, OSError, ValueError, AttributeError) as error:
        raise UserError(DAMAGED.format(path, f"not a complete safetensors file: {error}")) from None


def _metadata(path: Path, file: Any) -> dict[str, str]:
    metadata = {name: str(value) for name, value in parse_json((file.metadata() or {}).get(_KEY, "{}")).items()}
    if metadata.get("format") != _FORMAT:
        raise UserError(f"{path} was not written by this version of the program; expected format {_FORMAT}")
    return metadata


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the sha256 of names, dtypes, shapes, contents and metadata, independent of the order in the file."""
    digest = hashlib.sha256(repr(sorted(metadata.items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
