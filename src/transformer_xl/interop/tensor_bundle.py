"""Reads TensorFlow's checkpoint files ("tensor bundles") without TensorFlow.

    model.ckpt-0.index                  a sorted table (as LevelDB's): for each name its type, shape, place and checksum
    model.ckpt-0.data-00000-of-00001    the numbers, one tensor after another

The format is that of tensorflow/core/util/tensor_bundle and tensorflow/core/lib/io/table: blocks of entries whose names
share prefixes, a checksum (CRC-32C, masked) after each block and for each tensor, and two small protocol-buffer
messages. Only what TensorFlow's own writer makes is read: little-endian numbers, blocks that are not compressed,
tensors in one piece. Everything is checked before it is believed, and nothing in a file is run.
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
_MOST_INDEX, _MOST_NAME, _MOST_DIMENSIONS = 2**24, 1000, 8
_DTYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 19: "<f2"}
_AGAIN = "copy it again from where it came"


class _Damaged(Exception):
    """What is wrong with a file, in a few words."""


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    in_slices: bool


@dataclass(frozen=True)
class TensorBundle:
    """The names of a checkpoint and, when asked for, its tensors."""

    prefix: Path
    """The files' common beginning, such as `model.ckpt-0`."""
    _entries: dict[str, _Entry] = field(repr=False)
    _num_shards: int = field(repr=False)

    @classmethod
    def open(cls, prefix: Path) -> TensorBundle:
        """Reads the index alone.

        Raises:
            UserError: it is missing, damaged, or of a kind that is not read.
        """
        path = prefix.with_name(prefix.name + ".index")
        with as_user_error(f"reading {path}"):
            if path.stat().st_size > _MOST_INDEX:
                raise UserError(f"{path}: {path.stat().st_size:,} bytes, too large for an index of names; {_AGAIN}")
            content = path.read_bytes()
        try:
            found = dict(_table(content))
            header = _message(found.pop(b"", b""))
            if _number(header, 2):
                raise UserError(f"{path}: written on a big-endian machine, which is not read; save it again on another")
            entries = {name.decode("utf-8"): _entry(value) for name, value in found.items()}
        except (_Damaged, UnicodeDecodeError) as error:
            raise UserError(f"{path}: damaged or no TensorFlow checkpoint ({error}); {_AGAIN}") from None
        return cls(prefix, entries, _number(header, 1))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by name in rising order."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def tensor(self, name: str) -> Array:
        """A tensor of its own; its checksum is compared.

        Raises:
            UserError: its file is missing, cut off or damaged, or it is of a kind that is not read.
        """
        entry = self._entries[name]
        path = self.prefix.with_name(f"{self.prefix.name}.data-{entry.shard:05d}-of-{self._num_shards:05d}")
        about = f"{path}: '{name}'"
        if entry.in_slices or entry.dtype not in _DTYPES:
            what = "is saved in slices" if entry.in_slices else f"is of TensorFlow's type number {entry.dtype}"
            raise UserError(f"{about} {what}, which is not read; save it again in one piece, in float32")
        dtype = np.dtype(_DTYPES[entry.dtype])
        if entry.size != dtype.itemsize * np.prod(entry.shape, dtype=object):
            raise UserError(f"{about} has {entry.size:,} bytes for the shape {entry.shape}; {_AGAIN}")
        with as_user_error(f"reading {path}"), path.open("rb") as file:
            size = path.stat().st_size
            if entry.offset + entry.size > size:
                raise UserError(
                    f"{about} ends at byte {entry.offset + entry.size:,}, but the file has {size:,}; {_AGAIN}"
                )
            if not entry.size:
                return np.empty(entry.shape, dtype)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                content = np.frombuffer(mapped, dtype=np.uint8, count=entry.size, offset=entry.offset).copy()
        if _masked(crc32c(content)) != entry.checksum:
            raise UserError(f"{about} is damaged, its checksum is another; {_AGAIN}")
        return content.view(dtype).reshape(entry.shape)


def _table(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Names and values of a sorted table."""
    if len(content) < _FOOTER or struct.unpack("<Q", content[-8:])[0] != _MAGIC:
        raise _Damaged("its end is not that of an index")
    place = len(content) - _FOOTER
    handles: list[tuple[bytes, bytes]] = []
    for _ in range(2):  # what else there is, which is nothing, and the index of the blocks
        place, offset = _varint(content, place)
        place, size = _varint(content, place)
        handles = list(_block(content, offset, size))
    for _, handle in handles:
        place, offset = _varint(handle, 0)
        _, size = _varint(handle, place)
        yield from _block(content, offset, size)


def _block(content: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Entries of one block; each name says how much of the name before it begins with."""
    end = offset + size
    if end + _TRAILER > len(content) or size < 4:
        raise _Damaged("a block lies outside the file")
    if content[end]:
        raise _Damaged("a compressed block, as TensorFlow has not written since 1.2")
    checksum = struct.unpack_from("<I", content, end + 1)[0]
    if _masked(crc32c(np.frombuffer(content, np.uint8, size + 1, offset))) != checksum:
        raise _Damaged("the checksum of a block is another")
    block = content[offset:end]
    entries_end = size - 4 - 4 * struct.unpack_from("<I", block, size - 4)[0]
    if entries_end < 0:
        raise _Damaged("a block is shorter than it says")
    place, name = 0, b""
    while place < entries_end:
        place, shared = _varint(block, place)
        place, num_new = _varint(block, place)
        place, num_value = _varint(block, place)
        value_place = place + num_new
        if shared > len(name) or shared + num_new > _MOST_NAME or value_place + num_value > entries_end:
            raise _Damaged("an entry is longer than its block, or its name endless")
        name = name[:shared] + block[place:value_place]
        place = value_place + num_value
        yield name, block[value_place:place]


def _entry(value: bytes) -> _Entry:
    message = _message(value)
    sizes = [_message(_bytes(dim)) for dim in _message(_bytes(message.get(2, [b""])[-1])).get(2, [])]
    if len(sizes) > _MOST_DIMENSIONS:
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
    """The fields of a protocol-buffer message by their numbers."""
    fields: dict[int, list[int | bytes]] = {}
    place = 0
    while place < len(content):
        place, key = _varint(content, place)
        value: int | bytes
        match key & 7:
            case 0:
                place, value = _varint(content, place)
            case 1 | 5 as kind:  # 64 bits, 32 bits
                length = 8 if kind == 1 else 4
                value = int.from_bytes(content[place : place + length], "little")
                place += length
            case 2:
                place, length = _varint(content, place)
                value = content[place : place + length]
                place += length
            case kind:
                raise _Damaged(f"a field of kind {kind}")
        if place > len(content):
            raise _Damaged("a field is longer than its message")
        fields.setdefault(key >> 3, []).append(value)
    return fields


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """The place after a number of variable length, and the number."""
    number = 0
    for shift in range(0, 64, 7):
        if place >= len(content):
            raise _Damaged("a number is cut off")
        byte = content[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return place, number
    raise _Damaged("a number is too long")


def _number(fields: dict[int, list[int | bytes]], key: int) -> int:
    """A field that is a number; 0 where it is missing, as protocol buffers have it."""
    value = fields.get(key, [0])[-1]
    if not isinstance(value, int):
        raise _Damaged("a field of another kind than expected")
    return value


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise _Damaged("a field of another kind than expected")
    return value


def _masked(checksum: int) -> int:
    """A checksum as it is stored beside what it is of (LevelDB's rotation)."""
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


_POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reversed
_LANES, _STRIP = 2**14, 64
_Words: TypeAlias = npt.NDArray[np.uint32]


@lru_cache(maxsize=1)
def _after_one_byte() -> _Words:
    """What each byte makes of a checksum of 0."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ (table & np.uint32(1)) * np.uint32(_POLYNOMIAL)
    return table


@lru_cache(maxsize=1)
def _after_two_bytes() -> _Words:
    return _one_byte(_one_byte(np.arange(2**16, dtype=np.uint32)))


def _one_byte(state: _Words) -> _Words:
    """Checksums after a byte that was added to each."""
    return _after_one_byte()[state & np.uint32(0xFF)] ^ (state >> np.uint32(8))


def crc32c(content: npt.NDArray[np.uint8]) -> int:
    """CRC-32C (Castagnoli) of the bytes.

    Long contents are cut into lanes of equal length that go through the table side by side, two bytes of each at a
    time; the checksums of neighbours are then joined pair by pair, which takes only a matrix of bits for each doubling.
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
    """What this many zero bytes do to a checksum: (32,), one column for each of its bits."""
    one = np.uint32(1) << np.arange(32, dtype=np.uint32)
    power, result = _one_byte(one), one
    while length:
        if length & 1:
            result = _times(power, result)
        power, length = _times(power, power), length >> 1
    return result


def _times(matrix: _Words, vectors: _Words) -> _Words:
    """Each vector of bits times a matrix over the field of two elements."""
    bits = (vectors[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return np.bitwise_xor.reduce(bits * matrix, axis=1)
