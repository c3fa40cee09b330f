"""TensorFlow's checkpoint files for tests, written byte by byte.

A checkpoint has an .index file, which describes each tensor, and a .data file with the values. The index is a sorted
table of LevelDB: blocks of (name, value) entries, each followed by a byte for its compression and a checksum; then a
block of metadata, a block that lists the other blocks, and a footer that points to these two.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


def slow_crc32c(content: bytes) -> int:
    """Compute the checksum byte by byte, with a table that is computed bit by bit from the polynomial (0x82F63B78)."""
    table = list(range(256))
    for _ in range(8):
        table = [(entry >> 1) ^ (0x82F63B78 if entry & 1 else 0) for entry in table]
    checksum = 0xFFFFFFFF
    for byte in content:
        checksum = table[(checksum ^ byte) & 0xFF] ^ (checksum >> 8)
    return checksum ^ 0xFFFFFFFF


def varint(value: int) -> bytes:
    """Encode an integer with 7 bits in each byte, the lowest first; the top bit says whether another byte follows."""
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def stored_block(content: bytes, compression: int = 0) -> bytes:
    """Return a block, its compression byte (0 for none) and its checksum, masked as LevelDB stores it."""
    content += bytes([compression])
    checksum = slow_crc32c(content)
    return content + struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def block(entries: list[tuple[bytes, bytes]]) -> bytes:
    """Return the entries as a block; a name that begins with the name before it stores only the rest."""
    content, previous = b"", b""
    for name, value in entries:
        num_shared = len(previous) if name.startswith(previous) else 0
        content += varint(num_shared) + varint(len(name) - num_shared) + varint(len(value)) + name[num_shared:] + value
        previous = name
    return content + struct.pack("<II", 0, 1)  # the positions of entries for binary search: only 0; their number: 1


def table(*blocks: bytes, compression: int = 0, repeat: int = 1) -> bytes:
    """Return a sorted table of these blocks, the content of an .index file; it lists each block `repeat` times."""
    content, handles = b"", []
    for number, one_block in enumerate(blocks):  # a handle is the offset and the size of a block
        handles.append((bytes([number]), varint(len(content)) + varint(len(one_block))))
        content += stored_block(one_block, compression)
    metadata, index = block([]), block(handles * repeat)
    # the handles of the last two blocks; 5 is the size of a compression byte and a checksum
    footer = b"".join(map(varint, (len(content), len(metadata), len(content) + len(metadata) + 5, len(index))))
    content += stored_block(metadata) + stored_block(index)
    return content + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


# A field of a protocol-buffer message begins with a byte: 8 * its number + its wire type (0 integer, 2 bytes). In the
# message of a tensor the fields are 1 dtype, 2 shape, 3 number of the data file, 5 size in bytes and 7 slices.


def entry(shape: tuple[int, ...], size: int, dtype: int = 1, more_fields: bytes = b"") -> bytes:
    """Return the protocol-buffer message that describes a tensor at the start of the data file.

    Args:
        shape: shape of the tensor.
        size: number of bytes.
        dtype: TensorFlow's number of the dtype; 1 is float32.
        more_fields: further fields, encoded.
    """
    dims = b"".join(b"\x12" + varint(len(dim)) + dim for dim in (b"\x08" + varint(length) for length in shape))
    return b"\x08" + varint(dtype) + b"\x12" + varint(len(dims)) + dims + b"\x28" + varint(size) + more_fields


def write_tensors(prefix: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write float32 tensors as a checkpoint of one data file."""
    entries, content = [(b"", b"\x08\x01")], b""  # the header: one data file
    for name in sorted(tensors):
        values = tensors[name].float().contiguous().numpy().tobytes()
        checksum = struct.unpack("<I", stored_block(values[:-1], values[-1])[-4:])[0]
        place = b"\x20" + varint(len(content)) + b"\x35" + struct.pack("<I", checksum)  # fields 4 and 6
        entries.append((name.encode(), entry(tuple(tensors[name].shape), len(values), more_fields=place)))
        content += values
    prefix.with_name(f"{prefix.name}.index").write_bytes(table(block(entries)))
    prefix.with_name(f"{prefix.name}.data-00000-of-00001").write_bytes(content)
