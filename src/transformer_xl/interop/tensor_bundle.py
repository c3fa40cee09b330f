"""Read TensorFlow's checkpoint files ("tensor bundles") without TensorFlow.

    model.ckpt-0.index                  a sorted table (LevelDB): for each name its dtype, shape, offset and checksum
    model.ckpt-0.data-00000-of-00001    the values, one tensor after another

The format is that of tensorflow/core/util/tensor_bundle and tensorflow/core/lib/io/table: blocks of entries whose names
share prefixes, a checksum (CRC-32C, masked) after each block and for each tensor, and two small protocol-buffer
messages. Only what TensorFlow's own writer produces is read: little-endian numbers, uncompressed blocks, tensors
that are not sliced. Everything is checked before it is used, and nothing in a file is executed.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error

Array: TypeAlias = npt.NDArray[np.generic]

_FOOTER, _MAGIC = 48, 0xDB4775248B80FB57
_TRAILER = 5  # of a block: how it is compressed, and its checksum
_MAX_INDEX_BYTES, _MAX_NAME_LENGTH, _MAX_DIMENSIONS = 2**24, 1000, 8
_DTYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 19: "<f2"}
_ADVICE = "copy it again from where it came"


class _Damaged(Exception):
    """What is wrong with a file, in a few words."""


@dataclass(frozen=True)
class _Entry:
    """The dtype, shape and location of a tensor in the data files."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    in_slices: bool


@dataclass(frozen=True)
class TensorBundle:
    """A checkpoint: the names and shapes of its tensors, and the tensors, read on request."""

    prefix: Path
    """Common prefix of the files' paths, such as `model.ckpt-0`."""
    _entries: dict[str, _Entry] = field(repr=False)
    _num_shards: int = field(repr=False)

    @classmethod
    def open(cls, prefix: Path) -> TensorBundle:
        """Read the index only.

        Raises:
            UserError: the index is missing, damaged, or of a format that is not supported.
        """
        path = prefix.with_name(prefix.name + ".index")
        with as_user_error(f"reading {path}"):
            if path.stat().st_size > _MAX_INDEX_BYTES:
                raise UserError(f"{path}: {path.stat().st_size:,} bytes, too large for an index of names; {_ADVICE}")
            content = path.read_bytes()
        try:
            found = dict(_table(content))
            header = _message(found.pop(b"", b""))
            if _number(header, 2):
                raise UserError(f"{path}: written on a big-endian machine, which is not read; save it again on another")
            entries = {name.decode("utf-8"): _entry(value) for name, value in found.items()}
        except (_Damaged, UnicodeDecodeError) as error:
            raise UserError(f"{path}: damaged or no TensorFlow checkpoint ({error}); {_ADVICE}") from None
        return cls(prefix, entries, _number(header, 1))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by name, sorted."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def tensor(self, name: str) -> Array:
        """Read a tensor and verify its checksum.

        Raises:
            UserError: its file is missing, truncated or damaged, or its dtype is not supported.
        """
        entry = self._entries[name]
        path = self.prefix.with_name(f"{self.prefix.name}.data-{entry.shard:05d}-of-{self._num_shards:05d}")
        about = f"{path}: '{name}'"
        if entry.in_slices or entry.dtype not in _DTYPES:
            what = "is saved in slices" if entry.in_slices else f"is of TensorFlow's type number {entry.dtype}"
            raise UserError(f"{about} {what}, which is not read; save it again in one piece, in float32")
        dtype = np.dtype(_DTYPES[entry.dtype])
        if entry.size != dtype.itemsize * np.prod(entry.shape, dtype=object):
            raise UserError(f"{about} has {entry.size:,} bytes for the shape {entry.shape}; {_ADVICE}")
        with as_user_error(f"reading {path}"), path.open("rb") as file:
            size = path.stat().st_size
            if entry.offset + entry.size > size:
                raise UserError(
                    f"{about} ends at byte {entry.offset + entry.size:,}, but the file has {size:,}; {_ADVICE}"
                )
            if not entry.size:
                return np.empty(entry.shape, dtype)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                content = np.frombuffer(mapped, dtype=np.uint8, count=entry.size, offset=entry.offset).copy()
        if _masked(crc32c(content)) != entry.checksum:
            raise UserError(f"{about} is damaged, its checksum does not match; {_ADVICE}")
        return content.view(dtype).reshape(entry.shape)


def _table(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the names and values of a sorted table."""
    if len(content) < _FOOTER or struct.unpack("<Q", content[-8:])[0] != _MAGIC:
        raise _Damaged("its end is not that of an index")
    index = len(content) - _FOOTER
    handles: list[tuple[bytes, bytes]] = []
    for _ in range(2):  # the meta index, which is empty, then the index of the blocks
        index, offset = _varint(content, index)
        index, size = _varint(content, index)
        handles = list(_block(content, offset, size))
    for _, handle in handles:
        index, offset = _varint(handle, 0)
        _, size = _varint(handle, index)
        yield from _block(content, offset, size)


def _block(content: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries of one block; each name states how long a prefix it shares with the name before it."""
    end = offset + size
    if end + _TRAILER > len(content) or size < 4:
        raise _Damaged("a block lies outside the file")
    if content[end]:
        raise _Damaged("a compressed block, as TensorFlow has not written since 1.2")
    checksum = struct.unpack_from("<I", content, end + 1)[0]
    if _masked(crc32c(np.frombuffer(content, np.uint8, size + 1, offset))) != checksum:
        raise _Damaged("the checksum of a block does not match")
    block = content[offset:end]
    entries_end = size - 4 - 4 * struct.unpack_from("<I", block, size - 4)[0]
    if entries_end < 0:
        raise _Damaged("a block is shorter than it says")
    index, name = 0, b""
    while index < entries_end:
        index, shared = _varint(block, index)
        index, num_new = _varint(block, index)
        index, num_value = _varint(block, index)
        value_start = index + num_new
        if shared > len(name) or shared + num_new > _MAX_NAME_LENGTH or value_start + num_value > entries_end:
            raise _Damaged("an entry is longer than its block, or its name endless")
        name = name[:shared] + block[index:value_start]
        index = value_start + num_value
        yield name, block[value_start:index]


def _entry(value: bytes) -> _Entry:
    message = _message(value)
    sizes = [_message(_bytes(dim)) for dim in _message(_bytes(message.get(2, [b""])[-1])).get(2, [])]
    if len(sizes) > _MAX_DIMENSIONS:
        raise _Damaged(f"a tensor of {len(sizes)} dimensions")
    return _Entry(
        dtype=_number(message, 1),
        shape=tuple(_number(size, 1) for size in sizes),
        shard=_number(message, 3),
        offset=_number(message, 4),
        size=_number(message, 5),
        checksum=_number(message, 6),
        in_slices=7 in message,
    )


def _message(content: bytes) -> dict[int, list[int | bytes]]:
    """Return the fields of a protocol-buffer message, by number."""
    fields: dict[int, list[int | bytes]] = {}
    index = 0
    while index < len(content):
        index, key = _varint(content, index)
        value: int | bytes
        match key & 7:
            case 0:
                index, value = _varint(content, index)
            case 1 | 5 as kind:  # 64 bits, 32 bits
                length = 8 if kind == 1 else 4
                value = int.from_bytes(content[index : index + length], "little")
                index += length
            case 2:
                index, length = _varint(content, index)
                value = content[index : index + length]
                index += length
            case kind:
                raise _Damaged(f"a field of kind {kind}")
        if index > len(content):
            raise _Damaged("a field is longer than its message")
        fields.setdefault(key >> 3, []).append(value)
    return fields


def _varint(content: bytes, index: int) -> tuple[int, int]:
    """Return the index after a variable-length integer, and the integer."""
    number = 0
    for shift in range(0, 64, 7):
        if index >= len(content):
            raise _Damaged("a number is cut off")
        byte = content[index]
        index += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return index, number
    raise _Damaged("a number is too long")


def _number(fields: dict[int, list[int | bytes]], key: int) -> int:
    """Return an integer field; 0 where it is missing, as in protocol buffers."""
    value = fields.get(key, [0])[-1]
    if not isinstance(value, int):
        raise _Damaged("a field of another kind than expected")
    return value


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise _Damaged("a field of another kind than expected")
    return value


def _masked(checksum: int) -> int:
    """Return the masked form in which a checksum is stored (LevelDB's rotation)."""
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


_POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reversed
_LANES, _STRIP = 2**14, 64
_Words: TypeAlias = npt.NDArray[np.uint32]


@lru_cache(maxsize=1)
def _after_one_byte() -> _Words:
    """Return the checksum state after each byte, starting from state 0."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ (table & np.uint32(1)) * np.uint32(_POLYNOMIAL)
    return table


@lru_cache(maxsize=1)
def _after_two_bytes() -> _Words:
    return _one_byte(_one_byte(np.arange(2**16, dtype=np.uint32)))


def _one_byte(state: _Words) -> _Words:
    """Advance each checksum state by one byte, which was XORed into it."""
    return _after_one_byte()[state & np.uint32(0xFF)] ^ (state >> np.uint32(8))


def crc32c(content: npt.NDArray[np.uint8]) -> int:
    """Return the CRC-32C (Castagnoli) of the bytes.

    Long contents are split into lanes of equal length that are processed side by side, two bytes of each at a time; the
    checksums of neighbouring lanes are then combined in pairs, with one bit matrix for each doubling of the length.
    """
    num_lanes = min(1 << max(len(content).bit_length() - 7, 0), _LANES)
    num_steps = len(content) // (2 * num_lanes)
    body, rest = np.split(content, [2 * num_lanes * num_steps])
    words = body.view("<u2").reshape(num_lanes, num_steps)
    table = _after_two_bytes()
    state = np.zeros(num_lanes, dtype=np.uint32)
    state[0] = 0xFFFFFFFF
    for start in range(0, num_steps, _STRIP):
        for column in np.ascontiguousarray(words[:, start : start + _STRIP].T):
            state = table[(state ^ column) & 0xFFFF] ^ (state >> 16)
    shift = _zeros_after(2 * num_steps)
    while len(state) > 1:
        state = _times(shift, state[0::2]) ^ state[1::2]
        shift = _times(shift, shift)
    for byte in rest:
        state = _one_byte(state ^ byte)
    return int(state[0]) ^ 0xFFFFFFFF


def _zeros_after(length: int) -> _Words:
    """Return the bit matrix that advances a state by this many zero bytes: (32,), one column for each bit."""
    one = np.uint32(1) << np.arange(32, dtype=np.uint32)
    power, result = _one_byte(one), one
    while length:
        if length & 1:
            result = _times(power, result)
        power, length = _times(power, power), length >> 1
    return result


def _times(matrix: _Words, vectors: _Words) -> _Words:
    """Multiply each bit vector by a matrix over the field of two elements."""
    bits = (vectors[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return np.bitwise_xor.reduce(bits * matrix, axis=1)
