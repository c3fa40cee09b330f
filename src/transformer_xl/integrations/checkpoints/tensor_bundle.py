"""Read TensorFlow's checkpoint files ("tensor bundles") without TensorFlow.

    model.ckpt-0.index                  for each tensor its name, dtype, shape, location and checksum
    model.ckpt-0.data-00000-of-00001    the values, one tensor after another; data file 0 of 1

The formats are those of tensorflow/core/util/tensor_bundle and tensorflow/core/lib/io/table. The index is a sorted
table of LevelDB: blocks of (name, value) entries, whose names share prefixes; the last block lists the others, and a
footer at the end of the file points to it. Each value is a small protocol-buffer message. A checksum (CRC-32C) follows
each block, and the index has one for each tensor. The comments name the protocol-buffer messages, whose fields are
numbered.

Only what TensorFlow's own writer produces is supported: little-endian values, uncompressed blocks, tensors that are
not split into slices. Everything is checked before it is used, and nothing in a file is executed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error

Array: TypeAlias = npt.NDArray[np.generic]
_Uint32s: TypeAlias = npt.NDArray[np.uint32]
_Fields: TypeAlias = dict[int, list[Any]]

_FOOTER_SIZE, _MAGIC = 48, 0xDB4775248B80FB57  # the magic number is the last 8 bytes of a table
_TRAILER_SIZE = 5  # after each block: one byte for its compression, and its checksum
# limits far above those of real checkpoints
_MAX_INDEX_BYTES, _MAX_ENTRIES, _MAX_NAME_LENGTH, _MAX_DIMENSIONS = 2**22, 50_000, 1000, 8
_DTYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 19: "<f2"}  # TensorFlow's DataType -> numpy
_ADVICE = "copy it again from its source"


class _DamagedError(Exception):
    """The problem with a file, in a few words."""


def _check(condition: bool, problem: str) -> None:
    if not condition:
        raise _DamagedError(problem)


@dataclass(frozen=True)
class _Entry:
    """The dtype, shape and location of a tensor in the data files."""

    dtype: int
    """TensorFlow's number of the dtype, a key of `_DTYPES` if it is supported."""
    shape: tuple[int, ...]
    shard: int
    """Number of the data file."""
    offset: int
    """Position of the values in the data file, in bytes."""
    size: int
    """Number of bytes."""
    checksum: int
    """CRC-32C of these bytes, masked (see `_masked`)."""
    is_sliced: bool
    """Whether the tensor is stored in several parts (slices)."""


class TensorBundle:
    """A checkpoint: the names and shapes of its tensors, and each tensor on request."""

    def __init__(self, prefix: Path) -> None:
        """Read the index only.

        Args:
            prefix: common prefix of the files' paths, such as `model.ckpt-0`.

        Raises:
            UserError: the index is missing, damaged, or of a format that is not supported.
        """
        self.prefix = prefix
        path = prefix.with_name(prefix.name + ".index")
        with as_user_error(f"reading {path}"):
            if path.stat().st_size > _MAX_INDEX_BYTES:
                raise UserError(f"{path}: {path.stat().st_size:,} bytes are too many for an index of names; {_ADVICE}")
            content = path.read_bytes()
        try:
            values = dict(islice(_table_entries(content), _MAX_ENTRIES + 1))
            _check(len(values) <= _MAX_ENTRIES, "it has too many entries")
            # BundleHeaderProto: field 1 is the number of data files, field 2 the byte order (0 for little-endian)
            header = read_message(values.pop(b"", b""))
            if _integer(header, 2):
                raise UserError(f"{path}: written on a big-endian machine; save it again on a little-endian one")
            self._entries = {name.decode("utf-8"): _entry(value) for name, value in values.items()}
            self._num_shards = _integer(header, 1)
        except (_DamagedError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: damaged or not a TensorFlow checkpoint ({error}); {_ADVICE}") from None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, sorted by name."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def check_data(self, names: Iterable[str]) -> None:
        """Check that tensors do not take more bytes than the data files have, as they would if they overlapped.

        Raises:
            UserError: they do, or a data file is missing.
        """
        entries = [self._entries[name] for name in names]
        total = sum(entry.size for entry in entries)
        paths = {self._data_file(entry) for entry in entries}
        with as_user_error(f"reading {self.prefix}"):
            available = sum(path.stat().st_size for path in paths)
        if total > available:
            raise UserError(f"{self.prefix}: tensors of {total:,} bytes in data of {available:,} bytes; {_ADVICE}")

    def _data_file(self, entry: _Entry) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}.data-{entry.shard:05d}-of-{self._num_shards:05d}")

    def tensor(self, name: str) -> Array:
        """Read a tensor and verify its checksum.

        Raises:
            UserError: its file is missing, truncated or damaged, or its dtype is not supported.
        """
        entry = self._entries[name]
        path = self._data_file(entry)
        tensor = f"{path}: '{name}'"
        if entry.is_sliced or entry.dtype not in _DTYPES:
            what = "is split into slices" if entry.is_sliced else f"has TensorFlow's dtype number {entry.dtype}"
            raise UserError(f"{tensor} {what}, which is not supported; save it again unsplit, in float32")
        dtype = np.dtype(_DTYPES[entry.dtype])
        if entry.size != dtype.itemsize * np.prod(entry.shape, dtype=object):  # object: integers that cannot overflow
            raise UserError(f"{tensor} has {entry.size:,} bytes for the shape {entry.shape}; {_ADVICE}")
        with as_user_error(f"reading {path}"):
            end, file_size = entry.offset + entry.size, path.stat().st_size
            if end > file_size:
                raise UserError(f"{tensor} ends at byte {end:,}, but the file has {file_size:,}; {_ADVICE}")
            content = np.fromfile(path, np.uint8, entry.size, offset=entry.offset)
        if entry.size and _masked(crc32c(content)) != entry.checksum:
            raise UserError(f"{tensor} is damaged, its checksum does not match; {_ADVICE}")
        return content.view(dtype).reshape(entry.shape)


def _table_entries(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the names and values of a sorted table."""
    is_table = len(content) >= _FOOTER_SIZE and struct.unpack("<Q", content[-8:])[0] == _MAGIC
    _check(is_table, "its end is not that of an index")
    position = len(content) - _FOOTER_SIZE
    handles: list[tuple[bytes, bytes]] = []  # (name, handle); a handle is the offset and the size of a block
    for _ in range(2):  # a block of metadata, which is empty, then the list of the other blocks
        position, offset = _varint(content, position)
        position, size = _varint(content, position)
        handles = list(_block_entries(content, offset, size))
    total = 0
    for _, handle in handles:
        position, offset = _varint(handle, 0)
        _, size = _varint(handle, position)
        total += size
        _check(total <= len(content), "its blocks overlap")
        yield from _block_entries(content, offset, size)


def _block_entries(content: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the names and values of one block; each name shares a prefix of some length with the name before it."""
    end = offset + size
    _check(size >= 4 and end + _TRAILER_SIZE <= len(content), "a block lies outside the file")
    _check(content[end] == 0, "a compressed block, which TensorFlow has not written since version 1.2")
    checksum = struct.unpack_from("<I", content, end + 1)[0]
    actual = _masked(crc32c(np.frombuffer(content, np.uint8, size + 1, offset)))
    _check(actual == checksum, "the checksum of a block does not match")
    block = content[offset:end]
    # A block ends with the positions of some entries, for binary search, and their number.
    entries_end = size - 4 - 4 * struct.unpack_from("<I", block, size - 4)[0]
    _check(entries_end >= 0, "a block is shorter than its header requires")
    position, name = 0, b""
    while position < entries_end:
        position, num_shared = _varint(block, position)
        position, num_new = _varint(block, position)
        position, value_size = _varint(block, position)
        value_start = position + num_new
        is_valid = num_shared <= len(name) and num_shared + num_new <= _MAX_NAME_LENGTH
        _check(is_valid and value_start + value_size <= entries_end, "an entry or its name is too long")
        name = name[:num_shared] + block[position:value_start]
        position = value_start + value_size
        yield name, block[value_start:position]


def _entry(value: bytes) -> _Entry:
    """Parse a BundleEntryProto message."""
    fields = read_message(value)
    # field 2 is a TensorShapeProto: its field 2 is repeated for each dimension, and contains the size as field 1
    shape = [read_message(dimensions) for dimensions in _values(fields, 2, bytes)] or [{}]
    dimensions = [read_message(dimension) for dimension in _values(shape[-1], 2, bytes)]
    _check(len(dimensions) <= _MAX_DIMENSIONS, f"a tensor of {len(dimensions)} dimensions")
    return _Entry(
        dtype=_integer(fields, 1),
        shape=tuple(_integer(dimension, 1) for dimension in dimensions),
        shard=_integer(fields, 3),
        offset=_integer(fields, 4),
        size=_integer(fields, 5),
        checksum=_integer(fields, 6),
        is_sliced=7 in fields,
    )


def read_message(content: bytes) -> _Fields:
    """Return the values of a protocol-buffer message, by field number; a field can occur several times."""
    fields: _Fields = {}
    position = 0
    while position < len(content):
        position, key = _varint(content, position)
        match key & 7:  # the wire type: how the value is encoded; the other bits are the number of the field
            case 0:  # an integer
                position, value = _varint(content, position)
            case 1 | 5 as wire_type:  # 64 bits, 32 bits
                length = 8 if wire_type == 1 else 4
                value = int.from_bytes(content[position : position + length], "little")
                position += length
            case 2:  # bytes, after their number
                position, length = _varint(content, position)
                value = content[position : position + length]
                position += length
            case wire_type:
                raise _DamagedError(f"a field of wire type {wire_type}")
        _check(position <= len(content), "a field is longer than its message")
        fields.setdefault(key >> 3, []).append(value)
    return fields


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Return the position after a variable-length integer (7 bits in each byte), and the integer."""
    value = 0
    for shift in range(0, 64, 7):
        _check(position < len(content), "an integer is truncated")
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return position, value
    raise _DamagedError("an integer is too long")


def _values(fields: _Fields, number: int, field_type: type[int | bytes]) -> list[Any]:
    """Return all values of a field, which must be of one type."""
    values = fields.get(number, [])
    _check(all(isinstance(value, field_type) for value in values), "a field has another type than expected")
    return values


def _integer(fields: _Fields, number: int) -> int:
    """Return an integer field; a missing one is 0 in protocol buffers."""
    return (_values(fields, number, int) or [0])[-1]


def _masked(checksum: int) -> int:
    """Return the masked form in which LevelDB stores a checksum."""
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


_POLYNOMIAL = np.uint32(0x82F63B78)  # CRC-32C's (Castagnoli), with its bits reversed
_BITS = np.arange(32, dtype=np.uint32)
_BYTE_TABLE = np.arange(256, dtype=np.uint32)  # the checksum state after each of the 256 bytes, starting from state 0
for _ in range(8):
    _BYTE_TABLE = (_BYTE_TABLE >> np.uint32(1)) ^ (_BYTE_TABLE & np.uint32(1)) * _POLYNOMIAL
_MAX_LANES, _STRIP_LENGTH = 2**14, 64  # the bytes of a lane are read in strips of 64


def crc32c(content: npt.NDArray[np.uint8]) -> int:
    """Return the CRC-32C (Castagnoli) of the bytes.

    For speed in numpy, long contents are split into lanes of equal length, which are processed side by side, one byte
    of each at a time. The checksums of neighbouring lanes are then combined in pairs: the checksum of the left lane is
    advanced by as many zero bytes as the right one has, which is a multiplication by a bit matrix (32 columns, one for
    each bit).
    """
    # a power of 2, so that lanes can be combined in pairs; each has at least 64 bytes if there are several
    num_lanes = min(1 << max(len(content).bit_length() - 7, 0), _MAX_LANES)
    lane_length = len(content) // num_lanes
    lanes, rest = content[: num_lanes * lane_length].reshape(num_lanes, lane_length), content[num_lanes * lane_length :]
    state = np.zeros(num_lanes, dtype=np.uint32)
    state[0] = 0xFFFFFFFF
    shift = np.uint32(1) << _BITS  # the identity; then the matrix that advances a state by the bytes of a lane
    for start in range(0, lane_length, _STRIP_LENGTH):  # transposed in strips, which fit into the CPU cache
        for column in np.ascontiguousarray(lanes[:, start : start + _STRIP_LENGTH].T):
            state, shift = _after_byte(state ^ column), _after_byte(shift)
    while len(state) > 1:
        state = _multiply(shift, state[0::2]) ^ state[1::2]
        shift = _multiply(shift, shift)
    for byte in rest:
        state = _after_byte(state ^ byte)
    return int(state[0]) ^ 0xFFFFFFFF


def _after_byte(state: _Uint32s) -> _Uint32s:
    """Advance each checksum state by one byte, with which it was XORed."""
    return _BYTE_TABLE[state & np.uint32(0xFF)] ^ (state >> np.uint32(8))


def _multiply(matrix: _Uint32s, vectors: _Uint32s) -> _Uint32s:
    """Multiply each vector of 32 bits by a bit matrix, over the field of two elements."""
    return np.bitwise_xor.reduce(((vectors[:, None] >> _BITS) & np.uint32(1)) * matrix, axis=1)
