"""Reads what torch.save wrote, today's archives and the older single stream, without unpickling anything.

The pickle in such a file is read by `unpickler.py`, which makes nothing. The numbers of the tensors are not in it; they
are mapped from the disk, and copied only where somebody writes to them or asks for another number format.
"""

from __future__ import annotations

import math
import mmap
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error
from transformer_xl.interop.unpickler import Admits, Name, Outside, Record, read_pickle

_MAGIC = 0x1950A86A20F9469CFC6C  # the first number of the older form
_MOST_DIMENSIONS, _MOST_ROWS, _MOST_NUMBERS = 8, 2**31, 2**62
_ZIP = b"PK\x03\x04"
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
_NAMES = frozenset(
    [
        *(f"{home}.{kind}" for home in ("torch", "torch.cuda") for kind in _STORAGES),
        "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter",
        "torch.nn.parameter.Parameter", "torch.Size", "torch.device",
        *(f"torch.{kind}" for kind in ("float16", "float32", "float64", "bfloat16", "int64", "int32", "uint8", "bool")),
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Storage:
    """Where the numbers of some tensors lie in the file."""

    start: int
    numbers: int
    dtype: torch.dtype


class TorchFile:
    """One file: its value, with records in place of tensors, and the tensors when they are asked for."""

    def __init__(self, path: Path, admits: Admits) -> None:
        """Reads the pickle of the file.

        Args:
            path: the file.
            admits: which names may stand in it beside those that tensors need.

        Raises:
            UserError: it cannot be read, is damaged, or names what is not admitted.
        """
        self.path = path
        self._admits: Admits = lambda name: name in _NAMES or admits(name)
        self._places: dict[str, tuple[int, int]] = {}
        with as_user_error(f"reading {path}"), path.open("rb") as stream:
            if not stream.read(1):
                raise UserError(f"{path} is empty; get it again")
            # copies what is written to, so that tensors may be changed and the file is not
            self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self._view = memoryview(self._bytes)
        self.value: Any = self._archive() if self._view[:4] == _ZIP else self._stream()

    def _archive(self) -> Any:
        """The value of a zip archive: a pickle, and a member for each storage."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                members = archive.infolist()
                found = [member for member in members if member.filename.endswith("/data.pkl")]
                prefix = found[0].filename.removesuffix("data.pkl")
                names = {member.filename.removeprefix(prefix): member for member in members}
                places = {name: self._member(member) for name, member in names.items()}
        except (zipfile.BadZipFile, IndexError, NotImplementedError, RuntimeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise self._damaged("no whole archive of torch.save") from None
        order = places.get("byteorder", (0, 0))
        if bytes(self._view[order[0] : sum(order)]) not in (b"", b"little"):
            raise UserError(f"{self.path} was written on a machine with another byte order; save it on a common one")
        start, length = places["data.pkl"]
        value, _ = read_pickle(self._view[start : start + length], self._admits, str(self.path))
        self._places = {name.removeprefix("data/"): place for name, place in places.items()}
        return value

    def _member(self, member: zipfile.ZipInfo) -> tuple[int, int]:
        """Where a member's bytes begin, and how many there are."""
        header = member.header_offset
        if member.compress_type != zipfile.ZIP_STORED or bytes(self._view[header : header + 4]) != _ZIP:
            raise self._damaged(f"'{ascii(member.filename)[1:-1][:120]}' in it is not as torch.save writes it")
        name, extra = (int.from_bytes(self._view[header + at : header + at + 2], "little") for at in (26, 28))
        start = header + 30 + name + extra
        if start + member.file_size > len(self._view):
            raise self._damaged("it ends too early")
        return start, member.file_size

    def _stream(self) -> Any:
        """The value of the older form: five pickles in a row, then the storages; or of a pickle alone."""
        first, place = self._pickle(0)
        if first != _MAGIC:
            return first
        _, place = self._pickle(place)
        system, place = self._pickle(place)
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise UserError(f"{self.path} was written on a machine with another byte order; save it on a common one")
        value, place = self._pickle(place)
        keys, place = self._pickle(place)
        sizes = dict(_storage_sizes(value))
        if not isinstance(keys, list) or not all(isinstance(key, str) and key in sizes for key in keys):
            raise self._damaged("its list of storages is not one")
        self._places = {}
        for key in keys:
            numbers = int.from_bytes(self._view[place : place + 8], "little")
            length = numbers * sizes[key].itemsize
            place += 8
            if place + length > len(self._view):
                raise self._damaged("it ends too early")
            self._places[key] = place, length
            place += length
        return value

    def _pickle(self, place: int) -> tuple[Any, int]:
        value, length = read_pickle(self._view[place:], self._admits, str(self.path))
        return value, place + length

    def tensor(self, record: object) -> Tensor:
        """The tensor that a record stands for, mapped from the file.

        Raises:
            UserError: it is none, or reaches beyond its numbers.
        """
        record = tensor_record(record)
        storage = self.storage(record)
        try:
            offset, size, stride = (record.arguments[place] for place in (1, 2, 3))
            dimensions = list(zip(size, stride, strict=True))
        except (IndexError, TypeError, ValueError):
            raise self._damaged("a tensor in it has no shape") from None
        if not (_whole(offset, _MOST_NUMBERS) and _lengths(size) and _lengths(stride)):
            raise self._damaged("a tensor in it has no shape")
        numbers = math.prod(size)
        last = offset + sum((length - 1) * step for length, step in dimensions) if numbers else 0
        if last >= max(storage.numbers, 1) or numbers > storage.numbers:
            raise self._damaged("a tensor in it reaches beyond its numbers")
        try:
            if not numbers:
                return torch.zeros(size, dtype=storage.dtype)
            flat = torch.frombuffer(self._bytes, dtype=storage.dtype, count=storage.numbers, offset=storage.start)
            return flat.as_strided(size, stride, offset)
        except (RuntimeError, TypeError, OverflowError, ValueError):
            raise self._damaged("a tensor in it has a shape that cannot be") from None

    def storage(self, record: Record) -> Storage:
        """Where the numbers of a tensor's record lie; equal for tensors that share them."""
        outside = record.arguments[0] if record.arguments else None
        key, dtype, numbers = _storage(outside)
        start, length = self._places.get(key, (0, -1))
        if length < numbers * dtype.itemsize:
            raise self._damaged(f"the numbers of a tensor ('{ascii(key)[1:-1][:120]}') are not whole")
        return Storage(start, numbers, dtype)

    def _damaged(self, why: str) -> UserError:
        return UserError(f"{self.path} is damaged ({why}); get it again")


def _whole(number: object, most: int) -> bool:
    return type(number) is int and 0 <= number < most


def _lengths(values: object) -> bool:
    """Whether these can be the lengths or strides of a tensor."""
    few = isinstance(values, (tuple, list)) and len(values) <= _MOST_DIMENSIONS
    return few and all(_whole(value, _MOST_ROWS) for value in values)


def tensor_record(record: object) -> Record:
    """The record of a tensor, out of that of a parameter too.

    Raises:
        UserError: it is neither.
    """
    if isinstance(record, Record) and record.name.endswith("._rebuild_parameter") and record.arguments:
        record = record.arguments[0]
    if isinstance(record, Record) and record.name == "torch.nn.parameter.Parameter" and record.arguments:
        record = record.arguments[0]
    if isinstance(record, Record) and record.name.startswith("torch._utils._rebuild_tensor"):
        return record
    raise UserError(f"a tensor was expected, found {type(record).__name__}; the file is damaged, get it again")


def _storage(outside: object) -> tuple[str, torch.dtype, int]:
    """Key, number format and size of the storage that a reference means."""
    label = outside.label if isinstance(outside, Outside) else None
    if isinstance(label, tuple) and len(label) >= 5 and label[0] == "storage":
        kind, key, numbers = label[1], label[2], label[4]
        dtype = _STORAGES.get(kind.path.rpartition(".")[2]) if isinstance(kind, Name) else None
        part = label[5] if len(label) > 5 else None  # the older form could name a part of a storage
        if dtype is not None and isinstance(key, str) and type(numbers) is int and numbers >= 0 and part is None:
            return key, dtype, numbers
    raise UserError("a tensor's numbers are kept in a form that is not known; load and save it with a newer torch")


def _storage_sizes(value: object) -> Iterator[tuple[str, torch.dtype]]:
    """Key and number format of every storage that a value refers to."""
    seen: set[int] = set()
    left = [value]
    while left:
        found = left.pop()
        if id(found) in seen or isinstance(found, str | bytes | int | float | None):
            continue
        seen.add(id(found))
        if isinstance(found, Outside):
            if isinstance(found.label, tuple) and found.label[:1] == ("storage",):
                key, dtype, _ = _storage(found)
                yield key, dtype
        elif isinstance(found, Record):
            left += [found.arguments, found.state, found.items, found.entries]
        elif isinstance(found, dict):
            left += [*found.keys(), *found.values()]
        elif isinstance(found, (list, tuple)):
            left += found
