"""Read files of torch.save without unpickling: the zip archives of today, and the single stream of older versions.

An archive contains a pickle, `data.pkl`, that describes the saved value, and for each tensor storage (the elements of
one tensor, or of several that share memory) a member `data/KEY` with the raw bytes. The older form is one stream: five
pickles, the third of which describes the value, and then the storages. `unpickler.py` reads the pickles, and executes
nothing. Tensors are memory-mapped: their elements are copied only when somebody writes to them or converts them. Where
an archive has checksums they are compared, so that a single changed bit is found.
"""

from __future__ import annotations

import io
import math
import mmap
import zipfile
import zlib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error
from transformer_xl.integrations.checkpoints.unpickler import GlobalName, PickledObject, read_pickle

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C  # the first pickle of the older form
_ZIP_MAGIC = b"PK\x03\x04"
# limits of a tensor's shape, strides and offset; larger values could overflow inside torch
_MAX_DIMENSIONS, _MAX_LENGTH, _MAX_ELEMENTS = 8, 2**31, 2**62
# limits far above those of real files: the bytes of an archive's list of members, and the names of tensors, of which a
# small file can give any number to one tensor
_MAX_DIRECTORY, _MAX_TENSORS = 2**24, 100_000
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch.nn.parameter.Parameter")
TENSOR_NAMES = frozenset(
    [
        *_PARAMETERS,
        *(f"{module}.{kind}" for module in ("torch", "torch.cuda") for kind in _STORAGES),
        "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch.Size", "torch.device",
        *(f"torch.{kind}" for kind in ("float16", "float32", "float64", "bfloat16", "int64", "int32", "uint8", "bool")),
    ]
)  # fmt: skip
"""Classes and functions that the pickle of a tensor may name."""


@dataclass(frozen=True, slots=True)
class _Storage:
    """A reference in the pickle to the elements of one tensor, or of several that share memory."""

    key: str
    dtype: torch.dtype | None
    """None if the kind of storage is not supported."""
    num_elements: int


@dataclass(frozen=True)
class _Extent:
    """Where the bytes of a member or storage are in the file."""

    start: int
    length: int
    crc32: int = 0
    """Their checksum, or 0 if the file has none: torch.save can leave it out, and the older form never had one."""


class _Directory:
    """A zip archive for `zipfile`, which reads the list of members at once: up to `_MAX_DIRECTORY` bytes of it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read

    def read(self, size: int = _MAX_DIRECTORY) -> bytes:
        return self._read(min(size, _MAX_DIRECTORY))


class TorchFile:
    """A file of torch.save: its value, in which pickled objects represent tensors, and each tensor on request."""

    def __init__(self, path: Path, allowed: Set[str] = frozenset()) -> None:
        """Read the pickle of the file.

        Args:
            path: the file; a pickle that torch did not write is read too.
            allowed: the names that may occur in the pickle, besides those that tensors need.

        Raises:
            UserError: the file cannot be read, is damaged, or contains a name that is not allowed.
        """
        self.path = path
        self._allowed = TENSOR_NAMES | allowed
        self._storages: dict[str, _Storage] = {}
        self._extents: dict[str, _Extent] = {}  # by the key of the storage
        self._verified: set[str] = set()  # keys of the storages whose checksums match
        with as_user_error(f"reading {path}"), path.open("rb") as file:
            if not file.read(1):
                raise UserError(f"{path} is empty; get it again")
            # copy-on-write: tensors can be changed in place, and the file stays as it was
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.value: Any = self._read_archive() if self._bytes[:4] == _ZIP_MAGIC else self._read_stream()

    def _read_archive(self) -> Any:
        """Return the value of a zip archive."""
        try:
            with self.path.open("rb") as file, zipfile.ZipFile(cast("IO[bytes]", _Directory(file))) as archive:
                members = {member.filename: member for member in archive.infolist()}
                if sum(member.file_size for member in members.values()) > len(self._bytes):
                    raise self._damaged("its members overlap, or it is truncated")
                prefix = next(name for name in members if name.endswith("/data.pkl")).removesuffix("data.pkl")
                extents = {name.removeprefix(prefix): self._extent(member) for name, member in members.items()}
        except UserError:
            raise
        except (zipfile.BadZipFile, StopIteration, NotImplementedError, RuntimeError, ValueError):
            raise self._damaged("not a complete archive of torch.save") from None
        self._extents = {name.removeprefix("data/"): extent for name, extent in extents.items()}
        order, value = extents.get("byteorder", _Extent(0, 0)), extents["data.pkl"]
        self._check_byte_order(self._bytes[order.start : order.start + order.length] in (b"", b"little"))
        self._verify("data.pkl", value)
        return self._read_pickle(io.BytesIO(self._bytes[value.start : value.start + value.length]))

    def _verify(self, name: str, extent: _Extent) -> None:
        """Compare the checksum of a member or storage; each storage is read once."""
        with memoryview(self._bytes) as content, content[extent.start : extent.start + extent.length] as part:
            if extent.crc32 and zlib.crc32(part) != extent.crc32:
                raise self._damaged(f"the checksum of {ascii(name)[:120]} in it does not match")

    def _extent(self, member: zipfile.ZipInfo) -> _Extent:
        """Return where the bytes of a member are."""
        header = member.header_offset
        if member.compress_type != zipfile.ZIP_STORED or self._bytes[header : header + 4] != _ZIP_MAGIC:
            raise self._damaged(f"{ascii(member.filename)[:120]} in it is not stored as torch.save does")
        # A zip header has 30 bytes; the last four are the lengths of the name and of the extra field that follow it.
        lengths = (int.from_bytes(self._bytes[header + at : header + at + 2], "little") for at in (26, 28))
        start = header + 30 + sum(lengths)
        if start + member.file_size > len(self._bytes):
            raise self._damaged("it is truncated")
        return _Extent(start, member.file_size, member.CRC)

    def _read_stream(self) -> Any:
        """Return the value of the older form, or of a pickle that torch did not write."""
        first = self._read_pickle(self._bytes)
        if first != _MAGIC_NUMBER:
            return first
        _, system, value, keys = (self._read_pickle(self._bytes) for _ in range(4))
        self._check_byte_order(isinstance(system, dict) and system.get("little_endian") is True)
        if not isinstance(keys, list) or not all(isinstance(key, str) and key in self._storages for key in keys):
            raise self._damaged("its list of storages is wrong")
        for key in keys:
            length = int.from_bytes(self._bytes.read(8), "little") * self._dtype(self._storages[key]).itemsize
            start = self._bytes.tell()
            if start + length > len(self._bytes):
                raise self._damaged("it is truncated")
            self._extents[key] = _Extent(start, length)
            self._bytes.seek(start + length)
        return value

    def _read_pickle(self, file: Any) -> Any:
        return read_pickle(file, self._allowed, str(self.path), self._load_persistent)

    def _load_persistent(self, persistent_id: Any) -> _Storage | GlobalName:
        """Return what the id of something stored outside the pickle refers to."""
        match persistent_id:
            case ("module", GlobalName() as name, *_):  # older versions stored the source code of a class there
                return name
            case ("storage", GlobalName(path=kind), str(key), _, int(num_elements), *view) if num_elements >= 0:
                # A view is a part of a storage, which only the older form could refer to.
                dtype = None if any(part is not None for part in view) else _STORAGES.get(kind.rpartition(".")[2])
                self._storages[key] = _Storage(key, dtype, num_elements)
                return self._storages[key]
        raise self._damaged("it refers to something other than a storage")

    def tensors(self, pickled: Mapping[Any, object]) -> dict[str, Tensor]:
        """Return the tensors that the objects of a dictionary represent, by name.

        Raises:
            UserError: as for `tensor`, or there are far more names than any model has.
        """
        if len(pickled) > _MAX_TENSORS:
            raise self._damaged(f"it has {len(pickled):,} names of tensors")
        return {str(name): self.tensor(value) for name, value in pickled.items()}

    def tensor(self, pickled: object) -> Tensor:
        """Return the tensor that an object of the pickle represents, mapped from the file.

        Tensors that share elements in the file also share memory when they are read.

        Raises:
            UserError: the object is not a tensor, extends beyond its storage, or is not what was saved (a checksum
                does not match).
        """
        if isinstance(pickled, PickledObject) and pickled.name in _PARAMETERS and pickled.arguments:
            pickled = pickled.arguments[0]  # the tensor of a parameter
        if not (isinstance(pickled, PickledObject) and pickled.name.startswith("torch._utils._rebuild_tensor")):
            raise self._damaged(f"a tensor was expected, found {type(pickled).__name__}")
        match pickled.arguments:
            case (_Storage() as storage, offset, tuple() | list() as size, tuple() | list() as stride, *_) if (
                len(size) == len(stride) <= _MAX_DIMENSIONS
                and _is_count(offset, _MAX_ELEMENTS)
                and all(_is_count(length, _MAX_LENGTH) for length in (*size, *stride))
            ):
                pass
            case _:
                raise self._damaged("a tensor in it has no valid shape")
        dtype = self._dtype(storage)
        extent = self._extents.get(storage.key, _Extent(0, -1))
        if extent.length < storage.num_elements * dtype.itemsize:
            raise self._damaged(f"the elements of a tensor ({ascii(storage.key)[:120]}) are incomplete")
        if storage.key not in self._verified:
            self._verify(f"data/{storage.key}", extent)
            self._verified.add(storage.key)
        num_elements = math.prod(size)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if num_elements else 0
        if last >= max(storage.num_elements, 1) or num_elements > storage.num_elements:
            raise self._damaged("a tensor in it extends beyond its storage")
        try:
            if not num_elements:
                return torch.zeros(size, dtype=dtype)
            flat = torch.frombuffer(self._bytes, dtype=dtype, count=storage.num_elements, offset=extent.start)
            return flat.as_strided(size, stride, offset)
        except (RuntimeError, TypeError, OverflowError, ValueError):
            raise self._damaged("a tensor in it has an impossible shape") from None

    def _dtype(self, storage: _Storage) -> torch.dtype:
        if storage.dtype is None:
            raise UserError(f"{self.path}: unsupported tensor storage; load it with a newer torch and save it again")
        return storage.dtype

    def _check_byte_order(self, is_little_endian: bool) -> None:
        if not is_little_endian:
            raise UserError(f"{self.path} was written on a big-endian machine; save it again on a little-endian one")

    def _damaged(self, problem: str) -> UserError:
        return UserError(f"{self.path} is damaged ({problem}); get it again")


def _is_count(value: object, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit
