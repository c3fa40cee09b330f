"""TensorFlow's checkpoint files: read as TensorFlow wrote them, and refused in one line where they are damaged."""

from __future__ import annotations

import json
import shutil
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.interop.tensor_bundle import TensorBundle, crc32c

GOLDEN = Path(__file__).parent / "golden" / "tensorflow"


def slow_crc32c(content: bytes) -> int:
    """Byte by byte, each byte's table entry made bit by bit from the polynomial."""
    table = list(range(256))
    for _ in range(8):
        table = [(entry >> 1) ^ (0x82F63B78 if entry & 1 else 0) for entry in table]
    checksum = 0xFFFFFFFF
    for byte in content:
        checksum = table[(checksum ^ byte) & 0xFF] ^ (checksum >> 8)
    return checksum ^ 0xFFFFFFFF


def test_checksums_are_those_of_the_standard() -> None:
    """RFC 3720, B.4."""
    for content, checksum in (
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ):
        assert crc32c(np.frombuffer(content, np.uint8)) == checksum


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 3001), st.integers(0, 7))
def test_checksums_of_any_length(length: int, seed: int) -> None:
    content = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
    assert crc32c(content) == slow_crc32c(content.tobytes())


def test_long_contents_go_through_all_lanes() -> None:
    content = np.random.default_rng(1).integers(0, 256, 2**21 + 2**19 + 7, dtype=np.uint8)
    assert crc32c(content) == slow_crc32c(content.tobytes())


@pytest.mark.parametrize("folder", sorted(GOLDEN.iterdir()), ids=lambda path: path.name)
def test_every_tensor_is_what_tensorflow_wrote(folder: Path) -> None:
    bundle = TensorBundle.open(folder / "model.ckpt-17")
    sums = json.loads((folder / "expected.json").read_text())["sums"]
    assert bundle.shapes.keys() == sums.keys()
    for name, total in sums.items():
        assert bundle.tensor(name).shape == bundle.shapes[name]
        assert bundle.tensor(name).sum(dtype=np.float64) == pytest.approx(total, abs=1e-12)
    assert int(bundle.tensor("global_step")) == sums["global_step"]


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def stored_block(content: bytes, compressed: int = 0) -> bytes:
    """A block with what stands behind it."""
    content += bytes([compressed])
    checksum = slow_crc32c(content)
    return content + struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def block(entries: list[tuple[bytes, bytes]]) -> bytes:
    content, before = b"", b""
    for name, value in entries:
        shared = len(name) - len(name.removeprefix(before)) if name.startswith(before) else 0
        content += varint(shared) + varint(len(name) - shared) + varint(len(value)) + name[shared:] + value
        before = name
    return content + struct.pack("<II", 0, 1)


def table(*blocks: bytes, compressed: int = 0) -> bytes:
    """A sorted table of these blocks."""
    content, handles = b"", []
    for number, one in enumerate(blocks):
        handles.append((bytes([number]), varint(len(content)) + varint(len(one))))
        content += stored_block(one, compressed)
    other, index = block([]), block(handles)
    footer = b"".join(map(varint, (len(content), len(other), len(content) + len(other) + 5, len(index))))
    content += stored_block(other) + stored_block(index)
    return content + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


def entry(shape: tuple[int, ...], size: int, dtype: int = 1, more: bytes = b"") -> bytes:
    dims = b"".join(b"\x12" + varint(len(dim)) + dim for dim in (b"\x08" + varint(number) for number in shape))
    return b"\x08" + varint(dtype) + b"\x12" + varint(len(dims)) + dims + b"\x28" + varint(size) + more


def written(folder: Path, content: bytes) -> Path:
    (folder / "a.index").write_bytes(content)
    (folder / "a.data-00000-of-00001").write_bytes(bytes(64))
    return folder / "a"


HEADER = (b"", b"\x08\x01")


def test_a_table_of_several_blocks(tmp_path: Path) -> None:
    first = block([HEADER, (b"layer", entry((2, 3), 24)), (b"layer/x", entry((), 4))])
    prefix = written(tmp_path, table(first, block([(b"other", entry((0, 5), 0))])))
    bundle = TensorBundle.open(prefix)
    assert bundle.shapes == {"layer": (2, 3), "layer/x": (), "other": (0, 5)}
    assert bundle.tensor("other").shape == (0, 5)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "its end is not that of an index"),
        (table(block([HEADER]), compressed=1), "a compressed block"),
        (table(block([HEADER, (b"x" * 1001, b"")])), "its name endless"),
        (table(block([HEADER, (b"x", b"\x08")])), "a number is cut off"),
        (table(block([HEADER, (b"x", b"\x08" + b"\xff" * 10)])), "a number is too long"),
        (table(block([HEADER, (b"x", b"\x12\x07a")])), "a field is longer than its message"),
        (table(block([HEADER, (b"x", b"\x0b")])), "a field of kind 3"),
        (table(block([HEADER, (b"x", b"\x0a\x01a")])), "a field of another kind than expected"),
        (table(block([HEADER, (b"x", b"\x10\x01")])), "a field of another kind than expected"),
        (table(block([HEADER, (b"x", entry((1,) * 9, 4))])), "a tensor of 9 dimensions"),
        (table(block([HEADER, (b"\xff", b"")])), "can't decode byte 0xff"),
        (table(b"\xff" * 8), "a block is shorter than it says"),
        (table(b""), "a block lies outside the file"),
        (table(b"\x07\x01\x00x" + struct.pack("<II", 0, 1)), "an entry is longer than its block"),
        (table(block([(b"", b"\x08\x01\x10\x01")])), "written on a big-endian machine"),
    ],
)
def test_a_wrong_index_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said) as caught:
        TensorBundle.open(written(tmp_path, content))
    assert str(tmp_path / "a.index") in str(caught.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (entry((2,), 8, dtype=7), "is of TensorFlow's type number 7, which is not read"),
        (entry((2,), 8, more=b"\x3a\x00"), "is saved in slices, which is not read"),
        (entry((3,), 8), r"has 8 bytes for the shape \(3,\); copy it again"),
        (entry((2**62, 4), 0), "has 0 bytes for the shape"),
        (entry((17,), 68), "ends at byte 68, but the file has 64; copy it again"),
        (entry((16,), 64), "is damaged, its checksum does not match; copy it again"),
        (entry((2,), 8, more=b"\x18\x05"), r"a.data-00005-of-00001: no such file"),
    ],
)
def test_a_wrong_tensor_is_refused(value: bytes, said: str, tmp_path: Path) -> None:
    bundle = TensorBundle.open(written(tmp_path, table(block([HEADER, (b"x", value)]))))
    with pytest.raises(UserError, match=said):
        bundle.tensor("x")


def refusals_of(bundle: TensorBundle) -> list[str]:
    """What is said of the tensors that cannot be read."""
    said = []
    for name in bundle.shapes:
        try:
            bundle.tensor(name)
        except UserError as error:
            said.append(str(error))
    return said


@settings(deadline=None, max_examples=100)
@given(entries=st.binary(max_size=40), value=st.binary(max_size=40))
def test_no_index_does_harm(entries: bytes, value: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    for one in (entries + struct.pack("<II", 0, 1), block([HEADER, (b"x", value)])):
        with suppress(UserError):
            refusals_of(TensorBundle.open(written(folder, table(one))))


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    for name in ("model.ckpt-17.index", "model.ckpt-17.data-00000-of-00001"):
        shutil.copy(GOLDEN / "bytes" / name, tmp_path)
    path, prefix = tmp_path / "model.ckpt-17.index", tmp_path / "model.ckpt-17"
    whole, good = path.read_bytes(), TensorBundle.open(prefix)
    said_nothing = range(len(whole) - 48, len(whole) - 8)  # the end says where two blocks are, and is filled up
    for place in set(range(len(whole))) - set(said_nothing):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        with pytest.raises(UserError, match="damaged"):
            TensorBundle.open(prefix)
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="damaged or no TensorFlow checkpoint"):
            TensorBundle.open(prefix)
    path = tmp_path / "model.ckpt-17.data-00000-of-00001"
    numbers = path.read_bytes()
    for place in range(0, len(numbers), 311):
        path.write_bytes(numbers[:place] + bytes([numbers[place] ^ 1]) + numbers[place + 1 :])
        (said,) = refusals_of(good)
        assert "is damaged, its checksum does not match; copy it again" in said
    path.write_bytes(numbers[:-3])
    (said,) = refusals_of(good)
    assert f"ends at byte {len(numbers):,}, but the file has {len(numbers) - 3:,}" in said
